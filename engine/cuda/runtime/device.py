"""One GPU: memory, launches, captured graphs, and errors that say what to do.

All calls use NVIDIA's driver bindings on one stream of the device's primary context, which each call makes the current one of
its thread: one thread may use several GPUs in turn.  Kernels come from ``engine/cuda/runtime/compiler.py``.  From compute
capability 9.0 a kernel may start before the previous kernel has ended (programmatic dependent launch), so every kernel calls
``wait_for_inputs`` before it reads the results of another one.
"""

import contextlib
import ctypes
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import DTypeLike

from engine.cuda.runtime.arguments import ArgumentMemory
from engine.cuda.runtime.compiler import SHARED_OF_DRIVER, Specialization, cubin
from engine.cuda.runtime.driver import OLDEST, bindings, describe, require_gpu, value
from engine.cuda.runtime.kinds import Handle
from engine.errors import DeviceError, DeviceMemoryError

SHARED_PERCENT = 40
"""The percentage of a multiprocessor's fast memory used as shared memory; the rest is cache.  Kernels with different
percentages do not overlap, so it is the same for all kernels of a step.  Kernels get more if their resident blocks need
more."""

SMALL = 64 << 10
"""The maximum size of an asynchronous copy to the device, in bytes."""

STAGING = 1 << 20
"""The size of the pinned buffer for asynchronous copies, in bytes."""

CONTEXT = 512 << 20
"""Bytes that a limit of memory counts for the context, which takes them before the driver can be asked what is free."""


