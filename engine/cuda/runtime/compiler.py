"""Compiling kernels to machine code: specialized by constants, without a GPU, and stored on disk.

A :class:`Kernel` is a factory: called with constants, such as a format or a number of rows, it returns a ``@cuda.jit``
function for these constants.  Numba compiles the function to PTX, and NVIDIA's linker compiles the PTX to machine code (a
*cubin*).  The cubin is stored in the folder of ``engine/compile/cache.py``, so that a later run skips both steps.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import types
from numba.core.compiler_lock import global_compiler_lock

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
"""The compute capabilities for which the tests compile every kernel."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A factory of ``@cuda.jit`` functions.

    ``arguments``: Numba types of the kernel's arguments; ``threads``: the largest number of threads per block that it is
    launched with; ``blocks``: the number of blocks that should be resident on a multiprocessor, which limits the registers, 0
    for no limit; ``shared``: bytes of dynamic shared memory, for shared arrays of shape 0, which may exceed the 48 KiB of
    static shared arrays; ``cached``: whether the kernel needs the L1 cache; ``target``: the only compute capability that uses
    the kernel, such as for its instructions, None if all do.  ``threads``, ``blocks`` and ``shared`` may be functions of the
    constants.
    """

    name: str
    arguments: tuple[types.Type, ...]
    build: Callable[..., KernelCode]
    threads: int | Callable[..., int] = 0
    blocks: int | Callable[..., int] = 0
    shared: int | Callable[..., int] = 0
    cached: bool = False
    target: tuple[int, int] | None = None

    def __call__(self, *constants: Constant) -> "Specialization":
        return Specialization(self, constants)


@dataclass(frozen=True)
class Specialization:
    """A kernel with its constants."""

    kernel: Kernel
    constants: tuple[Constant, ...]

    @property
    def name(self) -> str:
        """The name in errors and reports, such as ``matmul[Q4_K, 1]``."""
        inside = ", ".join(str(c) for c in self.constants)
        return f"{self.kernel.name}[{inside}]" if inside else self.kernel.name

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory per block."""
        return _shared(self)

    @property
    def blocks(self) -> int:
        """The number of blocks that should be resident on a multiprocessor; 0 for no limit."""
        wish = self.kernel.blocks
        return wish(*self.constants) if callable(wish) else wish

    @property
    def function(self) -> KernelCode:
        """The ``@cuda.jit`` function."""
        return self.kernel.build(*self.constants)


@cache
def _shared(specialization: Specialization) -> int:
    """Bytes of dynamic shared memory per block.  Cached, because computing the number may take longer than a launch."""
    wish = specialization.kernel.shared
    return wish(*specialization.constants) if callable(wish) else wish


SHARED_OF_DRIVER = 1024
"""Bytes of shared memory that the driver adds to each block."""

KERNELS: dict[str, Kernel] = {}
"""Every kernel of the engine by name.  A kernel is added when its module is imported."""


def kernel(
    *arguments: types.Type,
    threads: int | Callable[..., int] = 0,
    blocks: int | Callable[..., int] = 0,
    shared: int | Callable[..., int] = 0,
    cached: bool = False,
    target: tuple[int, int] | None = None,
) -> Callable[[Callable[..., KernelCode]], Kernel]:
    """Declare a factory as a kernel with these argument types.  The other parameters are fields of :class:`Kernel`."""

    def declare(build: Callable[..., KernelCode]) -> Kernel:
        declared = Kernel(build.__name__, arguments, build, threads, blocks, shared, cached, target)
        if build.__module__.startswith("engine."):  # not one of a program, which may have the same name
            KERNELS[declared.name] = declared
        return declared

    return declare


