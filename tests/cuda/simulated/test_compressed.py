"""Hyper-connections, compressed rows, the indexer and attention over them, in the simulator: the bits of the mirrors."""

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from dataclasses import replace
from functools import partial

from engine.cache.compressed import CompressedCache, CompressedCacheSpec
from engine.cache.types import F16, F32, Types
from engine.cuda import backend, compressed_operations, indexer
from engine.gguf.quants import FORMATS
from engine.ops.compressor import Compressor
from tests.batches import one_sequence
from tests.cuda.simulated.test_operations import computed, cpu, gpu, same, weight
from tests.pages import layer_of
from tests.tiers import few

assert gpu

f32 = np.float32


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(f32)


def rows_of(*positions: int) -> Batch[np.ndarray]:
    return one_sequence(np.array(positions, np.int32))


def mixed_rows(*runs: tuple[int, int, int]) -> Batch[np.ndarray]:
    """A pass of runs (slot, first position, number of rows)."""
    positions = [p for _, first, count in runs for p in range(first, first + count)]
    sequences = [slot for slot, _, count in runs for _ in range(count)]
    n = len(positions)
    return Batch(np.zeros(n, np.int32), np.array(positions, np.int32), np.array(sequences, np.int32), True)


def both(
    gpu: backend.Backend, shape: CompressedCacheSpec, n_ctx: int, types: Types, n_sequences: int = 1
) -> tuple[CompressedCache[Any], CompressedCache[Any]]:
    """The memory of a layer with the same random contents on the CPU and on the GPU."""
    ours = layer_of(shape, n_ctx, 32, types, np.zeros, None, n_sequences)
    random = np.random.default_rng(3)
    for array in arrays(ours):
        values = random.standard_normal(array.shape)
        array[:] = values if array.dtype == f32 else values.astype(np.float16).view(np.uint16)
    theirs = layer_of(shape, n_ctx, 32, types, gpu.zeros, gpu.store, n_sequences)
    for array, on_device in zip(arrays(ours), arrays(theirs), strict=True):
        gpu.store(on_device, 0, array)
    return ours, theirs


def arrays(layer: CompressedCache[Any]) -> list[Any]:
    blocks = [b for b in (layer.compressed, layer.keys) if b is not None]
    return [layer.latents, *(array for b in blocks for array in (b.rows, b.pending))]


def same_memory(gpu: backend.Backend, ours: CompressedCache[Any], theirs: CompressedCache[Any]) -> None:
    for array, on_device in zip(arrays(ours), arrays(theirs), strict=True):
        same(gpu.download(on_device), array)


def batch_of(gpu: backend.Backend, batch: Batch[np.ndarray]) -> Batch[Any]:
    tokens, positions, sequences = map(gpu.upload, (batch.tokens, batch.positions, batch.sequences))
    return Batch(tokens, positions, sequences, batch.mixed)


@pytest.mark.parametrize("rounds", [1, 20])
def test_hyper_connections(gpu: backend.Backend, rounds: int) -> None:
    n = 40
    x, y, m, scale, base = draw(2, 4 * n), draw(2, n), 2 * draw(2, 24), draw(3), draw(24)
    a, b, c, d, e = map(gpu.upload, (x, y, m, scale, base))
    (ours,) = computed(gpu, lambda: gpu.stream_weights(c, d, e, 1e-3, rounds))
    theirs = cpu.stream_weights(m, scale, base, 1e-3, rounds)
    same(ours, theirs)
    first, w = gpu.upload(m[:, :4].copy()), gpu.upload(theirs)
    (ours,) = computed(gpu, lambda: gpu.stream_weights(first, d, e, 1e-3, rounds))
    same(ours, theirs[:, :4].copy())
    same(computed(gpu, lambda: gpu.collapse(a, w))[0], cpu.collapse(x, theirs))
    same(computed(gpu, lambda: gpu.expand(a, b, w))[0], cpu.expand(x, y, theirs))
    same(computed(gpu, lambda: gpu.repeat(b, 4))[0], cpu.repeat(y, 4))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("d", [24, 320])
def test_tails(gpu: backend.Backend, d: int, inverse: bool) -> None:
    x, norm, table, batch = draw(2, 3 * d), draw(d), draw(9, 2, 4), rows_of(7, 8)
    a, b, c, rows = gpu.upload(x), gpu.upload(norm), gpu.upload(table), batch_of(gpu, batch)
    (ours,) = computed(gpu, lambda: gpu.rotate_tail(a, 3, rows, c, b, 1e-6, inverse))
    same(ours, cpu.rotate_tail(x, 3, batch, table, norm, 1e-6, inverse))
    (ours,) = computed(gpu, lambda: gpu.rotate_tail(a, 3, rows, c, inverse=inverse))
    same(ours, cpu.rotate_tail(x, 3, batch, table, inverse=inverse))


