"""Kimi delta attention against a transcription of its law, against float64, and by all paths."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrays import Batch
from engine.cache.mamba import MambaCache
from engine.cache.types import F32
from engine.cpu import kda
from engine.cpu.rms_norm import NORM_CHAINS, squares
from engine.models.kda_config import KDAConfig
from engine.numerics import decay_of, inverse_root, sigmoid, silu
from engine.ops.kda import KDA
from tests.cpu.test_delta_net import dot, rounded_once
from tests.cpu.test_mamba import bytes_of, copied, needed
from tests.mirror import Mirror as Backend
from tests.pages import layer_of
from tests.tiers import examples

F = np.float32
NETS = [(4, 32, 4), (2, 64, 3), (3, 96, 2), (1, 128, 4)]
"""Heads, elements of a head, taps."""


def random_net(n_head: int, d: int, taps: int, seed: int = 0) -> KDA:
    rng = np.random.default_rng(seed)
    return KDA(
        *(n_head, d, taps, 1e-6),
        conv=(rng.standard_normal((3 * n_head * d, taps)) * taps**-0.5).astype(F),
        a=-np.exp(rng.uniform(-1, 2, n_head)).astype(F),
        dt=rng.uniform(-5, -2, n_head * d).astype(F),
    )


@dataclass
class Inputs:
    """The inputs of n tokens: queries, keys and values before the convolutions, and the inputs of the decays, [n, n_head d];
    those of the rates, [n, n_head]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    f: np.ndarray
    b: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v, self.f, self.b

    def __getitem__(self, tokens: slice) -> "Inputs":
        return Inputs(*(array[tokens] for array in self.arrays))

    def __len__(self) -> int:
        return len(self.q)


