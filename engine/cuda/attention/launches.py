"""The launches of attention: rotation and storing, then chunks, or all rows of a prompt in one launch."""

from dataclasses import replace
from typing import Any

import numpy as np

from engine.arrays import Batch
from engine.cache.kv import CHUNK, AttentionCache
from engine.cpu.integer_cache import LOG2_E
from engine.cuda import observe, rope, rope_chains
from engine.cuda.attention import attend as attention
from engine.cuda.attention import direct as direct_attention
from engine.cuda.attention import integer_steps, integer_tile, integer_tiled
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.attention.combine import PART
from engine.cuda.rows import NARROW_ROWS, groups
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Argument, Tensor
from engine.cuda.runtime.values import Attended, AttendedParts
from engine.ops.heads import Heads


def rotate(
    recorder: Recorder,
    heads: Heads[Tensor],
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    cache: AttentionCache[Tensor],
    batch: Batch[Tensor],
    angles: Tensor | None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Record the rotation of queries and keys, unless ``angles`` is None, and the storing of keys and values, if there are
    any, in the cache, with what comes before and after rotation.

    Returns the rotated queries (with scales if they are int8), and the stored keys and values as words if attention reads
    these, else None.
    """
    rows, d_k, d_v, kinds = batch.rows, cache.d_k, cache.d_v, (cache.k_type, cache.v_type)
    n_head, n_head_kv = heads.n_head if q else 0, heads.n_head_kv if k else 0
    query: tuple[Tensor, ...]
    if kinds[0].whole:
        blocks = d_k // kinds[0].block(d_k)
        query = recorder.empty((rows, n_head, d_k // 2), np.uint32), recorder.empty((rows, n_head, blocks))
    elif kinds[0].quantized:
        query = recorder.empty((rows, n_head, d_k // 4), np.uint32), recorder.empty((rows, n_head, d_k // 32))
    else:
        query = (recorder.empty((rows, n_head, d_k)),)
    noted = rope.notes(*kinds) and n_head_kv > 0 and rows <= NARROW_ROWS
    new = recorder.empty((rows, n_head_kv, d_k + d_v), np.uint32) if noted else None
    biased, normed = heads.biases is not None, heads.q_norm is not None
    scaled = q is not None and heads.query_scales is not None
    of_cache = *(kind.name for kind in kinds), d_k, d_v, 2 * angles.shape[2] if angles else 0
    how = heads.neox, normed, biased
    scale = heads.scale * LOG2_E if kinds[0].whole else heads.scale
    given: tuple[Argument, ...] = (
        *(batch.positions, cache.places(batch), batch.sequences, cache.table, angles or 0),
        *(heads.q_norm or 0, heads.k_norm or 0, *(heads.biases or (0, 0, 0)), heads.query_scales or 0),
        *(heads.eps, scale, n_head, cache.pages, cache.table.shape[1], int(batch.mixed)),
        *(query[0], query[-1]),
    )
    written = dict(zip(("query", "query_scales"), query, strict=False)) if n_head else {}
    if q and k and v and rows > NARROW_ROWS and not heads.gated and rope_chains.takes(d_k, d_v):
        chains = recorder.take_chains(q, k, v)
        if chains:
            of_chains = heads.v_normed, heads.norm_after, scaled, chains.tiles
            adding = rope_chains.rope_chains(*of_cache, *how, *of_chains)
            given = chains.chains, chains.n_chains, rows, *given, cache.keys, cache.values
            recorder.launch(adding, rope_chains.grid(rows, n_head, n_head_kv), rope_chains.BLOCK, given, **written)
            return query, None
    others = True, heads.gated, heads.v_normed, rows <= NARROW_ROWS, heads.norm_after, scaled
    kernel = rope.rope(*of_cache, *how, *others)
    given = (
        *(q or 0, k or 0, v or 0),
        *(heads.n_head * d_k * (2 if heads.gated else 1), heads.n_head_kv * d_k, heads.n_head_kv * d_v),
        *given,
        *(new or 0, cache.keys, cache.values),
    )
    if new:
        written["words"] = new
    recorder.launch(kernel, rope.grid(rows, n_head, n_head_kv), rope.BLOCK, given, **written)
    return query, new


def attend(
    recorder: Recorder,
    heads: Heads[Tensor],
    query: tuple[Tensor, ...],
    new: Tensor | None,
    cache: AttentionCache[Tensor],
    batch: Batch[Tensor],
    places: Tensor,
    window: int,
    gate: Tensor | None = None,
    spans: bool = False,
) -> Attended:
    """Record attention of the queries that ``rotate`` returned, over the sequences of the rows up to places int32 [rows], or
    over the rows' spans.  The chunks of the result are joined when it is used."""
    rows, k, v = batch.rows, cache.k_type, cache.v_type
    stride = cache.table.shape[1]
    partials = attention.partials(stride * CHUNK, window)
    sizes = rows, heads.n_head, heads.n_head_kv, cache.d_k, cache.d_v
    options: dict[str, Any] = {
        "early": True,
        "gated": heads.gated,
        "sinks": heads.sinks is not None,
        "mixed": batch.mixed,
        "cap": heads.softcap,
        "spans": spans,
    }
    multiprocessors = recorder.device.multiprocessors
    given: tuple[Argument, ...]
    if k.whole:
        shared = recorder.device.shared_memory if recorder.device.compute_capability >= (8, 0) else 0
        shape = integer_steps.geometry(*sizes, k.name, partials, multiprocessors, shared, **options)
        given = query
    elif attention.takes(k, v, cache.d_k, cache.d_v):
        options["past"] = new is None
        shape = attention.geometry(*sizes, k.bits == 16, partials, multiprocessors, **options)
        given = (query[0], new or 0)
    else:
        shape = direct_attention.geometry(*sizes, k.name, v.name, partials, multiprocessors, **options)
        given = query if k.quantized else (query[0], 0)
    mass, values = (recorder.empty((n,)) for n in attention.scratch(rows, heads.n_head, cache.d_v, partials))
    # Blocks of the kernel of integers have pairs of so many rows of one sequence.
    of_sequence = 1 if k.whole and batch.mixed else rows
    read = (*given, cache.keys, cache.values, places, batch.sequences, cache.table)
    seen = (*read, mass, values, of_sequence, cache.pages, stride, partials, window, heads.scale)
    recorder.launch(shape.attend, shape.attend_grid, shape.attend_block, seen, mass=mass, values=values)
    masses = cache.masses(batch, window)
    if masses is not None:
        given = mass, places, batch.sequences, heads.sinks or 0, masses, partials, masses.shape[1]
        recorder.launch(observe.observe(heads.n_head, heads.sinks is not None), (rows,), observe.THREADS, given)
    return Attended(mass, values, places, gate, heads.sinks, shape, partials, window, heads.n_head * cache.d_v)


def attend_wide(
    recorder: Recorder,
    heads: Heads[Tensor],
    query: tuple[Tensor, ...],
    cache: AttentionCache[Tensor],
    batch: Batch[Tensor],
    places: Tensor,
    window: int,
    gate: Tensor | None,
    spans: bool = False,
) -> Tensor | AttendedParts:
    """Record attention of more rows than narrow kernels take, up to places int32 [rows], or over spans; their keys and values
    are in the cache: float32 [rows, n_head * d_v].  Rows of several sequences are left to narrow kernels, unless the batch
    has runs, and these are recorded when the result is used."""
    assert cache.masses(batch, window) is None, f"at most {NARROW_ROWS} rows are observed at a time"
    rows, k, v = batch.rows, cache.k_type, cache.v_type
    sizes = rows, heads.n_head, heads.n_head_kv, cache.d_k, cache.d_v, k.name
    out, device = recorder.empty((rows, heads.n_head * cache.d_v)), recorder.device
    several, alone = batch.runs is not None, not batch.mixed
    sequences = batch.sequences if batch.runs is None else batch.runs
    read = cache.keys, cache.values, places, sequences, cache.table, gate or 0, heads.sinks or 0, out
    numbers = rows, cache.pages, cache.table.shape[1], window
    tiled, shared = tiled_attention.takes(k, v, cache.d_k, cache.d_v), device.shared_memory
    if k.whole:
        tile = integer_tile.tile_of(k, cache.d_k, cache.d_v, shared) if alone or several else None
        if tile and tile.fills(rows, heads.n_head, heads.n_head_kv, device.multiprocessors):
            kinds = heads.n_head, heads.n_head_kv, tile, heads.gated, heads.sinks is not None, heads.softcap, spans
            of_integers, blocks, threads = integer_tiled.geometry(rows, *kinds, several)
            recorder.launch(of_integers, blocks, threads, (*query, *read, *numbers), result=out)
            return out
    elif tiled and (alone or several) and tiled_attention.fills(*sizes, device.multiprocessors, shared):
        others = heads.gated, shared, heads.sinks is not None
        options: dict[str, Any] = {"cap": heads.softcap, "spans": spans, "several": several}
        kernel, grid, block = tiled_attention.geometry(*sizes, v.name, *others, **options)
        given: tuple[Argument, ...] = query if k.quantized else (query[0], 0)
        recorder.launch(kernel, grid, block, (*given, *read, *numbers, heads.scale), result=out)
        return out
    # Narrow kernels, some rows at a time.
    partials = attention.partials(cache.table.shape[1] * CHUNK, window)
    parts = groups(rows, attention.rows_at_once(rows, heads.n_head, cache.d_v, partials, batch.mixed))

    def attend_part(part: slice) -> Attended:
        sequences = batch.sequences[part] if batch.mixed else batch.sequences
        own = replace(batch, positions=batch.positions[part], sequences=sequences)
        of_part = tuple(x[part] for x in query), None, cache, own, places[part], window, gate[part] if gate else None
        return attend(recorder, heads, *of_part, spans)

    attended = AttendedParts(attend_part, parts, heads.n_head * cache.d_v)
    # Few passes over one prompt come here, and ``engine/verify/lockstep.py`` compares what they have computed.
    if batch.mixed and cache.d_v % PART == 0:
        return attended
    attended.write(recorder, out)
    return out