def shared_percent(shared: int, blocks: int, most: int) -> int:
    """The percentage of a multiprocessor's fast memory that a kernel prefers as shared memory, so that ``blocks`` blocks with
    ``shared`` bytes each can be resident.  ``most``: the maximum shared memory of a block, in bytes."""
    whole = most + SHARED_OF_DRIVER
    each = shared + SHARED_OF_DRIVER
    resident = min(max(1, blocks), whole // each)
    return max(SHARED_PERCENT, -(-100 * resident * each // whole)) if shared else SHARED_PERCENT


def allocated_bytes(n_bytes: int) -> int:
    """The bytes of an allocation of ``n_bytes`` bytes: whole lines of 256."""
    return max(256, -(-n_bytes // 256) * 256)


class Buffer:
    """Device memory: ``address`` and ``n_bytes``.  It is freed when the object is garbage-collected."""

    def __init__(self, address: int, n_bytes: int, release: Callable[[int, int], None]) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self._release = release

    def __del__(self) -> None:
        self._release(self.address, self.n_bytes)


@dataclass
class _Taken:
    """What this process has taken of a GPU's memory: ``free``, the bytes that were free when its first ``Device`` was made,
    and ``allocated``, the bytes of the buffers of all of them."""

    free: int
    allocated: int = 0


_TAKEN: dict[int, _Taken] = {}
"""What this process has taken of each GPU's memory."""


class _Owner:
    """A driver resource that is released when this object is garbage-collected."""

    def __init__(self, release: Callable[[Handle], object], handle: Handle) -> None:
        self._release = release
        self._handle = handle

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # when the interpreter exits, the bindings may be gone
            self._release(self._handle)


class Mark:
    """A point in the queue of a device: the last call of :meth:`set`."""

    def __init__(self, device: "Device") -> None:
        driver = device._driver
        flags = driver.CUevent_flags
        self._device = device
        # Threads that wait leave their core to others.
        flag = int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)
        self._event = device._check(driver.cuEventCreate(flag), "a mark")
        self._owner = _Owner(driver.cuEventDestroy, self._event)

    def set(self) -> None:
        """Move it to the end of everything launched so far."""
        self._device._use()
        self._device._check(self._device._driver.cuEventRecord(self._event, self._device._stream), "a mark")

    def wait(self, what: str) -> None:
        """Wait until everything before it has ended; for nothing before the first :meth:`set`.  Raises DeviceError, naming
        the operation ``what``, if that has failed."""
        self._device._use()
        self._device._check(self._device._driver.cuEventSynchronize(self._event), what)

    def is_passed(self, what: str) -> bool:
        """Whether :meth:`wait` would return at once.  Raises the same error."""
        self._device._use()
        (status,) = self._device._driver.cuEventQuery(self._event)
        if status == self._device._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._device._check((status,), what)
        return True


_FUNCTIONS: dict[int, dict[Specialization, Handle]] = {}
"""The kernels loaded on each GPU, which all models on it share."""


class Device:
    """A GPU with its own stream.  Several objects for one GPU are independent.

    Attributes: ``info``, ``compute_capability``, ``allocated`` (bytes in use), ``compiled`` (names of kernels that were
    compiled because they were not found on disk) and ``compile_seconds``.
    """

    def __init__(self, index: int = 0, limit: int = 0) -> None:
        """limit: the most bytes of the GPU's memory that this process may use, as if the GPU had no more; 0: all.  It covers
        what the driver uses for the process, too: modules and graphs as far as they take free memory, and ``CONTEXT`` bytes
        for the context.  Raises DeviceError if the GPU cannot be used."""
        require_gpu()
        self._driver = bindings()
        count = int(value(self._driver.cuDeviceGetCount()))
        if not 0 <= index < count:
            names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise DeviceError(
                f"there is no cuda:{index} on this machine; use {names} (bitmirror run --list-devices lists them), or cpu."
            )
        self._handle = value(self._driver.cuDeviceGet(index))
        # The primary context is shared by the process and never released.  It takes tenths of a second to create, so it is
        # there before the description, which would create one and destroy it again.
        self._context = value(self._driver.cuDevicePrimaryCtxRetain(self._handle))
        self.info = describe(self._driver, index)
        self.compute_capability = self.info.compute_capability
        if self.compute_capability < OLDEST:
            self._driver.cuDevicePrimaryCtxRelease(self._handle)
            raise DeviceError(
                f"{self.info.name} has compute capability {_dotted(self.compute_capability)} and this engine needs "
                f'{_dotted(OLDEST)} or more (Turing, 2018); use device="cpu".'
            )
        self._use()
        stream = value(self._driver.cuStreamCreate(1))  # 1: does not wait for the default stream
        self._stream = stream
        self._stream_owner = _Owner(self._driver.cuStreamDestroy, stream)
        self._functions = _FUNCTIONS.setdefault(index, {})
        self._overlap = self.compute_capability >= (9, 0)
        self._first = True
        #: What was launched last, for errors: a kernel or words.
        self._latest: Specialization | str = "nothing"
        self._arguments = ArgumentMemory()
        #: What a launch says of its kernel, by whether it may start before the previous kernel has ended and by the
        #: percentage of fast memory that it prefers as shared memory.
        self._configs: dict[tuple[bool, int], Handle] = {}
        #: The pinned buffer for asynchronous copies, and the number of its bytes in use.
        self._staging: np.ndarray | None = None
        self._staged_bytes = 0
        #: Words that kernels set, each with what it means and what is done then.
        self._alarms: list[tuple[np.ndarray, str, weakref.WeakMethod[Callable[[], None]]]] = []
        #: Whether another device reads the memory of this one, in another stream.
        self._is_reached = False
        self._limit = limit
        self._taken = _TAKEN.setdefault(index, _Taken(self.info.free))
        self.allocated = 0
        self.compiled: list[str] = []
        self.compile_seconds = 0.0
        self.on_launch: Callable[[str], None] | None = None

    @property
    def name(self) -> str:
        """The name of the GPU."""
        return self.info.name

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of the GPU."""
        return self.info.multiprocessors

    @property
    def shared_memory(self) -> int:
        """The maximum shared memory of a block, in bytes."""
        return self.info.shared_memory

    def _use(self) -> None:
        """Make this device's context the current context of this thread."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "its start")

    def _check(self, result: tuple[Handle, ...], what: str) -> Handle:
        """The result of a driver call.  Raises DeviceError, naming the operation ``what``, if the call failed."""
        status, *values = result
        if int(status) != 0:
            raise DeviceError(
                f"{self.info.name} reported {status.name.removeprefix('CUDA_ERROR_').lower().replace('_', ' ')} during "
                f'{what}; run again, and if it persists, use device="cpu".'
            )
        return values[0] if len(values) == 1 else tuple(values)

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""
        self._use()
        free = int(self._check(self._driver.cuMemGetInfo(), "a query of its memory")[0])
        if not self._limit:
            return free
        # More may be free than at first, because another process has ended.
        used = max(self._taken.free - free, self._taken.allocated) + CONTEXT
        return min(free, max(0, self._limit - used))

    def allocate(self, n_bytes: int, what: str) -> Buffer:
        """Allocate uninitialized memory.  Raises DeviceError with the name ``what`` if there is not enough free memory."""
        self._use()
        n_bytes = allocated_bytes(n_bytes)
        status, address = self._request(n_bytes)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            gc.collect()  # an unused model may still hold memory in a reference cycle
            status, address = self._request(n_bytes)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceMemoryError(
                f"{self.info.name} has {self.free_memory() / 1e9:.2f} GB free and {what} needs {n_bytes / 1e9:.2f} GB more; "
                'choose a smaller context (n_ctx=...), a smaller model, or device="cpu".'
            )
        self._check((status,), f"the allocation of {what}")
        self._count(n_bytes)
        return Buffer(int(address), n_bytes, self._free)

    def _request(self, n_bytes: int) -> tuple[Handle, ...]:
        """The driver's answer to a request of memory, or what it would be if the GPU had no more than the limit."""
        if self._limit and n_bytes > self.free_memory():
            return self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        return cast("tuple[Handle, ...]", self._driver.cuMemAlloc(n_bytes))

    def _count(self, n_bytes: int) -> None:
        self.allocated += n_bytes
        self._taken.allocated += n_bytes

    def _check_limit(self, what: str) -> None:
        """Raise DeviceError if the driver has used more than the limit for ``what``."""
        if self._limit and not self.free_memory():
            self._check((self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,), what)

    def allocate_host(self, n_bytes: int, what: str) -> Buffer:
        """Allocate uninitialized host memory that the device accesses at the buffer's address.  Raises DeviceError with the
        name ``what`` if there is not enough free memory."""
        pointer = self._host_memory(n_bytes, what)

        def free(address: int, n_bytes: int) -> None:
            self._release(lambda: self._driver.cuMemFreeHost(pointer))

        return Buffer(self._mapped(pointer), n_bytes, free)

    def _host_memory(self, n_bytes: int, what: str) -> int:
        self._use()
        flags = self._driver.CU_MEMHOSTALLOC_DEVICEMAP | self._driver.CU_MEMHOSTALLOC_PORTABLE
        status, pointer = self._driver.cuMemHostAlloc(n_bytes, flags)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceError(
                f"{what} need {n_bytes / 1e9:.2f} GB of host memory that {self.info.name} can read, and the system "
                'cannot provide it; close other programs, or use device="cpu".'
            )
        return int(self._check((status, pointer), f"the allocation of {what}"))

    def reach(self, other: "Device") -> None:
        """Let kernels of this device access the memory of another one.  Raises DeviceError if the two are not connected."""
        other._is_reached = True
        if not self.access(other):
            raise DeviceError(
                f"cuda:{self.info.index} cannot read the memory of cuda:{other.info.index}, as an assistant must; "
                "leave out its device (device_draft=...)."
            )

    def access(self, other: "Device") -> bool:
        """Let kernels and copies of this device access the memory of another one (peer access); False if the two are not
        connected.  True for the same GPU."""
        self._use()
        if other.info.index == self.info.index:
            return True
        if not self._check(self._driver.cuDeviceCanAccessPeer(self._handle, other._handle), "a query of another GPU"):
            return False
        status = self._driver.cuCtxEnablePeerAccess(other._context, 0)
        if status[0] != self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self._check(status, "enabling access to another GPU")
        return True

    def _release(self, release: Callable[[], object]) -> None:
        """Free memory.  The garbage collector calls this at any time, for example between :meth:`_use` and the next call of
        another device.  So it restores the current context: a kernel loaded into the wrong context fails from then on."""
        with contextlib.suppress(Exception):  # when the interpreter exits, the bindings may be gone
            status, *_ = self._driver.cuCtxPushCurrent(self._context)
            if int(status) == 0:  # a GPU that has failed keeps its memory
                try:
                    release()
                finally:
                    self._driver.cuCtxPopCurrent()

    def _mapped(self, pointer: int) -> int:
        """The device's address of host memory."""
        return int(self._check(self._driver.cuMemHostGetDevicePointer(pointer, 0), "the mapping of host memory"))

    def _free(self, address: int, n_bytes: int) -> None:
        self._count(-n_bytes)
        self._release(lambda: self._driver.cuMemFree(address))

    def clear(self, address: int, n_bytes: int) -> None:
        """Zero memory."""
        self._use()
        self._check(self._driver.cuMemsetD8Async(address, 0, n_bytes, self._stream), "the clearing of memory")

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device, after everything launched so far.  The array may be changed when this returns.  Small
        copies are asynchronous."""
        self._use()
        array = np.ascontiguousarray(array)
        if not array.nbytes:
            return
        wait = array.nbytes > SMALL or self._is_reached
        source = array.ctypes.data if wait else self._staged(array)
        result = self._driver.cuMemcpyHtoDAsync(address, source, array.nbytes, self._stream)
        self._check(result, "a copy to the device")
        if wait:
            self.synchronize("a copy to the device")
        self._first = True

    def beside(self) -> "Device":
        """The same GPU with another queue, whose work is independent of that of this one.  It may be used by one thread at a
        time, which may be another one than that of this device."""
        return Device(self.info.index, self._limit)

    def copy(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array of pinned memory to the device, after everything launched so far.  It must not be changed
        before the copy has ended."""
        self._use()
        result = self._driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self._stream)
        self._check(result, "a copy to the device")
        self._first = True

    def mark(self) -> Mark:
        """A point in the queue, which is nowhere yet."""
        self._use()
        return Mark(self)

    def follow(self, mark: Mark) -> None:
        """Let what is launched from now on start only after what was before a mark, usually one in the queue of another
        device.  The host does not wait."""
        self._use()
        self._check(self._driver.cuStreamWaitEvent(self._stream, mark._event, 0), "waiting for another GPU")
        self._first = True

    def move(self, target: int, source: int, n_bytes: int) -> None:
        """Copy memory after everything launched so far.  The host does not wait.

        target, source: addresses of memory of this device, of another one that it can :meth:`access`, or of pinned memory.
        """
        self._use()
        self._check(self._driver.cuMemcpyAsync(target, source, n_bytes, self._stream), "a copy of memory")
        self._first = True

    def _staged(self, array: np.ndarray) -> int:
        """Copy a small array to pinned memory, which is not reused before the copy to the device has ended; returns its host
        address."""
        if self._staging is None:
            self._staging = self.pinned((STAGING,), np.uint8)[0]
        if self._staged_bytes + array.nbytes > STAGING:
            self.synchronize("a copy to the device")
            self._staged_bytes = 0
        at, self._staged_bytes = self._staged_bytes, self._staged_bytes + -(-array.nbytes // 16) * 16
        self._staging[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        return int(self._staging.ctypes.data) + at

    def read(self, address: int, shape: tuple[int, ...], dtype: DTypeLike, out: np.ndarray | None = None) -> np.ndarray:
        """Copy an array from the device, after everything launched so far.  out: a contiguous array of this shape and dtype
        to copy it to; None: a new one."""
        self._use()
        out = np.empty(shape, dtype) if out is None else out
        if out.nbytes:
            result = self._driver.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._stream)
            self._check(result, "a copy from the device")
        self.synchronize()
        return out

    def write_lines(self, address: int, source: int, width: int, pitches: tuple[int, int], height: int) -> None:
        """Copy ``height`` lines of ``width`` bytes from host memory at ``source`` to device memory, after everything launched
        so far.  pitches: the bytes from one line to the next, on the device and in host memory."""
        self._copy_lines(address, source, width, pitches, height, True)
        self.synchronize("a copy to the device")

    def read_lines(self, address: int, target: int, width: int, pitches: tuple[int, int], height: int) -> None:
        """Copy ``height`` lines of ``width`` bytes from device memory to host memory at ``target``, after everything launched
        so far.  pitches: the bytes from one line to the next, on the device and in host memory."""
        self._copy_lines(address, target, width, pitches, height, False)
        self.synchronize("a copy from the device")

    def _copy_lines(
        self, address: int, host_address: int, width: int, pitches: tuple[int, int], height: int, to_device: bool
    ) -> None:
        self._use()
        host, device = self._driver.CUmemorytype.CU_MEMORYTYPE_HOST, self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what = self._driver.CUDA_MEMCPY2D()
        if to_device:
            what.srcMemoryType, what.srcHost, what.srcPitch = host, host_address, pitches[1]
            what.dstMemoryType, what.dstDevice, what.dstPitch = device, address, pitches[0]
        else:
            what.srcMemoryType, what.srcDevice, what.srcPitch = device, address, pitches[0]
            what.dstMemoryType, what.dstHost, what.dstPitch = host, host_address, pitches[1]
        what.WidthInBytes, what.Height = width, height
        self._check(self._driver.cuMemcpy2DAsync(what, self._stream), "a copy of lines")

    def pinned(
        self, shape: tuple[int, ...], dtype: DTypeLike, what: str = "messages from the GPU", zeroed: bool = True
    ) -> tuple[np.ndarray, int]:
        """Host memory that the device can write: (array, its address on the device).  The memory is freed together with the
        array.  zeroed: whether it is zeroed or uninitialized.  Raises DeviceError with the name ``what`` if there is not
        enough free memory."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        pointer = self._host_memory(n_bytes, what)
        memory = (ctypes.c_byte * n_bytes).from_address(pointer)
        memory.owner = _Owner(self._driver.cuMemFreeHost, pointer)  # type: ignore[attr-defined]
        array: np.ndarray = np.frombuffer(memory, np.dtype(dtype)).reshape(shape)  # type: ignore[call-overload]
        if zeroed:
            array[...] = 0
        return array, self._mapped(pointer)

    def pin(self, array: np.ndarray) -> object | None:
        """Pin the memory of an array, so that the device copies it fast and while the host continues, as long as the returned
        object exists; None if the system does not allow it.  The array must be contiguous, and exist for longer."""
        self._use()
        pointer = array.ctypes.data
        (status,) = self._driver.cuMemHostRegister(pointer, array.nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return None
        return _Owner(self._driver.cuMemHostUnregister, pointer)

    def alarm(self, sentence: str, then: Callable[[], None]) -> int:
        """The address of an int32 in host memory.  After a kernel has set it, the next wait for the device calls the method
        ``then``, if its object still exists, and raises DeviceError with this sentence."""
        word, address = self.pinned((1,), np.int32)
        self._alarms.append((word, sentence, weakref.WeakMethod(then)))
        return address

    def check_alarms(self) -> None:
        """Raise DeviceError if a kernel has set an alarm, and forget all of them."""
        said = [(sentence, then) for word, sentence, then in self._alarms if word[0]]
        if said:
            for word, *_ in self._alarms:
                word[0] = 0
            for _, of_object in said:
                if (then := of_object()) is not None:
                    then()
            raise DeviceError(said[0][0])

    def runs_beside(self, other: "Device") -> bool:
        """Whether kernels of both devices run at the same time, whatever the number of their blocks."""
        return other.info.index != self.info.index

    # --- kernels -----------------------------------------------------------------------------------------------

    def load(self, specialization: Specialization) -> Handle:
        """The driver's handle of a kernel.  The kernel is compiled or read from disk on first use."""
        function = self._functions.get(specialization)
        if function is None:
            self._use()
            started = time.perf_counter()
            code, entry, was_compiled = cubin(specialization, self.compute_capability)
            what = f"the loading of {specialization.name}"
            module = self._check(self._driver.cuModuleLoadData(code), what)
            self._check_limit(what)
            function = self._check(self._driver.cuModuleGetFunction(module, entry.encode()), what)
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            percent = shared_percent(specialization.shared, specialization.blocks, self.info.shared_memory)
            self._check(self._driver.cuFuncSetAttribute(function, attribute, percent), what)
            if specialization.shared:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._check(self._driver.cuFuncSetAttribute(function, attribute, specialization.shared), what)
            self._functions[specialization] = function
            if was_compiled:
                self.compiled.append(specialization.name)
            self.compile_seconds += time.perf_counter() - started
        return function

    def launch(
        self,
        specialization: Specialization,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[float],
        percent: int = 0,
    ) -> None:
        """Launch a kernel after everything launched so far.  Pointers are integer addresses.  percent: the percentage of fast
        memory that it prefers as shared memory; 0: that of ``shared_percent``."""
        if self.on_launch:
            self.on_launch(specialization.name)
        self._use()
        function = self.load(specialization)
        overlaps = self._overlap and not self._first
        config = self._configs.get((overlaps, percent)) or self._config(overlaps, percent)
        sizes = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)
        config.gridDimX, config.gridDimY, config.gridDimZ = sizes[:3]
        config.blockDimX = block
        config.sharedMemBytes = specialization.shared
        self._arguments.write(specialization.kernel, arguments)
        self._first = False
        self._latest = specialization
        (status,) = self._driver.cuLaunchKernelEx(config, function, self._arguments.addresses, 0)
        if int(status) != 0:
            self._check((status,), f"the launch of {specialization.name}")

    def _config(self, overlaps: bool, percent: int) -> Handle:
        """What launches say of kernels with these two properties; sizes are added by each launch.  Creating one takes longer
        than a launch."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = 1
        config.hStream = self._stream
        attributes = []
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if percent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            attribute.value.sharedMemCarveout = percent
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return self._configs.setdefault((overlaps, percent), config)

    @property
    def _so_far(self) -> str:
        """What has been launched, for errors."""
        last = self._latest
        return f"the kernels up to {last if isinstance(last, str) else last.name}"

    def finish(self) -> None:
        """Let the next kernel start only after everything launched so far has ended."""
        self._first = True

    def synchronize(self, what: str = "") -> None:
        """Wait until everything launched has ended.  Raises DeviceError if an operation has failed."""
        self._use()
        self._check(self._driver.cuStreamSynchronize(self._stream), what or self._so_far)
        self._first = True
        self.check_alarms()

    def is_idle(self) -> bool:
        """Whether everything launched has ended.  Raises DeviceError if an operation has failed."""
        self._use()
        (status,) = self._driver.cuStreamQuery(self._stream)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((status,), self._so_far)
        self.check_alarms()
        return True

    @contextlib.contextmanager
    def capture(self) -> Iterator["Graph"]:
        """A context that records launches instead of executing them.  The graph can be launched after the context ends."""
        self._use()
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._first = True
        self._check(driver.cuStreamBeginCapture(self._stream, mode), "the capture of a graph")
        graph = Graph(self)
        try:
            yield graph
        except BaseException:
            driver.cuStreamEndCapture(self._stream)
            raise
        self._use()
        captured = self._check(driver.cuStreamEndCapture(self._stream), "the capture of a graph")
        graph.executable = self._check(driver.cuGraphInstantiate(captured, 0), "the preparation of a graph")
        graph.n_nodes = int(self._check(driver.cuGraphGetNodes(captured), "the preparation of a graph")[1])
        driver.cuGraphDestroy(captured)
        self._first = True
        self._check_limit("the preparation of a graph")

    # --- time --------------------------------------------------------------------------------------------------

    def event(self) -> Handle:
        """Record an event in the stream, for ``elapsed``."""
        self._use()
        event = self._check(self._driver.cuEventCreate(0), "a time mark")
        self._check(self._driver.cuEventRecord(event, self._stream), "a time mark")
        self._first = True
        return event

    def elapsed(self, start: Handle, end: Handle) -> float:
        """Seconds between two events.  Waits for the second one."""
        self._use()
        self._check(self._driver.cuEventSynchronize(end), self._so_far)
        return float(self._check(self._driver.cuEventElapsedTime(start, end), "a time mark")) / 1e3


class Graph:
    """A captured sequence of launches, which one call launches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.executable: Handle = None
        self.n_nodes = 0

    def launch(self) -> None:
        """Launch the graph after everything launched so far."""
        device = self._device
        device._use()
        device._latest = "the last of a captured pass (python -m engine.parity MODEL finds which)"
        device._check(device._driver.cuGraphLaunch(self.executable, device._stream), "the start of a captured pass")
        device._first = True

    def __del__(self) -> None:
        if self.executable is not None:
            with contextlib.suppress(Exception):
                self._device._driver.cuGraphExecDestroy(self.executable)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