def inputs(net: KDA, n: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    return Inputs(*(rng.standard_normal((n, m)).astype(F) for m in (*[net.d_inner] * 4, net.n_head)))


def joined(*parts: Inputs) -> Inputs:
    return Inputs(*(np.concatenate(arrays) for arrays in zip(*(part.arrays for part in parts), strict=True)))


def empty_memory(net: KDA, rewind: int, rows: int = 64, n_sequences: int = 1) -> MambaCache:
    """What an earlier answer may have stored, which a new one must not read.  rows: the most rows of a pass."""
    spec = KDAConfig(net.n_head, net.d, net.taps).cache_spec(rewind, 16)
    layer: MambaCache = layer_of(
        spec, 0, rows, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    return layer


def run(net: KDA, given: Inputs, memory: MambaCache, first: int = 0, threads: int = 2, slot: int = 0) -> np.ndarray:
    """One pass over the rows from position ``first`` on."""
    positions = np.arange(first, first + len(given), dtype=np.int32)
    batch = Batch(positions, positions, np.full(len(given), slot, np.int32))
    return Backend(threads).kda(net, *given.arrays, memory, batch)


def one_by_one(net: KDA, given: Inputs) -> tuple[np.ndarray, MambaCache]:
    """Results, and a memory that keeps all tokens."""
    memory = empty_memory(net, len(given))
    out = np.concatenate([run(net, given[t : t + 1], memory, t, threads=1) for t in range(len(given))])
    assert np.isfinite(out).all()
    return out, memory


def law(net: KDA, given: Inputs) -> np.ndarray:
    """The formula of engine/cpu/kda.py, token by token, with one rounding for each fma."""
    n, heads, d = len(given), net.n_head, net.d
    out, state = np.empty((n, heads, d), F), np.zeros((heads, d, d), F)
    x, scale, chains = np.concatenate(given.arrays[:3], axis=1), F(1 / d**0.5), np.empty(NORM_CHAINS, F)
    for t in range(n):
        total = np.zeros(net.n_channels, F)
        for j in range(net.taps):
            if t - net.taps + 1 + j >= 0:
                total = rounded_once(x[t - net.taps + 1 + j], net.conv[:, j], total)
        q, k, v = np.array([silu(value) for value in total], F).reshape(3, heads, d)
        lengths = [[inverse_root(squares(row, chains), F(1), F(net.eps)) for row in part] for part in (q, k)]
        q, k = q * np.array(lengths[0], F)[:, None] * scale, k * np.array(lengths[1], F)[:, None]
        steps = (given.f[t] + net.dt).reshape(heads, d)
        e = np.array([[decay_of(a, step) for step in row] for a, row in zip(net.a, steps, strict=True)], F)
        rate = np.array([sigmoid(value) for value in given.b[t]], F)
        state = e[:, None, :] * state
        u = (v - dot(state, k[:, None, :])) * rate[:, None]
        state = rounded_once(u[:, :, None], k[:, None, :], state)
        out[t] = dot(state, q[:, None, :])
    return out.reshape(n, -1)


@pytest.mark.parametrize("sizes", NETS[:3])
def test_the_law(sizes: tuple[int, ...]) -> None:
    net = random_net(*sizes)
    given = inputs(net, 19)
    assert one_by_one(net, given)[0].tobytes() == law(net, given).tobytes()


@pytest.mark.parametrize("sizes", NETS)
def test_against_float64(sizes: tuple[int, ...]) -> None:
    """Over 100 tokens, in passes of several lengths: the paper's S = (I - b k k^T) diag(e) S + b k v^T, o = S^T q."""
    net = random_net(*sizes)
    given, memory = inputs(net, 100), empty_memory(net, 8)
    actual = np.concatenate([run(net, given[a:b], memory, a) for a, b in ((0, 60), (60, 61), (61, 75), (75, 100))])
    heads, d = net.n_head, net.d
    x = np.concatenate([np.zeros((net.taps - 1, net.n_channels)), np.concatenate(given.arrays[:3], axis=1)])
    y = sum(x[j : j + 100] * net.conv[:, j].astype(float) for j in range(net.taps))
    q, k, v = np.moveaxis((y / (1 + np.exp(-y))).reshape(100, 3, heads, d), 1, 0)
    q, k = (z / np.sqrt((z**2).sum(axis=2, keepdims=True) + net.eps) for z in (q, k))
    e = np.exp(net.a.astype(float)[:, None] * np.logaddexp(0, given.f.astype(float) + net.dt).reshape(100, heads, d))
    b = 1 / (1 + np.exp(-given.b.astype(float)))
    state, expected = np.zeros((heads, d, d)), np.empty((100, heads, d))
    for t in range(100):
        state = e[t, :, :, None] * state
        new = b[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * new[:, None, :]
        expected[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(d)
    whole = expected.reshape(100, -1)
    assert np.abs(actual - whole).max() / whole.std() < 1e-5


def test_heads_and_rows_do_not_show() -> None:
    """How items are divided, in a pass that the rings have no room for."""
    net = random_net(*NETS[0])
    given, found = inputs(net, 40), []
    positions, sequences = np.arange(40, dtype=np.int32), np.zeros(40, np.int32)
    for cuts in ((), (1, 3), (2,)):
        memory = empty_memory(net, 16)
        y, out = np.full((40, net.d_inner + net.width), np.nan, F), np.full((40, net.d_inner), np.nan, F)
        weights = net.conv, net.a, net.dt, F(net.eps), F(net.d**-0.5)
        for first, last in pairwise((0, *cuts, net.n_head)):
            kda.kda_conv(*given.arrays, positions, sequences, *weights, memory.inputs, y, first, last)
        for first, last in pairwise((0, *cuts, net.n_head)):
            kda.kda_scan(y, positions, sequences, memory.tokens, memory.states, out, first, last)
        for first, last in pairwise((0, *cuts, 40)):
            kda.kda_keep(y, positions, sequences, memory.tokens, first, last)
        found.append((out.tobytes(), y.tobytes(), *bytes_of(memory)))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == one_by_one(net, given)[0].tobytes()


@given(
    st.sampled_from(NETS[:2]),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([1, 16, 33]),
    st.integers(1, 2),
)
@examples(25)
def test_passes_and_threads_do_not_show(sizes: tuple[int, ...], batches: list[int], rewind: int, threads: int) -> None:
    net = random_net(*sizes)
    given = inputs(net, sum(batches))
    expected, every = one_by_one(net, given)
    memory, first = empty_memory(net, rewind), 0
    for rows in batches:
        span = slice(first, first + rows)
        assert run(net, given[span], memory, first, threads).tobytes() == expected[span].tobytes()
        first += rows
        for position in range(max(0, first - rewind), first + 1):
            assert needed(memory, position) == needed(every, position)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 33)), min_size=1, max_size=8), st.sampled_from([16, 33]))
