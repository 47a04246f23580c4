"""Causal attention for many rows at once over integer keys and values (cache types i8 and i12).

    for each chunk that the block's queries see:
        copy its keys and values to shared memory, while the one before is processed
        each warp: scores, weights, weighted values of its 16 queries        engine/cuda/attention/integer_chunk.py
        join them to those of the chunks before in the same group of 8
        at the end of a group: join the group to those before, which are in ``out``
    join the sink, divide, rotate back, multiply by the gates

Formula: ``engine/cpu/integer_attention.py``; gates as in ``engine/cpu/glu.py``.
Shapes: q words [rows, n_head, 2, d_k / 4] (``engine/cuda/integer_cache.py``), their scales float32 [rows, n_head, blocks];
    keys, values uint32 [n_head_kv, pages, words] (``engine/cache/types.py``); gate float32 [rows, n_head, 2, d_v], only [:,
    :, 1] is read; sink float32 [n_head]; positions int32 [rows], none smaller than the one before, all of the sequence s =
    sequences[0], or of several sequences, as ``runs`` (``engine.arrays.Batch``) says; table int32 [sequences, stride]:
    position j is lane j % 64 of page table[s, j // 64]; out float32 [rows, n_head, d_v].
Who owns what: a block owns a tile of (row, head) pairs of a KV head and a sequence, a part of the dimensions of its values,
    and all chunks that they see; a warp owns 16 pairs, or two warps own 16, each the scores of half of the positions and half
    of the dimensions. The longest tiles begin first. No grid depends on a position.
Reduction order: that of the mirror: integers in any order, the halving tree of 64 for the sum of weights, chunks joined in
    rising order within a group, groups in rising order, a sink after them.
Bytes moved: per tile d_k / 2 per pair in, 4 d_v out and 8 d_v per group of chunks, and (d_k + d_v) * bits / 8 per position.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CACHE_TYPES, CHUNK, GROUP
from engine.cuda.attention.combine import join_sink
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
from engine.cuda.attention.integer_tile import (
    KEY_PITCH,
    LOW_PITCH,
    RESIDENT,
    IntegerTile,
    join_factors,
    make_fetch,
    make_place,
    make_rotate,
)
from engine.cuda.attention.sight import sight
from engine.cuda.attention.tile import make_each
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    fma,
    keep4,
    let_next_begin,
    load4,
    pointer,
    sigmoid,
    store4,
    vector2,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runs import make_find_part, parts_of_runs
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


def geometry(
    rows: int,
    n_head: int,
    n_head_kv: int,
    tile: IntegerTile,
    gated: bool,
    sinks: bool = False,
    cap: float = 0.0,
    spans: bool = False,
    several: bool = False,
) -> tuple[Specialization, tuple[int, int, int], int]:
    """(kernel, grid, threads per block) for ``rows`` rows in tiles of this kind; ``gated``, ``sinks``: whether heads are
    gated, and have sinks; ``cap``: of scores, 0 for none; ``spans``: rows have spans in place of last positions;
    ``several``: rows belong to several sequences."""
    group = n_head // n_head_kv
    constants = tile.of.name, tile.d_k, tile.d_v, group, tile.part, tile.warps, tile.shared_by, gated, sinks, GROUP, cap
    tiles = parts_of_runs(rows * group, tile.pairs) if several else tile.number(rows * group)
    grid = (n_head_kv, tiles, tile.d_v // tile.width)
    kinds = (spans, True) if several else (True,) if spans else ()
    return attend_integers(*constants, *kinds), grid, 32 * tile.warps


# --- the kernel ------------------------------------------------------------------------------------------------


def _bytes(name: str, d_k: int, d_v: int, group: int, part: int, warps: int, shared_by: int, *_: int) -> int:
    return 4 * IntegerTile(CACHE_TYPES[name], d_k, d_v, part, warps, shared_by).size


def _blocks(name: str, d_k: int, d_v: int, group: int, part: int, warps: int, *_: int) -> int:
    return RESIDENT // warps


@kernel(
    *(U32P, F32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, F32P, i32, i32, i32, i32),
    threads=lambda *constants: 32 * constants[5],
    blocks=_blocks,
    shared=_bytes,
)
def attend_integers(
    name: str,
    d_k: int,
    d_v: int,
    group: int,
    part: int,
    warps: int,
    shared_by: int,
    gated: bool,
    sinks: bool = False,
    joined: int = GROUP,
    cap: float = 0.0,
    spans: bool = False,
    several: bool = False,
) -> KernelCode:
    """Attention of the rows of a pass over a cache of i8 or i12 (``name``).

    Arguments: q, q_scales, keys, values, positions, sequences, table, gate (not read unless ``gated``), sink (not read unless
    ``sinks``: heads have them), out, rows, pages, stride (chunks of a row of the table), window.
    ``group``: query heads per KV head; ``part``: dimensions of values of a warp, a divisor of d_v; ``shared_by``: warps that
    share 16 pairs, 1 or 2; ``joined``: chunks that are joined with one another before they are joined with others; ``cap``:
    of scores, 0 for none; ``spans``: positions are spans; ``several``: sequences are runs (``engine.arrays.Batch``).
    Grid: (n_head_kv, ceil(rows * group / (16 * warps / shared_by)), d_v / (part * shared_by)), or if ``several``
    ``parts_of_runs`` in place of the second number, blocks of 32 * ``warps`` threads.
    """
    of = CACHE_TYPES[name]
    tile = IntegerTile(of, d_k, d_v, part, warps, shared_by)
    threads, pairs, width = 32 * warps, tile.pairs, tile.width
    first_visible, last_visible, visible = sight(spans)
    find_part = make_find_part(pairs, group)
    own_strips = STRIPS // shared_by
    key_words, value_words = of.chunk_words(d_k), of.chunk_words(d_v)
    stage_words, of_warp, queries_at, scales_at = tile.stage, tile.of_warp, 2 * tile.stage, tile.scales
    low_keys, key_scales, values_at = tile.low_keys, tile.key_scales, tile.values
    low_values, value_scales, scores_at = tile.low_values, tile.value_scales, tile.scores
    block = of.block(d_v)
    blocks, per_block, strips = part // block, block // 16, part // 16
    n_elements, k_scales = 8 * strips, PAIRS * (d_k // of.block(d_k))
    # A chunk's code has to fit into the instruction cache, so strips take turns: those of a block, or half of one.
    per_turns = 2 if of.bits == 12 and blocks == 1 and per_block > 4 else 1
    turns, of_turn = blocks * per_turns, per_block // per_turns
    n_turn = 8 * of_turn
    fetch_keys, fetch_values = make_fetch(tile, threads)
    place = make_place(of, d_k, group, shared_by)
    scores = make_scores(of, d_k, KEY_PITCH, LOW_PITCH, vector2, 2, cap, own_strips)
    integers = make_integers(vector2)
    weighted = make_values(of, d_v, tile.value_pitch, tile.low_value_pitch, vector2)
    rotate = make_rotate(strips, block)

    @device
    def fetch(stage, keys, values, page, first, thread):
        """Start copying a page."""
        fetch_keys(stage, advance(keys, np.int64(page) * key_words), thread)
        fetch_values(stage, advance(values, np.int64(page) * value_words), first, thread)
        copies_commit()

    @device
    def clear_strip(i, element):
        for k in range(8):
            element[8 * i + k] = F(0.0)

    clear = make_each(strips, clear_strip)

    @device
    def share_scores(board, half, lane, s):
        """Write the scores of the warp's positions to where the other warp that has these queries reads them."""
        for m in range(own_strips):
            at = I(I(half * own_strips + m) * 256 + 8 * lane)
            for k in range(2):
                keep4(
                    board,
                    I(at + 4 * k),
                    s[8 * m + 4 * k],
                    s[8 * m + 4 * k + 1],
                    s[8 * m + 4 * k + 2],
                    s[8 * m + 4 * k + 3],
                )

    @device
    def take_scores(board, lane, s):
        for m in range(STRIPS):
            for k in range(2):
                words = vector4(board, I(256 * m + 4 * k) + I(8 * lane))
                for e in range(4):
                    s[8 * m + 4 * k + e] = bits_float(I(words[e]))

    @device
    def join_strip(i, stage, b, n, high, low, x, y, lane, shares, element):
        """Join 16 dimensions of a chunk's weighted values, number ``n`` + i of block b, to those of the group."""
        o = cuda.local.array(8, np.float32)
        words, lows = advance(stage, values_at), advance(stage, low_values)
        weighted(words, lows, b, I(n + i), high, low, x, y, lane, o)
        for k in range(8):
            r = k >> 2
            element[8 * i + k] = fma(element[8 * i + k], shares[2 * r], shares[2 * r + 1] * o[k])

    join_strips = make_each(of_turn, join_strip)

    @device
    def join_chunk(stage, first_block, s, lane, shares, element):
        """Join a chunk's weighted values, from a block on, to those of the group."""
        high = cuda.local.array(8, np.uint32)
        low = cuda.local.array(8, np.uint32)
        first = cuda.local.array(n_turn, np.float32)
        t, x, y = I(lane & 3), F(0.0), F(0.0)
        for turn in range(turns):
            b, n = I(first_block + I(turn // per_turns)), I(turn % per_turns * of_turn)
            if n == 0:
                scales = advance(stage, I(value_scales + b * (CHUNK // 2)))
                x, y = integers(s, 0, scales, t, high, low), integers(s, 1, scales, t, high, low)
            join_strips(0, stage, b, n, high, low, x, y, lane, shares, element)
            if turns > 1:
                # Registers have no computed index: the next turn finds its elements where this one did.
                for k in range(n_turn):
                    first[k] = element[k]
                for k in range(n_elements - n_turn):
                    element[k] = element[k + n_turn]
                for k in range(n_turn):
                    element[n_elements - n_turn + k] = first[k]

    @device
    def settle_strip(i, r, element, out, a, b, first, keep):
        k = 8 * i + 4 * r
        for e in range(4):
            element[k + e] = b * element[k + e]
        if first:
            for e in range(4):
                element[k + e] = fma(F(0.0), a, element[k + e])
        else:
            words = load4(out, 16 * i)
            for e in range(4):
                element[k + e] = fma(bits_float(I(words[e])), a, element[k + e])
        if keep:
            store4(out, 16 * i, element[k], element[k + 1], element[k + 2], element[k + 3])
            for e in range(4):
                element[k + e] = F(0.0)

    settle_strips = make_each(strips, settle_strip)

    @device
    def settle(r, element, out, top, mass, tops, masses, keep):
        """Join a group, whose sums are in element, to those before it, which are in ``out``, the row's part of the result;
        the sums of all are stored there if ``keep``, and then the next group begins."""
        # Sums show whether something has been seen: maxima are -inf also where all scores are NaN.
        first = masses[r] == F(0.0)
        a, b, tops[r], masses[r] = join_factors(tops[r], masses[r], top[r], mass[r], mass[r] != F(0.0))
        settle_strips(0, r, element, out, a, b, first, keep)
        top[r], mass[r] = F(-np.inf), F(0.0)

    @device
    def see(r, s, place, window, chunk, whole, lane, shares, top, mass):
        """From the scores of query r to weights; their maximum and sum are joined to those of the group."""
        if not whole:
            begin, end = visible(place, window, chunk)
            hide(s, r, begin, end, I(lane & 3))
        m, weight = weigh(s, r, lane)
        factors = join_factors(top[r], mass[r], m, weight, weight != F(0.0))
        shares[2 * r], shares[2 * r + 1], top[r], mass[r] = factors

    @device
    def finish_strip(i, r, element, total, share):
        """Join the sink and divide."""
        for e in range(4):
            k = 8 * i + 4 * r + e
            if sinks:
                element[k] = element[k] * share
            element[k] = element[k] / total

    @device
    def write_strip(i, r, element, gate, at, out):
        k = 8 * i + 4 * r
        if gated:
            words = load4(gate, at + 16 * i)
            for e in range(4):
                element[k + e] = element[k + e] * sigmoid(bits_float(I(words[e])))
        store4(out, 16 * i, element[k], element[k + 1], element[k + 2], element[k + 3])

    finish_strips, write_strips = make_each(strips, finish_strip), make_each(strips, write_strip)

    @device
    def place_of(task, last, head0, n_head):
        """The row of a pair, and its number among all heads of all rows."""
        task = min(last, task)
        row = I(U(task) // U(group))
        return row, I(I(row * n_head) + I(head0 + I(task - row * group)))

    @device
    def end_row(r, element, task, last, head0, n_head, tops, masses, sink):
        """Divide the result of a pair by the sum of its weights, and its sink's."""
        share, total = F(1.0), masses[r]
        if sinks:
            share, total = join_sink(tops[r], total, sink[I(head0 + I(U(min(last, task)) % U(group)))])
        finish_strips(0, r, element, total, share)

    @device
    def write_row(r, element, task, last, head0, n_head, column, gate, out):
        if task <= last:
            _, head = place_of(task, last, head0, n_head)
            of_head = np.int64(head) * d_v + column
            write_strips(0, r, element, gate, np.int64(head) * d_v + (of_head + d_v), advance(out, of_head))

    @cuda.jit
    def attend_integers(
        q, q_scales, keys, values, positions, sequences, table, gate, sink, out, rows, pages, stride, window
    ):
        let_next_begin()
        memory = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        numbers = pointer(cuda.shared.array(0, np.float32, ALIGNED))
        s = cuda.local.array(SCORES, np.float32)
        element = cuda.local.array(n_elements, np.float32)
        shares = cuda.local.array(4, np.float32)
        top = cuda.local.array(2, np.float32)
        mass = cuda.local.array(2, np.float32)
        tops = cuda.local.array(2, np.float32)
        masses = cuda.local.array(2, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (threads - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        # Warps that share queries, and have their own dimensions of values.
        tile_of_warp, half = I(U(warp) // U(shared_by)), I(U(warp) % U(shared_by))
        head_kv, first = I(cuda.blockIdx.x & 0xFFFF), I((cuda.blockIdx.z & 0xFF) * width)
        column = I(I(first + half * part) + 4 * (lane & 3))
        n_head, head0 = I(cuda.gridDim.x * group), I(head_kv * group)
        # Later rows see more.
        number = I((cuda.gridDim.y - 1 - cuda.blockIdx.y) & 0xFFFF)
        task0, last_task = I(number * pairs), I(rows * group - 1)
        wait_for_inputs()
        if several:
            begin, end, slot, number, _ = find_part(sequences, number)
            task0, last_task = I(I(begin * group) + I(number * pairs)), I(end * group - 1)
            if task0 > last_task:
                return
        else:
            slot = I(sequences[0])
        own_task = I(task0 + tile_of_warp * PAIRS)
        lowest = positions[I(U(task0) // U(group))]
        highest = positions[I(U(min(last_task, I(task0 + pairs - 1))) // U(group))]
        own_lowest = positions[I(U(min(last_task, own_task)) // U(group))]
        own_highest = positions[I(U(min(last_task, I(own_task + PAIRS - 1))) // U(group))]
        of_head, table = I(head_kv * pages), advance(table, I(slot * stride))
        chunk, last_chunk = I(first_visible(lowest, window) >> 6), I(last_visible(highest) >> 6)
        next_at = I(of_head + table[chunk])
        own_first, own_last = I(first_visible(own_lowest, window) >> 6), I(last_visible(own_highest) >> 6)
        inside = I(
            (first_visible(own_highest, window) + CHUNK - 1) >> 6
        )  # the first chunk that no row sees only in part
        task, other_task = I(own_task + (lane >> 2)), I(own_task + (lane >> 2) + 8)
        row, head = place_of(task, last_task, head0, n_head)
        other_row, other_head = place_of(other_task, last_task, head0, n_head)
        position, other_position = positions[row], positions[other_row]
        for r in range(2):
            top[r], mass[r], tops[r], masses[r] = F(-np.inf), F(0.0), F(-np.inf), F(0.0)
        clear(0, element)
        fetch(memory, keys, values, next_at, first, thread)
        if chunk < last_chunk:
            next_at = I(of_head + table[I(chunk + 1)])
        query = advance(memory, I(queries_at + tile_of_warp * of_warp))
        dq = advance(numbers, I(scales_at + tile_of_warp * k_scales))
        board = advance(numbers, I(scores_at + tile_of_warp * (PAIRS * CHUNK)))
        place(q, q_scales, own_task, last_task, head0, n_head, lane, half, query, dq)
        here = I(0)
        while chunk <= last_chunk:
            copies_wait()
            # The copies of all threads have arrived, and all have finished the chunk before, whose place is free.
            cuda.syncthreads()
            stage = advance(memory, here)
            here = I(stage_words - here)
            if chunk < last_chunk:
                fetch(advance(memory, here), keys, values, next_at, first, thread)
                if chunk + 1 < last_chunk:
                    # Read early: what is there depends on it.
                    next_at = I(of_head + table[I(chunk + 2)])
            seen = chunk >= own_first and chunk <= own_last
            if seen:
                at = I(half * (16 * own_strips))
                keys_of, lows_of = advance(stage, at), advance(stage, I(low_keys + at))
                scores(query, dq, keys_of, lows_of, advance(stage, I(key_scales + (at >> 1))), lane, s)
                if shared_by > 1:
                    share_scores(board, half, lane, s)
            if shared_by > 1:
                cuda.syncthreads()
            if seen:
                if shared_by > 1:
                    take_scores(board, lane, s)
                whole = chunk >= inside and I(chunk * CHUNK + CHUNK - 1) <= last_visible(own_lowest)
                see(0, s, position, window, chunk, whole, lane, shares, top, mass)
                see(1, s, other_position, window, chunk, whole, lane, shares, top, mass)
                join_chunk(stage, I(half * blocks), s, lane, shares, element)
            chunk = I(chunk + 1)
            if I(U(chunk) % U(joined)) == 0 or chunk > last_chunk:
                # The last group stays in registers.
                keep = chunk <= last_chunk
                to = advance(out, np.int64(head) * d_v + column)
                settle(0, element, to, top, mass, tops, masses, keep and task <= last_task)
                to = advance(out, np.int64(other_head) * d_v + column)
                settle(1, element, to, top, mass, tops, masses, keep and other_task <= last_task)
        end_row(0, element, task, last_task, head0, n_head, tops, masses, sink)
        end_row(1, element, other_task, last_task, head0, n_head, tops, masses, sink)
        rotate(element, lane)
        write_row(0, element, task, last_task, head0, n_head, column, gate, out)
        write_row(1, element, other_task, last_task, head0, n_head, column, gate, out)

    return attend_integers
