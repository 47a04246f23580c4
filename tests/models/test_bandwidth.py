"""Bandwidths: which device is measured and how, and how many bytes an answer has read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.timings import Timings
from engine.models import traffic as bandwidth


def test_what_an_answer_reads() -> None:
    llm = engine.load(None, device="cpu", n_ctx=128, cache_type="f16")
    answer = llm.complete("def add(a, b):", max_tokens=9, temperature=0.0, ignore_eos=True)
    t = answer.timings
    per_position = sum(2 * (k.keys.shape[0] * (k.keys.shape[2] + k.values.shape[3])) for k in llm.cache.layers)
    assert len(answer.ids) == 9  # 8 passes after the prompt's, the first of which sees the prompt and one token
    weights = sum(t.nbytes for t in llm.model.gguf.tensors.values())  # the embedding is also the output matrix
    read = 8 * weights + per_position * sum(len(answer.prompt_ids) + i for i in range(1, 9))
    assert bandwidth.bytes_per_second(llm, t) == pytest.approx(read / t.predicted_s)


@pytest.mark.parametrize(
    "timings", [Timings(), Timings(prompt_n=4, predicted_n=1, predicted_s=0.1), Timings(predicted_n=9)]
)
def test_nothing_is_known_of_nothing(timings: Timings) -> None:
    llm: Any = SimpleNamespace()
    assert bandwidth.bytes_per_second(llm, timings) == 0.0


def test_the_cpu_is_measured_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cpu import backend
    from engine.cpu import bandwidth as cpu

    monkeypatch.setattr(cpu, "machine_bandwidth", lambda n_threads: 1e9 * n_threads)
    ops = backend.Backend()
    assert ops.bandwidth() == 1e9 * ops.n_threads


# --- a fake GPU --------------------------------------------------------------------------------------------------


class FakeDevice:
    """Takes ``seconds`` for each pass over ``n_bytes``, in turn; the first pass must not be timed."""

    multiprocessors = 132

    def __init__(self, free: int, seconds: list[float]) -> None:
        self.free, self.seconds = free, seconds
        self.allocated: list[int] = []
        self.launches: list[Any] = []

    def free_memory(self) -> int:
        return self.free

    def allocate(self, n_bytes: int, what: str) -> Any:
        self.allocated.append(n_bytes)
        return SimpleNamespace(address=sum(self.allocated), n_bytes=n_bytes)

    def launch(self, kernel: Any, grid: int, block: int, arguments: Any) -> None:
        self.launches.append((kernel.name, grid, block, arguments))

    def event(self) -> int:
        return len(self.launches)

    def elapsed(self, start: int, end: int) -> float:
        assert end == start + 1
        return self.seconds[start]


@pytest.mark.parametrize("free", [100 << 30, 1 << 30, 1 << 20])
def test_the_gpu_is_measured_once(free: int) -> None:
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    from engine.cuda.bandwidth import PASSES, STEP, THREADS, device_bandwidth

    device: Any = FakeDevice(free, [1e-9, 3e-3, 2e-3, *[4e-3] * PASSES])
    rate = device_bandwidth(device)
    assert device_bandwidth(device) == rate
    assert len(device.launches) == PASSES + 1
    ((name, grid, block, (data, steps, sums)),) = set(device.launches)
    size = 4 * STEP * grid * steps
    assert (name, block, data) == ("read_sum", THREADS, device.allocated[0])
    assert device.allocated == [size, 4 * THREADS * grid]
    assert rate == size / 2e-3
    assert size <= max(min(1 << 30, free // 8), 4 * STEP * grid)
    assert grid % device.multiprocessors == 0
    if free >= 8 << 30:
        assert size > 0.98 * (1 << 30)


def test_loads_are_wide_and_side_by_side() -> None:
    """In the PTX, all loads of a step precede the first sum."""
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    from engine.cuda.bandwidth import LOADS, read_sum
    from engine.cuda.intrinsics import SIMULATED
    from engine.cuda.runtime.compiler import compile_ptx
    from engine.cuda.runtime.ptx import statements

    if SIMULATED:
        pytest.skip("the simulator does not compile")
    opcodes = [s.opcode for s in statements(compile_ptx(read_sum(), (9, 0)))]
    loads = np.array([opcode == "ld.global.L1::no_allocate.v4.u32" for opcode in opcodes])
    assert loads.sum() % LOADS == 0
    assert not any(opcode.startswith("ld.global") for opcode, wide in zip(opcodes, loads, strict=True) if not wide)
    first = int(np.argmax(loads))
    sums = next(i for i in range(first, len(opcodes)) if opcodes[i] in ("add.s32", "add.u32"))  # addresses have 64 bits
    assert loads[first:sums].sum() >= LOADS
