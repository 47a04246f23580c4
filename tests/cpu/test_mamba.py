"""Mamba-2 against a transcription of its law, against float64, and by all paths."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrays import Batch
from engine.cache.mamba import MambaCache, MambaCacheSpec
from engine.cache.types import F32
from engine.cpu import mamba
from engine.numerics import decay_of, silu, softplus
from engine.ops.mamba import Mamba
from tests.cpu.test_delta_net import rounded_once
from tests.mirror import Mirror as Backend
from tests.pages import layer_of, no_pages
from tests.tiers import examples

F = np.float32
NETS = [(4, 16, 32, 2, 4), (2, 32, 64, 1, 3), (6, 16, 96, 3, 2), (2, 16, 128, 1, 4)]
"""Heads, elements of a head, elements of a row of the state, groups, taps."""


def random_net(n_head: int, d: int, n: int, n_group: int, taps: int, seed: int = 0) -> Mamba:
    rng = np.random.default_rng(seed)
    channels = n_head * d + 2 * n_group * n
    return Mamba(
        *(n_head, d, n, n_group, taps),
        conv=(rng.standard_normal((channels, taps)) * taps**-0.5).astype(F),
        conv_bias=(rng.standard_normal(channels) / 4).astype(F),
        dt=rng.uniform(-5, -2, n_head).astype(F),
        a=-np.exp(rng.uniform(-1, 2, n_head)).astype(F),
        skip=rng.uniform(0.5, 1.5, n_head).astype(F),
    )


@dataclass
class Inputs:
    """The inputs of n tokens: channels before the convolution and steps [n, n_channels + n_head], and gates [n, n_head d]."""

    u: np.ndarray
    z: np.ndarray

    def __getitem__(self, tokens: slice) -> "Inputs":
        return Inputs(self.u[tokens], self.z[tokens])

    def __len__(self) -> int:
        return len(self.u)


def inputs(net: Mamba, n: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    return Inputs(*(rng.standard_normal((n, m)).astype(F) for m in (net.n_channels + net.n_head, net.d_inner)))


def joined(*parts: Inputs) -> Inputs:
    return Inputs(np.concatenate([part.u for part in parts]), np.concatenate([part.z for part in parts]))


def spec_of(net: Mamba, rewind: int) -> MambaCacheSpec:
    return MambaCacheSpec(net.n_channels, net.taps, net.n_head, net.d, net.n, net.width, rewind)


def empty_memory(net: Mamba, rewind: int, rows: int = 64, n_sequences: int = 1) -> MambaCache:
    """What an earlier answer may have stored, which a new one must not read.  rows: the most rows of a pass."""
    layer: MambaCache = layer_of(
        spec_of(net, rewind), 0, rows, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    return layer


def copied(memory: MambaCache) -> MambaCache:
    return replace(memory, inputs=memory.inputs.copy(), states=memory.states.copy(), tokens=memory.tokens.copy())


def bytes_of(memory: MambaCache) -> list[bytes]:
    return [array.tobytes() for array in (memory.inputs, memory.states, memory.tokens)]


def run(net: Mamba, given: Inputs, memory: MambaCache, first: int = 0, threads: int = 2, slot: int = 0) -> np.ndarray:
    """One pass over the rows from position ``first`` on."""
    positions = np.arange(first, first + len(given), dtype=np.int32)
    batch = Batch(positions, positions, np.full(len(given), slot, np.int32))
    return Backend(threads).mamba(net, given.u, given.z, memory, batch)


def one_by_one(net: Mamba, given: Inputs) -> tuple[np.ndarray, MambaCache]:
    """Results, and a memory that keeps all tokens."""
    memory = empty_memory(net, len(given))
    out = np.concatenate([run(net, given[t : t + 1], memory, t, threads=1) for t in range(len(given))])
    assert np.isfinite(out).all()
    return out, memory


def needed(memory: MambaCache, position: int) -> list[bytes]:
    """What a pass at ``position`` reads, in the order of positions."""
    return [b"".join(rows.ring[run].tobytes() for run in rows.runs()) for rows in memory.needed(0, position, no_pages)]


def law(net: Mamba, given: Inputs) -> np.ndarray:
    """The formula of engine/cpu/mamba.py, token by token, with one rounding for each fma."""
    out, state = np.empty_like(given.z), np.zeros((net.n_head, net.d, net.n), F)
    v, steps = np.split(given.u, [net.n_channels], axis=1)
    for t in range(len(given)):
        total = net.conv_bias
        for j in range(net.taps):
            if t - net.taps + 1 + j >= 0:
                total = rounded_once(v[t - net.taps + 1 + j], net.conv[:, j], total)
        y = np.array([silu(value) for value in total], F)
        x, b, c = np.split(y, [net.d_inner, net.d_inner + net.n_group * net.n])
        for h in range(net.n_head):
            g = h // (net.n_head // net.n_group) * net.n
            own, step = x[h * net.d : (h + 1) * net.d], F(steps[t, h] + net.dt[h])
            delta, decay = F(softplus(step)) * own, F(decay_of(net.a[h], step))
            row = b[None, g : g + net.n].repeat(net.d, 0)
            state[h] = rounded_once(delta[:, None].repeat(net.n, 1), row, decay * state[h])
            chains = np.zeros((net.d, 32), F)
            for m in range(0, net.n, 32):
                part = c[None, g + m : g + m + 32].repeat(net.d, 0)
                chains = rounded_once(state[h, :, m : m + 32], part, chains)
            four = (chains[:, 0::4] + chains[:, 2::4]) + (chains[:, 1::4] + chains[:, 3::4])
            while four.shape[1] > 1:
                half = four.shape[1] // 2
                four = four[:, :half] + four[:, half:]
            total = rounded_once(np.full(net.d, net.skip[h]), own, four[:, 0])
            span = slice(h * net.d, (h + 1) * net.d)
            out[t, span] = total * np.array([silu(value) for value in given.z[t, span]], F)
    return out


@pytest.mark.parametrize("sizes", NETS[:3])
def test_the_law(sizes: tuple[int, ...]) -> None:
    net = random_net(*sizes)
    given = inputs(net, 19)
    assert one_by_one(net, given)[0].tobytes() == law(net, given).tobytes()


@pytest.mark.parametrize("sizes", NETS)
def test_against_float64(sizes: tuple[int, ...]) -> None:
    """Over 100 tokens, in passes of several lengths."""
    net = random_net(*sizes)
    given, memory = inputs(net, 100), empty_memory(net, 8)
    actual = np.concatenate([run(net, given[a:b], memory, a) for a, b in ((0, 60), (60, 61), (61, 75), (75, 100))])
    u, z = given.u.astype(float), given.z.astype(float)
    v = np.concatenate([np.zeros((net.taps - 1, net.n_channels)), u[:, : net.n_channels]])
    total = net.conv_bias + sum(net.conv[:, j] * v[j : j + 100] for j in range(net.taps))
    y = total / (1 + np.exp(-total))
    x = y[:, : net.d_inner].reshape(100, net.n_head, net.d)
    b, c = (part.reshape(100, net.n_group, net.n) for part in np.split(y[:, net.d_inner :], 2, axis=1))
    b, c = (part.repeat(net.n_head // net.n_group, axis=1) for part in (b, c))
    step = np.log1p(np.exp(u[:, net.n_channels :] + net.dt))
    state, expected = np.zeros((net.n_head, net.d, net.n)), np.empty((100, net.n_head, net.d))
    for t in range(100):
        delta = step[t, :, None] * x[t]
        state = np.exp(step[t] * net.a)[:, None, None] * state + delta[:, :, None] * b[t, :, None]
        expected[t] = (state * c[t, :, None]).sum(2) + net.skip[:, None] * x[t]
    whole = expected.reshape(100, -1) * (z / (1 + np.exp(-z)))
    assert np.abs(actual - whole).max() / whole.std() < 1e-5


def test_blocks_of_elements_and_heads_do_not_show() -> None:
    """Of which the last one is not whole."""
    net = random_net(*NETS[0])
    given, found = inputs(net, 20), []
    positions, sequences = np.arange(20, dtype=np.int32), np.zeros(20, np.int32)
    blocks = -(-net.width // mamba.ELEMENTS)
    assert net.width % mamba.ELEMENTS
    for cuts in ((), (1, 3), (2,)):
        memory = empty_memory(net, 16)
        y, out = np.full((20, net.width), np.nan, F), np.full((20, net.d_inner), np.nan, F)
        weights = net.conv, net.conv_bias, net.dt, net.a
        for first, last in pairwise((0, *cuts, blocks)):
            mamba.mamba_conv(given.u, positions, sequences, *weights, memory.inputs, y, first, last)
        rest = y, given.z, net.skip, net.n_group, positions, sequences, memory.tokens, memory.states, out
        for first, last in pairwise((0, *cuts, net.n_head)):
            mamba.mamba_scan(*rest, first, last)
        for first, last in pairwise((0, *cuts, 20)):
            mamba.keep_tokens(y, positions, sequences, memory.tokens, first, last)
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


def together(net: Mamba, texts: list[Inputs], runs: list[tuple[int, int, int]], memory: MambaCache) -> np.ndarray:
    """One mixed pass over the rows of runs (slot, position, rows)."""
    given = joined(*(texts[slot][first : first + rows] for slot, first, rows in runs))
    positions = np.concatenate([np.arange(first, first + rows, dtype=np.int32) for _, first, rows in runs])
    sequences = np.concatenate([np.full(rows, slot, np.int32) for slot, _, rows in runs])
    return Backend(2).mamba(net, given.u, given.z, memory, Batch(positions, positions, sequences, True))


def begun(runs: list[tuple[int, int, int]], net: Mamba, texts: list[Inputs]) -> MambaCache:
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
    other.u[at] = np.nan
    outs = []
    for text in (given, other):
        memory = empty_memory(net, 12)
        if first:
            run(net, text[:first], memory)
        outs.append(run(net, text[first:], memory, first))
    assert outs[0][:7].tobytes() == outs[1][:7].tobytes()
    assert np.isnan(outs[1][7:]).all()


def test_sizes_of_the_cache() -> None:
    """The rings have room for a decode batch or for what is rolled back, beside what a token reads."""
    net = random_net(*NETS[0])
    spec = spec_of(net, 5)
    assert (net.n_channels, net.width, spec.width) == (192, 200, 200)
    assert [spec.length(rows) for rows in (1, 16, 512)] == [8, 19, 19]
    assert spec.segments == 2 and spec_of(net, 17).segments == 3 and replace(spec, decode_rows=32).segments == 3
    segment = 4 * (4 * 16 * 32 + 16 * 200)
    assert spec.ring_bytes(512) == 4 * 19 * 192 + 2 * segment and spec.snapshot_bytes == segment
    assert [(ring.back, ring.capacity) for ring in spec.rings(512)] == [(15, 31), (3, 19)]
    memory = empty_memory(net, 5)
    assert [memory.has_room(rows) for rows in (1, 16, 17)] == [True, True, False]
    assert memory.bytes_per_token(np.array([1])) == 4 * (4 * 16 * 32 + 200 + 192)
    assert memory.bytes_per_token(np.array([16])) == 4 * (2 * 4 * 16 * 32 + 16 * 200 + 4 * 192)
