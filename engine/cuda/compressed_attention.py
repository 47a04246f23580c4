"""Attention over compressed rows and a window of latents, each of which is the key and the value of all heads.

Formula: ``engine/cpu/compressed_attention.py``.
Shapes: q, out float32 [rows, n_head, d]; latents, compressed [pages, 64, d], as words of one float32 or two float16, with
    tables int32 [sequences, stride] that have the pages of each sequence; sequences int32 [rows]; chosen int32 [rows,
    top_k]; sinks float32 [n_head]; float32 weights [rows, n_head, partials, 2] (maximum, sum) and sums [rows, n_head,
    partials, d]: the list of a row has the first partials, its window those from ``listed`` on.
Who owns what: a block owns up to 16 heads of a row: in ``attend_compressed`` one chunk after another, in
    ``attend_compressed_chunks`` one chunk, which ``join_compressed`` joins to the others: there a block owns a head of a
    row, a thread four elements.  For scores a lane owns two entries of a chunk, a warp every eighth head; for weighted
    values a thread owns two elements of all heads.
Reduction order: that of ``engine/cpu/compressed_attention.py``: one chain per score and per element of a weighted sum, the
    halving tree of 64, groups of chunks.
Bytes moved: d * element size per latent and compressed row that a token sees, for every 16 heads, and some of it again if
    shared memory holds only a slice of the elements at a time; with chunks of their own 8 + 4 d per (row, head, chunk) out
    and in.

Pseudocode of ``attend_compressed``::

    q of the heads times scale to shared memory
    for chunks of 64 of the list, then for chunks of the window:
        which lanes [a, b) the row sees; where these rows are, which was looked up with the last chunk
        for slices of the elements: rows to shared memory; scores += q . rows
        weigh: m, p_j = exp(score_j - m) or HIDDEN, l; and for each head, with the group's maximum M and sum L,
            M' = max(M, m), before = exp(M - M'), here = exp(m - M'), L = fma(L, before, here * l)
        for slices of the elements, the last one first, which is still there: o = sum over j of p_j row_j
        look the rows of the next chunk up
        inner = fma(inner, before, here * o)
        after the last chunk of a group: the same with the group and all groups before it, in ``result``
    a sink; result / total
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.attention.latent_chunk import (
    AT_ONCE,
    HIDDEN,
    RESIDENT,
    THREADS,
    WARPS,
    Layout,
    layout,
    make_score,
    make_stage,
    make_sum,
)
from engine.cuda.attention.sight import first_visible, visible
from engine.cuda.attention.weigh import warp_max
from engine.cuda.elements import setter
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    float_bits,
    fma,
    keep4,
    let_next_begin,
    load4,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.errors import DeviceError

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

MOST_HEADS = 16
"""The most heads of a block: a thread keeps six numbers for each."""

MOST = 2 * THREADS
"""The most elements of a latent: a thread owns two."""

JOIN_THREADS = 128
"""Threads of a block that joins chunks: each owns four elements."""

AT_A_TIME = 4
"""Chunks whose results are loaded before they are joined."""


@kernel(F32P, i32, I32P, I32P, I32P, i32, F32P, threads=256)
def append(half: bool, mixed: bool) -> KernelCode:
    """Store latents x [rows, d] at their positions; ``mixed``: rows may belong to several sequences.  Grid: (ceil(d / 256),
    rows)."""
    put = setter(half)

    @cuda.jit
    def append(x, d, positions, sequences, table, stride, latents):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < d:
            p, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
            page = I(table[I(sequence * stride) + p // CHUNK])
            place = np.int64(I(page * CHUNK) + p % CHUNK) * d + i
            put(latents, place, x[np.int64(t) * d + i])

    return append


# --- launches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompressedGeometry:
    """The launches of a pass.

    attend: the kernel; parts: the blocks of a row; partials: chunks of a row with blocks of their own, of which ``listed``
    are for the list; 0: a block computes all chunks.
    """

    attend: Specialization
    parts: int
    partials: int
    listed: int


def geometry(
    rows: int,
    n_head: int,
    d: int,
    half: bool,
    window: int,
    listed: int,
    multiprocessors: int,
    shared: int,
    step: bool,
    mixed: bool,
) -> CompressedGeometry:
    """Launches for ``rows`` rows whose lists have at most ``listed`` chunks and whose windows have ``window`` positions.

    shared: bytes of shared memory that a block may have; step: whether each chunk has blocks of its own; mixed: whether rows
    may belong to several sequences, only in a step.  Raises DeviceError for sizes that the kernels do not support.
    """
    assert step or not mixed
    if d > MOST:
        raise DeviceError(
            f'attention over compressed rows on a GPU takes at most {MOST} elements, not {d}; use device="cpu".'
        )
    partials = listed + (window + CHUNK - 2) // CHUNK + 1
    most = MOST_HEADS
    if step and rows * partials * -(-n_head // most) < multiprocessors:
        most //= 2
    # A block that computes one chunk after another has a multiprocessor for itself if a row has several slices (``_alone``),
    # so it has as few of them as fit.
    of = layout(half, d, 0, n_head, shared, most, True, RESIDENT if step else 1)
    sizes = half, d, of.tasks, of.slices
    attend = attend_compressed_chunks(*sizes, mixed) if step else attend_compressed(*sizes)
    return CompressedGeometry(attend, -(-n_head // of.tasks), partials if step else 0, listed)


# --- one chunk -------------------------------------------------------------------------------------------------


def make_chunk(of: Layout) -> tuple[DeviceFunction, DeviceFunction]:
    """The device functions ``begin``, which stores the queries of a block's heads, and ``one_chunk``.

    ``begin(q, shared, first, n, thread, scale)``: q points to the queries of the row, of which the block has n heads from
    ``first`` on.
    ``one_chunk(source, shared, thread, a, b, total)``: scores, weights and weighted values of the lanes [a, b) of a chunk,
    whose rows of ``source`` are in ``places``.  The values of the thread's two elements are in total [heads, 2]; maxima and
    sums of the weights are numbers 0 and 1 of each head.
    """
    tasks, slices, words = of.tasks, of.slices, of.words
    width, pitch, apart = of.width, of.pitch, of.apart
    queries_at, scores_at, weights_at, places_at = of.queries, of.scores, of.weights, of.places
    numbers_at = of.places + CHUNK
    per = 2 if of.half else 1
    slice_width = words * per
    own_tasks, n_scores, n_sums = tasks // WARPS, 2 * (tasks // WARPS), 2 * tasks
    vectors = width // 4
    n_query, rounds = tasks * vectors, -(-tasks * vectors // THREADS)
    exact = n_query % THREADS == 0
    pairs_of_slice, value_step = slice_width // 2, 1 if of.half else 2
    stage, score = make_stage(of), make_score(of)
    add, add_masked = make_sum(of, False), make_sum(of, True)
    steps, step_tile, step_p = CHUNK // AT_ONCE, AT_ONCE * pitch, AT_ONCE * apart

    @device
    def begin(q, shared, first, n, thread, scale):
        for k in range(rounds):
            i = I(thread + k * THREADS)
            if exact or i < n_query:
                t, d = I(i // vectors), I(4 * I(i % vectors))
                # Heads that do not exist repeat the last one.
                x = load4(q, I(I(first + min(t, I(n - 1))) * width + d))
                to = I(queries_at + I(t * width + d))
                e, f = bits_float(I(x[0])) * scale, bits_float(I(x[1])) * scale
                g, h = bits_float(I(x[2])) * scale, bits_float(I(x[3])) * scale
                keep4(shared, to, e, f, g, h)

    @device
    def weigh(shared, thread, a, b):
        """From scores to weights, maxima and sums, one head per warp at a time."""
        lane = I(thread & 31)
        for k in range(own_tasks):
            t = I((thread >> 5) + WARPS * k)
            own = advance(shared, I(scores_at + t * CHUNK))
            s, u = bits_float(I(own[lane])), bits_float(I(own[lane + 32]))
            first, second = lane >= a and lane < b, lane + 32 >= a and lane + 32 < b
            if not first:
                s = F(-np.inf)
            if not second:
                u = F(-np.inf)
            m = warp_max(max(s, u))
            s = exp(s - m)
            u = exp(u - m)
            total = fold32(s + u)
            to = advance(shared, I(weights_at + t))
            to[lane * apart] = U(float_bits(s if first else HIDDEN))
            to[(lane + 32) * apart] = U(float_bits(u if second else HIDDEN))
            if lane == 0:
                numbers = advance(shared, I(numbers_at + t))
                numbers[0] = U(float_bits(m))
                numbers[tasks] = U(float_bits(total))

    @device
    def one_chunk(source, shared, thread, a, b, total):
        scores = cuda.local.array(n_scores, np.float32)
        warp, lane = I(thread >> 5), I(thread & 31)
        places = advance(shared, I(places_at))
        for t in range(n_scores):
            scores[t] = F(0.0)
        s = I(0)
        while s < slices:
            stage(advance(source, I(s * words)), shared, thread, places)
            cuda.syncthreads()
            score(shared, advance(shared, I(queries_at + I(warp * width) + s * slice_width)), lane, scores)
            s = I(s + 1)
            if s < slices:
                cuda.syncthreads()
        for t in range(own_tasks):
            own = advance(shared, I(scores_at + I(warp + WARPS * t) * CHUNK))
            own[lane] = U(float_bits(scores[2 * t]))
            own[lane + 32] = U(float_bits(scores[2 * t + 1]))
        cuda.syncwarp()
        weigh(shared, thread, a, b)
        cuda.syncthreads()
        for t in range(n_sums):
            total[t] = F(0.0)
        # The slice of the thread's two elements, and their place in it.
        mine = I(thread // pairs_of_slice)
        place = I(value_step * I(thread % pairs_of_slice))
        # The last slice is still there.
        while s > 0:
            s = I(s - 1)
            if s < slices - 1:
                cuda.syncthreads()
                stage(advance(source, I(s * words)), shared, thread, places)
                cuda.syncthreads()
            if s == mine:
                value, p = advance(shared, place), advance(shared, I(weights_at))
                left = I(steps)
                while left > 0:
                    if b - a == CHUNK:
                        add(value, p, total)
                    else:
                        add_masked(value, p, total)
                    value, p = advance(value, step_tile), advance(p, step_p)
                    left = I(left - 1)

    return begin, one_chunk


@device
def list_place(chosen, t, top_k, c, count, lane, table):
    """Where the compressed row is that is entry ``lane`` of chunk c of a row's list of ``count`` entries; the last one
    instead of one that does not exist.  table: the pages of compressed rows of the row's sequence."""
    entry = min(I(c * CHUNK + lane), I(count - 1))
    row = U(max(I(chosen[np.int64(t) * top_k + entry]), I(0))) if top_k > 0 else U(entry)
    return U(table[row // U(CHUNK)]) * U(CHUNK) + row % U(CHUNK)


@device
def checked_scale(scale, chosen, t, top_k, count):
    """The scale of scores of a row whose list has ``count`` entries: NaN if scores of the indexer were not finite."""
    return F(np.nan) if top_k > 0 and count > 0 and chosen[np.int64(t) * top_k] < 0 else scale


@device
def listed_rows(position, ratio, top_k):
    """The number of entries of a row's list."""
    n = I(I(position + 1) // ratio) if ratio > 0 else I(0)
    return min(n, I(top_k)) if top_k > 0 else n


def _bytes(half: bool, d: int, tasks: int, slices: int, *_: int) -> int:
    return Layout(half, d, 0, tasks, slices, True).bytes


def _resident(half: bool, d: int, tasks: int, slices: int, *_: int) -> int:
    return Layout(half, d, 0, tasks, slices, True).resident


def _alone(half: bool, d: int, tasks: int, slices: int, *_: int) -> int:
    # A slice is copied while a thread keeps the sums of a chunk, of a group and of all groups: these and the words that are
    # on their way need more than half of the registers.
    return 1 if slices > 1 else _resident(half, d, tasks, slices)


# --- all chunks of a row ---------------------------------------------------------------------------------------


@kernel(
    *(F32P, U32P, I32P, i32, U32P, I32P, i32, I32P, I32P, I32P, i32, i32, i32, i32, f32_t, F32P, F32P),
    threads=THREADS,
    blocks=_alone,
    shared=_bytes,
)
def attend_compressed(half: bool, d: int, tasks: int, slices: int, group: int = GROUP) -> KernelCode:
    """Attention of all rows, which belong to one sequence.

    Arguments: q, latents, table, stride, compressed, compressed_table, compressed_stride, chosen, positions, sequences,
    n_head, window, ratio, top_k (0: the list of a row has all compressed rows that it sees), scale, sinks, out.  ``tasks``:
    heads of a block, a multiple of 8; ``slices``: ``Layout``.
    Grid: (ceil(n_head / tasks), rows), blocks of ``THREADS``.
    """
    of = Layout(half, d, 0, tasks, slices, True)
    begin, one_chunk = make_chunk(of)
    n_sums, own_tasks, places_at, numbers_at = 2 * tasks, tasks // WARPS, of.places, of.places + CHUNK

    @device
    def join(shared, thread, first):
        """Join, for each head, maximum and sum in numbers ``first`` and ``first`` + 1 to those in the next two; the factors
        of values before and of new ones are in the first two afterwards."""
        if (thread & 31) == 0:
            for k in range(own_tasks):
                own = advance(shared, I(numbers_at + I(first * tasks) + I((thread >> 5) + WARPS * k)))
                m, mass = bits_float(I(own[0])), bits_float(I(own[tasks]))
                top, total = bits_float(I(own[2 * tasks])), bits_float(I(own[3 * tasks]))
                joined = max(top, m)
                before, here = exp(top - joined), exp(m - joined)
                own[0], own[tasks] = U(float_bits(before)), U(float_bits(here))
                own[2 * tasks] = U(float_bits(joined))
                own[3 * tasks] = U(float_bits(fma(total, before, here * mass)))
        cuda.syncthreads()

    @device
    def scaled(shared, first, x, total):
        """x = x * before + here * total, with the factors in numbers ``first`` and ``first`` + 1 of each head."""
        own = advance(shared, I(numbers_at + I(first * tasks)))
        for t in range(tasks):
            before, here = bits_float(I(own[t])), bits_float(I(own[tasks + t]))
            x[2 * t] = fma(x[2 * t], before, here * total[2 * t])
            x[2 * t + 1] = fma(x[2 * t + 1], before, here * total[2 * t + 1])

    @device
    def clear(shared, thread, first):
        """No maximum and no sum in numbers ``first`` and ``first`` + 1 of each head."""
        if thread < tasks:
            own = advance(shared, I(numbers_at + I(first * tasks) + thread))
            own[0], own[tasks] = U(float_bits(F(-np.inf))), U(0)

    @device
    def end_group(shared, thread, inner, result):
        """Join the current group, which has a chunk, to those before it, and begin the next one."""
        join(shared, thread, I(2))
        scaled(shared, I(2), result, inner)
        for t in range(n_sums):
            inner[t] = F(0.0)
        cuda.syncthreads()
        clear(shared, thread, I(2))

    @cuda.jit
    def attend_compressed(
        q,
        latents,
        table,
        stride,
        compressed,
        compressed_table,
        compressed_stride,
        chosen,
        positions,
        sequences,
        n_head,
        window,
        ratio,
        top_k,
        scale,
        sinks,
        out,
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        total = cuda.local.array(n_sums, np.float32)
        inner = cuda.local.array(n_sums, np.float32)
        result = cuda.local.array(n_sums, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread, t = I(cuda.threadIdx.x & (THREADS - 1)), I(cuda.blockIdx.y)
        first = I(cuda.blockIdx.x * tasks)
        n = min(I(n_head - first), I(tasks))
        places = advance(shared, I(places_at))
        wait_for_inputs()
        position, sequence = I(positions[t]), I(sequences[0])
        pages = advance(table, I(sequence * stride))
        listed_pages = advance(compressed_table, I(sequence * compressed_stride))
        count = listed_rows(position, ratio, top_k)
        of_list, c0 = I(I(count + CHUNK - 1) // CHUNK), I(first_visible(position, window) // CHUNK)
        c, end = I(0), I(of_list + I(position // CHUNK) - c0 + 1)
        place = U(0)
        if thread < CHUNK:
            if of_list > 0:
                place = list_place(chosen, t, top_k, c, count, thread, listed_pages)
            else:
                place = U(pages[c0]) * U(CHUNK) + U(thread)
        scale = checked_scale(scale, chosen, t, top_k, count)
        begin(advance(q, np.int64(t) * (n_head * d)), shared, first, n, thread, scale)
        for k in range(n_sums):
            inner[k] = F(0.0)
            result[k] = F(0.0)
        clear(shared, thread, I(2))
        clear(shared, thread, I(4))
        while c < end:
            number, a, b = c, I(0), min(I(CHUNK), I(count - c * CHUNK))
            if c >= of_list:
                number = I(c - of_list + c0)
                a, b = visible(position, window, number)
            if thread < CHUNK:
                places[thread] = place
            cuda.syncthreads()
            if c < of_list:
                one_chunk(compressed, shared, thread, a, b, total)
            else:
                one_chunk(latents, shared, thread, a, b, total)
            c = I(c + 1)
            # Not before the chunk: a register that it needs would be spilled.
            if thread < CHUNK and c < end:
                if c < of_list:
                    place = list_place(chosen, t, top_k, c, count, thread, listed_pages)
                else:
                    place = U(pages[I(c - of_list + c0)]) * U(CHUNK) + U(thread)
            join(shared, thread, I(0))
            scaled(shared, I(0), inner, total)
            if (number + 1) % group == 0 or c == of_list or c == end:
                end_group(shared, thread, inner, result)
            cuda.syncthreads()
        i = I(2 * thread)
        if i < d:
            own = advance(shared, I(numbers_at + 4 * tasks))
            for k in range(tasks):
                if k < n:
                    top, sink = bits_float(I(own[k])), sinks[first + k]
                    joined = max(top, sink)
                    before = exp(top - joined)
                    sum_ = fma(bits_float(I(own[tasks + k])), before, exp(sink - joined))
                    at = advance(out, (np.int64(t) * n_head + I(first + k)) * d + i)
                    at[0] = result[2 * k] * before / sum_
                    at[1] = result[2 * k + 1] * before / sum_

    return attend_compressed


# --- chunks of their own, and joining them ---------------------------------------------------------------------


@kernel(
    *(F32P, U32P, I32P, i32, U32P, I32P, i32, I32P, I32P, I32P, i32, i32, i32, i32, f32_t, F32P, F32P, i32, i32),
    threads=THREADS,
    blocks=_resident,
    shared=_bytes,
)
def attend_compressed_chunks(half: bool, d: int, tasks: int, slices: int, mixed: bool) -> KernelCode:
    """Maximum, sum and weighted values of each chunk.

    Arguments: q, latents, table, stride, compressed, compressed_table, compressed_stride, chosen, positions, sequences,
    n_head, window, ratio, top_k (0: the list of a row has all compressed rows that it sees), scale, weights, sums, partials,
    listed.  ``tasks``: heads of a block, a multiple of 8; ``slices``: ``Layout``; ``mixed``: rows may belong to several
    sequences.
    Grid: (ceil(n_head / tasks), partials, rows), blocks of ``THREADS``.
    """
    of = Layout(half, d, 0, tasks, slices, True)
    begin, one_chunk = make_chunk(of)
    n_sums, places_at, numbers_at = 2 * tasks, of.places, of.places + CHUNK

    @cuda.jit
    def attend_compressed_chunks(
        q,
        latents,
        table,
        stride,
        compressed,
        compressed_table,
        compressed_stride,
        chosen,
        positions,
        sequences,
        n_head,
        window,
        ratio,
        top_k,
        scale,
        weights,
        sums,
        partials,
        listed,
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, ALIGNED))
        total = cuda.local.array(n_sums, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread, t = I(cuda.threadIdx.x & (THREADS - 1)), I(cuda.blockIdx.z)
        first, partial = I(cuda.blockIdx.x * tasks), I(cuda.blockIdx.y)
        n = min(I(n_head - first), I(tasks))
        places = advance(shared, I(places_at))
        wait_for_inputs()
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        count = listed_rows(position, ratio, top_k)
        number, a, b = partial, I(0), min(I(CHUNK), I(count - partial * CHUNK))
        if partial >= listed:
            number = I(partial - listed + I(first_visible(position, window) // CHUNK))
            a, b = visible(position, window, number)
        if b > 0:
            place = U(0)
            if thread < CHUNK:
                if partial < listed:
                    pages = advance(compressed_table, I(sequence * compressed_stride))
                    place = list_place(chosen, t, top_k, partial, count, thread, pages)
                else:
                    place = U(table[I(sequence * stride) + number]) * U(CHUNK) + U(thread)
            scale = checked_scale(scale, chosen, t, top_k, count)
            begin(advance(q, np.int64(t) * (n_head * d)), shared, first, n, thread, scale)
            if thread < CHUNK:
                places[thread] = place
            cuda.syncthreads()
            if partial < listed:
                one_chunk(compressed, shared, thread, a, b, total)
            else:
                one_chunk(latents, shared, thread, a, b, total)
            own = (np.int64(t) * n_head + first) * partials + partial
            if thread < n:
                numbers, to = advance(shared, I(numbers_at + thread)), advance(weights, 2 * (own + thread * partials))
                to[0] = bits_float(I(numbers[0]))
                to[1] = bits_float(I(numbers[tasks]))
            i = I(2 * thread)
            if i < d:
                for k in range(tasks):
                    if k < n:
                        at = advance(sums, (own + I(k * partials)) * d + i)
                        at[0] = total[2 * k]
                        at[1] = total[2 * k + 1]

    return attend_compressed_chunks


@kernel(F32P, F32P, I32P, i32, i32, i32, i32, i32, i32, F32P, F32P, threads=JOIN_THREADS)
def join_compressed(d: int, group: int = GROUP) -> KernelCode:
    """Join the chunks of each head: those of the list, then those of the window.

    Arguments: weights, sums, positions, n_head, window, ratio, top_k, partials, listed, sinks, out.
    Grid: (n_head, rows), blocks of ``JOIN_THREADS``.
    """
    n_weights, n_values = 2 * AT_A_TIME, 4 * AT_A_TIME

    @cuda.jit
    def join_compressed(weights, sums, positions, n_head, window, ratio, top_k, partials, listed, sinks, out):
        let_next_begin()
        pairs = cuda.local.array(n_weights, np.float32)
        values = cuda.local.array(n_values, np.float32)
        inner = cuda.local.array(4, np.float32)
        result = cuda.local.array(4, np.float32)
        t, head = I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        i = I(4 * cuda.threadIdx.x)
        sink = sinks[head]
        wait_for_inputs()
        if i >= d:
            return
        position = I(positions[t])
        own = (np.int64(t) * n_head + head) * partials
        weights, sums = advance(weights, 2 * own), advance(sums, own * d + i)
        of_list = I(I(listed_rows(position, ratio, top_k) + CHUNK - 1) // CHUNK)
        c0 = I(first_visible(position, window) // CHUNK)
        end = I(of_list + I(position // CHUNK) - c0 + 1)
        top, mass, group_top, group_mass = F(-np.inf), F(0.0), F(-np.inf), F(0.0)
        for e in range(4):
            inner[e] = F(0.0)
            result[e] = F(0.0)
        c = I(0)
        while c < end:
            for k in range(AT_A_TIME):
                chunk = min(I(c + k), I(end - 1))
                partial = chunk if chunk < of_list else I(chunk - of_list + listed)
                pairs[2 * k], pairs[2 * k + 1] = weights[2 * partial], weights[2 * partial + 1]
                x = load4(sums, np.int64(partial) * d)
                for e in range(4):
                    values[4 * k + e] = bits_float(I(x[e]))
            for k in range(AT_A_TIME):
                chunk = I(c + k)
                if chunk < end:
                    joined = max(group_top, pairs[2 * k])
                    before, here = exp(group_top - joined), exp(pairs[2 * k] - joined)
                    group_top = joined
                    group_mass = fma(group_mass, before, here * pairs[2 * k + 1])
                    for e in range(4):
                        inner[e] = fma(inner[e], before, here * values[4 * k + e])
                    number = chunk if chunk < of_list else I(chunk - of_list + c0)
                    if (number + 1) % group == 0 or chunk + 1 == of_list or chunk + 1 == end:
                        joined = max(top, group_top)
                        before, here = exp(top - joined), exp(group_top - joined)
                        top = joined
                        mass = fma(mass, before, here * group_mass)
                        group_top, group_mass = F(-np.inf), F(0.0)
                        for e in range(4):
                            result[e] = fma(result[e], before, here * inner[e])
                            inner[e] = F(0.0)
            c = I(c + AT_A_TIME)
        joined = max(top, sink)
        before = exp(top - joined)
        total = fma(mass, before, exp(sink - joined))
        at = advance(out, (np.int64(t) * n_head + head) * d + i)
        for e in range(4):
            at[e] = result[e] * before / total

    return join_compressed
