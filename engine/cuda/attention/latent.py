"""Latent attention of a step: all heads of a row read the same vectors, each chunk of 64 positions on its own.

Chunks are those of absolute positions or, if positions are chosen, of the list of a row.

Formula: out_h = sum_j softmax_j(scale * q_h . [c_j, k_j]) c_j over the positions j <= p
    (``engine/cpu/latent_attention.py``); this file computes the part of each chunk, and ``engine/cuda/attention/combine.py``
    joins them.
Shapes: q float32 [rows, n_head, width]; latents [pages, 64, width], width = rank + n_rope, as words of one float32 or two
    float16; positions, sequences int32 [rows]; table int32 [sequences, stride]: position j of a sequence is row j % 64 of
    page table[sequence, j // 64]; chosen int32 [rows, top_k], the positions that each row attends to, of which positions[row]
    is the number of the last one; it begins with -1 if scores of the indexer are not finite; float32 weights [rows, n_head,
    partials, 2] (maximum, sum) and sums [rows, n_head, partials, d_pad], d_pad = rank rounded up to 32; partial c of a row is
    that of chunk c.
Who owns what: a block owns every ``splits``-th chunk for up to 32 of the (row, head) pairs, usually all heads of a row.  All
    rows that a block has pairs of read the same positions: in a mixed pass, and if positions are chosen, it has pairs of one
    row.  For scores a lane owns
    two positions, a warp every eighth pair; for weighted values a thread owns two elements of all pairs.
Reduction order: that of the mirror: one chain per score and per element of a weighted sum, the halving tree of 64.
Bytes moved: width * element size per visible position and block that owns pairs of its row, and some of it again if shared
    memory holds only a slice of the elements at a time; 8 + 4 d_pad per (row, head, chunk) out.
"""

from dataclasses import replace

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.attention.attend import MAX_ROWS, Geometry
from engine.cuda.attention.combine import COMBINE_THREADS, PART, combine, padded
from engine.cuda.attention.latent_chunk import (
    AT_ONCE,
    HIDDEN,
    THREADS,
    WARPS,
    Layout,
    layout,
    make_score,
    make_stage,
    make_sum,
)
from engine.cuda.attention.weigh import warp_max
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    float_bits,
    keep4,
    lane_xor_int,
    let_next_begin,
    load4,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


