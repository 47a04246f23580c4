"""An absent GPU as a compile target: it has sizes, accepts all writes, and runs nothing."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, allocated_bytes
from engine.cuda.runtime.driver import DeviceInfo
from engine.errors import UsageError


@dataclass(frozen=True)
class Size:
    """The sizes that the choice of kernels depends on: the number of multiprocessors, the shared memory of a block in KiB,
    and the memory in GiB."""

    example: str
    multiprocessors: int
    shared_kib: int
    memory_gib: int


SIZES = {
    "sm_75": Size("T4", 40, 64, 15),
    "sm_80": Size("A100", 108, 163, 79),
    "sm_86": Size("RTX 3090", 82, 99, 23),
    "sm_89": Size("RTX 4090", 128, 99, 23),
    "sm_90": Size("H100, H200", 132, 227, 79),
    "sm_100": Size("B200", 148, 227, 178),
    "sm_120": Size("RTX 5090", 170, 99, 31),
}
"""Sizes by compute capability.  Sources: NVIDIA's CUDA C++ Programming Guide, table of technical specifications, and the data
sheets of the example GPUs."""


class Target:
    """An absent GPU with the part of the interface of ``engine.cuda.runtime.device.Device`` that recording a pass uses."""

    def __init__(self, name: str, multiprocessors: int = 0) -> None:
        """name: a key of ``SIZES``; multiprocessors: the number that the GPU has, 0: that of the example GPU.  Raises
        UsageError for any other name."""
        if name not in SIZES:
            raise UsageError(f"target {name!r} is unknown; use {', '.join(SIZES)}.")
        size = SIZES[name]
        digits = name.removeprefix("sm_")
        self.name = name
        self.compute_capability = (int(digits[:-1]), int(digits[-1]))
        self.multiprocessors = multiprocessors or size.multiprocessors
        self.shared_memory = size.shared_kib << 10
        memory = size.memory_gib << 30
        self.info = DeviceInfo(
            0, name, self.compute_capability, memory, memory, self.multiprocessors, self.shared_memory
        )
        self.allocated = 0
        #: Kernels that were started; loading a model starts some.
        self.launched: dict[Specialization, None] = {}
        self._next = 1 << 40

    def free_memory(self) -> int:
        """Bytes of memory that are not in use."""
        return self.info.memory - self.allocated

    def allocate(self, n_bytes: int, what: str) -> Buffer:
        """A buffer with an unused address and no memory."""
        n_bytes, address = allocated_bytes(n_bytes), self._next
        self._next += n_bytes + 256
        self.allocated += n_bytes
        return Buffer(address, n_bytes, self._release)

    def allocate_host(self, n_bytes: int, what: str) -> Buffer:
        """A buffer of host memory with an unused address and no memory."""
        return self.allocate(n_bytes, what)

    def _release(self, address: int, n_bytes: int) -> None:
        self.allocated -= n_bytes

    def pinned(self, shape: tuple[int, ...], dtype: Any, what: str = "", zeroed: bool = True) -> tuple[np.ndarray, int]:
        """An array of zeros, and an unused address."""
        array = np.zeros(shape, dtype)
        return array, self.allocate(array.nbytes, "").address

    def clear(self, address: int, n_bytes: int) -> None:
        """Nothing."""

    def write(self, address: int, array: np.ndarray) -> None:
        """Nothing."""

    def alarm(self, sentence: str, then: Callable[[], None]) -> int:
        """An unused address."""
        return self.allocate(4, "").address

    def check_alarms(self) -> None:
        """Nothing."""

    def runs_beside(self, other: "Target") -> bool:
        """False: nothing runs."""
        return False

    def pin(self, array: np.ndarray) -> None:
        """Nothing."""

    def beside(self) -> "Target":
        """Itself: it has no queue."""
        return self

    def copy(self, address: int, array: np.ndarray) -> None:
        """Nothing."""

    def reach(self, other: "Target") -> None:
        """Nothing."""

    def mark(self) -> "Target":
        """Itself."""
        return self

    def follow(self, mark: "Target") -> None:
        """Nothing."""

    def set(self) -> None:
        """Nothing."""

    def wait(self, what: str) -> None:
        """Nothing."""

    def is_passed(self, what: str) -> bool:
        """True: nothing runs."""
        return True

    def read(self, address: int, shape: tuple[int, ...], dtype: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Zeros, or ``out`` as it is."""
        return np.zeros(shape, dtype) if out is None else out

    def load(self, specialization: Specialization) -> None:
        """Record the kernel in ``launched``."""
        self.launched[specialization] = None

    def launch(self, specialization: Specialization, *launch: Any) -> None:
        """Record the kernel in ``launched``; nothing runs."""
        self.launched[specialization] = None

    def finish(self) -> None:
        """Nothing."""

    def synchronize(self, what: str = "") -> None:
        """Nothing."""

    @contextlib.contextmanager
    def capture(self) -> Iterator["Target"]:
        """A graph that is never launched."""
        yield self
