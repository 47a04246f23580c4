"""From a kernel's source to machine code: specialized by constants, compiled without needing a GPU, kept on disk.

A :class:`Kernel` is a factory: called with constants (a format, a number of rows) it returns a ``@cuda.jit`` function for
just these.  Numba makes PTX of it, the driver's linker makes machine code (a *cubin*) of that, and the cubin is kept in the
folder of ``engine/compile/cache.py``, so a later run does neither.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import types

from engine.compile import cache as kernel_cache
from engine.cuda.runtime.kinds import Constant, KernelCode
from engine.errors import DeviceError

f32, i32, u32, u64 = types.float32, types.int32, types.uint32, types.uint64
F32P = types.CPointer(types.float32)
I32P = types.CPointer(types.int32)
U8P = types.CPointer(types.uint8)
U16P = types.CPointer(types.uint16)
U32P = types.CPointer(types.uint32)
U64P = types.CPointer(types.uint64)

TARGETS = ((7, 5), (8, 0), (9, 0), (10, 0))
"""Compute capabilities that every kernel is compiled for in the tests."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A factory of ``@cuda.jit`` functions.

    ``arguments``: Numba types of the kernel's arguments; ``threads``: threads of the largest block it is launched with;
    ``blocks``: blocks that should fit on a multiprocessor at once (bounds the registers), 0 for no wish.  Either may be a
    function of the constants.  ``shared``: bytes of shared memory that a launch brings with it, for arrays of shape 0; more
    than the 48 KiB of other shared arrays.
    """

    name: str
    arguments: tuple[types.Type, ...]
    build: Callable[..., KernelCode]
    threads: int | Callable[..., int] = 0
    blocks: int | Callable[..., int] = 0
    shared: int | Callable[..., int] = 0

    def __call__(self, *constants: Constant) -> "Specialization":
        return Specialization(self, constants)


@dataclass(frozen=True)
class Specialization:
    """A kernel for given constants."""

    kernel: Kernel
    constants: tuple[Constant, ...]

    @property
    def name(self) -> str:
        """As errors and reports show it, e.g. ``matmul[Q4_K, 1]``."""
        inside = ", ".join(str(c) for c in self.constants)
        return f"{self.kernel.name}[{inside}]" if inside else self.kernel.name

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a launch brings with it."""
        return _shared(self)

    @property
    def function(self) -> KernelCode:
        """The ``@cuda.jit`` function."""
        return self.kernel.build(*self.constants)


@cache
def _shared(specialization: Specialization) -> int:
    """Every launch asks for it, and to answer may take longer than to launch."""
    wish = specialization.kernel.shared
    return wish(*specialization.constants) if callable(wish) else wish


KERNELS: dict[str, Kernel] = {}
"""Every kernel by name, once the files of ``engine/cuda`` are imported."""


def kernel(
    *arguments: types.Type,
    threads: int | Callable[..., int] = 0,
    blocks: int | Callable[..., int] = 0,
    shared: int | Callable[..., int] = 0,
) -> Callable[[Callable[..., KernelCode]], Kernel]:
    """Declares a factory as a kernel with these argument types."""

    def declare(build: Callable[..., KernelCode]) -> Kernel:
        declared = Kernel(build.__name__, arguments, build, threads, blocks, shared)
        KERNELS[declared.name] = declared
        return declared

    return declare


# --- compiling -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_a_device() -> Iterator[list[tuple[list[str], dict[str, Any]]]]:
    """Numba compiles for a device that is not there and stops at LLVM IR: yields what it would have given to NVVM.

    It asks the current device for its compute capability in a few places; the lowest one will do, since atoms that differ
    between targets are only declared (``engine/cuda/intrinsics.py``).
    """
    from numba.cuda import compiler, dispatcher
    from numba.cuda.cudadrv import nvvm

    class Device:
        compute_capability = TARGETS[0]

    given: list[tuple[list[str], dict[str, Any]]] = []

    def take(modules: list[str], **options: Any) -> bytes:
        given.append((list(modules), options))
        return b""

    changes: list[tuple[Any, str, Any]] = [
        (compiler, "get_current_device", Device),
        (dispatcher, "get_current_device", Device),
        (nvvm, "compile_ir", take),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield given
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@dataclass(frozen=True)
class Intermediate:
    """What Numba makes of a kernel, for all targets: modules of LLVM IR, and options for NVVM."""

    modules: list[str]
    options: dict[str, Any]

    def ptx(self, compute_capability: tuple[int, int]) -> str:
        """PTX for a target.

        NVVM is told to leave products and sums apart (``-fma=0``), so that the only fused ones are those the source spells
        out.
        """
        from numba.cuda.cudadrv import nvvm

        from engine.cuda.intrinsics import definitions

        options = self.options | {"arch": "compute_{}{}".format(*compute_capability), "fma": False}
        text: bytes = nvvm.compile_ir([*self.modules, definitions(compute_capability)], **options)
        return text.decode().strip("\x00").strip()


def intermediate(specialization: Specialization) -> Intermediate:
    """The first and by far the longest part of compiling a kernel.  No GPU is needed."""
    from numba import cuda

    declared = specialization.kernel
    threads, blocks = (
        wish(*specialization.constants) if callable(wish) else wish for wish in (declared.threads, declared.blocks)
    )
    bounds = (threads, blocks) if threads and blocks else threads or None
    with _without_a_device() as given:
        cuda.compile_ptx(specialization.function.py_func, declared.arguments, cc=TARGETS[0], launch_bounds=bounds)
    ((modules, options),) = given
    return Intermediate(modules, options)


def compile_ptx(specialization: Specialization, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel.  No GPU is needed."""
    return intermediate(specialization).ptx(compute_capability)


def entry_name(ptx: str) -> str:
    """The name of the only kernel in a PTX text."""
    found = re.search(r"\.visible \.entry (\w+)", ptx)
    assert found
    return found[1]


def link(ptx: str, compute_capability: tuple[int, int]) -> bytes:
    """Machine code of PTX."""
    from cuda.bindings import nvjitlink

    major, minor = compute_capability
    options = [f"-arch=sm_{major}{minor}", "-O3"]
    handle = nvjitlink.create(len(options), options)
    try:
        text = ptx.encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return bytes(code)
    except nvjitlink.nvJitLinkError as error:
        raise DeviceError(f"a kernel could not be linked for compute capability {major}.{minor}: {error}.") from error
    finally:
        nvjitlink.destroy(handle)


# --- kept between runs -----------------------------------------------------------------------------------------


def cubin(specialization: Specialization, compute_capability: tuple[int, int]) -> tuple[bytes, str, bool]:
    """(machine code, name of its entry, whether it had to be compiled)."""
    kept = kernel_cache.read("gpu", file_name(specialization, compute_capability))
    if kept is not None:
        name, _, code = kept.partition(b"\n")
        return code, name.decode(), False
    ptx = compile_ptx(specialization, compute_capability)
    name_, code = entry_name(ptx), link(ptx, compute_capability)
    kernel_cache.write("gpu", file_name(specialization, compute_capability), name_.encode() + b"\n" + code)
    return code, name_, True


def file_name(specialization: Specialization, compute_capability: tuple[int, int]) -> str:
    """Where the machine code is kept, in the folder of ``engine/compile/cache.py``."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", specialization.name).strip("-")
    exact = hashlib.sha256(specialization.name.encode()).hexdigest()[:8]
    return "sm_{}{}/{}-{}.cubin".format(*compute_capability, name, exact)
