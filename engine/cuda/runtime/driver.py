"""NVIDIA's driver: its start, the GPUs that it sees, and their contexts.

This module imports neither NumPy nor Numba, so that a command can begin to start the driver while it imports them.
"""

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from engine.cuda.runtime.kinds import Handle
from engine.errors import DeviceError

OLDEST = (7, 5)
"""The lowest supported compute capability: the first with int8 tensor cores."""

MODULE_VERSION = Path("/sys/module/nvidia/version")
"""Where Linux has the version of NVIDIA's driver."""


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a GPU that the driver reports.  Memory is in bytes; shared memory is the maximum per block;
    ``driver`` is the version of the driver, if it can be read, and the latest version of CUDA that it supports; ``peers`` are
    the numbers of the other GPUs whose memory it can access."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory: int
    free: int
    multiprocessors: int
    shared_memory: int
    driver: str = ""
    peers: tuple[int, ...] = ()


def bindings() -> ModuleType:
    """The initialized driver bindings.  Raises DeviceError with the reason if they are not available."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError(
            "the GPU needs the package numba-cuda: install it with pip install 'bitmirror[cuda]', or use device=\"cpu\"."
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except Exception:  # the bindings raise their own error if no driver is installed
        raise DeviceError('no NVIDIA driver was found on this machine; install one, or use device="cpu".') from None
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceError('the NVIDIA driver sees no GPU on this machine; use device="cpu".')
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            f'the NVIDIA driver could not start ({status.name}); restart the machine, or use device="cpu".'
        )
    return driver


def require_gpu() -> None:
    """Raise DeviceError if there is no GPU.  This is fast and does not create a context."""
    if int(value(bindings().cuDeviceGetCount())) == 0:
        raise DeviceError('the NVIDIA driver sees no GPU on this machine; use device="cpu".')


def list_devices() -> list[DeviceInfo]:
    """All GPUs of this machine.  Raises DeviceError if there are none."""
    driver = bindings()
    return [describe(driver, index) for index in range(int(value(driver.cuDeviceGetCount())))]


def describe(driver: ModuleType, index: int) -> DeviceInfo:
    """The properties of a GPU.  driver: the initialized bindings; index: its number.  Raises DeviceError."""
    handle = value(driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute
    major, minor, count, shared = (
        int(value(driver.cuDeviceGetAttribute(a, handle)))
        for a in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )
    )
    name = value(driver.cuDeviceGetName(256, handle)).split(b"\0")[0].decode()
    context = value(driver.cuDevicePrimaryCtxRetain(handle))
    try:
        driver.cuCtxPushCurrent(context)
        free, total = value(driver.cuMemGetInfo())
        driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(handle)
    sizes = int(total), int(free), count, shared
    return DeviceInfo(index, name, (major, minor), *sizes, _version(driver), _peers(driver, index))


def _peers(driver: ModuleType, index: int) -> tuple[int, ...]:
    others = (i for i in range(int(value(driver.cuDeviceGetCount()))) if i != index)
    own = value(driver.cuDeviceGet(index))
    return tuple(i for i in others if value(driver.cuDeviceCanAccessPeer(own, value(driver.cuDeviceGet(i)))))


def _version(driver: ModuleType) -> str:
    cuda = int(value(driver.cuDriverGetVersion()))
    words = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    try:
        return f"{MODULE_VERSION.read_text(encoding='ascii').strip()}, {words}"
    except (OSError, UnicodeError):  # another system than Linux
        return words


def value(result: tuple[Handle, ...]) -> Handle:
    """The result of a driver call without its status.  Raises DeviceError if the call failed."""
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f'the GPU reported {status.name}; restart the program, or use device="cpu".')
    return values[0] if len(values) == 1 else tuple(values)


def begin_context(index: int) -> None:
    """Begin to create the context of a GPU in another thread, which takes tenths of a second.  A ``Device`` that is made
    meanwhile waits for it, and reports errors.  Nothing happens if there is no such GPU or if it is not supported."""

    def create() -> None:
        with contextlib.suppress(Exception):  # whoever opens the device reports it
            driver = bindings()
            handle, names = value(driver.cuDeviceGet(index)), driver.CUdevice_attribute
            parts = (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
            if tuple(int(value(driver.cuDeviceGetAttribute(part, handle))) for part in parts) >= OLDEST:
                value(driver.cuDevicePrimaryCtxRetain(handle))

    # No daemon: a process must not end while its driver starts.
    threading.Thread(target=create, name="context").start()