@examples(25)
def test_tokens_are_taken_back_by_position_alone(steps: list[tuple[int, int]], rewind: int) -> None:
    """Passes that read any number of wrong tokens, which are rolled back, after any number of right ones."""
    net = random_net(*NETS[0])
    given, wrong = inputs(net, 20 * len(steps) + 1), inputs(net, 64, seed=2)
    expected, every = one_by_one(net, given)
    memory, at = empty_memory(net, rewind), 0
    for rows, refused in steps:
        out = run(net, joined(given[at : at + rows], wrong[: min(refused, rewind)]), memory, at)
        assert out[:rows].tobytes() == expected[at : at + rows].tobytes()
        at += rows
        assert needed(memory, at) == needed(every, at)
    assert run(net, given[at : at + 1], memory, at).tobytes() == expected[at].tobytes()


def together(net: KDA, texts: list[Inputs], runs: list[tuple[int, int, int]], memory: MambaCache) -> np.ndarray:
    """One mixed pass over the rows of runs (slot, position, rows)."""
    given = joined(*(texts[slot][first : first + rows] for slot, first, rows in runs))
    positions = np.concatenate([np.arange(first, first + rows, dtype=np.int32) for _, first, rows in runs])
    sequences = np.concatenate([np.full(rows, slot, np.int32) for slot, _, rows in runs])
    return Backend(2).kda(net, *given.arrays, memory, Batch(positions, positions, sequences, True))


def begun(runs: list[tuple[int, int, int]], net: KDA, texts: list[Inputs]) -> MambaCache:
    """A memory of sequences that have come to where the runs begin."""
    memory = empty_memory(net, 16, n_sequences=len(texts))
    for slot, first, _ in runs:
        if first:
            run(net, texts[slot][:first], memory, slot=slot)
    return memory


@pytest.mark.parametrize(
    "runs",
    [
        [(2, 0, 1), (0, 15, 1), (1, 1, 1)],
        [(1, 14, 4), (0, 0, 5), (2, 2, 1)],
        [(0, 7, 60), (2, 0, 41), (1, 64, 50)],  # more rows than the rings have
    ],
)
def test_rows_of_several_sequences(runs: list[tuple[int, int, int]]) -> None:
    """One pass over runs (slot, position, rows) is a pass over each of them: results, and all that is stored."""
    net = random_net(*NETS[0])
    texts = [inputs(net, 128, seed) for seed in range(3)]
    memory = begun(runs, net, texts)
    alone = copied(memory)
    expected = [run(net, texts[slot][first : first + rows], alone, first, 1, slot) for slot, first, rows in runs]
    out = together(net, texts, runs, memory)
    assert out.tobytes() == np.concatenate(expected).tobytes() and np.isfinite(out).all()
    assert bytes_of(memory) == bytes_of(alone)


def test_repeated_rows() -> None:
    """Copies of the last row of a run after it, and of a first row elsewhere, change nothing."""
    net = random_net(*NETS[0])
    texts = [inputs(net, 40, seed) for seed in range(2)]
    runs = [(0, 13, 3), (1, 14, 5)]
    memory = begun(runs, net, texts)
    again = copied(memory)
    expected = together(net, texts, runs, memory)
    padded = [(0, 13, 3), (0, 15, 1), (0, 15, 1), (1, 14, 5), (0, 13, 1), (1, 14, 1)]
    out = together(net, texts, padded, again)
    assert out.tobytes() == expected[[0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 0, 3]].tobytes()
    assert bytes_of(again) == bytes_of(memory)


@pytest.mark.parametrize("first", [0, 13])
def test_a_token_says_nothing_about_those_before_it(first: int) -> None:
    net = random_net(*NETS[1])
    given = inputs(net, first + 12)
    other, at = joined(given), first + 7
    other.k[at] = np.nan
    outs = []
    for text in (given, other):
        memory = empty_memory(net, 12)
        if first:
            run(net, text[:first], memory)
        outs.append(run(net, text[first:], memory, first))
    assert outs[0][:7].tobytes() == outs[1][:7].tobytes()
    assert np.isnan(outs[1][7:]).all()


def test_sizes_of_the_cache() -> None:
    """A segment has a state and what 16 tokens do to it: keys, values and decays, and a rate for each head."""
    spec = KDAConfig(4, 32, 3).cache_spec(5, 16)
    assert (spec.n_channels, spec.width, spec.segments) == (3 * 128, 3 * 128 + 4, 2)
    assert spec.segment_bytes == 4 * (4 * 32 * 32 + 16 * spec.width)
