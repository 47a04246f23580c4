"""A GPU in the simulator, with the interface of ``engine/cuda/runtime/device.py``: memory is NumPy arrays at made-up
addresses, and a launch runs the kernel thread by thread before it returns."""

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from numba import types

from engine.cuda import backend, sample
from engine.cuda.runtime import device as real
from engine.cuda.runtime import driver
from engine.cuda.runtime.arguments import layout
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer
from engine.cuda.runtime.driver import DeviceInfo
from engine.cuda.runtime.simulator import run
from engine.errors import DeviceError, DeviceMemoryError

GAP = 1 << 20
"""Bytes between two allocations, so that an address past the end of one is in none."""

SPACE = 1 << 40
"""Bytes of the addresses of a device, which no other device has."""

_running = threading.Lock()
"""Held while a kernel runs: the simulator runs one at a time, and devices load weights in threads of their own."""

_numbers = count(1)
_devices: "weakref.WeakValueDictionary[int, SimulatedDevice]" = weakref.WeakValueDictionary()
"""The devices by the part of the address space that they have."""


class SimulatedGraph:
    """Launches that were recorded, each with its device."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.launches: list[tuple[Any, ...]] = []
        #: The devices whose launches are being recorded.
        self.members = [device]
        #: The numbers of launches before which devices wait for each other.
        self.joins = {0}

    @property
    def n_nodes(self) -> int:
        return len(self.launches)

    def launch(self) -> None:
        ends = [*sorted(self.joins), len(self.launches)]
        for first, last in pairwise(ends):
            self._device.waiting.extend(side_by_side(self.launches[first:last]))
        self._device.resume()


def side_by_side(launches: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Launches in an order in which those that wait for packets of other devices find them.  Devices run up to such a launch;
    then each of them only gives, and then they run it as it is."""
    queues: dict[Any, deque[tuple[Any, ...]]] = {}
    for launch in launches:
        queues.setdefault(launch[0], deque()).append(launch)
    while any(queues.values()):
        for queue in queues.values():
            while queue and polls_of(queue[0]) < 2:
                yield queue.popleft()
        heads = [queue.popleft() for queue in queues.values() if queue]
        for device, specialization, grid, block, arguments in heads:
            place = PLACE_OF_POLLS[specialization.kernel.name]
            yield device, specialization, grid, block, (*arguments[:place], 0, *arguments[place + 1 :])
        yield from heads


def polls_of(launch: tuple[Any, ...]) -> int:
    """How often a launch looks for a packet."""
    place = PLACE_OF_POLLS.get(launch[1].kernel.name)
    return 0 if place is None else launch[4][place]


PLACE_OF_POLLS = {
    "gather": 6,
    "gather_quantize": 11,
    "gather_norm_quantize": 8,
    "gather_combine_quantize": 12,
    "gather_gated_norm_quantize": 9,
    "take_quantize": 2,
    "gather_words": 7,
    "wide_gather_norm_quantize": 11,
    "wide_gather_quantize": 13,
    "wide_gather_combine_quantize": 14,
}
"""The places of the argument polls."""


