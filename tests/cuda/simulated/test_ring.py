"""Weights on their way to a GPU that copies as late as it may: every buffer keeps its bytes until they are copied."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.backend import Backend
from engine.cuda.products import repack
from engine.cuda.runtime import memory, ring
from engine.cuda.runtime.compiler import Specialization
from engine.errors import DeviceError, GGUFError
from engine.gguf.pages import MappedFile
from engine.ops.weight import Weight
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, weight


class LateMark:
    """A point in the queue of a :class:`LateDevice`."""

    def __init__(self, device: "LateDevice") -> None:
        self.device, self.at = device, 0

    def set(self) -> None:
        self.at = self.device.n_queued

    def wait(self, what: str) -> None:
        self.device.run_up_to(self.at)


class LateDevice(SimulatedDevice):
    """Copies from pinned memory and kernels run when somebody waits for them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], None]] = []
        self.n_queued = self.n_run = 0
        self.pinned_bytes: list[int] = []
        self.running = threading.RLock()

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.n_queued += 1

    def run_up_to(self, end: int) -> None:
        with self.running:
            while self.n_run < end:
                self.queue[self.n_run]()
                self.n_run += 1

    def copy(self, address: int, array: np.ndarray) -> None:
        self.put(partial(self.write, address, array))

    def launch(
        self,
        specialization: Specialization,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        percent: int = 0,
    ) -> None:
        self.put(partial(super().launch, specialization, grid, block, arguments, percent))

    def mark(self) -> Any:
        return LateMark(self)

    def synchronize(self, what: str = "") -> None:
        self.run_up_to(self.n_queued)

    def pinned(self, shape: tuple[int, ...], dtype: Any, what: str = "", zeroed: bool = True) -> tuple[np.ndarray, int]:
        found = super().pinned(shape, dtype, what, zeroed)
        if not zeroed:
            self.pinned_bytes.append(found[0].nbytes)
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    for module in (memory, ring):
        monkeypatch.setattr(module, "PIECE", 1 << 10)
    monkeypatch.setattr(memory, "available_cores", lambda: 3)
    before = threading.active_count()
    yield LateDevice()
    assert threading.active_count() == before


def opened(device: LateDevice) -> Any:
    given: Any = device
    return Backend(0, given)


def test_every_byte_arrives(device: LateDevice) -> None:
    """Through six buffers, which take no more than their share of pinned memory, while other matrices are requested."""
    ops, allocated = opened(device), device.allocated
    f32, q8_0 = FORMATS_BY_NAME["F32"], FORMATS_BY_NAME["Q8_0"]
    weights = [weight(f32, 128, 64), weight(q8_0, 40, 32), weight(f32, 33, 16), weight(q8_0, 5, 64)]
    reports: list[tuple[str, int, int]] = []
    ops.loading([w.data for w in weights], lambda *report: reports.append(report))
    held = [ops.weight(w) for w in weights]
    ops.loaded()
    for found, w in zip(held, weights, strict=True):
        law = repack.repack_rows(w.format, w.data) if w.format.quantized else w.data
        assert np.array_equal(device.read(found.address, law.shape, np.uint8), law)
    # A buffer is of the size PIECE, or as large as a piece that is larger: 16 rows of 256 bytes.
    assert len(device.pinned_bytes) > 0 and sum(device.pinned_bytes[:6]) <= 6 * 4096
    assert ops._memory.weight_bytes == sum(found.memory.n_bytes for found in held)
    assert device.allocated - allocated == ops._memory.weight_bytes
    total = sum(w.data.nbytes for w in weights)
    assert reports[-1] == ("load", total, total) and reports == sorted(reports)
    assert {report[2] for report in reports} == {total}


def test_a_matrix_alone_is_there_at_once(device: LateDevice) -> None:
    w = weight(FORMATS_BY_NAME["F32"], 64, 64)
    found = opened(device).weight(w)
    assert np.array_equal(device.at(found.address, w.data.nbytes), w.data.reshape(-1))


def test_a_buffer_is_not_reused_before_it_is_copied(device: LateDevice) -> None:
    """The ring hands out the buffer that was given back first, and waits for its copy."""
    target, pinned = device.allocate(1 << 13, "a test"), ring.PinnedRing(device, 2)  # type: ignore[arg-type]
    for k in range(8):
        buffer = pinned.take(1 << 10)
        buffer.data[:] = k
        pinned.copy(target, 1024 * k, buffer, 1 << 10)
        pinned.give(buffer)
        assert device.n_run == max(0, k - 3)
    pinned.wait()
    assert np.array_equal(
        device.at(target.address, 1 << 13).reshape(8, -1), np.repeat(np.arange(8), 1024).reshape(8, -1)
    )
    assert pinned.n_bytes == sum(device.pinned_bytes) == 4 << 10


def test_a_kernel_that_fails(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(what: str = "") -> None:
        raise DeviceError(f"the GPU failed during {what}.")

    ops = opened(device)
    ops.loading([], None)
    ops.weight(weight(FORMATS_BY_NAME["F32"], 16, 64))
    monkeypatch.setattr(device, "synchronize", broken)
    with pytest.raises(DeviceError, match="failed during the loading of weights"):
        ops.loaded()
    assert ops._memory._reader is ops._memory._ring is None


def test_a_file_that_shrinks_while_it_is_loaded(device: LateDevice, tmp_path: Path) -> None:
    path, f32 = tmp_path / "file", FORMATS_BY_NAME["F32"]
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        data = np.frombuffer(MappedFile(path, file.fileno(), 1 << 16), np.uint8).reshape(-1, 256)
    path.write_bytes(bytes(1 << 12))
    ops = opened(device)
    ops.loading([data], None)
    ops.weight(Weight("w", f32, 64, data))
    with pytest.raises(GGUFError, match="it ends here"):
        ops.loaded()
    ops.weight(weight(f32, 16, 64))  # another model can be loaded


def test_a_loading_that_is_given_up(device: LateDevice) -> None:
    ops, allocated = opened(device), device.allocated
    ops.loading([], None)
    ops.weight(weight(FORMATS_BY_NAME["Q8_0"], 64, 64))
    ops.stop_loading()
    assert device.allocated == allocated
