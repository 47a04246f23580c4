"""Causal attention for many rows at once: keys and values are read once for a tile of queries, and no second kernel is
needed.

Formula: out = sum_j softmax_j(scale q . k_j) v_j over the visible positions j: lo <= j <= p, lo = max(0, p - window + 1),
    where a head's sink is one more score of its softmax, with the value 0; rotated back where values are quantized
    (``engine/cpu/quantized_cache.py``), times sigmoid(gate) where heads are gated (``engine/cpu/attention.py``,
    ``engine/cpu/glu.py``).
Shapes: q float32 [rows, n_head, d_k], or where keys are quantized words [rows, n_head, d_k / 4] of int8, already scaled, and
    float32 [rows, n_head, d_k / 32]; keys [n_head_kv, pages, d_k, 64], values [n_head_kv, pages, 64, d_v], as words of one
    float32 or two float16, or as ``engine/cache/types.py`` says, or both rows of latents, [pages, 64, d_k], whose first d_v
    elements are values (``engine/cache/latent.py``); gate float32 [rows, n_head, 2, d_v], only [:, :, 1] is read; sink
    float32 [n_head]; positions int32 [rows], none smaller than the one before, all of the sequence s = sequences[0], or of
    several sequences, as ``runs`` (``engine.arrays.Batch``) says; table int32 [sequences, stride]: position j is lane j % 64
    of page table[s, j // 64]; out float32 [rows, n_head, d_v].
Who owns what: a block owns a tile of (row, head) pairs of a KV head and a sequence, and all chunks that they see, several
    chunks at a time.
    For scores a warp owns 16 or 32 pairs of one chunk, a thread 4 or 8 of them and 8 positions; for the weighted sum a thread
    owns 8 pairs and 4 or 8 elements: those of the current group of chunks in registers, those of the groups so far in shared
    memory, or in out where shared memory is too small.
    The longest tiles begin first.  No grid depends on a position.
Reduction order: that of the mirror: one chain per score and per element of a chunk's weighted sum, the halving tree of 64 for
    the sum of weights, the chunks of a group joined in rising order, then the groups in rising order, a sink after them.
Bytes moved: per tile and pair 4 d_k in for all chunks that are processed at a time, or d_k + d_k / 8 once if keys are
    quantized, 4 d_v out, 8 d_v for each group if the groups so far are in out; and (d_k + d_v) * element size per position.
"""

from dataclasses import replace

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, GROUP, CacheType
from engine.cuda.attention.combine import join_sink
from engine.cuda.attention.quantized_tile import make_query, make_scores, make_values
from engine.cuda.attention.sight import sight
from engine.cuda.attention.tile import (
    DIMENSIONS,
    Tile,
    make_bound,
    make_finish,
    make_groups,
    make_join,
    make_steps,
    make_sum_run,
    make_weigh,
)
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    fma,
    keep4,
    let_next_begin,
    load2,
    load4,
    pointer,
    settled,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device, high_half, low_half
from engine.cuda.runs import make_find_part, parts_of_runs
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, f32, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

MAX_HEAD = 512
"""The largest d_k and d_v."""
THREADS = 256
UNROLLED = 8
"""Dimensions, or positions, that are processed without a loop."""
FILLED = 3
"""This kernel serves a pass that has at least one tile for every so many multiprocessors: with fewer tiles, kernels that
divide the chunks of a tile among blocks are faster at many visible positions."""


# --- launch geometry -------------------------------------------------------------------------------------------


def takes(k_type: CacheType, v_type: CacheType, d_k: int, d_v: int) -> bool:
    """Whether the kernel of this file serves such a cache."""
    multiples = BLOCK if k_type.quantized else DIMENSIONS, BLOCK if v_type.quantized else 8
    return max(d_k, d_v) <= MAX_HEAD and d_k % multiples[0] == 0 and d_v % multiples[1] == 0


def takes_latents(width: int, rank: int) -> bool:
    """Whether the kernel of this file serves rows of ``width`` elements whose first ``rank`` are values."""
    return rank <= MAX_HEAD and width % DIMENSIONS == 0 and rank % 8 == 0