# --- compiling -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_a_device() -> Iterator[list[tuple[list[str], dict[str, Any]]]]:
    """A context in which Numba compiles without a device and stops at LLVM IR.  Yields the list of inputs that Numba would
    pass to NVVM.

    Numba queries the compute capability of the current device in a few places.  The lowest supported one is sufficient,
    because functions that differ between targets are only declared (``engine/cuda/intrinsics.py``).

    By default Numba compiles a device function again for each literal argument, for example the indices 0 to 7 of the blocks
    of a record.  Here it is compiled once per type.  NVVM inlines all calls and then folds the constants, so the instructions
    are the same.
    """
    from numba.cuda import compiler, dispatcher
    from numba.cuda.cudadrv import nvvm

    declared = dispatcher.CUDADispatcher.get_call_template

    class TargetDevice:
        compute_capability = TARGETS[0]

    given: list[tuple[list[str], dict[str, Any]]] = []

    def take(modules: list[str], **options: Any) -> bytes:
        given.append((list(modules), options))
        return b""

    def without_literals(self: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        unliteral = {name: types.unliteral(type_) for name, type_ in kws.items()}
        return declared(self, tuple(map(types.unliteral, args)), unliteral)

    changes: list[tuple[Any, str, Any]] = [
        (compiler, "get_current_device", TargetDevice),
        (dispatcher, "get_current_device", TargetDevice),
        (dispatcher.CUDADispatcher, "get_call_template", without_literals),
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
    """The LLVM IR of a kernel, which is the same for all targets, and options for NVVM."""

    modules: list[str]
    options: dict[str, Any]
    target: tuple[int, int] | None = None

    def ptx(self, compute_capability: tuple[int, int]) -> str:
        """The PTX for a compute capability.

        With ``-fma=0``, NVVM does not contract products and sums, so only an explicit ``fma`` in the source is fused.
        """
        from numba.cuda.cudadrv import nvvm

        from engine.cuda.intrinsics import definitions

        options = self.options | {"arch": "compute_{}{}".format(*compute_capability), "fma": False}
        with global_compiler_lock:  # ``intermediate`` replaces the function
            compile_ir = nvvm.compile_ir
        text: bytes = compile_ir([*self.modules, definitions(compute_capability)], **options)
        ptx = text.decode().strip("\x00").strip()
        if self.target is not None:
            # Instructions that later compute capabilities do not have need a target of their own.
            assert compute_capability == self.target
            ptx = re.sub(r"^\.target sm_\d+$", r"\g<0>a", ptx, flags=re.MULTILINE)
        return ptx


def intermediate(specialization: Specialization) -> Intermediate:
    """Compile a kernel to LLVM IR, which takes most of the time of compiling it.  No GPU is needed."""
    from numba import cuda

    declared = specialization.kernel
    threads, blocks = (
        wish(*specialization.constants) if callable(wish) else wish for wish in (declared.threads, declared.blocks)
    )
    bounds = (threads, blocks) if threads and blocks else threads or None
    # A thread that compiles at the same time would use the replaced functions.
    with global_compiler_lock, _without_a_device() as given:
        cuda.compile_ptx(specialization.function.py_func, declared.arguments, cc=TARGETS[0], launch_bounds=bounds)
    ((modules, options),) = given
    return Intermediate(modules, options, declared.target)


def compile_ptx(specialization: Specialization, compute_capability: tuple[int, int]) -> str:
    """Compile a kernel to PTX.  No GPU is needed."""
    return intermediate(specialization).ptx(compute_capability)


def entry_name(ptx: str) -> str:
    """The name of the kernel in a PTX text that contains exactly one."""
    found = re.search(r"\.visible \.entry (\w+)", ptx)
    assert found
    return found[1]


def link(ptx: str, compute_capability: tuple[int, int], *options: str) -> tuple[bytes, str]:
    """Compile PTX to machine code: (machine code, what the linker says with these further ``options``).  Raises DeviceError
    with the linker's message on failure."""
    from cuda.bindings import nvjitlink

    major, minor = compute_capability
    specific = "a" if re.search(r"^\.target sm_\d+a$", ptx, flags=re.MULTILINE) else ""
    words = [f"-arch=sm_{major}{minor}{specific}", "-O3", *options]
    handle = nvjitlink.create(len(words), words)
    try:
        text = ptx.encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        said = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, said)
        return bytes(code), said.decode()
    except nvjitlink.nvJitLinkError as error:
        raise DeviceError(f"a kernel could not be linked for compute capability {major}.{minor}: {error}.") from error
    finally:
        nvjitlink.destroy(handle)


# --- kept between runs -----------------------------------------------------------------------------------------


def cubin(specialization: Specialization, compute_capability: tuple[int, int]) -> tuple[bytes, str, bool]:
    """The machine code of a kernel, read from disk or compiled: (machine code, name of the entry, whether it was
    compiled)."""
    kept = kernel_cache.read("gpu", file_name(specialization, compute_capability))
    if kept is not None:
        name, _, code = kept.partition(b"\n")
        return code, name.decode(), False
    ptx = compile_ptx(specialization, compute_capability)
    name_, code = entry_name(ptx), link(ptx, compute_capability)[0]
    kernel_cache.write("gpu", file_name(specialization, compute_capability), name_.encode() + b"\n" + code)
    return code, name_, True


def file_name(specialization: Specialization, compute_capability: tuple[int, int]) -> str:
    """The name of the file for the machine code in the folder of ``engine/compile/cache.py``."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", specialization.name).strip("-")
    exact = hashlib.sha256(specialization.name.encode()).hexdigest()[:8]
    return "sm_{}{}/{}-{}.cubin".format(*compute_capability, name, exact)