def stored(ops: Any, law: Any, layer: Any, values: Any, scores: Any, rows: Any, table: Any) -> list[Any]:
    """Both kinds of rows that a pass completes."""
    ops.compress(law, values, scores, layer.compressed, rows, table)
    ops.compress(law, values, scores, layer.keys, rows, table, transposed=True)
    return []


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("types", [F32, F16])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, 2), (7, 1)])
def test_compressed_rows(gpu: backend.Backend, ratio: int, overlap: int, types: Types) -> None:
    """Passes that complete no row, one, and several, also the first one and those after a wrapped ring."""
    d = 40
    shape = CompressedCacheSpec(d, 32, ratio, overlap, d, 2, 5)
    ours, theirs = both(gpu, shape, 300, types)
    width, table = overlap * d, draw(300, 2, 3)
    ape, norm, angles = draw(ratio, width, seed=3), draw(d, seed=4), gpu.upload(table)
    law = Compressor(ratio, overlap, ape, norm, 1e-6)
    on_device = Compressor(ratio, overlap, gpu.upload(ape), gpu.upload(norm), 1e-6)
    for first, count in ((0, 1), (1, ratio - 1), (ratio, 2 * ratio + 3), (260, 30)):
        batch = rows_of(*range(first, first + count))
        rows, values, scores = batch_of(gpu, batch), draw(count, width, seed=first), draw(count, width, seed=first + 1)
        a, b = gpu.upload(values), gpu.upload(scores)

        computed(gpu, partial(stored, gpu, on_device, theirs, a, b, rows, angles))
        stored(cpu, law, ours, values, scores, batch, table)
        same_memory(gpu, ours, theirs)


def rounded(ops: Any, layer: Any, rows: Any, n_rot: int) -> list[Any]:
    """Both kinds of rows that a pass completes."""
    ops.round_rows(layer.compressed, 4, n_rot, rows)
    ops.round_rows(layer.keys, 4, n_rot, rows, True)
    return []


@pytest.mark.parametrize(("d", "n_keys", "n_rot"), few([(200, 32, 8), (64, 128, 16)]))
def test_rounding(gpu: backend.Backend, d: int, n_keys: int, n_rot: int) -> None:
    """Blocks that are whole and others; more and fewer elements than threads; rows that end in a pass, and others."""
    scale = 10.0 ** np.linspace(-9, 3, 3)[:, None]
    x, q = (scale * draw(3, d)).astype(f32), (scale * draw(3, 2 * n_keys)).astype(f32)
    x[1] = 0
    a, b = gpu.upload(x), gpu.upload(q)
    same(computed(gpu, lambda: gpu.round_latents(a, n_rot))[0], cpu.round_latents(x, n_rot))
    same(computed(gpu, lambda: gpu.round_queries(b, 2))[0], cpu.round_queries(q, 2))
    ours, theirs = both(gpu, CompressedCacheSpec(d, 32, 4, 2, n_keys, 2, 5), 300, F32)
    for first, count in ((0, 3), (3, 1), (254, 9)):
        batch = rows_of(*range(first, first + count))
        computed(gpu, partial(rounded, gpu, theirs, batch_of(gpu, batch), n_rot))
        rounded(cpu, ours, batch, n_rot)
        same_memory(gpu, ours, theirs)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("types", [F32, F16])