class SimulatedMark:
    """A point in the queue, which everything has already passed.  Devices that wait for it join the graph that is being
    recorded there."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.graph: SimulatedGraph | None = None

    def set(self) -> None:
        self.graph = self._device.capturing

    def wait(self, what: str) -> None:
        pass

    def is_passed(self, what: str) -> bool:
        return True


class SimulatedDevice:
    """``damage``: called after each kernel with (device, specialization, arguments), to imitate a faulty kernel;
    ``in_graph``: whether that kernel was started by a captured graph; ``peers``: devices whose memory its kernels access, if
    it ``links`` to others at all."""

    name = "simulated GPU"
    compute_capability = (9, 0)
    multiprocessors = 1
    #: That of the smallest GPUs, so that kernels have small blocks, which take less time here.
    shared_memory = 99 << 10
    #: Shuffles the order of threads; None: they run in order.
    seed: int | None = None
    #: Whether it can access the memory of other devices.
    links = True

    def __init__(self, index: int = 0, memory: int = 1 << 30) -> None:
        sizes = memory, memory, self.multiprocessors, self.shared_memory
        self.info = DeviceInfo(index, self.name, self.compute_capability, *sizes)
        self.allocated = 0
        self.compiled: list[str] = []
        self.compile_seconds = 0.0
        self.on_launch: Callable[[str], None] | None = None
        self.damage: Callable[[SimulatedDevice, Specialization, Sequence[Any]], None] | None = None
        self.in_graph = False
        #: Launches of a graph that begin when the host has set the flag that the first one waits for.
        self.waiting: deque[tuple[Any, ...]] = deque()
        self._memory: dict[int, np.ndarray] = {}
        number = next(_numbers)
        self._next = number * SPACE
        _devices[number] = self
        self.peers: list[SimulatedDevice] = []
        self.alarms: list[tuple[np.ndarray, str, Any]] = []
        self.capturing: SimulatedGraph | None = None

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        return self.info.memory - self.allocated

    def allocate(self, n_bytes: int, what: str) -> Buffer:
        """Memory filled with bytes 0xFF, since nothing guarantees zeros."""
        n_bytes = max(256, -(-n_bytes // 256) * 256)
        if n_bytes > self.free_memory():
            raise DeviceMemoryError(f"{self.name} has too little memory for {what}.")
        address = self._map(np.full(n_bytes, 0xFF, np.uint8))
        self.allocated += n_bytes
        return Buffer(address, n_bytes, self._free)

    def allocate_host(self, n_bytes: int, what: str) -> Buffer:
        """Host memory filled with bytes 0xFF, which is not counted."""
        return Buffer(self._map(np.full(n_bytes, 0xFF, np.uint8)), n_bytes, self._free_host)

    def _map(self, memory: np.ndarray) -> int:
        address = self._next
        self._next += -(-memory.size // GAP) * GAP + GAP
        self._memory[address] = memory
        return address

    def _free(self, address: int, n_bytes: int) -> None:
        del self._memory[address]
        self.allocated -= n_bytes

    def _free_host(self, address: int, n_bytes: int) -> None:
        del self._memory[address]

    def at(self, address: int, n_bytes: int = 0) -> np.ndarray:
        """The memory from an address to the end of its allocation, uint8, or the first ``n_bytes`` of it."""
        # A copy: the garbage collector may free memory at any time.
        for start, memory in [pair for device in (self, *self.peers) for pair in list(device._memory.items())]:
            if start <= address < start + memory.size:
                rest = memory[address - start :]
                assert n_bytes <= rest.size, f"{n_bytes} bytes where {rest.size} are allocated"
                return rest[:n_bytes] if n_bytes else rest
        raise IndexError(f"address {address:#x} is not allocated")

    def clear(self, address: int, n_bytes: int) -> None:
        self.at(address, n_bytes)[:] = 0

    def write(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            self.at(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read(self, address: int, shape: tuple[int, ...], dtype: Any, out: np.ndarray | None = None) -> np.ndarray:
        self.synchronize()
        out = np.empty(shape, dtype) if out is None else out
        if out.nbytes:
            out.reshape(-1).view(np.uint8)[:] = self.at(address, out.nbytes)
        return out

    def write_lines(self, address: int, source: int, width: int, pitches: tuple[int, int], height: int) -> None:
        for line in range(height):
            given = (ctypes.c_uint8 * width).from_address(source + line * pitches[1])
            self.at(address + line * pitches[0], width)[:] = np.ctypeslib.as_array(given)

    def read_lines(self, address: int, target: int, width: int, pitches: tuple[int, int], height: int) -> None:
        self.synchronize()
        for line in range(height):
            out = (ctypes.c_uint8 * width).from_address(target + line * pitches[1])
            np.ctypeslib.as_array(out)[:] = self.at(address + line * pitches[0], width)

    def pin(self, array: np.ndarray) -> None:
        return None

    def beside(self) -> "SimulatedDevice":
        return self

    def copy(self, address: int, array: np.ndarray) -> None:
        self.write(address, array)

    def mark(self) -> "SimulatedMark":
        return SimulatedMark(self)

    def follow(self, mark: "SimulatedMark") -> None:
        if mark.graph is not None and mark.graph is not self.capturing:
            assert self.capturing is None
            self.capturing = mark.graph
            mark.graph.members.append(self)
        if self.capturing is not None:
            self.capturing.joins.add(len(self.capturing.launches))

    def access(self, other: "SimulatedDevice") -> bool:
        if self.links and other is not self and other not in self.peers:
            self.peers.append(other)
        return self.links or other is self

    def reach(self, other: "SimulatedDevice") -> None:
        assert self.access(other)

    def move(self, target: int, source: int, n_bytes: int) -> None:
        for device in (_devices[target // SPACE], _devices[source // SPACE]):
            device.resume()
        given = _devices[source // SPACE].at(source, n_bytes)
        _devices[target // SPACE].at(target, n_bytes)[:] = given

    def pinned(self, shape: tuple[int, ...], dtype: Any, what: str = "", zeroed: bool = True) -> tuple[np.ndarray, int]:
        array = np.zeros(shape, dtype) if zeroed else np.full(shape, 0xFF, dtype)
        return array, self._map(array.reshape(-1).view(np.uint8))

    def alarm(self, sentence: str, then: Callable[[], None]) -> int:
        word, address = self.pinned((1,), np.int32)
        self.alarms.append((word, sentence, weakref.WeakMethod(then)))
        return address

    def check_alarms(self) -> None:
        said = [(sentence, then) for word, sentence, then in self.alarms if word[0]]
        if said:
            for word, *_ in self.alarms:
                word[0] = 0
            for _, of_object in said:
                if (then := of_object()) is not None:
                    then()
            raise DeviceError(said[0][0])

    def runs_beside(self, other: "SimulatedDevice") -> bool:
        return False

    def resume(self) -> None:
        """Run the launches of a graph up to one that waits for the host."""
        self.in_graph = True
        while self.waiting and not self._waits(*self.waiting[0]):
            device, *launch = self.waiting.popleft()
            device.launch(*launch)
        self.in_graph = False

    def _waits(
        self, device: object, specialization: Specialization, grid: Any, block: int, arguments: Sequence[Any], *_: Any
    ) -> bool:
        return specialization.kernel.name == "receive" and not self.at(arguments[3], 4).any()

    # --- kernels -----------------------------------------------------------------------------------------------

    def load(self, specialization: Specialization) -> None:
        pass

    def launch(
        self,
        specialization: Specialization,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        percent: int = 0,
    ) -> None:
        if self.capturing:
            self.capturing.launches.append((self, specialization, grid, block, arguments))
            return
        assert specialization.shared <= self.shared_memory
        layout(specialization.kernel).pack(*arguments)  # every argument fits its type, which the driver cannot check
        if self.on_launch:
            self.on_launch(specialization.name)
        pairs = zip(specialization.kernel.arguments, arguments, strict=True)
        given = [(self.at(a) if a else None) if isinstance(kind, types.CPointer) else a for kind, a in pairs]
        with _running:
            run(specialization, grid, block, given, seed=self.seed)
        if self.damage:
            self.damage(self, specialization, arguments)

    def finish(self) -> None:
        pass

    def synchronize(self, what: str = "") -> None:
        self.resume()
        assert not self.waiting, "a kernel waits for the host, which waits for it"
        self.check_alarms()

    def is_idle(self) -> bool:
        self.resume()
        return not self.waiting

    @contextlib.contextmanager
    def capture(self) -> Iterator[SimulatedGraph]:
        self.capturing = graph = SimulatedGraph(self)
        try:
            yield graph
        finally:
            for device in graph.members:
                device.capturing = None

    def close(self) -> None:
        self._memory.clear()


class WaitingDevice(SimulatedDevice):
    """One whose kernels wait for those of other devices, which run at the same time."""

    def runs_beside(self, other: SimulatedDevice) -> bool:
        return True


def use_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models be loaded on a simulated GPU, whose choice of tokens has few threads."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    for module in (driver, real):
        monkeypatch.setattr(module, "require_gpu", lambda: None)
    monkeypatch.setattr(sample, "GROUPS", 32)
    monkeypatch.setattr(sample, "OWNED_GROUPS", 64)
