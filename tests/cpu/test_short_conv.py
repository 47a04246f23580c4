"""The gated short convolution against a transcription of its law, against float64, and by all paths."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrays import Batch
from engine.cache.short_conv import ShortConvCache, ShortConvCacheSpec
from engine.cache.types import F32
from engine.cpu import short_conv
from tests.cpu.test_delta_net import rounded_once
from tests.mirror import Mirror as Backend
from tests.pages import layer_of, no_pages
from tests.tiers import examples

F = np.float32


def random_weight(n: int, taps: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, taps)) * taps**-0.5).astype(F)


def inputs(n: int, rows: int, seed: int = 1) -> np.ndarray:
    """b, c and x of each row, [rows, 3 n]."""
    return np.random.default_rng(seed).standard_normal((rows, 3 * n)).astype(F)


def empty_memory(n: int, taps: int, rewind: int, rows: int = 64, n_sequences: int = 1) -> ShortConvCache:
    """What an earlier answer may have stored, which a new one must not read.  rows: the most rows of a pass."""
    spec = ShortConvCacheSpec(n, taps, rewind)
    layer: ShortConvCache = layer_of(
        spec, 0, rows, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    return layer


def run(
    weight: np.ndarray, bcx: np.ndarray, memory: ShortConvCache, first: int = 0, threads: int = 2, slot: int = 0
) -> np.ndarray:
    """One pass over the rows from position ``first`` on."""
    positions = np.arange(first, first + len(bcx), dtype=np.int32)
    batch = Batch(positions, positions, np.full(len(bcx), slot, np.int32))
    return Backend(threads).short_conv(weight, bcx, memory, batch)


def one_by_one(weight: np.ndarray, bcx: np.ndarray) -> tuple[np.ndarray, ShortConvCache]:
    """Results, and a memory that keeps the inputs of all tokens."""
    n, taps = weight.shape
    memory = empty_memory(n, taps, len(bcx))
    out = np.concatenate([run(weight, bcx[t : t + 1], memory, t, threads=1) for t in range(len(bcx))])
    assert np.isfinite(out).all()
    return out, memory


def needed(memory: ShortConvCache, position: int) -> list[bytes]:
    """What a pass at ``position`` reads, in the order of positions."""
    return [b"".join(rows.ring[run].tobytes() for run in rows.runs()) for rows in memory.needed(0, position, no_pages)]


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_law(taps: int) -> None:
    weight, bcx = random_weight(96, taps), inputs(96, 20)
    b, c, x = np.split(bcx, 3, axis=1)
    u = b * x
    expected = np.zeros((20, 96), F)
    for j in range(taps):
        back = taps - 1 - j
        expected[back:] = rounded_once(u[: 20 - back], weight[:, j], expected[back:])
    assert one_by_one(weight, bcx)[0].tobytes() == (c * expected).tobytes()


@pytest.mark.parametrize(("n", "taps"), [(64, 3), (96, 4), (160, 2), (7, 8)])
def test_against_float64(n: int, taps: int) -> None:
    """Over 100 tokens, in passes of several lengths."""
    weight, bcx, memory = random_weight(n, taps), inputs(n, 100), empty_memory(n, taps, 8)
    actual = np.concatenate([run(weight, bcx[a:b], memory, a) for a, b in ((0, 60), (60, 61), (61, 75), (75, 100))])
    b, c, x = np.split(bcx.astype(float), 3, axis=1)
    u = np.concatenate([np.zeros((taps - 1, n)), b * x])
    expected = c * sum(weight[:, j] * u[j : j + 100] for j in range(taps))
    assert np.abs(actual - expected).max() / expected.std() < 3e-6  # a product of three values may be large


def test_blocks_of_elements_do_not_show() -> None:
    """Of which the last one is not whole."""
    bcx, weight = inputs(160, 20), random_weight(160, 4)
    positions, sequences = np.arange(20, dtype=np.int32), np.zeros(20, np.int32)
    found = []
    for ends in ((0, 3), (0, 1, 3)):
        ring, y = np.zeros((1, 19, 160), F), np.full((20, 160), np.nan, F)
        for first, last in pairwise(ends):
            short_conv.short_conv(bcx, positions, sequences, weight, ring, y, first, last)
        found.append((y.tobytes(), ring.tobytes()))
    assert found[0] == found[1]


@given(
    st.sampled_from([(96, 3), (64, 4)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([1, 16, 33]),
    st.integers(1, 2),
)
@examples(25)
def test_passes_and_threads_do_not_show(sizes: tuple[int, int], batches: list[int], rewind: int, threads: int) -> None:
    weight, bcx = random_weight(*sizes), inputs(sizes[0], sum(batches))
    expected, every = one_by_one(weight, bcx)
    memory, first = empty_memory(*sizes, rewind), 0
    for rows in batches:
        span = slice(first, first + rows)
        assert run(weight, bcx[span], memory, first, threads).tobytes() == expected[span].tobytes()
        first += rows
        for position in range(max(0, first - rewind), first + 1):
            assert needed(memory, position) == needed(every, position)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 33)), min_size=1, max_size=8), st.sampled_from([16, 33]))
@examples(25)
def test_tokens_are_taken_back_by_position_alone(steps: list[tuple[int, int]], rewind: int) -> None:
    """Passes that read any number of wrong tokens, which are rolled back, after any number of right ones."""
    weight, bcx, wrong = random_weight(64, 4), inputs(64, 20 * len(steps) + 1), inputs(64, 64, seed=2)
    expected, every = one_by_one(weight, bcx)
    memory, at = empty_memory(64, 4, rewind), 0
    for rows, refused in steps:
        out = run(weight, np.concatenate([bcx[at : at + rows], wrong[: min(refused, rewind)]]), memory, at)
        assert out[:rows].tobytes() == expected[at : at + rows].tobytes()
        at += rows
        assert needed(memory, at) == needed(every, at)
    assert run(weight, bcx[at : at + 1], memory, at).tobytes() == expected[at].tobytes()


def together(
    weight: np.ndarray, texts: list[np.ndarray], runs: list[tuple[int, int, int]], memory: ShortConvCache
) -> np.ndarray:
    """One mixed pass over the rows of runs (slot, position, rows)."""
    bcx = np.concatenate([texts[slot][first : first + rows] for slot, first, rows in runs])
    positions = np.concatenate([np.arange(first, first + rows, dtype=np.int32) for _, first, rows in runs])
    sequences = np.concatenate([np.full(rows, slot, np.int32) for slot, _, rows in runs])
    return Backend(2).short_conv(weight, bcx, memory, Batch(positions, positions, sequences, True))


def begun(runs: list[tuple[int, int, int]], weight: np.ndarray, texts: list[np.ndarray]) -> ShortConvCache:
    """A memory of sequences that have come to where the runs begin."""
    n, taps = weight.shape
    memory = empty_memory(n, taps, 16, n_sequences=len(texts))
    for slot, first, _ in runs:
        if first:
            run(weight, texts[slot][:first], memory, slot=slot)
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
    weight, texts = random_weight(96, 4), [inputs(96, 128, seed) for seed in range(3)]
    memory = begun(runs, weight, texts)
    alone = replace(memory, inputs=memory.inputs.copy())
    expected = [run(weight, texts[slot][first : first + rows], alone, first, 1, slot) for slot, first, rows in runs]
    out = together(weight, texts, runs, memory)
    assert out.tobytes() == np.concatenate(expected).tobytes() and np.isfinite(out).all()
    assert memory.inputs.tobytes() == alone.inputs.tobytes()


def test_repeated_rows() -> None:
    """Copies of the last row of a run after it, and of a first row elsewhere, change nothing."""
    weight, texts = random_weight(96, 4), [inputs(96, 40, seed) for seed in range(2)]
    runs = [(0, 13, 3), (1, 14, 5)]
    memory = begun(runs, weight, texts)
    again = replace(memory, inputs=memory.inputs.copy())
    expected = together(weight, texts, runs, memory)
    padded = [(0, 13, 3), (0, 15, 1), (0, 15, 1), (1, 14, 5), (0, 13, 1), (1, 14, 1)]
    out = together(weight, texts, padded, again)
    assert out.tobytes() == expected[[0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 0, 3]].tobytes()
    assert again.inputs.tobytes() == memory.inputs.tobytes()


@pytest.mark.parametrize("first", [0, 13])
def test_a_token_says_nothing_about_those_before_it(first: int) -> None:
    weight, bcx = random_weight(64, 3), inputs(64, first + 12)
    other, at = bcx.copy(), first + 7
    other[at] = np.nan
    outs = []
    for text in (bcx, other):
        memory = empty_memory(64, 3, 12)
        if first:
            run(weight, text[:first], memory)
        outs.append(run(weight, text[first:], memory, first))
    assert outs[0][:7].tobytes() == outs[1][:7].tobytes()
    assert np.isnan(outs[1][7:10]).all() and outs[0][10:].tobytes() == outs[1][10:].tobytes()


def test_sizes_of_the_cache() -> None:
    """The ring has room for a decode batch or for what is rolled back, beside what a token reads."""
    spec = ShortConvCacheSpec(96, 4, rewind=5, decode_rows=16)
    assert [spec.length(rows) for rows in (1, 16, 512)] == [8, 19, 19]
    assert ShortConvCacheSpec(96, 4, rewind=40).length(512) == 43
    assert spec.ring_bytes(512) == 4 * 19 * 96 and spec.snapshot_bytes == 4 * 3 * 96
    (ring,) = spec.rings(512)
    assert (ring.back, ring.capacity) == (3, 19)
    memory = empty_memory(96, 4, 5)
    assert [memory.has_room(rows) for rows in (1, 16, 17)] == [True, True, False]
    assert memory.bytes_per_token(np.array([1, 2])) == 4 * 96 * 1.5
    assert memory.bytes_per_token(np.array([100])) == 4 * 96 * 4