@pytest.mark.parametrize(("n_head", "top_k"), few([(20, 70), (3, 5), (1, 150)]))
def test_chosen_rows(
    gpu: backend.Backend, types: Types, n_head: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that see fewer than top_k, as many, and more; equal scores; several chunks for one block; more heads than fit."""
    monkeypatch.setattr(indexer, "THREADS", 64)
    monkeypatch.setattr(indexer, "PARTS", 2)
    monkeypatch.setattr(indexer, "FLOATS", 600)
    d, ratio = 24, 4
    ours, theirs = both(gpu, CompressedCacheSpec(8, 32, ratio, 2, d, top_k, 5), 1200, types)
    assert ours.keys is not None and theirs.keys is not None
    ours.keys.rows[1] = ours.keys.rows[0]
    gpu.store(theirs.keys.rows, 0, ours.keys.rows)
    batch = rows_of(2, 4 * top_k - 2, 4 * top_k - 1, 4 * top_k + 3, 1199)
    q, w, rows = draw(5, n_head * d), draw(5, n_head), batch_of(gpu, batch)
    a, b = gpu.upload(q), gpu.upload(w)
    given = 0.25, ratio, top_k
    keys: Any = theirs.keys
    (found,) = computed(gpu, lambda: gpu.choose_rows(a, b, *given, keys, rows))
    expected = cpu.choose_rows(q, w, *given, ours.keys, batch)
    same(found, expected)


@pytest.mark.parametrize("types", [F32, F16])
@pytest.mark.parametrize(
    ("n_head", "d", "window", "ratio", "top_k", "positions"),
    few(
        [
            (20, 24, 16, 3, 0, (130,)),
            (6, 72, 70, 4, 100, (63, 479)),
            (3, 8, 16, 1, 0, (599,)),
            (2, 264, 30, 0, 0, (100,)),
        ],
        3,
    ),
)
@pytest.mark.parametrize(("step", "shared"), few([(True, 99 << 10), (False, 16 << 10), (True, 16 << 10)], 2))
@pytest.mark.covering(1, 2)
def test_attention(
    gpu: backend.Backend,
    n_head: int,
    d: int,
    window: int,
    ratio: int,
    top_k: int,
    positions: tuple[int, ...],
    types: Types,
    step: bool,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads that do not fill blocks, windows over chunks, lists of several chunks and groups, elements that do not fill
    warps; chunks with blocks of their own and one after another; blocks whose shared memory holds a part of the elements."""
    monkeypatch.setattr(compressed_operations, "NARROW_ROWS", 16 if step else 0)
    monkeypatch.setattr(gpu.device, "shared_memory", shared)
    overlap, keys = (2, 8) if top_k else (1, 0)
    ours, theirs = both(gpu, CompressedCacheSpec(d, window, ratio, overlap, keys, top_k, 5), max(positions) + 1, types)
    batch = rows_of(*positions)
    n = batch.rows
    x, q, sinks, rows = draw(n, d), 2 * draw(n, n_head * d), draw(n_head), batch_of(gpu, batch)
    a, b, c = gpu.upload(x), gpu.upload(q), gpu.upload(sinks)
    chosen = on_device = None
    if top_k:
        random = np.random.default_rng(0)
        chosen = np.zeros((n, top_k), np.int32)
        for t, p in enumerate(batch.positions):
            seen = (p + 1) // ratio
            chosen[t, : min(seen, top_k)] = np.sort(random.permutation(seen)[:top_k])
        on_device = gpu.upload(chosen)

    def run() -> Any:
        gpu.keep_latents(a, theirs, rows)
        return gpu.attend_compressed(b, theirs, rows, d**-0.5, c, ratio, on_device)

    (found,) = computed(gpu, run)
    cpu.keep_latents(x, ours, batch)
    same(found, cpu.attend_compressed(q, ours, batch, d**-0.5, sinks, ratio, chosen))
    same_memory(gpu, ours, theirs)


def draws(n: int, d: int) -> dict[str, np.ndarray]:
    """What the rows of a pass of 2 heads have."""
    names = {"x": d, "q": 2 * d, "values": 2 * d, "scores": 2 * d, "queries": 16, "weights": 2, "a": 16, "b": 16}
    return {name: draw(n, width, seed=k) for k, (name, width) in enumerate(names.items())}


def layer_pass(ops: Any, layer: Any, laws: Any, x: Any, rows: Any, table: Any, sinks: Any, done: list[Any]) -> Any:
    """All operations on the memory of a layer."""
    ops.keep_latents(x["x"], layer, rows)
    for law, blocks, a, b in ((laws[0], layer.compressed, "values", "scores"), (laws[1], layer.keys, "a", "b")):
        ops.compress(law, x[a], x[b], blocks, rows, table, blocks is layer.keys)
        if layer.k_type.bits == 32:
            ops.round_rows(blocks, law.ratio, 8, rows, blocks is layer.keys)
    chosen = ops.choose_rows(x["queries"], x["weights"], 0.25, laws[0].ratio, 5, layer.keys, rows)
    done += [chosen, ops.attend_compressed(x["q"], layer, rows, 0.2, sinks, laws[0].ratio, chosen)]
    return done


@pytest.mark.parametrize("types", few([F32, F16], 0))
def test_rows_of_several_sequences(gpu: backend.Backend, types: Types, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in a pass, with a copy of its last row, which completes a block whose other tokens are partly in the
    pass, have the bits of the mirror; one of them in a pass that is not mixed, which takes one chunk after another, has those
    of the mixed pass."""
    monkeypatch.setattr(indexer, "THREADS", 64)
    monkeypatch.setattr(indexer, "PARTS", 1)
    d, ratio, n_ctx = 24, 4, 330
    runs = (1, 303, 1), (0, 323, 2), (2, 325, 3)
    shape = CompressedCacheSpec(d, 9, ratio, 2, 8, 5, 5)
    ours, theirs = both(gpu, shape, n_ctx, types, 3)
    table, sinks = draw(n_ctx, 2, 4), draw(2)
    given = [(draw(ratio, 2 * width, seed=3), draw(width, seed=4)) for width in (d, 8)]
    laws = [Compressor(ratio, 2, *one, 1e-6) for one in given]
    on_device = [Compressor(ratio, 2, gpu.upload(ape), gpu.upload(norm), 1e-6) for ape, norm in given]
    angles, c = gpu.upload(table), gpu.upload(sinks)

    def run_gpu(layer: Any, batch: Batch[np.ndarray], x: dict[str, np.ndarray]) -> list[np.ndarray]:
        rows, inputs = batch_of(gpu, batch), {name: gpu.upload(array) for name, array in x.items()}
        return computed(gpu, lambda: layer_pass(gpu, layer, on_device, inputs, rows, angles, c, []))

    batch, x = mixed_rows(*runs, (2, 327, 1)), draws(7, d)
    for array in x.values():
        array[-1] = array[-2]
    alone = both(gpu, shape, n_ctx, types, 3)[1]
    found = run_gpu(theirs, batch, x)
    for one, other in zip(found, layer_pass(cpu, ours, laws, x, batch, table, sinks, []), strict=True):
        same(one, other)
    same_memory(gpu, ours, theirs)
    own = slice(3, 6)
    monkeypatch.setattr(compressed_operations, "NARROW_ROWS", 0)
    single = replace(mixed_rows(runs[-1]), mixed=False)
    for one, other in zip(run_gpu(alone, single, {name: array[own] for name, array in x.items()}), found, strict=True):
        same(one, other[own])
    assert ours.compressed is not None
    for of_alone, of_mixed in ((alone.compressed, theirs.compressed), (alone.keys, theirs.keys)):
        assert of_alone is not None and of_mixed is not None
        pages = [gpu.download(blocks.rows)[ours.compressed.table[2]] for blocks in (of_alone, of_mixed)]
        same(*pages)
        same(*(gpu.download(blocks.pending)[2] for blocks in (of_alone, of_mixed)))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_K, T.F16])
def test_products_of_groups(gpu: backend.Backend, rows: int, kind: T) -> None:
    entry, n_group, n_rows = FORMATS[kind], 3, 32
    columns = max(entry.block, 32)
    w = replace(weight(entry, n_group * n_rows, columns), stack=n_group)
    x = draw(rows, n_group * columns)
    a, matrix = gpu.upload(x), gpu.weight(w)
    (ours,) = computed(gpu, lambda: gpu.grouped_matmul(a, matrix, n_group))
    records: Any = cpu.weight(w)
    theirs = cpu.grouped_matmul(x, records, n_group)
    same(ours, theirs)
    # Each group is a product of its own.
    alone = []
    for g in range(n_group):
        own: Any = cpu.weight(replace(w.slice(g * n_rows, (g + 1) * n_rows), stack=1))
        alone.append(cpu.matmul(x[:, g * columns : (g + 1) * columns].copy(), own)[0])
    same(theirs, np.hstack(alone))


@pytest.mark.parametrize("first", [0, 6])
def test_the_input_of_a_layer_that_reads_streams(gpu: backend.Backend, first: int) -> None:
    """Each stream of the position before follows the token; before position 0 there are zeros."""
    n, batch = 40, rows_of(first, first + 1)
    e, ring, norms = draw(2, n), draw(5, 4 * n)[None], draw(2, n, seed=1)
    a, b, rows = gpu.upload(e), gpu.upload(ring), batch_of(gpu, batch)
    c, d = (gpu.upload(norm) for norm in norms)
    (ours,) = computed(gpu, lambda: gpu.mtp_input(a, c, b, d, rows, 1e-6))
    theirs = cpu.mtp_input(e, norms[0], ring, norms[1], batch, 1e-6)
    assert theirs.shape == (8, 2 * n)
    same(ours, theirs)
    for s in range(4):
        part = cpu.mtp_input(e, norms[0], ring[..., s * n : (s + 1) * n].copy(), norms[1], batch, 1e-6)
        same(theirs[s::4].copy(), part)
