"""A fake of NVIDIA's driver bindings, to test machines without a GPU, with an unsuitable one, or with too little memory.

It answers everything before a kernel runs: devices, contexts, memory.  It does not run kernels.
"""

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any


class Result(IntEnum):
    """CUresult."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_SYSTEM_NOT_READY = 802


class EventFlags(IntEnum):
    """CUevent_flags."""

    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


class Names:
    """An enumeration whose members are their own names, and which has every member that is requested."""

    def __getattr__(self, name: str) -> str:
        return name


OK = Result.CUDA_SUCCESS


@dataclass
class FakeDriver:
    """``gpus``: (name, compute capability) of each; ``free``: bytes it reports as free; ``room``: bytes it really
    provides; ``linked``: whether a GPU can access the memory of others."""

    gpus: list[tuple[str, tuple[int, int]]] = field(default_factory=lambda: [("Abacus X1", (9, 0))])
    free: int = 8 << 30
    room: int = 8 << 30
    copies: Result = OK
    linked: bool = True
    addresses: Any = field(default_factory=lambda: count(1 << 40, 1 << 36))
    pinned: list[Any] = field(default_factory=list)

    CUresult = Result
    CUevent_flags = EventFlags
    CUdevice_attribute = CUfunction_attribute = Names()
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def cuDriverGetVersion(self) -> Any:
        return OK, 13010

    def cuDeviceGetCount(self) -> Any:
        return OK, len(self.gpus)

    def cuDeviceGet(self, index: int) -> Any:
        return OK if 0 <= index < len(self.gpus) else Result.CUDA_ERROR_INVALID_DEVICE, index

    def cuDeviceGetAttribute(self, attribute: str, index: int) -> Any:
        major, minor = self.gpus[index][1]
        values = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": major,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": minor,
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 3,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 99 << 10,
        }
        return OK, values.get(attribute, 65536)

    def cuDeviceCanAccessPeer(self, index: int, other: int) -> Any:
        return OK, int(self.linked)

    def cuDeviceGetName(self, size: int, index: int) -> Any:
        return OK, self.gpus[index][0].encode().ljust(size, b"\0")

    def cuDevicePrimaryCtxRetain(self, index: int) -> Any:
        return OK, f"context of {index}"

    def cuMemGetInfo(self) -> Any:
        return OK, self.free, 16 << 30

    def cuStreamCreate(self, flags: int) -> Any:
        return OK, "stream"

    def cuMemAlloc(self, n_bytes: int) -> Any:
        if n_bytes > self.room:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        return OK, next(self.addresses)

    def cuMemHostAlloc(self, n_bytes: int, flags: int) -> Any:
        if n_bytes > self.room:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.pinned.append(ctypes.create_string_buffer(n_bytes))
        return OK, ctypes.addressof(self.pinned[-1])

    def cuMemHostGetDevicePointer(self, pointer: int, flags: int) -> Any:
        return OK, pointer

    def cuMemcpyHtoDAsync(self, *arguments: Any) -> Any:
        return (self.copies,)

    def cuEventCreate(self, flags: int) -> Any:
        return OK, "event"

    def _nothing(self, *arguments: Any) -> Any:
        return (OK,)

    cuDevicePrimaryCtxRelease = cuCtxPushCurrent = cuCtxPopCurrent = cuCtxSetCurrent = _nothing
    cuEventRecord = cuEventSynchronize = cuEventDestroy = cuStreamWaitEvent = cuMemcpyAsync = _nothing
    cuCtxEnablePeerAccess = _nothing
    cuStreamSynchronize = cuStreamDestroy = cuMemsetD8Async = cuMemFree = cuModuleUnload = cuMemFreeHost = _nothing
