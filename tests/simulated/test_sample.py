"""engine/cuda/sample.py in the simulator: the tokens of engine/sampler.py, from blocks of 32 and 64 threads."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import types

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.sample import pack
from engine.cuda import sample
from engine.cuda.compiler import Specialization
from engine.cuda.simulator import run
from engine.errors import ModelError, UsageError
from engine.sampler import Sampler, SamplingParams

N_CTX = 40
RING = 4


class Machine:
    """The memory of a device, and one step on it after another."""

    def __init__(self, prompt: list[int], groups: int = 32, warps: int = 2, simulate_maxima: bool = False) -> None:
        self.groups, self.warps, self.simulate_maxima = groups, warps, simulate_maxima
        self.history = np.full(N_CTX, -1, np.int32)
        self.history[: len(prompt)] = prompt
        self.tokens = np.array(prompt[-1:], np.int32)
        self.positions = np.array([len(prompt) - 1], np.int32)
        self.ring = np.full(RING, sample.EMPTY, np.int32)
        self.step = np.zeros(1, np.int32)
        self.best = np.full(groups, 12345, np.uint64)

    def sample(self, sampler: Sampler, logits: np.ndarray, seed: int | None = None) -> int:
        """The word of the ring that a step writes."""
        logits, params, at = logits.copy(), sample.pack_params(sampler), int(self.step[0])
        state = [N_CTX, self.tokens, self.positions, self.history, self.ring, RING, self.step]
        if sample.edits(sampler.params):
            run(sample.edit(32), 1, 32, [logits, params, self.history, self.positions], seed=seed)
        if self.simulate_maxima:
            maxima = sample.maxima(self.groups, self.warps)
            run(maxima, self.groups // self.warps, 32 * self.warps, [logits, logits.size, self.best], seed=seed)
        else:
            self.best[:] = maxima_of(logits, self.groups)
        if sampler.params.greedy:
            run(sample.argmax(self.groups), 1, self.groups, [self.best, *state], seed=seed)
        else:
            run(sample.draw(self.groups), 1, self.groups, [logits, logits.size, self.best, params, *state], seed=seed)
        assert self.step[0] == at + 1
        return int(self.ring[at % RING])


def maxima_of(logits: np.ndarray, groups: int) -> np.ndarray:
    """What ``maxima`` computes, uint64 [groups]: NumPy is faster at it than simulated warps."""
    best = np.zeros(groups, np.uint64)
    keys = np.array([pack(x, place) for place, x in enumerate(logits)], np.uint64)
    np.maximum.at(best, np.arange(logits.size) // 32 % groups, keys)
    return best


def logits_of(n: int, seed: int, kind: str = "normal") -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 3
    if kind == "ties":
        x = np.round(x / 2) + 0.0 * rng.choice([-1.0, 1.0], n)
    elif kind == "equal":
        x = np.zeros(n) * rng.choice([-1.0, 1.0], n)
    elif kind == "falling":
        x = np.sort(x)[::-1]
    elif kind == "rising":
        x = np.sort(x)
    elif kind == "sparse":
        x[rng.permutation(n)[5:]] = -np.inf
    return x.astype(np.float32)


def agree(params: SamplingParams, logits: np.ndarray, prompt: list[int], **geometry: Any) -> None:
    assert sample.supported(params)
    sampler = Sampler(params, logits.size)
    expected = sampler.sample(logits, len(prompt), prompt)
    machine = Machine(prompt, **geometry)
    assert machine.sample(sampler, logits) == expected
    assert machine.tokens[0] == machine.history[len(prompt)] == expected
    assert machine.positions[0] == len(prompt)


KINDS = ["normal", "ties", "equal", "falling", "rising", "sparse"]


@pytest.mark.parametrize(("n", "groups", "warps"), [(1, 2, 1), (33, 2, 2), (1000, 4, 1), (1500, 4, 2)])
def test_maxima(n: int, groups: int, warps: int) -> None:
    """1500 logits are more than a lane loads at once."""
    for kind in ("normal", "rising"):
        logits, best = logits_of(n, n, kind), np.full(groups, 12345, np.uint64)
        run(sample.maxima(groups, warps), groups // warps, 32 * warps, [logits, n, best], seed=n)
        assert np.array_equal(best, maxima_of(logits, groups))


@pytest.mark.parametrize("kind", KINDS)
def test_argmax(kind: str) -> None:
    for n in (1, 33, 3000):
        agree(SamplingParams(temperature=0), logits_of(n, n, kind), [0])
    agree(SamplingParams(temperature=0), logits_of(1500, 3, kind), [0], groups=64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_kernels(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=7, frequency_penalty=0.5, logit_bias={1: 2.0})
    agree(params, logits_of(1030, 4), [1, 2, 3, 1], simulate_maxima=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(300, 1), (1000, 3), (1000, 20), (1000, 40), (20, 40)])
def test_draw(kind: str, n: int, k: int) -> None:
    """k = 3 leaves few candidates, 20 more than a block of 32 can hold; a block of 64 serves k = 40."""
    groups = 32 if k <= 32 else 64
    for seed in range(2):
        params = SamplingParams(temperature=0.9, top_k=k, top_p=0.97, min_p=0.02, seed=2**64 - 1 - seed)
        agree(params, logits_of(n, 7 * seed + k, kind), list(range(1 + seed)), groups=groups)


def test_draw_of_a_whole_block() -> None:
    params = SamplingParams(temperature=1.5, top_k=256, top_p=0.99, min_p=0.0, seed=1)
    agree(params, logits_of(40000, 2), [0], groups=sample.GROUPS)


@pytest.mark.parametrize("seed", range(9))
def test_filters(seed: int) -> None:
    """Each on, off and at its edges; large vocabulary of a group: 9 lines, more than a lane loads at once."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        temperature=float(rng.choice([1e-40, 0.3, 1.0, 5.0])),
        top_k=int(rng.integers(1, 33)),
        top_p=float(rng.choice([0.0, 0.5, 0.9, 0.999, 1 - 1e-12, 1.0, 2.0])),
        min_p=float(rng.choice([-1.0, 0.0, 1e-60, 0.05, 0.3, 1.0])),
        seed=int(rng.integers(2**63)),
    )
    agree(params, logits_of(int(rng.choice([400, 1024, 9300])), seed, str(rng.choice(["normal", "ties"]))), [0, 1, 2])


