"""Compile jobs of GPU kernels: a kernel for its constants and a compute capability."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from engine.compile import cache as kernel_cache
from engine.compile.jobs import size_of
from engine.cuda.runtime.compiler import Specialization, cubin, file_name


@dataclass(frozen=True)
class GPUJob:
    """A kernel of module ``home`` for these constants and a GPU of this compute capability."""

    home: str
    name: str
    constants: tuple[Any, ...]
    compute_capability: tuple[int, int]
    part: ClassVar[kernel_cache.Part] = "gpu"

    @property
    def _specialization(self) -> Any:
        return getattr(import_module(self.home), self.name)(*self.constants)

    def kept(self) -> bool:
        """Whether it was compiled before."""
        return kernel_cache.has("gpu", file_name(self._specialization, self.compute_capability))

    def compile(self) -> None:
        """Compile it and keep what comes of it."""
        cubin(self._specialization, self.compute_capability)

    def size(self) -> int:
        """An estimate of the work: bytes of bytecode, weighted by the number of rows or columns at a time."""
        numbers = [n for n in self.constants if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 32]
        return size_of(self._specialization.kernel.build) * max(numbers, default=1)


def gpu_job(specialization: Specialization, compute_capability: tuple[int, int]) -> GPUJob:
    """The job that compiles a kernel of a pass for this compute capability."""
    kernel = specialization.kernel
    return GPUJob(kernel.build.__module__, kernel.name, specialization.constants, compute_capability)
