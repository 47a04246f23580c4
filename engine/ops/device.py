"""The device of a backend."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DeviceMemory:
    """The state of a GPU's memory, in bytes.

    allocated: the memory that this process has allocated, including ``weights``.
    weights: the memory of weights.
    free: the free memory.
    """

    allocated: int
    weights: int
    free: int


class DeviceOperations(Protocol):
    """The properties of a backend's device, and its access to other devices."""

    name: str
    """The kind of device: "cpu" or "cuda"."""

    n_threads: int
    """The number of CPU threads that compute passes; 0 for a GPU."""

    @property
    def owners(self) -> tuple[Any, ...]:
        """The backends that share the layers of a model; usually only this one."""

    @property
    def label(self) -> str:
        """The name of the device in reports, such as "cpu" or "cuda:0 NVIDIA H200"."""

    @property
    def gpu_name(self) -> str:
        """The name of the GPU, such as "NVIDIA H200"; "" for the CPU."""

    def device_memory(self) -> DeviceMemory | None:
        """The state of the GPU's memory; None for the CPU, which keeps weights and caches in host memory."""

    def bandwidth(self) -> float:
        """The bandwidth of sequential reads of the device's memory with the backend's number of threads, in bytes per second.

        The first call measures it.  This takes about half a second and a gigabyte of memory on the CPU, and milliseconds on a
        GPU.  Raises MemoryError or DeviceError if too little memory is free for the measurement.
        """

    def shares_memory_with(self, other: "DeviceOperations") -> bool:
        """Whether both backends use the same arrays and the same queue of work, so that no copies or waits are needed."""

    def can_reach(self, other: "DeviceOperations") -> bool:
        """Whether this kind of device can access arrays of the kind of ``other``."""

    def reach(self, other: "DeviceOperations") -> None:
        """Enable kernels of this device to access the memory of ``other``, for which :meth:`can_reach` must be true.

        Raises DeviceError if the two devices are not connected.
        """