@pytest.mark.parametrize("seed", range(8))
def test_edit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 300))
    prompt = rng.integers(0, min(n, int(rng.choice([3, 1000]))), N_CTX - 1).tolist()[: int(rng.choice([1, 20, 39]))]
    bias = {int(i): float(rng.normal() * 5) for i in rng.permutation(n)[: int(rng.choice([0, 3, 70]))]}
    bias |= {prompt[-1]: -float("inf")} if seed % 2 else {}
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.8])),
        top_k=4,
        repeat_penalty=float(rng.choice([1.0, 1.3])),
        repeat_last_n=int(rng.choice([1, 16, 64, 1024])),
        frequency_penalty=float(rng.choice([0.0, 0.7])),
        presence_penalty=float(rng.choice([0.0, -0.4])),
        logit_bias=bias,
        seed=seed,
    )
    agree(params, logits_of(n, seed, "ties"), prompt)


@pytest.mark.parametrize("threads_seed", [0, 1])
def test_every_logit_after_edit(threads_seed: int) -> None:
    """Not only the chosen one, in a shuffled order of threads."""
    rng = np.random.default_rng(threads_seed)
    prompt = rng.integers(0, 20, 35).tolist()
    bias = {i: float(rng.normal()) for i in range(0, 40, 2)}
    params = SamplingParams(repeat_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.1, logit_bias=bias)
    sampler, machine, logits = Sampler(params, 50), Machine(prompt), logits_of(50, 1)
    expected = sampler._edit(logits, prompt)
    run(
        sample.edit(32),
        1,
        32,
        [logits, sample.pack_params(sampler), machine.history, machine.positions],
        seed=threads_seed,
    )
    assert np.array_equal(logits.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sequence(temperature: float) -> None:
    """Steps that follow each other, past the end of the ring and of the context."""
    params = SamplingParams(temperature=temperature, top_k=12, repeat_penalty=1.5, seed=5)
    prompt = [3] * (N_CTX - 6)
    sampler, machine, history = Sampler(params, 200), Machine(prompt), list(prompt)
    for step in range(8):
        logits = logits_of(200, 40 + step)
        word = machine.sample(sampler, logits, seed=step)
        if len(history) < N_CTX:
            history.append(sampler.sample(logits, len(history), history))
            assert word == history[-1]
    assert machine.history.tolist() == history
    assert machine.positions[0] == N_CTX - 1


@pytest.mark.parametrize(("value", "code"), [(np.nan, sample.NAN), (np.inf, sample.INFINITE), (-np.inf, sample.BANNED)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_cannot_be_sampled(value: float, code: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=5)
    logits = np.full(100, -np.inf, np.float32)
    logits[70] = value
    sampler, machine = Sampler(params, 100), Machine([7, 8])
    with pytest.raises((ModelError, UsageError)) as expected:
        sampler.sample(logits, 2, [7, 8])
    assert machine.sample(sampler, logits) == code
    assert machine.tokens[0] == 0
    with pytest.raises(expected.type, match=str(expected.value)):
        sample.token_of(code)


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"top_k": 256}, True),
        ({"top_k": 257}, False),
        ({"top_k": 0}, False),
        ({"top_k": 0, "typical_p": 0.5, "temperature": 0}, True),
        ({"typical_p": 0.9}, False),
        ({"repeat_last_n": -1}, True),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, False),
        ({"repeat_last_n": 1024, "repeat_penalty": 1.1}, True),
        ({"repeat_last_n": 1025, "presence_penalty": 1.1}, False),
        ({"logit_bias": dict.fromkeys(range(1024), 0.5)}, True),
        ({"logit_bias": dict.fromkeys(range(1025), 0.5)}, False),
    ],
)
def test_supported(changes: dict[str, Any], can: bool) -> None:
    assert sample.supported(SamplingParams(**changes)) == can