def _tile(k_type: str, d_k: int, d_v: int, shared: int) -> Tile:
    """The tile for a GPU whose blocks have ``shared`` bytes of shared memory: the threads of a block hold the weighted sum of
    the pairs in registers, and queries stay in shared memory if keys are quantized."""
    quantized = CACHE_TYPES[k_type].quantized
    most = max(d_v, d_k if quantized else 0)
    tiles = [
        Tile(d_k, d_v, pairs, 8 if pairs == 128 else 4, THREADS, quantized)
        for pairs, largest in ((128, 128), (64, 256), (32, MAX_HEAD))
        if most <= largest
    ]

    def fits(tile: Tile) -> bool:
        # The kernel also uses one word per pair.
        return 4 * (tile.size + tile.pairs) <= shared

    tile = next(filter(fits, tiles), tiles[-1])
    # With quantized keys, the kernel is slower: more of its registers are occupied while it computes weights.
    kept = replace(tile, kept=not quantized)
    return kept if fits(kept) else tile


def fills(
    rows: int, n_head: int, n_head_kv: int, d_k: int, d_v: int, k_type: str, multiprocessors: int, shared: int
) -> bool:
    """Whether the kernel of this file serves ``rows`` rows on a GPU with so many multiprocessors, whose blocks have
    ``shared`` bytes of shared memory."""
    tiles = n_head_kv * -(-rows * n_head // n_head_kv // _tile(k_type, d_k, d_v, shared).pairs)
    return tiles * FILLED >= multiprocessors


def geometry(
    rows: int,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    k_type: str,
    v_type: str,
    gated: bool,
    shared: int,
    sinks: bool = False,
    together: int = GROUP,
    latent: bool = False,
    cap: float = 0.0,
    spans: bool = False,
    several: bool = False,
) -> tuple[Specialization, tuple[int, int], int]:
    """(kernel, grid, threads per block) for ``rows`` rows over a cache of these types, on a GPU whose blocks have ``shared``
    bytes of shared memory; ``gated``, ``sinks``: whether heads are gated, and have sinks; ``together``: chunks of a group;
    ``latent``: keys and values are rows of latents; ``cap``: of scores, 0 for none; ``spans``: rows have
    spans in place of last positions; ``several``: rows belong to several sequences."""
    tile, group = _tile(k_type, d_k, d_v, shared), n_head // n_head_kv
    pairs = rows * group
    grid = (n_head_kv, parts_of_runs(pairs, tile.pairs) if several else -(-pairs // tile.pairs))
    constants = k_type, v_type, d_k, d_v, group, tile.pairs, tile.own, THREADS, tile.kept, gated, sinks, together
    kinds = (spans, True) if several else (True,) if spans else ()
    return attend_tiles(*constants, latent, cap, *kinds), grid, THREADS


# --- the kernel ------------------------------------------------------------------------------------------------


def _bytes(
    k_type: str, v_type: str, d_k: int, d_v: int, group: int, pairs: int, own: int, threads: int, kept: bool, *_: int
) -> int:
    return 4 * Tile(d_k, d_v, pairs, own, threads, CACHE_TYPES[k_type].quantized, kept).size


@kernel(
    *(U32P, F32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, F32P, i32, i32, i32, i32, f32),
    threads=lambda *constants: constants[7],
    shared=_bytes,
)
def attend_tiles(
    k_type: str,
    v_type: str,
    d_k: int,
    d_v: int,
    group: int,
    pairs: int,
    own: int,
    threads: int,
    kept: bool,
    gated: bool,
    sinks: bool = False,
    together: int = GROUP,
    latent: bool = False,
    cap: float = 0.0,
    spans: bool = False,
    several: bool = False,
) -> KernelCode:
    """Attention of the rows of a pass, or of queries over the results of earlier passes.

    Arguments: q (as words), q_scales (not read unless keys are quantized), keys, values, positions, sequences, table, gate
    (not read unless ``gated``), sink (not read unless ``sinks``: heads have them), out, rows, pages, stride (chunks of a row
    of the table), window, scale (not used where keys are quantized).
    ``group``: query heads per KV head; ``pairs``, ``own``, ``threads``, ``kept``: of a ``Tile``; d_k: a multiple of 16, d_v:
    of 8, and each of 32 where quantized; ``together``: chunks of a group, a power of two; ``latent``: keys and values are the
    same rows of latents, float32 or float16, and there is one KV head; ``cap``: of scores, 0 for none; ``spans``: positions
    are spans; ``several``: sequences are runs (``engine.arrays.Batch``).
    Grid: (n_head_kv, ceil(rows * group / pairs)), or (n_head_kv, ``parts_of_runs``) if ``several``, blocks of ``threads``.
    """
    of_keys, of_values = CACHE_TYPES[k_type], CACHE_TYPES[v_type]
    quantized, half, quantized_values, half_values = (
        of_keys.quantized,
        of_keys.bits == 16,
        of_values.quantized,
        of_values.bits == 16,
    )
    tile = Tile(d_k, d_v, pairs, own, threads, quantized, kept)
    per, per_value = 8 if half else 4, 8 if half_values else 4  # elements of a vector
    key_words, value_words = of_keys.chunk_words(d_k), of_values.chunk_words(d_k if latent else d_v)
    row_words = key_words // CHUNK
    at_once, apart, columns, pitch = tile.at_once, tile.warps_apart, tile.columns, tile.pitch
    width, keys_at, slice_size = at_once * CHUNK, DIMENSIONS * pairs, tile.slice
    weights_at, tops_at, groups_at = tile.weights, tile.factors, tile.groups
    masses_at = tops_at + at_once * pairs
    totals_at = masses_at + at_once * pairs

    # Queries: a thread copies ``n_query`` dimensions of one pair.
    n_query = DIMENSIONS * pairs // threads
    # Keys: vectors thread, thread + threads, ... of the slices of all chunks.
    of_chunk = DIMENSIONS * CHUNK // per
    key_rounds = at_once * of_chunk // threads
    n_key, slice_words = 4 * key_rounds, of_chunk * 4
    if latent:
        slice_words = DIMENSIONS * row_words // d_k
    n_slices, n_key_scales = d_k // DIMENSIONS, 1
    fetch_keys, score, place_query, queries_at = None, None, None, tile.queries
    scales_at = queries_at + pairs * d_k // 4
    if quantized:
        n_key, fetch_keys, score = make_scores(tile, of_keys)
        n_query, key_rounds, n_key_scales = 1, 1, 8
        place_query = make_query(tile, of_keys, group)
    # Values: the same of one slice of a chunk.
    of_position = d_v // per_value
    n_vectors = tile.positions * of_position
    value_rounds = -(-n_vectors // threads)
    n_value, n_value_scales, value_slice_words = 4 * value_rounds, 1, 4 * n_vectors
    value_slices = CHUNK // tile.positions
    if latent:
        value_slice_words = tile.positions * row_words

    n_scores, n_sums, n_elements = 8 * own, own if quantized else 4 * own, 8 * columns
    runs, value_runs = DIMENSIONS // UNROLLED, tile.positions // UNROLLED
    q_further, k_further = UNROLLED * pairs, UNROLLED * width
    score_run = make_steps(own, 8, pairs, width, CHUNK // 2, False, UNROLLED)
    full_run, masked_run = (make_sum_run(tile, masked) for masked in (False, True))
    a_further, b_further, positions, turn = UNROLLED * pairs, UNROLLED * pitch, tile.positions, tile.turn
    hide, weigh, total, mark = make_weigh(tile, spans)
    first_visible, last_visible, visible = sight(spans)
    capped, bound = cap > 0.0, make_bound(tile, cap)
    find_part = make_find_part(pairs, group)
    join, finish = make_join(tile), make_finish(tile, group, gated, quantized_values, sinks)
    clear_groups, join_groups, load_groups = make_groups(tile, group)

    def make_put(half: bool) -> DeviceFunction:
        """The device function ``put(to, at, words, k)``: store the vector words[k : k + 4] of elements as float32 in
        ``to``."""

        @device
        def put(to, at, words, k):
            a, b, c, d = words[k], words[k + 1], words[k + 2], words[k + 3]
            if half:
                keep4(to, at, low_half(a), high_half(a), low_half(b), high_half(b))
                keep4(to, I(at + 4), low_half(c), high_half(c), low_half(d), high_half(d))
            else:
                keep4(to, at, a, b, c, d)

        return put

    put_key, put_value = make_put(half), make_put(half_values)

    @device
    def put_row(to, at, words, k):
        """Store a vector of elements of one position, one above the other."""
        for e in range(4):
            if half:
                to[I(at + 2 * e * width)] = low_half(words[k + e])
                to[I(at + (2 * e + 1) * width)] = high_half(words[k + e])
            else:
                to[I(at + e * width)] = bits_float(I(words[k + e]))

    @device
    def fetch_scores(q, keys, starts, step, chunk, last_chunk, thread, query, key):
        """Start loading slice ``step`` of queries and of keys into registers."""
        q = advance(q, I(step * DIMENSIONS))
        if n_query == 2:
            two = load2(q, I(0))
            query[0], query[1] = two[0], two[1]
        else:
            for k in range(n_query // 4):
                vector = load4(q, I(4 * k))
                for e in range(4):
                    query[4 * k + e] = vector[e]
        keys = advance(keys, I(step * slice_words))
        for k in range(key_rounds):
            if chunk + I(thread + k * threads) // of_chunk <= last_chunk:
                vector = load4(keys, starts[k])
                for e in range(4):
                    key[4 * k + e] = vector[e]

    @device
    def find_pages(table, of_head, chunk, chunk_of, last_chunk, thread, lies):
        """Look up where the thread's keys of the chunks from ``chunk`` on are, as far as these exist."""
        for k in range(key_rounds):
            own = I(chunk + (chunk_of if quantized else I(thread + k * threads) // of_chunk))
            if own <= last_chunk:
                lies[k] = I(of_head + table[own])

    @device
    def begin_scores(q, keys, starts, lies, chunk, last_chunk, thread, query, key):
        """Find the thread's keys in the pages at ``lies``, and start loading the first slice."""
        for k in range(key_rounds):
            i = I(thread + k * threads)
            starts[k] = np.int64(lies[k]) * key_words + i % of_chunk * 4
            if latent:
                # A vector is a part of a row; neighbouring threads have neighbouring rows.
                v = I(i % of_chunk)
                starts[k] = np.int64(lies[k]) * key_words + I(I(v % CHUNK) * row_words + 4 * I(v // CHUNK))
        fetch_scores(q, keys, starts, I(0), chunk, last_chunk, thread, query, key)

    @device
    def begin_keys(keys, lies, chunk, last_chunk, lane, key, key_scales):
        """Find the quantized keys of a chunk in the page at ``lies``, and start loading the first block into registers."""
        own = advance(keys, np.int64(lies) * key_words)
        if chunk <= last_chunk:
            fetch_keys(own, lane, key, key_scales)
        return own

    @device
    def store_scores(to, scale, thread, query, key):
        """Move them from there to shared memory: queries times ``scale`` [16, pairs], keys [16, at_once, 64]."""
        own_query = advance(to, I(I(thread // pairs * n_query) * pairs + thread % pairs))
        for k in range(n_query):
            own_query[k * pairs] = bits_float(I(query[k])) * scale
        for k in range(key_rounds):
            i = I(thread + k * threads)
            c, v = I(i // of_chunk), I(i % of_chunk)
            if latent:
                put_row(to, I(I(keys_at + I(v // CHUNK) * (per * width)) + I(c * CHUNK + I(v % CHUNK))), key, 4 * k)
                continue
            dimension, column = I(v // (CHUNK // per)), I(v % (CHUNK // per) * per)
            put_key(to, I(keys_at + I(dimension * width) + I(c * CHUNK + column)), key, 4 * k)

    @device
    def fetch_values(values, step, thread, value, value_scales):
        """Start loading slice ``step`` of a chunk's values into registers."""
        values = advance(values, I(step * value_slice_words))
        for k in range(value_rounds):
            i = I(thread + k * threads)
            if n_vectors % threads == 0 or i < n_vectors:
                vector = load4(
                    values, I(I(i // of_position) * row_words + 4 * I(i % of_position)) if latent else I(4 * i)
                )
                for e in range(4):
                    value[4 * k + e] = vector[e]

    @device
    def store_values(to, thread, value, value_scales):
        """Move it from there to shared memory: [positions, pitch]."""
        for k in range(value_rounds):
            i = I(thread + k * threads)
            if n_vectors % threads == 0 or i < n_vectors:
                put_value(to, I(I(i // of_position * pitch) + i % of_position * per_value), value, 4 * k)

    if quantized_values:
        n_value, n_value_scales, fetch_values, store_values = make_values(tile, of_values)

    @device
    def keep_weights(s, to, row, quad):
        """Store a thread's weights in [64, pairs], from its position on.

        Of eight quads of pairs, number q of positions 4 k .. 4 k + 3 is stored in the place of number q ^ (2 k & 6), or if
        keys are quantized, of position k, in that of number q ^ (4 k & 4): then no two of eight lanes share a bank.
        """
        for e in range(8):
            at = I(row + (8 * e if quantized else e if e < 4 else e + 28) * pairs)
            keep4(to, I(at + 4 * quad), s[e], s[8 + e], s[16 + e], s[24 + e])
            if own == 8:
                keep4(to, I(at + I(4 * quad ^ 16)), s[32 + e], s[40 + e], s[48 + e], s[56 + e])

    @device
    def find_factors(tops, masses, place, chunk, window, maximum, mass):
        """Turn the maximum and the sum of a pair's chunk into the factors that join it to its group, in place; returns the
        maximum and the sum of the group."""
        first, last = visible(place, window, chunk)
        # What joins a chunk that is hidden leaves every sum unchanged, even -0.
        a, b = F(1.0), F(-0.0)
        if first < last:
            m = tops[0]
            joined = max(maximum, m)
            a, b = exp(maximum - joined), exp(m - joined)
            mass = fma(mass, a, b * masses[0])
            maximum = joined
        tops[0] = a
        masses[0] = b
        return maximum, mass

    @device
    def find_group_factors(factors, totals, top, maximum, mass):
        """Write the factors that join a pair's group to those before it, whose sum is totals[0]; returns the maximum of
        all."""
        a, b = F(1.0), F(-0.0)
        # The sum of a chunk is at least 1, so this is 0 only where the pair has seen none of the group.
        if mass != F(0.0):
            joined = max(top, maximum)
            a, b = exp(top - joined), exp(maximum - joined)
            totals[0] = fma(totals[0], a, b * mass)
            top = joined
        factors[0] = a
        factors[pairs] = b
        return top

    @cuda.jit
    def attend_tiles(
        q, q_scales, keys, values, at, sequences, table, gate, sink, out, rows, pages, stride, window, scale
    ):
        let_next_begin()
        memory = pointer(cuda.shared.array(0, np.float32, ALIGNED))
        places = pointer(cuda.shared.array(pairs, np.int32, ALIGNED))
        query = cuda.local.array(n_query, np.uint32)
        key = cuda.local.array(n_key, np.uint32)
        key_scales = cuda.local.array(n_key_scales, np.uint16)
        value = cuda.local.array(n_value, np.uint32)
        value_scales = cuda.local.array(n_value_scales, np.uint16)
        starts = cuda.local.array(key_rounds, np.int64)
        lies = cuda.local.array(key_rounds, np.int32)
        s = cuda.local.array(n_scores, np.float32)
        sums = cuda.local.array(n_sums, np.float32)
        o = cuda.local.array(n_elements, np.float32)
        element = cuda.local.array(n_elements, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (threads - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        head_kv = I(cuda.blockIdx.x & 0xFFFF)
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
        lowest = at[I(U(task0) // U(group))]
        highest = at[I(U(min(last_task, I(task0 + pairs - 1))) // U(group))]
        task = min(last_task, I(task0 + thread % pairs))
        row = I(U(task) // U(group))
        place = at[row]
        if thread < pairs:
            places[thread] = place
            memory[totals_at + thread] = F(0.0)
        own_q = advance(
            q, np.int64(I(I(row * n_head) + I(head0 + I(task - row * group)))) * d_k + thread // pairs * n_query
        )
        # Lanes that share four pairs, or eight positions or elements, are arranged so that a vector for all is two accesses.
        across, along = I((lane & 1) + ((lane >> 4) << 1)), I((lane >> 1) & 7)
        chunk_of, pair = I(warp // apart), I(warp % apart * (4 * own) + 4 * (lane & 3 if quantized else across))
        first = I(lane >> 2 if quantized else 4 * along)  # the thread's first position
        quad = I((pair >> 2) ^ ((lane & 4) if quantized else ((along & 3) << 1)))
        n_across = pairs // 32
        sum_pair, column = I(warp % n_across * 32), I((warp // n_across * 8 + along) * 4)
        of_head, table = I(head_kv * pages), advance(table, I(slot * stride))
        chunk, last_chunk = I(first_visible(lowest, window) >> 6), I(last_visible(highest) >> 6)
        inside = I((first_visible(highest, window) + CHUNK - 1) >> 6)  # the first chunk that no row sees only in part
        lowest = last_visible(lowest)
        for k in range(key_rounds):
            lies[k] = I(0)
        find_pages(table, of_head, chunk, chunk_of, last_chunk, thread, lies)
        page = I(of_head + table[chunk])  # of the values that are loaded next
        # Of the groups so far, and of the chunks so far of the current one.
        top, maximum, mass = F(-np.inf), F(-np.inf), F(0.0)
        here = I(0)
        groups, task = advance(memory, I(groups_at + 4 * thread)), I(task0 + I(sum_pair + 4 * across))
        clear_groups(0, element, groups, out, task, last_task, head0, n_head, column)
        if quantized:
            own_keys = begin_keys(keys, lies[0], I(chunk + chunk_of), last_chunk, lane, key, key_scales)
            place_query(q, q_scales, task0, last_task, head0, n_head, thread, advance(memory, queries_at))
            cuda.syncthreads()
        else:
            begin_scores(own_q, keys, starts, lies, chunk, last_chunk, thread, query, key)
        while chunk <= last_chunk:
            own_chunk = I(chunk + chunk_of)
            whole = own_chunk >= inside and I(own_chunk * CHUNK + CHUNK - 1) <= lowest
            chunk_values = advance(values, np.int64(page) * value_words)
            for k in range(n_scores):
                s[k] = F(0.0)
            if quantized:
                fetch_values(chunk_values, I(0), thread, value, value_scales)
                if own_chunk <= last_chunk:
                    own_queries = advance(memory, I(I(queries_at + I(warp % apart * (own // 4) * 128)) + 4 * lane))
                    score(own_keys, lane, key, key_scales, own_queries, advance(memory, I(scales_at + pair)), s)
                    # All threads have read the weights of the preceding chunks.
                cuda.syncthreads()
            else:
                step = I(0)
                while step < n_slices:
                    to = advance(memory, here)
                    store_scores(to, scale, thread, query, key)
                    cuda.syncthreads()
                    step = I(step + 1)
                    if step < n_slices:
                        fetch_scores(own_q, keys, starts, step, chunk, last_chunk, thread, query, key)
                    else:
                        fetch_values(chunk_values, I(0), thread, value, value_scales)
                    if own_chunk <= last_chunk:
                        a, b = advance(to, pair), advance(to, I(keys_at + I(chunk_of * CHUNK + 4 * along)))
                        left = I(runs)
                        while left > 0:
                            score_run(a, advance(a, 16), b, s)
                            a, b = advance(a, q_further), advance(b, k_further)
                            left = I(left - 1)
                    here = I(slice_size - here)
            if own_chunk <= last_chunk:
                own_places = advance(places, pair)
                if capped:
                    bound(0, s)
                if not whole:
                    hide(0, s, own_places, first, window, own_chunk)
                weigh(0, s, sums, advance(memory, I(tops_at + I(chunk_of * pairs + pair))), lane)
                total(sums, advance(memory, I(masses_at + I(chunk_of * pairs + pair))), lane)
                if not whole:
                    mark(0, s, own_places, first, window, own_chunk)
                keep_weights(s, memory, I(weights_at + I(I(chunk_of * CHUNK + first) * pairs)), quad)
            after = I(chunk + at_once)
            # Pages are looked up early: what is there depends on them.
            find_pages(table, of_head, after, chunk_of, last_chunk, thread, lies)
            for c in range(at_once):
                current = I(chunk + c)
                if current < last_chunk:
                    page = I(of_head + table[I(current + 1)])
                if current <= last_chunk:
                    whole = current >= inside and I(current * CHUNK + CHUNK - 1) <= lowest
                    closes = I(current + 1) & (together - 1) == 0 or current == last_chunk
                    for k in range(n_elements):
                        o[k] = F(0.0)
                    step = I(0)
                    while step < value_slices:
                        to = advance(memory, here)
                        store_values(to, thread, value, value_scales)
                        cuda.syncthreads()
                        if step == 0 and thread < pairs:
                            tops = advance(memory, I(tops_at + c * pairs + thread))
                            masses = advance(tops, at_once * pairs)
                            maximum, mass = find_factors(tops, masses, places[thread], current, window, maximum, mass)
                        elif step == 1 and closes and thread < pairs:
                            # Nothing reads the weights of the chunk's first positions any more.
                            factors = advance(memory, I(weights_at + c * (CHUNK * pairs) + thread))
                            totals = advance(memory, I(totals_at + thread))
                            top = find_group_factors(factors, totals, top, maximum, mass)
                            maximum, mass = F(-np.inf), F(0.0)
                        step = I(step + 1)
                        if step < value_slices:
                            fetch_values(chunk_values, step, thread, value, value_scales)
                        elif c + 1 < at_once and current < last_chunk:
                            chunk_values = advance(values, np.int64(page) * value_words)
                            fetch_values(chunk_values, I(0), thread, value, value_scales)
                        elif after <= last_chunk:
                            if quantized:
                                following = I(after + chunk_of)
                                own_keys = begin_keys(keys, lies[0], following, last_chunk, lane, key, key_scales)
                            else:
                                begin_scores(own_q, keys, starts, lies, after, last_chunk, thread, query, key)
                        weight = I(weights_at + I(c * CHUNK + (step - 1) * positions) * pairs)
                        a = advance(memory, I(weight + sum_pair))
                        b = advance(to, column)
                        # In the layout of ``keep_weights``.
                        left, of_lane = I(value_runs), I(4 * across ^ ((step - 1) * (2 * positions) & 3 * turn))
                        if whole:
                            while left > 0:
                                full_run(a, of_lane, b, o)
                                a, b = advance(a, a_further), advance(b, b_further)
                                left, of_lane = I(left - 1), I(of_lane ^ 2 * turn)
                        else:
                            while left > 0:
                                masked_run(a, of_lane, b, o)
                                a, b = advance(a, a_further), advance(b, b_further)
                                left, of_lane = I(left - 1), I(of_lane ^ 2 * turn)
                        here = I(slice_size - here)
                    factors = advance(memory, I(I(tops_at + c * pairs) + I(sum_pair + 4 * across)))
                    join(0, element, o, factors, advance(factors, at_once * pairs))
                    if closes:
                        # Settled, so that no address is kept in a register in all loops.
                        task = settled(I(task0 + I(sum_pair + 4 * across)))
                        groups = advance(memory, settled(I(groups_at + 4 * thread)))
                        factors = advance(memory, I(I(weights_at + c * (CHUNK * pairs)) + I(sum_pair + 4 * across)))
                        join_groups(0, element, groups, out, task, last_task, head0, n_head, column, factors)
            chunk = after
        cuda.syncthreads()
        if thread < pairs:
            mass = memory[totals_at + thread]
            if sinks:
                # The row's number is found again: a register for it would be occupied in all loops.
                own_task = min(last_task, I(task0 + thread))
                of_head = I(head0 + I(U(own_task) % U(group)))
                memory[I(masses_at + thread)], mass = join_sink(top, mass, sink[of_head])
            memory[I(tops_at + thread)] = mass
        cuda.syncthreads()
        totals = advance(memory, I(tops_at + I(sum_pair + 4 * across)))
        task = I(task0 + I(sum_pair + 4 * across))
        groups = advance(memory, I(groups_at + 4 * thread))
        load_groups(0, element, groups, out, task, last_task, head0, n_head, column)
        finish(0, element, totals, gate, out, task, last_task, head0, n_head, column)

    return attend_tiles
