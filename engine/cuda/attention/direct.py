"""Attention over keys and values in place: quantized caches, mixed ones, and heads of up to 512.

Formula, order: ``engine/cpu/attention.py`` and, where keys or values are quantized, ``engine/cpu/quantized_cache.py``.  This
    file computes the part of each chunk, and ``engine/cuda/attention/combine.py`` joins them;
    ``engine/cuda/attention/attend.py`` serves the other caches.
Shapes: q float32 [rows, n_head, d_k], or where keys are quantized words [rows, n_head, d_k / 4] of int8, already scaled,
    and float32 [rows, n_head, d_k / 32]; keys and values [n_head_kv, pages, ...] by type (``engine/cache/types.py``);
    sequences, table, weights, sums, partials as in ``engine/cuda/attention/attend.py``.
Who owns what: a block of four warps owns every ``splits``-th chunk of a KV head and up to eight of the (row, head) pairs that
    read it, in a mixed pass pairs of one row.  Where keys are quantized, a warp processes a chunk alone
    (``engine/cuda/attention/warp_chunk.py``), but all four share the last one if it would be the only one.  In a shared
    chunk, for scores of quantized keys a warp owns 16 positions, which a tensor core multiplies by all pairs; for others a
    thread owns two positions, a warp up to two pairs.  For weighted values a thread owns four elements, of one or more pairs.
Reduction order: that of the mirror; integers are exact in any order.
Bytes moved: as ``CacheType.row_bytes`` says per visible position and KV head, in a mixed pass for each row, and 4 per chunk
    for its page; 8 + 4 d_pad per (row, head, chunk) out.
"""

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, GROUP
from engine.cuda.attention.attend import MAX_ROWS, Geometry, _make_copies, parts_of
from engine.cuda.attention.combine import COMBINE_THREADS, PART, combine, padded
from engine.cuda.attention.scores import PAIRS, make_float_run, make_own_keys, make_quantized_scores
from engine.cuda.attention.sight import sight
from engine.cuda.attention.warp_chunk import make_chunk_of_a_warp, make_prefetch
from engine.cuda.attention.weigh import make_weigh
from engine.cuda.attention.weighted_values import OWNED, STEP, make_weighted_sum
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    float_bits,
    halves,
    lanes_max,
    let_next_begin,
    load4,
    pointer,
    store4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.errors import DeviceError

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

MAX_HEAD = 512
"""The largest d_k and d_v."""
THREADS = 128
WARPS = THREADS // 32
BLOCKS = 4
"""Blocks that fit on a multiprocessor."""
TILE_WORDS = 2048
"""The most words of float keys that are in shared memory at a time."""


# --- launch geometry -------------------------------------------------------------------------------------------