class FakeDevice:
    """Device memory whose addresses are numbers of arrays."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []
        self.launched: list[str] = []

    def add(self, array: np.ndarray) -> int:
        self.memory.append(array)
        return len(self.memory) - 1

    def allocate(self, n_bytes: int, what: str) -> SimpleNamespace:
        return SimpleNamespace(address=self.add(np.full(n_bytes, 0xFF, np.uint8)))

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, int]:
        array = np.zeros(shape, dtype)
        return array, self.add(array)

    def write(self, address: int, array: np.ndarray) -> None:
        data = array.reshape(-1).view(np.uint8)
        self.memory[address].view(np.uint8)[: data.size] = data

    def launch(self, specialization: Specialization, grid: int, block: int, arguments: list[int]) -> None:
        self.launched.append(specialization.kernel.name)
        pointers = [isinstance(kind, types.CPointer) for kind in specialization.kernel.arguments]
        run(specialization, grid, block, [self.memory[a] if p else a for a, p in zip(arguments, pointers, strict=True)])


def test_device_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samplers after one another; the host looks after every third step."""
    monkeypatch.setattr(sample, "GROUPS", 32)
    device, n, prompt = FakeDevice(), 200, [5, 6]
    machine = sample.DeviceSampler(device, n, N_CTX, RING)
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=9, repeat_penalty=1.8, seed=3)):
        sampler, choice = Sampler(params, n), {"greedy": params.greedy, "with_edit": sample.edits(params)}
        machine.begin(sampler)
        state, history = Machine(prompt), list(prompt)
        tokens, positions, memory = (device.add(array) for array in (state.tokens, state.positions, state.history))
        device.launched.clear()
        for step in (0, 3):
            for logits in (logits_of(n, step), logits_of(n, step + 1), logits_of(n, step + 2)):
                machine.launch(device.add(logits.copy()), tokens, positions, memory, **choice)
                history.append(sampler.sample(logits, len(history), history))
            for expected in history[-3:]:
                assert machine.ready() and machine.take() == expected
            assert not machine.ready()
        assert device.launched == 6 * [s.kernel.name for s in machine.kernels(**choice)]