def geometry(
    rows: int,
    n_head: int,
    rank: int,
    n_rope: int,
    half: bool,
    n_partials: int,
    multiprocessors: int,
    shared: int,
    early: bool,
    mixed: bool = False,
    slices: int = 0,
    together: int = GROUP,
    listed: bool = False,
) -> Geometry:
    """Launches for ``rows`` rows that each see up to ``n_partials`` chunks of a cache of float16 (``half``) or float32.

    ``shared``: bytes of shared memory that a block may have; ``early``: no kernel of the same chain writes the positions, so
    they and the first page are read before ``wait_for_inputs``; ``mixed``: rows may belong to several sequences, and each is
    computed by the kernel of a single row; ``slices``: of a row, 0 to choose a good number; ``together``: chunks of a group;
    ``listed``: rows have lists of chosen positions, and each is computed by the kernel of a single row.
    Raises DeviceError for sizes that the kernel does not support.
    """
    if rows > MAX_ROWS and not mixed:
        raise ValueError(f"at most {MAX_ROWS} rows of a sequence, not {rows}")
    alone = rows if mixed or listed else 1
    own_rows = rows // alone
    of = layout(half, rank, n_rope, own_rows * n_head, shared, listed=listed)
    if slices:
        of = replace(of, slices=slices)
    parts = -(-own_rows * n_head // of.tasks)
    # No more blocks than are resident at once: the next kernel cannot begin before all have begun.
    splits = min(n_partials, max(1, of.resident * multiprocessors // (parts * alone)))
    return Geometry(
        attend_latents(half, rank, n_rope, n_head, of.tasks, of.slices, own_rows == 1, early, listed),
        # Blocks begin in this order, x first: those that read the same chunk are neighbours.
        (parts, splits, alone),
        THREADS,
        combine(rank, early, False, 0, False, together),
        (n_head, rows, padded(rank) // PART),
        COMBINE_THREADS,
        rank,
        early,
        gated=False,
        n_partials=n_partials,
        together=together,
    )


def _bytes(half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, *others: bool) -> int:
    return Layout(half, rank, n_rope, tasks, slices, others[2]).bytes


def _resident(half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, *others: bool) -> int:
    return Layout(half, rank, n_rope, tasks, slices, others[2]).resident


@kernel(
    *(F32P, U32P, I32P, I32P, I32P, F32P, F32P, i32, i32, i32, f32, I32P, i32, i32),
    threads=THREADS,
    blocks=_resident,
    shared=_bytes,
)
def attend_latents(
    half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, single: bool, early: bool, listed: bool
) -> KernelCode:
    """Maximum, sum and weighted values of each visible chunk.

    Arguments: q, latents, positions, sequences, table, weights, sums, rows, stride (chunks of a row of the table), partials,
    scale, chosen, top_k, mixed (1: each row has its own slot; 0: all have that of the first row).  ``tasks``: (row, head)
    pairs of a block, a multiple of 8; ``slices``: ``Layout``; ``single``: a block has pairs of one row, rows is 1; ``early``:
    see ``geometry``; ``listed``: rows have lists of chosen positions; then ``single``, and not ``early``.
    Grid: (ceil(rows * n_head / tasks), splits, 1), blocks of ``THREADS``; if ``single``, for each row of the pass.
    """
    of = Layout(half, rank, n_rope, tasks, slices, listed)
    width, pitch, apart = of.width, of.pitch, of.apart
    queries_at, scores_at, weights_at, places_at = of.queries, of.scores, of.weights, of.places
    per = 2 if half else 1
    slice_words, slice_width, row_words = of.words, of.words * per, width // per
    page_words = CHUNK * row_words
    own_tasks, n_scores, summed, n_sums = tasks // WARPS, 2 * (tasks // WARPS), of.summed, 2 * of.summed
    vectors = width // 4
    n_query, query_rounds = tasks * vectors, -(-tasks * vectors // THREADS)
    query_exact = n_query % THREADS == 0
    # The values of a slice in pairs of elements, some of which may belong to the rotated part.
    pairs_of_slice, value_step = slice_width // 2, 1 if half else 2
    sum_rounds = -(-pairs_of_slice // THREADS)
    stage, score = make_stage(of), make_score(of)
    add, add_masked = make_sum(of, False), make_sum(of, True)
    d_pad = padded(rank)
    steps, step_tile, step_p = CHUNK // AT_ONCE, AT_ONCE * pitch, AT_ONCE * apart

    @device
    def row_of(task):
        return I(0) if single else I(U(task) // U(n_head))

    @device
    def place_queries(q, shared, task0, n, thread, scale):
        """Queries times scale to shared memory; pairs that do not exist repeat the last one."""
        for k in range(query_rounds):
            i = I(thread + k * THREADS)
            if query_exact or i < n_query:
                t, d = I(i // vectors), I(4 * I(i % vectors))
                task = np.int64(I(task0 + min(t, I(n - 1))))
                x = load4(q, task * width + d)
                to = I(queries_at + I(t * width + d))
                a, b = bits_float(I(x[0])) * scale, bits_float(I(x[1])) * scale
                c, e = bits_float(I(x[2])) * scale, bits_float(I(x[3])) * scale
                keep4(shared, to, a, b, c, e)

    @device
    def weigh(shared, places, weights, thread, task0, n, partials, chunk):
        """From scores to weights, maxima and sums, one pair per warp at a time."""
        lane = I(thread & 31)
        for k in range(own_tasks):
            t = I((thread >> 5) + WARPS * k)
            task = I(task0 + min(t, I(n - 1)))
            last = min(I(I(places[row_of(task)]) - chunk * CHUNK + 1), I(CHUNK))
            own = advance(shared, I(scores_at + t * CHUNK))
            s, u = bits_float(I(own[lane])), bits_float(I(own[lane + 32]))
            if lane >= last:
                s = F(-np.inf)
            if lane + 32 >= last:
                u = F(-np.inf)
            m = warp_max(max(s, u))
            s = exp(s - m)
            u = exp(u - m)
            total = fold32(s + u)
            to = advance(shared, I(weights_at + t))
            to[lane * apart] = U(float_bits(s if lane < last else HIDDEN))
            to[(lane + 32) * apart] = U(float_bits(u if lane + 32 < last else HIDDEN))
            if lane == 0 and t < n and last > 0:
                at = advance(weights, (np.int64(task) * partials + chunk) * 2)
                at[0] = m
                at[1] = total

    @device
    def weighted_sum(shared, t0, places, sums, thread, task0, n, partials, chunk, first, whole):
        """Weighted sums of some pairs, from t0 on, for the elements of the slice in shared memory, which begins with element
        ``first``; ``whole``: every pair sees the whole chunk."""
        total = cuda.local.array(n_sums, np.float32)
        for k in range(sum_rounds):
            i = I(thread + k * THREADS)
            d = I(first + 2 * i)
            if i < pairs_of_slice and d < rank:
                for t in range(n_sums):
                    total[t] = F(0.0)
                value, p = advance(shared, I(value_step * i)), advance(shared, I(weights_at + t0))
                left = I(steps)
                while left > 0:
                    if whole:
                        add(value, p, total)
                    else:
                        add_masked(value, p, total)
                    value, p = advance(value, step_tile), advance(p, step_p)
                    left = I(left - 1)
                for t in range(summed):
                    task = I(I(task0 + t0) + t)
                    if t0 + t < n and I(places[row_of(task)]) >= chunk * CHUNK:
                        at = advance(sums, (np.int64(task) * partials + chunk) * d_pad + d)
                        at[0] = total[2 * t]
                        at[1] = total[2 * t + 1]

    @cuda.jit
    def attend_latents(
        q, latents, positions, sequences, table, weights, sums, rows, stride, partials, scale, chosen, top_k, mixed
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        if single:
            places = cuda.local.array(1, np.int32)
        else:
            places = advance(shared, I(places_at))
        total = cuda.local.array(n_scores, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        task0 = I((cuda.blockIdx.x * tasks) & 0xFFFF)
        n = min(I(rows * n_head - task0), I(tasks))
        if single:
            own_row = I(cuda.blockIdx.z)
            first_task = np.int64(own_row) * n_head
            q = advance(q, first_task * width)
            weights, sums = advance(weights, first_task * partials * 2), advance(sums, first_task * partials * d_pad)
            positions, sequences = advance(positions, own_row), advance(sequences, I(own_row * mixed))
            if listed:
                chosen = advance(chosen, np.int64(own_row) * top_k)
        if not early:
            wait_for_inputs()
        place = positions[min(lane, I(rows - 1))]
        # All rows of the block belong to the sequence of its first one.
        table = advance(table, I(sequences[0] * stride))
        lowest, highest = place, place
        if single:
            places[0] = place
        else:
            for k in range(5):
                lowest = min(lowest, lane_xor_int(lowest, I(1 << k)))
                highest = max(highest, lane_xor_int(highest, I(1 << k)))
            if thread < 32:
                places[thread] = U(place)
        chunk, last_chunk = I(cuda.blockIdx.y), I(highest >> 6)
        page = I(0)
        if listed:
            # Without a choice, because scores of the indexer are not finite, no score is.
            scale = F(np.nan) if chosen[0] < 0 else scale
        else:
            page = table[min(chunk, last_chunk)]
        numbers = advance(shared, I(places_at))
        if early:
            wait_for_inputs()
        if chunk <= last_chunk:
            place_queries(q, shared, task0, n, thread, scale)
        while chunk <= last_chunk:
            here = latents
            if listed:
                if thread < CHUNK:
                    j = max(I(chosen[min(I(chunk * CHUNK + thread), place)]), I(0))
                    numbers[thread] = U(table[j >> 6]) * U(CHUNK) + U(j & 63)
                cuda.syncthreads()
            else:
                here = advance(latents, np.int64(page) * page_words)
                page = table[min(I(chunk + cuda.gridDim.y), last_chunk)]
            for t in range(n_scores):
                total[t] = F(0.0)
            s = I(0)
            while s < slices:
                stage(advance(here, I(s * slice_words)), shared, thread, numbers)
                cuda.syncthreads()
                score(shared, advance(shared, I(queries_at + I(warp * width) + s * slice_width)), lane, total)
                s = I(s + 1)
                if s < slices:
                    cuda.syncthreads()
            for t in range(own_tasks):
                own = advance(shared, I(scores_at + I(warp + WARPS * t) * CHUNK))
                own[lane] = U(float_bits(total[2 * t]))
                own[lane + 32] = U(float_bits(total[2 * t + 1]))
            cuda.syncwarp()
            weigh(shared, places, weights, thread, task0, n, partials, chunk)
            cuda.syncthreads()
            whole = lowest >= I(chunk * CHUNK + CHUNK - 1)
            # The last slice is still there.
            while s > 0:
                s = I(s - 1)
                if s < slices - 1:
                    cuda.syncthreads()
                    stage(advance(here, I(s * slice_words)), shared, thread, numbers)
                    cuda.syncthreads()
                t0 = I(0)
                while t0 < n:
                    first = I(s * slice_width)
                    weighted_sum(shared, t0, places, sums, thread, task0, n, partials, chunk, first, whole)
                    t0 = I(t0 + summed)
            chunk = I(chunk + cuda.gridDim.y)
            if chunk <= last_chunk:
                cuda.syncthreads()

    return attend_latents