def geometry(
    rows: int,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    k_type: str,
    v_type: str,
    n_partials: int,
    multiprocessors: int,
    early: bool,
    tasks: int = 0,
    gated: bool = False,
    sinks: bool = False,
    together: int = GROUP,
    mixed: bool = False,
    cap: float = 0.0,
    spans: bool = False,
) -> Geometry:
    """Launches for ``rows`` rows that each see up to ``n_partials`` chunks of a cache of these types.

    ``early``: no kernel of the same chain writes the positions, so they are read before ``wait_for_inputs``; ``tasks``:
    (row, head) pairs per block, 0 to choose a good number; ``gated``: the result is multiplied by the sigmoid of a gate;
    ``sinks``: heads have them; ``together``: chunks of a group; ``mixed``: rows may belong to several
    sequences; ``cap``: of scores, 0 for none; ``spans``: rows have spans in place of last positions.
    Raises DeviceError for heads that the kernel does not support.
    """
    types = CACHE_TYPES[k_type], CACHE_TYPES[v_type]
    for d, of in zip((d_k, d_v), types, strict=True):
        multiple = BLOCK if of.quantized else OWNED
        if d > MAX_HEAD or d % multiple:
            raise DeviceError(
                f"attention on a GPU takes {of.name} heads of a multiple of {multiple} up to {MAX_HEAD}, not {d}; "
                'use device="cpu", or another cache type (cache_type=...).'
            )
    if rows > MAX_ROWS and not mixed:
        raise ValueError(f"at most {MAX_ROWS} rows of a sequence, not {rows}")
    group, single = n_head // n_head_kv, mixed or rows == 1
    tasks = tasks or min(PAIRS, 1 << ((group if single else rows * group) - 1).bit_length())
    parts = parts_of(rows, group, tasks, mixed)
    # No more blocks than are resident at once: the next kernel cannot begin before all have begun.
    splits = min(n_partials, max(1, BLOCKS * multiprocessors // (n_head_kv * parts)))
    apart, rotated = types[0].quantized and n_partials > splits, BLOCK if types[1].quantized else 0
    of_spans = (True,) if spans else ()
    return Geometry(
        attend_in_place(k_type, v_type, d_k, d_v, group, tasks, single, early, apart, cap, *of_spans),
        # Blocks begin in this order, x first: those that read the same chunk are neighbours.
        (n_head_kv, parts, splits),
        THREADS,
        combine(d_v, early, gated, rotated, sinks, together, *of_spans),
        (n_head, rows, padded(d_v) // PART),
        COMBINE_THREADS,
        d_v,
        early,
        gated,
        rotated,
        n_partials,
        sinks,
        together,
        of_spans,
    )


# --- the kernel ------------------------------------------------------------------------------------------------


@kernel(
    *(U32P, F32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, i32, i32, i32, i32, i32, f32),
    threads=THREADS,
    blocks=BLOCKS,
)
def attend_in_place(
    k_type: str,
    v_type: str,
    d_k: int,
    d_v: int,
    group: int,
    tasks: int,
    single: bool,
    early: bool,
    apart: bool,
    cap: float = 0.0,
    spans: bool = False,
) -> KernelCode:
    """The maximum, the sum and the weighted values of each visible chunk.

    Arguments: q (float32 as words, or words), q_scales (not read unless keys are quantized), keys, values, positions,
    sequences, table, weights, sums, rows, pages, stride (chunks of a row of the table), partials, window, scale (not used
    where keys are quantized).
    ``single``: a block has pairs of one row, else all rows belong to the sequence of row 0; ``group``: query heads per KV
    head; ``tasks``: (row, head) pairs per block; ``early``: see ``geometry``; ``apart``: a warp processes a chunk alone
    where a block has several; keys are quantized; ``cap``: of scores, 0 for none; ``spans``: positions are spans.
    Grid: (n_head_kv, ceil(rows * group / tasks), splits), or (n_head_kv, rows * ceil(group / tasks), splits) if ``single``;
    blocks of ``THREADS``.
    """
    parts = -(-group // tasks)
    of_keys, of_values = CACHE_TYPES[k_type], CACHE_TYPES[v_type]
    quantized, half = of_keys.quantized, of_keys.bits == 16
    key_words, value_words = of_keys.chunk_words(d_k), of_values.chunk_words(d_v)
    value_integers = of_values.integer_words(d_v)
    of_warp = -(-tasks // WARPS)
    blocks = d_k // BLOCK
    row_words, row_scales, dimension_words = d_v * of_values.bits // 32, d_v // BLOCK, CHUNK * of_keys.bits // 32

    # Keys in registers, and the shared memory through which they or the queries pass.
    n_query, n_scales, tile_words, score_run, load_tile, store_tile = 4, 4, 4, None, None, None
    n_key, n_key_scales, load_key, score_key = 1, 1, None, None
    tile = step = 1
    if quantized:
        n_key, n_key_scales, load_key, score_key = make_quantized_scores(of_keys.bits, d_k, 1)
        n_query, n_scales = blocks * PAIRS * 8, blocks * PAIRS
        n_vectors = tasks * d_k // 16
        query_rounds, scale_rounds = -(-n_vectors // THREADS), -(-tasks * blocks // THREADS)
        n_loaded = 4 * query_rounds
    else:
        tile = next(n for n in (64, 48, 40, 32, 24, 16, 8, 4) if d_k % n == 0 and n * dimension_words <= TILE_WORDS)
        step = 8 if tile % 8 == 0 else 4
        n_key, load_tile, store_tile = _make_copies(tile * dimension_words // 4, THREADS)
        score_run = make_float_run(half, of_warp, step)
        tile_words, n_query = tile * dimension_words, tasks * d_k
        n_vectors = tasks * d_k // 4
        query_rounds, scale_rounds = -(-n_vectors // THREADS), 1
        n_loaded = 4 * query_rounds
    n_tiles, per_tile, step_apart = d_k // tile, tile // step, step * dimension_words
    scaled_apart = step * of_warp
    n_tile_words = 2 * tile_words
    vectors = n_vectors // tasks

    columns = d_v // OWNED
    sets = min(tasks, 1 << ((THREADS // columns).bit_length() - 1))
    shared_by = tasks // sets
    n_bounds = 1 if single or group % shared_by == 0 else shared_by
    one_row = n_bounds == 1
    n_total = OWNED * shared_by
    span = 8 if of_values.bits == 32 or shared_by > 2 else 16
    n_value, load_span, weighted_sum = make_weighted_sum(of_values, d_v, shared_by, shared_by, n_bounds, span)
    n_chains = 2 * of_warp
    weigh_rounds = -(-tasks // WARPS)
    row_of, head_of, weigh, note = make_weigh(group, tasks, shared_by, THREADS, single, cap, spans)
    first_visible, last_visible, visible = sight(spans)
    d_pad = padded(d_v)
    n_scores, take_scores, take_values = tasks * CHUNK, None, None
    n_limits = 3 * tasks * WARPS if apart else 4
    if apart:
        n_scores *= WARPS
        kinds = of_keys, of_values, d_k, d_v, group, tasks, single, cap, spans
        take_scores, take_values = make_chunk_of_a_warp(*kinds)

    own_keys = make_own_keys(of_keys, d_k) if quantized else None
    prefetch_keys, prefetch_values = make_prefetch(key_words, value_words)

    @device
    def fetch_query(q, q_scales, thread, n, task0, head0, n_head, words, scales):
        """Start loading a thread's part of the queries into registers."""
        for k in range(query_rounds):
            i = I(thread + k * THREADS)
            if i < n_vectors:
                t, v = I(i // vectors), I(i % vectors)
                head = head_of(I(task0 + min(t, I(n - 1))), n_head, head0)
                vector = load4(q, I(I(head * (4 * vectors)) + 4 * v))
                for e in range(4):
                    words[4 * k + e] = vector[e]
        if quantized:
            for k in range(scale_rounds):
                i = I(thread + k * THREADS)
                t, b = I(i // blocks), I(i % blocks)
                if t < tasks:
                    head = head_of(I(task0 + min(t, I(n - 1))), n_head, head0)
                    scales[k] = q_scales[I(I(head * blocks) + b)]

    @device
    def place_query(words, scales, thread, scale, query, d):
        """Move them from there to where all threads find them: in the layout of a tensor core, or times ``scale`` with the
        pairs of a warp interleaved."""
        for k in range(query_rounds):
            i = I(thread + k * THREADS)
            if i < n_vectors:
                t, v = I(i // vectors), I(i % vectors)
                for e in range(4):
                    if quantized:
                        query[I((v >> 1) * (8 * PAIRS) + t * 8 + (v & 1) * 4 + e)] = words[4 * k + e]
                    else:
                        at = I(I(t // of_warp * d_k + 4 * v + e) * of_warp + t % of_warp)
                        query[at] = U(float_bits(bits_float(I(words[4 * k + e])) * scale))
        if quantized:
            for k in range(scale_rounds):
                i = I(thread + k * THREADS)
                t, b = I(i // blocks), I(i % blocks)
                if t < tasks:
                    d[I(b * PAIRS + t)] = scales[k]

    @device
    def fetch_keys(keys, thread, words, scales):
        """Start loading the first keys of a chunk into registers."""
        if quantized:
            own, own_scales = own_keys(keys, I(thread & 31), I(thread >> 5))
            load_key(own, own_scales, words, scales)
        else:
            load_tile(keys, thread, words)

    @device
    def put_score(scores, task, position, x):
        if task < tasks:
            scores[I(I(task // shared_by * CHUNK + position) * shared_by + task % shared_by)] = x

    @device
    def score(keys, thread, words, scales, query, d, tiles, scores):
        """Scores of all pairs, hidden or not."""
        lane, warp = I(thread & 31), I(thread >> 5)
        if quantized:
            acc = cuda.local.array(4, np.float32)
            own, own_scales = own_keys(keys, lane, warp)
            pair = I(2 * (lane & 3))
            score_key(own, own_scales, words, scales, advance(query, 2 * lane), advance(d, pair), acc)
            for k in range(4):
                put_score(scores, I(pair + (k & 1)), I(16 * warp + 2 * (lane >> 2) + (k >> 1)), acc[k])
        else:
            total = cuda.local.array(n_chains, np.float32)
            for k in range(n_chains):
                total[k] = F(0.0)
            scaled = advance(query, I(warp * (d_k * of_warp)))
            current = I(0)
            while current < n_tiles:
                tile_of = advance(tiles, I((current & 1) * tile_words))
                store_tile(tile_of, thread, words)
                cuda.syncthreads()
                current = I(current + 1)
                keys = advance(keys, tile_words)
                if current < n_tiles:
                    load_tile(keys, thread, words)
                if warp * of_warp < tasks:
                    key = advance(tile_of, lane if half else I(2 * lane))
                    left = I(per_tile)
                    while left > 0:
                        score_run(key, scaled, total)
                        key, scaled = advance(key, step_apart), advance(scaled, scaled_apart)
                        left = I(left - 1)
            for k in range(n_chains):
                put_score(scores, I(warp * of_warp + (k >> 1)), I(2 * lane + (k & 1)), total[k])

    @device
    def bounds(places, t0, n, task0, window, chunk, firsts, lasts):
        """The lanes of a chunk, firsts to before lasts, that the pairs from t0 which a thread serves see; and the ranges
        that any of them, and all of them, see."""
        begin, end, inner_begin, inner_end = I(CHUNK), I(0), I(0), I(CHUNK)
        for h in range(n_bounds):
            t = min(I(t0 + h), I(n - 1))
            firsts[h], lasts[h] = visible(places[row_of(I(task0 + t))], window, chunk)
            begin, end = min(begin, firsts[h]), max(end, lasts[h])
            inner_begin, inner_end = max(inner_begin, firsts[h]), min(inner_end, lasts[h])
        return begin, end, inner_begin, inner_end

    @cuda.jit
    def attend_in_place(
        q, q_scales, keys, values, positions, sequences, table, weights, sums, rows, pages, stride, partials, window, scale,
    ):  # fmt: skip
        let_next_begin()
        query = pointer(cuda.shared.array(n_query, np.uint32, ALIGNED))
        query_scales = pointer(cuda.shared.array(n_scales, np.float32, ALIGNED))
        tiles = pointer(cuda.shared.array(n_tile_words, np.uint32, ALIGNED))
        scores = pointer(cuda.shared.array(n_scores, np.float32, ALIGNED))
        limits = pointer(cuda.shared.array(n_limits, np.int32, ALIGNED))
        if single:
            places = cuda.local.array(1, np.int32)
        else:
            places = pointer(cuda.shared.array(MAX_ROWS, np.int32, ALIGNED))
        key = cuda.local.array(n_key, np.uint32)
        key_scales = cuda.local.array(n_key_scales, np.uint32)
        loaded = cuda.local.array(n_loaded, np.uint32)
        loaded_scales = cuda.local.array(scale_rounds, np.float32)
        words = cuda.local.array(n_value, np.uint32)
        scales = cuda.local.array(span, np.uint16)
        firsts = cuda.local.array(n_bounds, np.int32)
        lasts = cuda.local.array(n_bounds, np.int32)
        total = cuda.local.array(n_total, np.float32)
        tops = cuda.local.array(weigh_rounds, np.float32)
        masses = cuda.local.array(weigh_rounds, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        head_kv = I(cuda.blockIdx.x & 0xFFFF)
        n_head = I(cuda.gridDim.x * group)
        head0 = I(head_kv * group)
        row, part = I(0), I(cuda.blockIdx.y & 0xFFFF)
        if single:
            row, part = I(U(part) // U(parts)), I(U(part) % U(parts))
            head0 = I(head0 + row * n_head)
        task0 = I(part * tasks)
        n = min(I((group if single else rows * group) - task0), I(tasks))
        # The thread's part of the weighted values.
        own, column = I(thread // columns), I(thread % columns)
        t0, shift = I(own * shared_by), I(4 * (column & 1))
        owner = t0 < n and own < sets
        if not early:
            wait_for_inputs()
        place = positions[row if single else min(I(thread & 31), I(rows - 1))]
        table = advance(table, I(sequences[row] * stride))
        # This tells the compiler that the values are the same in all lanes, and so are the branches that depend on them.
        highest = lanes_max(place)
        lowest = highest if single else I(-lanes_max(I(-place)))
        of_head = I(head_kv * pages)
        chunk = I((first_visible(lowest, window) >> 6) + cuda.blockIdx.z)
        last_chunk = I(last_visible(highest) >> 6)
        if single:
            places[0] = highest
        elif thread < 32:
            places[thread] = place
        splits = I(cuda.gridDim.z)
        warp, lane = lanes_max(I(thread >> 5)), I(thread & 31)
        # Warps of blocks that have fewer chunks than warps are spread over the schedulers.
        turn = I((warp + cuda.blockIdx.x + cuda.blockIdx.z + (cuda.blockIdx.z >> 2)) & (WARPS - 1))
        # The page of the block's first chunk, and that of the warp's.
        at = I(of_head + table[chunk]) if chunk <= last_chunk else I(0)
        first = I(chunk + turn * splits) if apart else chunk
        own_at = at
        if apart and first <= last_chunk:
            own_at = I(of_head + table[first])
        if early:
            # Into the L2 cache: whatever is written there meanwhile is seen.
            if lane == 0 if apart else thread == 0:
                prefetch_keys(keys, own_at, first <= last_chunk)
                prefetch_values(values, own_at, first <= last_chunk)
            wait_for_inputs()
        if apart and I(chunk + splits) <= last_chunk:
            fetch_query(q, q_scales, thread, n, task0, head0, n_head, loaded, loaded_scales)
            place_query(loaded, loaded_scales, thread, scale, query, query_scales)
            own_scores, own_limits = advance(scores, I(warp * (tasks * CHUNK))), advance(limits, I(warp * (3 * tasks)))
            cuda.syncthreads()
            while I(chunk + splits) <= last_chunk:
                mine = I(chunk + turn * splits)
                if mine <= last_chunk:
                    following, next_at = I(mine + WARPS * splits), own_at
                    if following <= last_chunk:
                        # Read early: what is there depends on it.
                        next_at = I(of_head + table[following])
                    if lane == 0:
                        prefetch_values(values, own_at, True)
                    of_keys_at = advance(keys, np.int64(own_at) * key_words)
                    take_scores(of_keys_at, query, query_scales, own_scores, lane)
                    if lane == 0:
                        # Not earlier: what many warps have prefetched would evict itself from the L2 cache.
                        prefetch_keys(keys, next_at, following <= last_chunk)
                    of_values_at = advance(values, np.int64(own_at) * value_words)
                    own_at = next_at
                    take_values(
                        of_values_at, own_scores, own_limits, places, weights, sums, lane, n, task0, head0, n_head, partials,
                        window, mine,
                    )  # fmt: skip
                chunk = I(chunk + WARPS * splits)
            if chunk <= last_chunk:
                at = I(of_head + table[chunk])
                fetch_keys(advance(keys, np.int64(at) * key_words), thread, key, key_scales)
        elif chunk <= last_chunk:
            fetch_query(q, q_scales, thread, n, task0, head0, n_head, loaded, loaded_scales)
            fetch_keys(advance(keys, np.int64(at) * key_words), thread, key, key_scales)
            place_query(loaded, loaded_scales, thread, scale, query, query_scales)
        while chunk <= last_chunk:
            chunk_values = advance(values, np.int64(at) * value_words)
            value = advance(chunk_values, I(column * row_words // columns))
            value_scales = advance(halves(advance(chunk_values, value_integers)), I(column >> 3))
            after, at_after = I(chunk + splits), at
            if not apart and after <= last_chunk:
                # Read early: what is there depends on it.
                at_after = I(of_head + table[after])
            cuda.syncthreads()
            begin, end, inner_begin, inner_end = bounds(places, t0, n, task0, window, chunk, firsts, lasts)
            middle = I((inner_begin + STEP - 1) & ~(STEP - 1))
            spans_end = I(middle + max(I(inner_end - middle), I(0)) // span * span)
            if owner and middle < spans_end:
                load_span(
                    advance(value, I(middle * row_words)), advance(value_scales, I(middle * row_scales)), words, scales
                )
            if not apart and thread == 0:
                prefetch_keys(keys, at_after, after <= last_chunk)
                prefetch_values(values, at_after, after <= last_chunk)
            score(advance(keys, np.int64(at) * key_words), thread, key, key_scales, query, query_scales, tiles, scores)
            cuda.syncthreads()
            weigh(scores, places, tops, masses, thread, n, task0, window, chunk)
            cuda.syncthreads()
            if owner:
                p = advance(scores, I(t0 * CHUNK))
                weighted_sum(
                    value, value_scales, shift, p, begin, end, middle, spans_end, firsts, lasts, words, scales, total
                )
                for h in range(shared_by):
                    t = I(t0 + h)
                    bound = 0 if one_row else h
                    if t < n and firsts[bound] < lasts[bound]:
                        head = head_of(I(task0 + t), n_head, head0)
                        partial = I(chunk - (first_visible(places[row_of(I(task0 + t))], window) >> 6))
                        to = (np.int64(head) * partials + partial) * d_pad + OWNED * column
                        k = OWNED * h
                        store4(sums, to, total[k], total[k + 1], total[k + 2], total[k + 3])
            note(places, tops, masses, weights, thread, n, task0, head0, n_head, partials, window, chunk)
            if apart:
                # There is no other chunk.
                break
            if after <= last_chunk:
                fetch_keys(advance(keys, np.int64(at_after) * key_words), thread, key, key_scales)
            chunk, at = after, at_after

    return attend_in_place
