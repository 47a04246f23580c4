"""The device of a backend."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory: ``allocated`` by this process (including ``weights``), and ``free``."""

    allocated: int
    weights: int
    free: int


class DeviceOperations(Protocol):
    """What a backend says of its device, and how it reaches others."""

    name: str
    """Kind of device: "cpu" or "cuda"."""

    n_threads: int
    """The number of CPU threads that compute; 0 for a GPU."""

    @property
    def label(self) -> str:
        """The name of the device in reports, such as "cpu" or "cuda:0 NVIDIA H200"."""

    @property
    def gpu_name(self) -> str:
        """The name of the GPU, such as "NVIDIA H200"; "" for the CPU."""

    def device_memory(self) -> DeviceMemory | None:
        """The state of the GPU's memory; None for the CPU, which keeps weights and caches in host memory."""

    def bandwidth(self) -> float:
        """Bytes per second of a plain read of the device's memory, with the backend's number of threads.

        The first call measures it: this takes about half a second and a gigabyte on the CPU, milliseconds on a GPU.
        Raises MemoryError or DeviceError if too little memory is free for the measurement.
        """

    def shares_memory_with(self, other: "DeviceOperations") -> bool:
        """Whether both backends share arrays and one queue of work, so that neither copies nor waits are needed."""

    def can_reach(self, other: "DeviceOperations") -> bool:
        """Whether this kind of device can read arrays of the other kind."""

    def reach(self, other: "DeviceOperations") -> None:
        """Give kernels of this device access to the memory of another one for which ``can_reach`` is true.  Raises
        DeviceError if the two devices are not connected."""
