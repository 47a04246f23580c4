"""Causal attention of a few rows over integer keys and values (cache types i8 and i12), each chunk on its own.

Formula: ``engine/cpu/integer_attention.py``; this file computes the part of each chunk, and
    ``engine/cuda/attention/combine.py`` joins them.
Shapes: q words [rows, n_head, 2, d_k / 4] (``engine/cuda/integer_cache.py``), their scales float32 [rows, n_head, blocks];
    keys and values uint32 [n_head_kv, pages, words] (``engine/cache/types.py``); sequences, table, weights, sums, partials
    as in ``engine/cuda/attention/attend.py``.
Who owns what: a block owns every ``splits``-th chunk of a KV head and up to 16 of the (row, head) pairs that read it, in a
    mixed pass pairs of one row; a warp processes a chunk alone (``engine/cuda/attention/integer_chunk.py``).
Reduction order: that of the mirror; integers are exact in any order.
Bytes moved: (d_k + d_v) * bits / 8 per visible position and KV head, in a mixed pass for each row, once from memory to the
    shared memory of the warp: its next keys are copied while it processes values, and its next values while it processes
    keys.  Where shared memory is too small for a chunk per warp, from the L2 cache, into which chunks are prefetched.  4 per
    chunk for its page, 8 + 4 d_pad per (row, head, chunk) out.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CACHE_TYPES, CHUNK, GROUP
from engine.cuda.attention.attend import MAX_ROWS, Geometry, parts_of
from engine.cuda.attention.combine import combine, padded, threads_of
from engine.cuda.attention.integer_chunk import (
    PAIRS,
    SCORES,
    STRIPS,
    hide,
    make_integers,
    make_scores,
    make_values,
    weigh,
)
from engine.cuda.attention.integer_tile import KEY_PITCH, LOW_PITCH, IntegerTile, make_fetch, make_place
from engine.cuda.attention.sight import sight
from engine.cuda.attention.tile import make_each
from engine.cuda.attention.warp_chunk import make_prefetch
from engine.cuda.intrinsics import (
    advance,
    copies_commit,
    copies_wait_but_one,
    lanes_max,
    let_next_begin,
    load2,
    pointer,
    store4,
    vector2,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, SHARED_OF_DRIVER, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

WARPS = 4
"""The most warps of a block."""
RESIDENT = 12
"""Warps that a multiprocessor has registers for."""
LEAST = 2
"""The fewest warps with chunks in shared memory."""


def geometry(
    rows: int,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    name: str,
    n_partials: int,
    multiprocessors: int,
    shared: int,
    early: bool,
    gated: bool = False,
    sinks: bool = False,
    together: int = GROUP,
    mixed: bool = False,
    cap: float = 0.0,
    spans: bool = False,
) -> Geometry:
    """Launches for ``rows`` rows that each see up to ``n_partials`` chunks of a cache of this type.

    ``shared``: bytes of shared memory that a block may have, 0 if copies to it cannot overlap with work; ``early``: no
    kernel of the same chain writes the positions, so they are read before ``wait_for_inputs``; ``gated``: the result is
    multiplied by the sigmoid of a gate; ``sinks``: heads have them; ``together``: chunks of a group; ``mixed``: rows may
    belong to several sequences; ``cap``: of scores, 0 for none; ``spans``: rows have spans in place of last positions.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, not {rows}")
    group, block = n_head // n_head_kv, CACHE_TYPES[name].block(d_v)
    parts = parts_of(rows, group, PAIRS, mixed)
    warps, resident = warps_of(name, d_k, d_v, shared)
    staged = warps > 0
    if not staged:
        warps, resident = WARPS, RESIDENT // WARPS
    # No more blocks than are resident at once: the next kernel cannot begin before all have begun.
    splits = min(n_partials, max(1, resident * multiprocessors // (n_head_kv * parts)))
    of_spans = (True,) if spans else ()
    return Geometry(
        attend_integer_chunks(name, d_k, d_v, group, early, warps, resident, staged, cap, *of_spans),
        # Blocks begin in this order, x first: those that read the same chunk are neighbours.
        (n_head_kv, parts, splits),
        32 * warps,
        combine(d_v, early, gated, block, sinks, together, *of_spans),
        (n_head, rows, d_v // block),
        threads_of(block),
        d_v,
        early,
        gated,
        block,
        n_partials,
        sinks,
        together,
        of_spans,
    )


def _bytes(
    name: str, d_k: int, d_v: int, group: int, early: bool, warps: int, resident: int, staged: bool, *_: float
) -> int:
    """The shared memory of a block: a chunk per warp, the queries and their scales."""
    tile = IntegerTile(CACHE_TYPES[name], d_k, d_v, d_v, warps)
    return 4 * (warps * tile.stage * staged + tile.of_warp + PAIRS * (d_k // tile.of.block(d_k)))


def warps_of(name: str, d_k: int, d_v: int, shared: int) -> tuple[int, int]:
    """(warps of a block, blocks on a multiprocessor) so that as many warps as possible have a chunk in shared memory, where a
    block may have ``shared`` bytes; (0, 0) if these are too few."""
    found = LEAST - 1, 0, 0
    for warps in range(1, WARPS + 1):
        bytes_ = _bytes(name, d_k, d_v, 1, True, warps, 1, True)
        if bytes_ <= shared:
            resident = min(RESIDENT // warps, (shared + SHARED_OF_DRIVER) // (bytes_ + SHARED_OF_DRIVER))
            found = max(found, (warps * resident, warps, resident))
    return found[1:]


@kernel(
    *(U32P, F32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, i32, i32, i32, i32, i32, f32),
    threads=lambda *constants: 32 * constants[5],
    blocks=lambda *constants: constants[6],
    shared=_bytes,
)
def attend_integer_chunks(
    name: str,
    d_k: int,
    d_v: int,
    group: int,
    early: bool,
    warps: int,
    resident: int,
    staged: bool,
    cap: float = 0.0,
    spans: bool = False,
) -> KernelCode:
    """The maximum, the sum and the weighted values of each visible chunk of a cache of i8 or i12 (``name``).

    Arguments: q, q_scales, keys, values, positions, sequences, table, weights, sums, rows (that all belong to the sequence
    of the first of them: those of the pass, or 1 if it is mixed), pages, stride (chunks of a row of the table), partials,
    window, scale (not used: queries have it).
    ``group``: query heads per KV head; ``early``: see ``geometry``; ``warps``: of a block, of which ``resident`` fit on a
    multiprocessor; ``staged``: each has a chunk in shared memory; ``cap``: of scores, 0 for none; ``spans``: positions are
    spans.
    Grid: (n_head_kv, ceil(rows * group / 16) * (rows of the pass / rows), splits), blocks of 32 * ``warps`` threads.
    """
    first_visible, last_visible, visible = sight(spans)
    of, tile = CACHE_TYPES[name], IntegerTile(CACHE_TYPES[name], d_k, d_v, d_v, warps)
    key_words, value_words = of.chunk_words(d_k), of.chunk_words(d_v)
    block, d_pad = of.block(d_v), padded(d_v)
    blocks, per_block = d_v // block, block // 16
    n_query, stage_words = tile.of_warp, tile.stage
    stages_at = n_query + PAIRS * (d_k // of.block(d_k))
    place = make_place(of, d_k, group, warps)
    strips = 2 if of.bits == 8 else 1
    if staged:
        low_keys, key_scales, values_at = tile.low_keys, tile.key_scales, tile.values
        low_values, value_scales = tile.low_values - values_at, tile.value_scales - values_at
        scores = make_scores(of, d_k, KEY_PITCH, LOW_PITCH, vector2, strips, cap)
        integers = make_integers(vector2)
        weighted = make_values(of, d_v, tile.value_pitch, tile.low_value_pitch, vector2)
    else:
        low_keys, key_scales, values_at = CHUNK * d_k // 4, of.integer_words(d_k), 0
        low_values, value_scales = CHUNK * d_v // 4, of.integer_words(d_v)
        scores = make_scores(of, d_k, CHUNK, CHUNK, load2, strips, cap)
        integers = make_integers(load2)
        weighted = make_values(of, d_v, d_v, d_v // 2, load2)
    fetch_keys, fetch_values = make_fetch(tile, 32)
    prefetch_keys, prefetch_values = make_prefetch(key_words, value_words)

    @device
    def copy_keys(stage, keys, page, seen, lane):
        """Start copying the keys of a page to the warp's stage, if ``seen``; always the next group of copies."""
        if seen:
            fetch_keys(stage, advance(keys, np.int64(page) * key_words), lane)
        copies_commit()

    @device
    def copy_values(stage, values, page, seen, lane):
        """The same for its values."""
        if seen:
            fetch_values(stage, advance(values, np.int64(page) * value_words), I(0), lane)
        copies_commit()

    @device
    def write_strip(i, values, high, low, x, y, lane, sums, at, other_at):
        """Write 16 dimensions of the weighted values to where ``combine`` reads them, if the places are not negative."""
        o = cuda.local.array(8, np.float32)
        weighted(values, advance(values, low_values), i // per_block, i % per_block, high, low, x, y, lane, o)
        if at >= 0:
            store4(sums, at + 16 * i, o[0], o[1], o[2], o[3])
        if other_at >= 0:
            store4(sums, other_at + 16 * i, o[4], o[5], o[6], o[7])

    write_strips = make_each(per_block, write_strip)

    @device
    def write_block(b, values, s, lane, both, sums, at, other_at):
        high = cuda.local.array(8, np.uint32)
        low = cuda.local.array(8, np.uint32)
        scales, t = advance(values, value_scales + b * (CHUNK // 2)), I(lane & 3)
        x, y = integers(s, 0, scales, t, high, low), F(0.0)
        if both:
            y = integers(s, 1, scales, t, high, low)
        else:
            for m in range(STRIPS):
                high[2 * m + 1], low[2 * m + 1] = U(0), U(0)
        write_strips(b * per_block, values, high, low, x, y, lane, sums, at, other_at)

    write_blocks = make_each(blocks, write_block)

    @device
    def see(r, s, first, last, lane, weights, partial):
        """From the scores of query r to weights; their maximum and sum go to its partial, if it is not negative."""
        hide(s, r, first, last, I(lane & 3))
        m, weight = weigh(s, r, lane)
        if partial >= 0 and lane & 3 == 0:
            weights[2 * partial], weights[2 * partial + 1] = m, weight

    @cuda.jit
    def attend_integer_chunks(
        q, q_scales, keys, values, positions, sequences, table, weights, sums, rows, pages, stride, partials, window, scale,
    ):  # fmt: skip
        let_next_begin()
        query = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        dq = advance(pointer(cuda.shared.array(0, np.float32, ALIGNED)), n_query)
        s = cuda.local.array(SCORES, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & 0x7F)
        # This tells the compiler that the values are the same in all lanes, and so are the branches that depend on them.
        warp, lane = lanes_max(I(thread >> 5)), I(thread & 31)
        head_kv = I(cuda.blockIdx.x & 0xFFFF)
        last_task = I(rows * group - 1)
        # In a mixed pass, the number of a row; else 0.
        part, parts = I(cuda.blockIdx.y & 0xFFFF), I(U(last_task + PAIRS) // U(PAIRS))
        first_row = I(U(part) // U(parts))
        n_head = I(cuda.gridDim.x * group)
        head0 = I(head_kv * group + first_row * n_head)
        task0 = I(I(part - first_row * parts) * PAIRS)
        positions, sequences = advance(positions, first_row), advance(sequences, first_row)
        both = I(task0 + 8) <= last_task  # whether the second half of the pairs exists
        task, other_task = I(task0 + (lane >> 2)), I(task0 + (lane >> 2) + 8)
        row = I(U(min(last_task, task)) // U(group))
        other_row = I(U(min(last_task, other_task)) // U(group))
        head = I(I(row * n_head) + I(head0 + I(min(last_task, task) - row * group)))
        other_head = I(I(other_row * n_head) + I(head0 + I(min(last_task, other_task) - other_row * group)))
        if not early:
            wait_for_inputs()
        position, other_position = positions[row], positions[other_row]
        table = advance(table, I(sequences[0] * stride))
        highest = lanes_max(max(position, other_position))
        lowest = I(-lanes_max(I(-min(position, other_position))))
        of_head, splits = I(head_kv * pages), I(cuda.gridDim.z)
        # Warps of blocks that have fewer chunks than warps are spread over the schedulers.
        turn = I(U(warp + cuda.blockIdx.x + cuda.blockIdx.z + (cuda.blockIdx.z >> 2)) % U(warps))
        last_chunk = I(last_visible(highest) >> 6)
        chunk = I((first_visible(lowest, window) >> 6) + cuda.blockIdx.z + turn * splits)
        at, next_at = I(0), I(0)
        if chunk <= last_chunk:
            at = I(of_head + table[chunk])
        if staged and I(chunk + warps * splits) <= last_chunk:
            next_at = I(of_head + table[I(chunk + warps * splits)])
        if early:
            if lane == 0:
                # Into the L2 cache: whatever is written there meanwhile is seen.
                prefetch_keys(keys, at, chunk <= last_chunk)
                prefetch_values(values, at, chunk <= last_chunk)
            wait_for_inputs()
        stage = advance(query, I(stages_at + warp * stage_words))
        if staged:
            copy_keys(stage, keys, at, chunk <= last_chunk, lane)
            copy_values(stage, values, at, chunk <= last_chunk, lane)
            # From here on the page of the chunk that is copied next.
            at = next_at
            if lane == 0:
                prefetch_keys(keys, at, I(chunk + warps * splits) <= last_chunk)
                prefetch_values(values, at, I(chunk + warps * splits) <= last_chunk)
        place(q, q_scales, task0, last_task, head0, n_head, lane, warp, query, dq)
        cuda.syncthreads()
        while chunk <= last_chunk:
            after = I(chunk + warps * splits)
            following = I(after + warps * splits) if staged else after
            if following <= last_chunk:
                # Read early: what is there depends on it.
                next_at = I(of_head + table[following])
            if staged:
                own_keys, own_values = stage, advance(stage, values_at)
                copies_wait_but_one()
                cuda.syncwarp()
            else:
                own_keys = advance(keys, np.int64(at) * key_words)
                own_values = advance(values, np.int64(at) * value_words)
            scores(query, dq, own_keys, advance(own_keys, low_keys), advance(own_keys, key_scales), lane, s)
            if staged:
                cuda.syncwarp()
                copy_keys(stage, keys, at, after <= last_chunk, lane)
            if lane == 0:
                # Not earlier: what many warps have prefetched would evict itself from the L2 cache.
                prefetch_keys(keys, next_at, following <= last_chunk)
                prefetch_values(values, next_at, following <= last_chunk)
            first, last = visible(position, window, chunk)
            other_first, other_last = visible(other_position, window, chunk)
            partial = I(I(head * partials) + I(chunk - (first_visible(position, window) >> 6)))
            other_partial = I(I(other_head * partials) + I(chunk - (first_visible(other_position, window) >> 6)))
            if task > last_task or first >= last:
                partial = I(-1)
            if other_task > last_task or other_first >= other_last:
                other_partial = I(-1)
            see(0, s, first, last, lane, weights, partial)
            if both:
                see(1, s, other_first, other_last, lane, weights, other_partial)
            to, other_to = np.int64(partial) * d_pad, np.int64(other_partial) * d_pad
            if staged:
                copies_wait_but_one()
                cuda.syncwarp()
            write_blocks(0, own_values, s, lane, both, advance(sums, 4 * (lane & 3)), to, other_to)
            if staged:
                cuda.syncwarp()
                copy_values(stage, values, at, after <= last_chunk, lane)
            chunk, at = after, next_at

    return attend_integer_chunks
