"""Causal attention of a few rows over integer keys and values (cache types i8 and i12), each chunk on its own.

    start copying the block's first chunk to shared memory
    for each chunk of the block:
        -- barrier: its copies have arrived, and those of the chunk before are no longer needed
        start copying the next chunk over the one before
        each warp: scores of 16 positions, weights, integers, then some dimensions of the weighted values
            (``engine/cuda/attention/integer_strip.py``, three barriers)
        write the maximum, the sum of weights and the weighted values

Formula: ``engine/cpu/integer_attention.py``; this file computes the part of each chunk, and
    ``engine/cuda/attention/combine.py`` joins them.
Shapes: q words [rows, n_head, 2, d_k / 4] (``engine/cuda/integer_cache.py``), their scales float32 [rows, n_head, blocks];
    keys and values uint32 [n_head_kv, pages, words] (``engine/cache/types.py``); sequences, table, weights, sums, partials
    as in ``engine/cuda/attention/attend.py``.
Who owns what: a block owns every ``splits``-th chunk of a KV head and up to 16 of the (row, head) pairs that read it, in a
    mixed pass pairs of one row; its four warps share a chunk.
Reduction order: that of the mirror; integers are exact in any order.
Bytes moved: (d_k + d_v) * bits / 8 per visible position and KV head, in a mixed pass for each row, once from memory to shared
    memory.  Where that is too small for two chunks, from the L2 cache, into which chunks are prefetched.  4 per chunk for its
    page, 8 + 4 d_pad per (row, head, chunk) out.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CACHE_TYPES, CHUNK, GROUP
from engine.cuda.attention.attend import MAX_ROWS, Geometry, parts_of
from engine.cuda.attention.combine import combine, padded, threads_of
from engine.cuda.attention.integer_chunk import PAIRS, make_scores, make_values
from engine.cuda.attention.integer_strip import (
    SHARERS,
    Board,
    hide_strip,
    make_clear_integers,
    make_show_integers,
    make_show_weights,
    make_take_integers,
    show_top,
    sum_weights,
)
from engine.cuda.attention.integer_tile import KEY_PITCH, LOW_PITCH, IntegerTile, make_fetch, make_place
from engine.cuda.attention.sight import sight
from engine.cuda.attention.warp_chunk import make_prefetch
from engine.cuda.intrinsics import (
    advance,
    copies_commit,
    copies_wait,
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
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import F32P, I32P, SHARED_OF_DRIVER, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

THREADS = 32 * SHARERS
"""Threads of a block."""
RESIDENT = 4
"""The most blocks of a multiprocessor."""
ENOUGH = 2
"""Blocks of a multiprocessor that hide each other's barriers: more only where they leave the other kernels of a step their
cache, which all have the same."""
PERCENT = 45
"""What more than ``ENOUGH`` blocks may take of the fast memory of a multiprocessor in steps of few rows."""


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
    if rows > MAX_ROWS and not mixed:
        raise ValueError(f"at most {MAX_ROWS} rows of a sequence, not {rows}")
    group, block = n_head // n_head_kv, CACHE_TYPES[name].block(d_v)
    parts = parts_of(rows, group, PAIRS, mixed)
    resident = resident_of(name, d_k, d_v, shared, rows)
    staged = resident > 0
    resident = resident or RESIDENT
    # No more blocks than are resident at once: the next kernel cannot begin before all have begun.
    splits = min(n_partials, max(1, resident * multiprocessors // (n_head_kv * parts)))
    of_spans = (True,) if spans else ()
    return Geometry(
        attend_integer_chunks(name, d_k, d_v, group, early, staged, resident, cap, *of_spans),
        # Blocks begin in this order, x first: those that read the same chunk are neighbours.
        (n_head_kv, parts, splits),
        THREADS,
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


def _bytes(name: str, d_k: int, d_v: int, group: int, early: bool, staged: bool, *_: float) -> int:
    """The shared memory of a block: two chunks, the queries, their scales, and what warps exchange."""
    of, tile = CACHE_TYPES[name], IntegerTile(CACHE_TYPES[name], d_k, d_v, d_v, SHARERS)
    scales = PAIRS * (d_k // of.block(d_k))
    return 4 * (2 * tile.stage * staged + tile.of_warp + scales + Board(d_v // of.block(d_v)).size)


def resident_of(name: str, d_k: int, d_v: int, shared: int, rows: int) -> int:
    """Blocks on a multiprocessor, in a pass of ``rows`` rows, whose chunks are in shared memory, where a block may have
    ``shared`` bytes; 0 if that is too little."""
    each, whole = _bytes(name, d_k, d_v, 1, True, True) + SHARED_OF_DRIVER, shared + SHARED_OF_DRIVER
    # In wide passes each kernel has the cache that it prefers.
    most = whole if rows > NARROW_ROWS else max(ENOUGH * each, whole * PERCENT // 100)
    return min(RESIDENT, whole // each, most // each)


@kernel(
    *(U32P, F32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, i32, i32, i32, i32, i32, f32),
    threads=THREADS,
    blocks=lambda *constants: constants[6],
    shared=_bytes,
)
def attend_integer_chunks(
    name: str,
    d_k: int,
    d_v: int,
    group: int,
    early: bool,
    staged: bool,
    resident: int,
    cap: float = 0.0,
    spans: bool = False,
) -> KernelCode:
    """The maximum, the sum and the weighted values of each visible chunk of a cache of i8 or i12 (``name``).

    Arguments: q, q_scales, keys, values, positions, sequences, table, weights, sums, rows (that all belong to the sequence
    of the first of them: those of the pass, or 1 if it is mixed), pages, stride (chunks of a row of the table), partials,
    window, scale (not used: queries have it).
    ``group``: query heads per KV head; ``early``: see ``geometry``; ``staged``: chunks pass through shared memory;
    ``resident``: blocks that fit on a multiprocessor; ``cap``: of scores, 0 for none; ``spans``: positions are spans.
    Grid: (n_head_kv, ceil(rows * group / 16) * (rows of the pass / rows), splits), blocks of ``THREADS`` threads.
    """
    first_visible, last_visible, visible = sight(spans)
    of, tile = CACHE_TYPES[name], IntegerTile(CACHE_TYPES[name], d_k, d_v, d_v, SHARERS)
    key_words, value_words = of.chunk_words(d_k), of.chunk_words(d_v)
    block, d_pad = of.block(d_v), padded(d_v)
    blocks, per_block, strips = d_v // block, block // 16, d_v // 16
    scales_at, stage_words = tile.of_warp, tile.stage
    places = Board(blocks)
    board_at = scales_at + PAIRS * (d_k // of.block(d_k))
    weights_at, powers_at, stages_at = places.weights, places.powers, board_at + places.size
    half = CHUNK // 2
    place = make_place(of, d_k, group, SHARERS)
    load = vector2 if staged else load2
    if staged:
        low_keys, key_scales, values_at = tile.low_keys, tile.key_scales, tile.values
        low_values, value_scales = tile.low_values - values_at, tile.value_scales - values_at
        pitches = KEY_PITCH, LOW_PITCH, tile.value_pitch, tile.low_value_pitch
    else:
        low_keys, key_scales, values_at = CHUNK * d_k // 4, of.integer_words(d_k), 0
        low_values, value_scales = CHUNK * d_v // 4, of.integer_words(d_v)
        pitches = CHUNK, CHUNK, d_v, d_v // 2
    scores = make_scores(of, d_k, *pitches[:2], load, 1, cap, 1)
    weighted = make_values(of, d_v, *pitches[2:], load)
    show_weights, show_integers = make_show_weights(blocks, half, load), make_show_integers(blocks, half, load)
    clear_integers, take_integers = make_clear_integers(blocks), make_take_integers(blocks)
    fetch_keys, fetch_values = make_fetch(tile, THREADS)
    prefetch_keys, prefetch_values = make_prefetch(key_words, value_words)

    @device
    def copy(stage, keys, values, page, thread):
        """Start copying a page to a stage."""
        fetch_keys(stage, advance(keys, np.int64(page) * key_words), thread)
        fetch_values(stage, advance(values, np.int64(page) * value_words), I(0), thread)
        copies_commit()

    @device
    def write_values(values, words, board, lane, warp, sums, to, other_to):
        """Write the warp's dimensions of the weighted values to where ``combine`` reads them, if the places are not
        negative."""
        high = cuda.local.array(8, np.uint32)
        low = cuda.local.array(8, np.uint32)
        o = cuda.local.array(8, np.float32)
        i = warp
        while i < strips:
            b = I(U(i) // U(per_block))
            take_integers(b, lane, words, high, low)
            powers = advance(board, I(I(16 * b + powers_at) + I(lane >> 2)))
            x, y, n = powers[0], powers[8], I(i - b * per_block)
            weighted(values, advance(values, low_values), b, n, high, low, x, y, lane, o)
            if to >= 0:
                store4(sums, to + 16 * i, o[0], o[1], o[2], o[3])
            if other_to >= 0:
                store4(sums, other_to + 16 * i, o[4], o[5], o[6], o[7])
            i = I(i + SHARERS)

    @cuda.jit
    def attend_integer_chunks(
        q, q_scales, keys, values, positions, sequences, table, weights, sums, rows, pages, stride, partials, window, scale,
    ):  # fmt: skip
        let_next_begin()
        query = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        numbers = pointer(cuda.shared.array(0, np.float32, ALIGNED))
        dq, board, words = advance(numbers, scales_at), advance(numbers, board_at), advance(query, board_at)
        stage = advance(query, stages_at)
        s = cuda.local.array(8, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
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
        last_chunk = I(last_visible(highest) >> 6)
        chunk = I((first_visible(lowest, window) >> 6) + cuda.blockIdx.z)
        at = I(0)
        if chunk <= last_chunk:
            at = I(of_head + table[chunk])
        if early:
            if thread == 0:
                # Into the L2 cache: whatever is written there meanwhile is seen.
                prefetch_keys(keys, at, chunk <= last_chunk)
                prefetch_values(values, at, chunk <= last_chunk)
            wait_for_inputs()
        if staged and chunk <= last_chunk:
            copy(stage, keys, values, at, thread)
        place(q, q_scales, task0, last_task, head0, n_head, lane, warp, query, dq)
        if not both:
            clear_integers(lane, warp, words)
        following, here = I(chunk + splits), I(0)
        if staged and following <= last_chunk:
            at = I(of_head + table[following])
        while chunk <= last_chunk:
            if staged:
                copies_wait()
            # The copies of all threads have arrived, and all have finished the chunk before, whose place is free.
            cuda.syncthreads()
            following = I(chunk + splits)
            if staged:
                own_keys, own_values = advance(stage, here), advance(stage, I(here + values_at))
                here = I(stage_words - here)
                if following <= last_chunk:
                    copy(advance(stage, here), keys, values, at, thread)
                following = I(following + splits)
            else:
                own_keys = advance(keys, np.int64(at) * key_words)
                own_values = advance(values, np.int64(at) * value_words)
            if following <= last_chunk:
                # Read early: what is there depends on it.
                at = I(of_head + table[following])
            if thread == 0:
                prefetch_keys(keys, at, following <= last_chunk)
                prefetch_values(values, at, following <= last_chunk)
            keys_of, lows_of = advance(own_keys, 16 * warp), advance(own_keys, I(low_keys + 16 * warp))
            scores(query, dq, keys_of, lows_of, advance(own_keys, I(key_scales + 8 * warp)), lane, s)
            first, last = visible(position, window, chunk)
            other_first, other_last = visible(other_position, window, chunk)
            strip, t = I(16 * warp), I(lane & 3)
            hide_strip(s, 0, I(first - strip), I(last - strip), t)
            show_top(s, 0, lane, warp, board)
            if both:
                hide_strip(s, 1, I(other_first - strip), I(other_last - strip), t)
                show_top(s, 1, lane, warp, board)
            cuda.syncthreads()
            scales = advance(own_values, I(value_scales + 8 * warp))
            m = show_weights(s, 0, scales, lane, warp, board)
            other_m = F(0.0)
            if both:
                other_m = show_weights(s, 1, scales, lane, warp, board)
            cuda.syncthreads()
            show_integers(s, 0, scales, lane, warp, board, words)
            if both:
                show_integers(s, 1, scales, lane, warp, board, words)
            cuda.syncthreads()
            partial = I(I(head * partials) + I(chunk - (first_visible(position, window) >> 6)))
            other_partial = I(I(other_head * partials) + I(chunk - (first_visible(other_position, window) >> 6)))
            if task > last_task or first >= last:
                partial = I(-1)
            if other_task > last_task or other_first >= other_last:
                other_partial = I(-1)
            # Warps 2 and 3, which may have fewer dimensions.
            if warp == 2 or (both and warp == 3):
                total = sum_weights(I(warp - 2), lane, advance(words, weights_at))
                own = partial if warp == 2 else other_partial
                if own >= 0 and t == 0:
                    weights[2 * own], weights[2 * own + 1] = (m if warp == 2 else other_m), total
            to, other_to = np.int64(partial) * d_pad, np.int64(other_partial) * d_pad
            write_values(own_values, words, board, lane, warp, advance(sums, 4 * t), to, other_to)
            chunk = I(chunk + splits)

    return attend_integer_chunks
