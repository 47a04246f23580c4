"""engine/cuda/sample.py in the simulator: the tokens of engine/sampling/sampler.py, from blocks of 32 and 64 threads."""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numba import types

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.accept import probabilities
from engine.cpu.sample import pack
from engine.cuda import sample
from engine.cuda.accept import EMPTY, MOST_K, RESULT_WORDS
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.simulator import run
from engine.decode.device_params import edits, pack_params, supported, token_of
from engine.decode.device_sampler import DeviceSampler, Rows
from engine.errors import ModelError, UsageError
from engine.limits import DECODE_ANSWERS, DECODE_ROWS
from engine.sampling.sampler import Sampler, SamplerParams
from tests.tiers import few

N_CTX = 40
RING_STEPS = 4


class Machine:
    """A device's memory, on which rows of logits are sampled: row r for the position after positions[r]."""

    def __init__(self, prompt: list[int], groups: int = 32, warps: int = 2, simulate_maxima: bool = False) -> None:
        self.groups, self.warps, self.simulate_maxima = groups, warps, simulate_maxima
        self.history = np.full(N_CTX, -1, np.int32)
        self.history[: len(prompt)] = prompt
        self.tokens = np.full(DECODE_ANSWERS, prompt[-1], np.int32)
        self.positions = np.arange(DECODE_ROWS, dtype=np.int32) + np.int32(len(prompt) - 1)
        self.slots, self.starts = np.zeros(DECODE_ROWS, np.int32), np.array([0, 1], np.int32)
        self.at = np.array([len(prompt) - 1], np.int32)
        self.best = np.full((DECODE_ROWS, groups), 12345, np.uint64)
        self.found = np.full(DECODE_ROWS, -99, np.int32)
        self.ids = np.full((DECODE_ROWS, MOST_K), -99, np.int32)
        self.probabilities = np.full((DECODE_ROWS, MOST_K), -99, np.float32)
        self.counts = np.full(DECODE_ROWS, -99, np.int32)

    def sample(
        self, sampler: Sampler, *rows: np.ndarray, keep_at: int | None = None, seed: int | None = None
    ) -> list[int]:
        """The result for each row; its candidates are stored from row ``keep_at`` on."""
        params, n_vocab, n = pack_params(sampler), rows[0].size, len(rows)
        # Rows may be further apart than their length.
        logits = np.full((n, n_vocab + 3), np.inf, np.float32)
        logits[:, :n_vocab] = rows
        shape = [logits, n_vocab + 3, n_vocab]
        self.found[:] = -99
        if edits(sampler.params):
            where = [self.history, N_CTX, self.slots, self.positions, 1]
            run(sample.edit(32), n, 32, [*shape[:2], params, *where], seed=seed)
        if self.simulate_maxima:
            grid = (self.groups // self.warps, n)
            run(sample.maxima(self.groups, self.warps), grid, 32 * self.warps, [*shape, 0, self.best], seed=seed)
        else:
            self.best[:n] = [maxima_of(row[:n_vocab], self.groups) for row in logits]
        if sampler.params.greedy:
            run(sample.argmax(self.groups), n, self.groups, [self.best, self.found], seed=seed)
        else:
            keep = keep_at is not None
            lists: list[Any] = [None, 0, None, None, None]
            if keep_at is not None:
                kept = np.arange(DECODE_ROWS + 1, dtype=np.int32) + np.int32(keep_at)
                lists = [kept, 0, self.ids, self.probabilities, self.counts]
            arguments = [*shape, self.best, params, self.slots, self.positions, 1, self.found, *lists]
            run(sample.draw(self.groups, keep), n, self.groups, arguments, seed=seed)
        assert (self.found[n:] == -99).all()
        return self.found[:n].tolist()


def maxima_of(logits: np.ndarray, groups: int) -> np.ndarray:
    """The result of ``maxima``, uint64 [groups]: NumPy is faster at it than simulated warps."""
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


def agree(params: SamplerParams, logits: np.ndarray, prompt: list[int], **geometry: Any) -> None:
    assert supported(params)
    sampler = Sampler(params, logits.size)
    expected = sampler.sample(logits, len(prompt), prompt)
    assert Machine(prompt, **geometry).sample(sampler, logits) == [expected]


KINDS = ["normal", "ties", "equal", "falling", "rising", "sparse"]


@pytest.mark.parametrize(("n", "groups", "warps"), [(1, 2, 1), (33, 2, 2), (1000, 4, 1), (1500, 4, 2)])
def test_maxima(n: int, groups: int, warps: int) -> None:
    """1500 logits are more than a lane loads at once."""
    for kind in ("normal", "rising"):
        logits, best = logits_of(n, n, kind), np.full(groups, 12345, np.uint64)
        run(sample.maxima(groups, warps), (groups // warps, 1), 32 * warps, [logits, n, n, 0, best], seed=n)
        assert np.array_equal(best, maxima_of(logits, groups))


@pytest.mark.parametrize("kind", KINDS)
def test_argmax(kind: str) -> None:
    for n in (1, 33, 3000):
        agree(SamplerParams(temperature=0), logits_of(n, n, kind), [0])
    agree(SamplerParams(temperature=0), logits_of(1500, 3, kind), [0], groups=64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_kernels(temperature: float) -> None:
    params = SamplerParams(temperature=temperature, top_k=7, frequency_penalty=0.5, logit_bias={1: 2.0})
    agree(params, logits_of(1030, 4), [1, 2, 3, 1], simulate_maxima=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(300, 1), (1000, 3), (1000, 20), (1000, 40), (20, 40)])
def test_draw(kind: str, n: int, k: int) -> None:
    """k = 3 leaves few candidates, 20 more than a block of 32 can hold; a block of 64 serves k = 40."""
    groups = 32 if k <= 32 else 64
    for seed in range(2):
        params = SamplerParams(temperature=0.9, top_k=k, top_p=0.97, min_p=0.02, seed=2**64 - 1 - seed)
        agree(params, logits_of(n, 7 * seed + k, kind), list(range(1 + seed)), groups=groups)


def test_draw_of_a_whole_block() -> None:
    params = SamplerParams(temperature=1.5, top_k=256, top_p=0.99, min_p=0.0, seed=1)
    agree(params, logits_of(40000, 2), [0], groups=sample.GROUPS)


@pytest.mark.parametrize("seed", few(range(9), 4))
def test_filters(seed: int) -> None:
    """Each on, off and at its edges; large vocabulary of a group: 9 lines, more than a lane loads at once."""
    rng = np.random.default_rng(seed)
    params = SamplerParams(
        temperature=float(rng.choice([1e-40, 0.3, 1.0, 5.0])),
        top_k=int(rng.integers(1, 33)),
        top_p=float(rng.choice([0.0, 0.5, 0.9, 0.999, 1 - 1e-12, 1.0, 2.0])),
        min_p=float(rng.choice([-1.0, 0.0, 1e-60, 0.05, 0.3, 1.0])),
        seed=int(rng.integers(2**63)),
    )
    agree(params, logits_of(int(rng.choice([400, 1024, 9300])), seed, str(rng.choice(["normal", "ties"]))), [0, 1, 2])


@pytest.mark.parametrize("seed", few(range(8), 4))
def test_edit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 300))
    prompt = rng.integers(0, min(n, int(rng.choice([3, 1000]))), N_CTX - 1).tolist()[: int(rng.choice([1, 20, 39]))]
    bias = {int(i): float(rng.normal() * 5) for i in rng.permutation(n)[: int(rng.choice([0, 3, 70]))]}
    bias |= {prompt[-1]: -float("inf")} if seed % 2 else {}
    params = SamplerParams(
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
    """All candidates, not only the chosen one, in a shuffled order of threads."""
    rng = np.random.default_rng(threads_seed)
    prompt = rng.integers(0, 20, 35).tolist()
    bias = {i: float(rng.normal()) for i in range(0, 40, 2)}
    params = SamplerParams(repeat_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.1, logit_bias=bias)
    sampler, machine, logits = Sampler(params, 50), Machine(prompt), logits_of(50, 1)
    expected = sampler._edit(logits, prompt)
    where = [machine.history, N_CTX, machine.slots, machine.positions, 1]
    run(sample.edit(32), 1, 32, [logits, logits.size, pack_params(sampler), *where], seed=threads_seed)
    assert np.array_equal(logits.view(np.int32), expected.view(np.int32))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows(rows: int, temperature: float) -> None:
    """Each row is sampled at its own position and with the history up to it, including drafts."""
    params = SamplerParams(temperature=temperature, top_k=12, repeat_penalty=1.5, logit_bias={3: -1.0}, seed=5)
    history, sampler = np.random.default_rng(rows).integers(0, 20, 20 + rows).tolist(), Sampler(params, 130)
    machine = Machine(history[:20], simulate_maxima=rows == 3)
    machine.history[: len(history)] = history
    logits = [(logits_of(130, row) / 3).astype(np.float32) for row in range(rows)]
    expected = [sampler.sample(x, 20 + row, history[: 20 + row]) for row, x in enumerate(logits)]
    assert machine.sample(sampler, *logits, seed=rows) == expected
    assert len(set(expected)) > rows // 3


def test_rows_beyond_the_context() -> None:
    """Steps that were started past the end read nothing beyond the history."""
    sampler = Sampler(SamplerParams(temperature=0, presence_penalty=0.5), 40)
    machine = Machine([1] * (N_CTX - 1))
    machine.history[-1] = 2
    assert machine.sample(sampler, *[logits_of(40, 1)] * 4)[1] == sampler.sample(logits_of(40, 1), 40, [*[1] * 39, 2])


@pytest.mark.parametrize("keep_at", [0, 2])
def test_candidates(keep_at: int) -> None:
    """The candidates of ``Sampler.candidates`` in their order, and their probabilities; the token does not depend on them."""
    params = SamplerParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, frequency_penalty=0.1, seed=8)
    sampler, machine, history = Sampler(params, 300), Machine([4, 4, 4, 4]), [4, 4, 4, 4]
    kinds = ["normal", "equal", "ties", "sparse"]
    logits = [logits_of(300, row, kind) for row, kind in enumerate(kinds)]
    without = machine.sample(sampler, *logits)
    machine.history[:8] = 4
    assert machine.sample(sampler, *logits, keep_at=keep_at) == without
    for row, x in enumerate(logits):
        ids, values = sampler.candidates(x, history + row * [4])
        expected, at = np.empty(ids.size, np.float32), keep_at + row
        probabilities(values, ids.size, sampler._temperature, expected, np.empty(2, np.float32))
        assert machine.counts[at] == ids.size > 1
        assert np.array_equal(machine.ids[at, : ids.size], ids)
        assert np.array_equal(machine.probabilities[at, : ids.size].view(np.int32), expected.view(np.int32))
        assert (machine.ids[at, ids.size :] == -99).all()
    assert (np.delete(machine.counts, np.arange(4) + keep_at) == -99).all()


@pytest.mark.parametrize("temperature", [1e-40, 1e30])
def test_candidates_at_extreme_temperatures(temperature: float) -> None:
    params = SamplerParams(temperature=temperature, top_k=256, top_p=1, min_p=0)
    sampler, machine = Sampler(params, 900), Machine([4], groups=sample.GROUPS)
    machine.sample(sampler, logits_of(900, 1), keep_at=0)
    ids, values = sampler.candidates(logits_of(900, 1))
    expected = np.empty(256, np.float32)
    probabilities(values, 256, sampler._temperature, expected, np.empty(1, np.float32))
    assert machine.counts[0] == 256
    assert np.array_equal(machine.probabilities[0], expected)
    assert expected[0] == (1 if temperature < 1 else 1 / 256)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("value", "code"), [(np.nan, sample.NAN), (np.inf, sample.INFINITE), (-np.inf, sample.BANNED)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_cannot_be_sampled(value: float, code: int, temperature: float) -> None:
    params = SamplerParams(temperature=temperature, top_k=5)
    logits = np.full(100, -np.inf, np.float32)
    logits[70] = value
    sampler, machine = Sampler(params, 100), Machine([7, 8])
    with pytest.raises((ModelError, UsageError)) as expected:
        sampler.sample(logits, 2, [7, 8])
    fine = logits_of(100, 1)
    machine.history[2] = 9
    assert machine.sample(sampler, logits, fine) == [code, sampler.sample(fine, 3, [7, 8, 9])]
    if temperature:
        machine.sample(sampler, fine, logits, keep_at=0)
        assert machine.counts[0] > 0 and machine.counts[1] == 0
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        token_of(code, sampler)


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
        ({"dry_multiplier": 0.8}, False),
        ({"dry_multiplier": 0.8, "temperature": 0}, False),
        ({"xtc_probability": 0.5}, False),
        ({"logits_processors": [print]}, False),
        ({"xtc_threshold": 0.2}, True),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, True),
        ({"xtc_probability": 0.5, "temperature": 0}, True),
        ({"dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64, "dry_breakers": [[1]]}, True),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, True),
    ],
)
def test_supported(changes: dict[str, Any], can: bool) -> None:
    assert supported(SamplerParams(**changes)) == can


def test_a_parameter_that_is_not_listed_is_not_supported() -> None:
    """So a new one is taken into account by the host until there is a kernel for it."""

    @dataclass(frozen=True)
    class Extended(SamplerParams):
        novelty: float = 0.0

    assert supported(Extended())
    assert not supported(Extended(novelty=0.1))


class FakeDevice:
    """Device memory whose addresses are numbers of arrays and offsets in bytes."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []
        self.launched: list[str] = []
        self.simulate_maxima = True

    def add(self, array: np.ndarray) -> int:
        self.memory.append(array)
        return (len(self.memory) - 1) << 32

    def at(self, address: int) -> np.ndarray:
        """The memory from an address to the end of its array."""
        return self.memory[address >> 32].reshape(-1).view(np.uint8)[address & 0xFFFFFFFF :]

    def rows_of(self, machine: Machine, rows: int = 1) -> Rows:
        """A step of one answer."""
        machine.starts = np.array([0, rows], np.int32)
        arrays = machine.tokens, machine.positions, machine.slots, machine.starts, machine.history
        return Rows(*map(self.add, arrays))

    def allocate(self, n_bytes: int, what: str) -> SimpleNamespace:
        return SimpleNamespace(address=self.add(np.full(n_bytes, 0xFF, np.uint8)))

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, int]:
        array = np.zeros(shape, dtype)
        return array, self.add(array)

    def write(self, address: int, array: np.ndarray) -> None:
        data = array.reshape(-1).view(np.uint8)
        self.at(address)[: data.size] = data

    def launch(self, specialization: Specialization, grid: Any, block: int, arguments: list[int]) -> None:
        self.launched.append(specialization.name)
        pointers = [isinstance(kind, types.CPointer) for kind in specialization.kernel.arguments]
        given: list[Any] = [self.at(a) if p else a for a, p in zip(arguments, pointers, strict=True)]
        if specialization.kernel is sample.maxima and not self.simulate_maxima:
            logits, stride, n_vocab, _, best = given
            for row in range(grid[1]):
                x = logits.view(np.float32)[row * stride :][:n_vocab]
                best.view(np.uint64).reshape(-1, sample.GROUPS)[row] = maxima_of(x, sample.GROUPS)
            return
        run(specialization, grid, block, given)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(sample, "GROUPS", 32)
    device = FakeDevice()
    # Address 0 belongs to no array.
    device.add(np.zeros(0, np.uint8))
    return device


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sequence(device: FakeDevice, temperature: float) -> None:
    """Plain steps that follow each other, past the end of the ring and of the context."""
    params = SamplerParams(temperature=temperature, top_k=12, repeat_penalty=1.5, seed=5)
    history, sampler = [3] * (N_CTX - 6), Sampler(params, 100)
    state, machine = Machine(history), DeviceSampler(cast(Any, device), 100, N_CTX, RING_STEPS)
    rows, at = device.rows_of(state), device.add(state.at)
    machine.begin(sampler)
    for step in range(8):
        logits = logits_of(100, 40 + step)
        machine.launch(device.add(logits.copy()), 100, 1, rows, at, params.greedy, True)
        (word,) = machine.take()
        if len(history) < N_CTX:
            history.append(sampler.sample(logits, len(history), history))
            assert word == history[-1] == state.tokens[0]
            assert state.positions[0] == state.at[0] == len(history) - 1
    assert state.history.tolist() == history
    assert state.positions[0] == state.at[0] == N_CTX - 1


def test_device_sampler(device: FakeDevice) -> None:
    """Two samplers, one after the other; the host reads results after every third step."""
    n, prompt = 200, [5, 6]
    machine = DeviceSampler(cast(Any, device), n, N_CTX, RING_STEPS)
    for params in (SamplerParams(temperature=0), SamplerParams(top_k=9, repeat_penalty=1.8, seed=3)):
        sampler, choice = Sampler(params, n), (params.greedy, edits(params))
        machine.begin(sampler)
        state, history = Machine(prompt), list(prompt)
        rows, at = device.rows_of(state), device.add(state.at)
        device.launched.clear()
        for step in (0, 3):
            for logits in (logits_of(n, step), logits_of(n, step + 1), logits_of(n, step + 2)):
                machine.launch(device.add(logits.copy()), n, 1, rows, at, *choice)
                history.append(sampler.sample(logits, len(history), history))
            for expected in history[-3:]:
                assert machine.ready() and machine.take() == [expected]
            assert not machine.ready()
        assert device.launched == 6 * [s.name for s in machine.kernels(*choice)]


@pytest.mark.parametrize(("mode", "temperature"), [("exact", 1.0), ("ratio", 1.0), ("p-min", 1.0), ("ratio", 0.0)])
def test_verify_steps(device: FakeDevice, mode: str, temperature: float) -> None:
    """A step of 3 rows with certain drafts, the first of which is what the target chooses, and one that cannot be sampled."""
    params = SamplerParams(temperature=temperature, top_k=8, seed=11)
    sampler, machine = Sampler(params, 70), DeviceSampler(cast(Any, device), 70, N_CTX, RING_STEPS)
    machine.begin(sampler, mode, p_accept=2.0)
    state, logits = Machine([5]), np.array([logits_of(70, row) for row in range(3)])
    first = [sampler.sample(x, 1 + row) for row, x in enumerate(logits)]
    state.tokens[1:3] = [first[0], (first[1] + 1) % 70]

    def step(rows: int) -> None:
        place, at = device.rows_of(state, rows), device.add(state.at)
        machine.launch(device.add(logits.copy()), 70, rows, place, at, params.greedy, False, mode)

    step(3)
    taken = machine.take()
    if mode == "ratio" and temperature:
        # Acceptance is decided by other noise here.
        assert 1 <= len(taken) <= 3
    else:
        assert taken == first[:2]
    assert state.history[1 : 1 + len(taken)].tolist() == taken and state.at[0] == len(taken)
    assert device.launched == [s.name for s in machine.kernels(params.greedy, False, mode)]
    assert device.launched[-1] == ("accept[exact]" if params.greedy else f"accept[{mode}]")
    state.positions[:] = np.arange(DECODE_ROWS)
    logits[:] = np.nan
    step(1)
    assert machine.ready() and machine.ring[0, 1, :2].tolist() == [1, sample.NAN]
    with pytest.raises(ModelError, match="NaN"):
        machine.take()
    assert (
        not machine.ready() and machine.ring[0, 1, 0] == EMPTY and machine.ring.shape == (1, RING_STEPS, RESULT_WORDS)
    )


@pytest.mark.parametrize(("mode", "keeps"), [("exact", False), ("ratio", True), ("p-min", False)])
def test_a_draft_models_step(device: FakeDevice, mode: str, keeps: bool) -> None:
    """Tokens are only found, and candidates stored if their probabilities will be needed."""
    sampler = Sampler(SamplerParams(top_k=5, seed=2), 70)
    machine = DeviceSampler(cast(Any, device), 70, N_CTX, RING_STEPS)
    machine.begin(sampler, mode)
    state, logits = Machine([5, 6]), logits_of(70, 3)
    machine.launch_draft(device.add(logits.copy()), 70, device.rows_of(state, 4), False, False, mode, draft=2)
    assert device.launched == [s.name for s in machine.kernels(False, False, mode, accept=False)]
    assert device.launched == ["maxima[32, 8]", f"draw[32, {keeps}]"]
    assert device.at(machine.found.address).view(np.int32)[0] == sampler.sample(logits, 2)
    assert not machine.ready() and state.positions[0] == 1
    if keeps:
        ids, _ = sampler.candidates(logits)
        assert device.at(machine.lists.counts).view(np.int32)[2] == ids.size
        assert device.at(machine.lists.ids).view(np.int32)[2 * MOST_K :][: ids.size].tolist() == ids.tolist()
        assert not device.at(machine.no_lists.counts).any()


# --- several answers -----------------------------------------------------------------------------------------------

ANSWERS = [
    SamplerParams(temperature=0.8, top_k=12, seed=5, repeat_penalty=1.5),
    SamplerParams(temperature=0.0, top_k=9, top_p=0.5, min_p=0.4, seed=6, presence_penalty=0.3),
    SamplerParams(temperature=1.3, top_k=30, top_p=0.9, seed=2**64 - 1, logit_bias={3: 1.5, 7: -2.0}),
    SamplerParams(temperature=0.5, top_k=3, min_p=0.1, seed=8),
]
"""Greedy ones, with and without changes of logits, share a launch."""


class Answers:
    """Steps of several answers in one launch each, with logits that depend on the answer and the position."""

    def __init__(self, device: FakeDevice, slots: list[int], mode: str = "exact") -> None:
        self.device, self.slots, self.mode = device, slots, mode
        device.simulate_maxima = False
        n_slots = max(slots) + 2
        self.machine = DeviceSampler(cast(Any, device), 70, N_CTX, RING_STEPS, n_slots)
        self.samplers = [Sampler(params, 70) for params in ANSWERS[: len(slots)]]
        self.known = [[*range(3 + e)] for e in range(len(slots))]
        self.history = np.full((n_slots, N_CTX), -99, np.int32)
        self.tokens, self.positions, self.sequences = (np.full(DECODE_ANSWERS, -99, np.int32) for _ in range(3))
        self.starts = np.zeros(DECODE_ROWS + 1, np.int32)
        arrays = self.tokens, self.positions, self.sequences, self.starts, self.history
        self.rows = Rows(*map(device.add, arrays))
        self.at = np.full(n_slots, -99, np.int32)
        self.address = device.add(self.at)
        for slot, sampler, known in zip(slots, self.samplers, self.known, strict=True):
            self.machine.begin(sampler, mode, p_accept=2.0, slot=slot)
            self.history[slot, : len(known)] = known
            self.at[slot] = len(known) - 1

    def logits(self, entry: int, position: int) -> np.ndarray:
        return (logits_of(70, 100 * entry + position) / 2).astype(np.float32)

    def next(self, entry: int, n: int) -> list[int]:
        """The next n tokens of an answer alone."""
        known = list(self.known[entry])
        for _ in range(n):
            known.append(self.samplers[entry].sample(self.logits(entry, len(known) - 1), len(known), known))
        return known[len(self.known[entry]) :]

    def step(self, drafts: list[list[int]]) -> None:
        """A step with these drafts of each answer; the host sets all its rows."""
        counts = [1 + len(tokens) for tokens in drafts]
        self.starts[:] = np.cumsum([0, *counts, *[0] * (DECODE_ROWS - len(drafts))])
        logits = np.full((DECODE_ROWS, 70), np.nan, np.float32)
        for array in (self.tokens, self.positions, self.sequences):
            array[:] = -99
        for e, tokens in enumerate(drafts):
            p = len(self.known[e]) - 1
            for i, token in enumerate([self.known[e][-1], *tokens]):
                row = self.starts[e] + i
                self.tokens[row], self.positions[row], self.sequences[row] = token, p + i, self.slots[e]
                self.history[self.slots[e], p + i] = token
                logits[row] = self.logits(e, p + i)
        self.used = int(self.starts[-1])
        place = self.rows, self.address
        self.machine.launch(
            self.device.add(logits), 70, self.used, *place, False, True, self.mode, n_entries=len(drafts)
        )

    def take(self) -> None:
        """Take the results of a step, and check what is prepared for the next one."""
        for e, slot in enumerate(self.slots):
            tokens = self.machine.take(slot)
            self.known[e] += tokens
            at, end = self.starts[e], self.starts[e + 1]
            assert self.tokens[at] == tokens[-1]
            assert self.positions[at:end].tolist() == [len(self.known[e]) - 1 + i for i in range(end - at)]
            assert self.history[slot, : len(self.known[e])].tolist() == self.known[e]
            assert self.at[slot] == len(self.known[e]) - 1
        assert (np.delete(self.at, self.slots) == -99).all()
        assert (self.tokens[self.used :] == -99).all() and (self.positions[self.used :] == -99).all()
        assert not any(map(self.machine.ready, range(len(self.history))))


def test_several_answers(device: FakeDevice) -> None:
    """Steps of answers with other parameters, seeds, histories and numbers of drafts give the tokens of each alone."""
    slots = [4, 0, 2, 1]
    answers, rng = Answers(device, slots), np.random.default_rng(3)
    for step in range(2):
        before, drafts, right = [len(known) for known in answers.known], [], []
        for e in range(len(slots)):
            n = (step + e) % 5
            tokens = answers.next(e, n + 1)
            wrong = int(rng.integers(n + 2))
            right.append(tokens[: min(wrong, n) + 1])
            drafts.append([(token + (i >= wrong)) % 70 for i, token in enumerate(tokens[:n])])
        answers.step(drafts)
        answers.take()
        assert [known[n:] for known, n in zip(answers.known, before, strict=True)] == right


@pytest.mark.parametrize("mode", ["ratio", "p-min"])
def test_several_answers_with_lists(device: FakeDevice, mode: str) -> None:
    """The words of each answer are those of a launch of this answer alone, where that of the greedy one is exact."""
    drafts = [[5, 6], [1], [], [9, 9, 9]]
    answers = Answers(device, [2, 0, 3, 1], mode)
    drafts[1] = answers.next(1, 1)
    greedy = answers.next(1, 2)
    answers.step(drafts)
    answers.take()
    for e, params in enumerate(ANSWERS):
        alone = Answers(device, [0, 1, 2, 3], mode)
        state, known = Machine([0]), alone.known[e]
        first = len(known) - 1
        state.history[: first + 1 + len(drafts[e])] = known + drafts[e]
        state.positions += np.int32(first)
        state.tokens[: 1 + len(drafts[e])] = [known[-1], *drafts[e]]
        alone.machine.begin(alone.samplers[e], mode, p_accept=2.0)
        logits = np.array([alone.logits(e, first + i) for i in range(1 + len(drafts[e]))])
        place = device.rows_of(state, len(logits)), device.add(state.at)
        alone.machine.launch(device.add(logits), 70, len(logits), *place, params.greedy, True, mode)
        assert alone.machine.take() == answers.known[e][first + 1 :]
    assert answers.known[1][-2:] == greedy


def test_drafts_of_several_answers(device: FakeDevice) -> None:
    """A pass of two rows per answer, the last of which is sampled; candidates go where the answer has a row for the draft."""
    answers, lasts = Answers(device, [2, 0, 1], "ratio"), [3, 6, 2]
    answers.starts[:5] = [0, 2, 3, 6, 6]
    positions, sequences = np.zeros(8, np.int32), np.full(8, -1, np.int32)
    logits = np.full((8, 70), np.nan, np.float32)
    for e, last in enumerate([*lasts, lasts[2]]):
        k = min(e, 2)
        positions[2 * e : 2 * e + 2], sequences[2 * e : 2 * e + 2] = (last - 1, last), answers.slots[k]
        answers.history[answers.slots[k], : last + 1] = np.arange(last + 1)
        logits[2 * e + 1] = answers.logits(k, last)
    rows = answers.rows._replace(positions=device.add(positions) + 4, sequences=device.add(sequences) + 4)
    counts = device.at(answers.machine.lists.counts).view(np.int32)[:DECODE_ROWS]
    counts[:] = -99
    for draft in (1, 0):
        address = device.add(logits.copy()) + 4 * 70
        answers.machine.launch_draft(address, 140, rows, False, True, "ratio", draft=draft, n_entries=4, every=2)
    found = device.at(answers.machine.found.address).view(np.int32)
    ids = device.at(answers.machine.lists.ids).view(np.int32).reshape(-1, MOST_K)
    expected = []
    for e, (sampler, last) in enumerate(zip(answers.samplers, lasts, strict=True)):
        known = list(range(last + 1))
        expected.append(sampler.sample(answers.logits(e, last), last + 1, known))
        candidates, _ = sampler.candidates(answers.logits(e, last), known)
        for row in ([0, 1], [2], [3, 4])[e]:
            assert counts[row] == candidates.size and np.array_equal(ids[row, : candidates.size], candidates)
    assert found[:4].tolist() == [*expected, expected[2]]
    assert (counts[5:] == -99).all()
