"""Latent attention of a step: all heads of a row read the same vectors, each chunk of 64 absolute positions on its own.

Formula: out_h = sum_j softmax_j(scale * q_h . [c_j, k_j]) c_j over the positions j <= p
    (``engine/cpu/latent_attention.py``); this file computes the part of each chunk, and ``engine/cuda/attention/combine.py``
    joins them.
Shapes: q float32 [rows, n_head, width]; ring [chunks, 64, width], width = rank + n_rope, as words of one float32 or two
    float16; float32 weights [rows, n_head, slots, 2] (maximum, sum) and sums [rows, n_head,
    slots, d_pad], d_pad = rank rounded up to 32; slot = chunk.
Who owns what: a block owns every ``splits``-th chunk for up to 32 of the (row, head) pairs, usually all heads of a row.  For
    scores a lane owns two positions, a warp every eighth pair; for weighted values a thread owns two elements of all pairs.
Reduction order: that of the mirror: one chain per score and per element of a weighted sum, the halving tree of 64.
Bytes moved: width * element size per visible position and block that owns pairs of its row, and some of it again if shared
    memory holds only a slice of the elements at a time; 8 + 4 d_pad per (row, head, chunk) out.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.attention.attend import MAX_ROWS, Geometry
from engine.cuda.attention.combine import COMBINE_THREADS, PART, combine, padded
from engine.cuda.attention.tile import take4
from engine.cuda.attention.weigh import warp_max
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    float_bits,
    fma,
    keep4,
    lane_xor_int,
    let_next_begin,
    load4,
    pointer,
    vector2,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device, high_half, low_half
from engine.cuda.runtime.compiler import F32P, I32P, SHARED_OF_DRIVER, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.errors import DeviceError

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

THREADS = 256
WARPS = THREADS // 32
MOST_TASKS = 32
"""(row, head) pairs of a block."""
RESIDENT = 2
"""The most blocks that should fit on a multiprocessor, so that some load while others compute."""
SHARED_OF_MULTIPROCESSOR = 228 << 10
"""Shared memory that they have together on the GPUs that the kernel is tuned for."""
MOST_SUMS = 16
"""Pairs whose weighted sums a thread computes at once: more would need too many registers."""
AT_ONCE = 4
"""Positions of a weighted sum without a loop."""
HIDDEN = F(-1.0)
"""The weight of a position that a pair does not see."""


@dataclass(frozen=True)
class Layout:
    """What a block has in shared memory, in words: 64 rows of a slice of the elements, queries [tasks, width], scores
    [tasks, 64], weights [64, tasks + 4], positions of rows.

    half: whether elements are float16; slices: the number of runs that the elements of a row are divided into.
    """

    half: bool
    rank: int
    n_rope: int
    tasks: int
    slices: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rank + self.n_rope

    @property
    def words(self) -> int:
        """Words of a slice of a row."""
        return self.width // (2 if self.half else 1) // self.slices

    @property
    def pitch(self) -> int:
        """Words from one row to the next: an odd number of vectors, so that eight lanes that read vectors of different rows
        use every bank."""
        vectors = self.words // 4
        return 4 * (vectors + 1 - vectors % 2)

    @property
    def queries(self) -> int:
        """Where the queries begin."""
        return CHUNK * self.pitch

    @property
    def scores(self) -> int:
        """Where the scores begin."""
        return self.queries + self.tasks * self.width

    @property
    def weights(self) -> int:
        """Where the weights begin."""
        return self.scores + self.tasks * CHUNK

    @property
    def apart(self) -> int:
        """Words from the weights of one position to those of the next."""
        return self.tasks + 4

    @property
    def places(self) -> int:
        """Where the positions begin."""
        return self.weights + CHUNK * self.apart

    @property
    def summed(self) -> int:
        """Pairs whose weighted sums a thread computes at once: a multiple of 4."""
        return self.tasks // -(-self.tasks // MOST_SUMS)

    @property
    def bytes(self) -> int:
        """The size of all."""
        return 4 * (self.places + MAX_ROWS)

    @property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor."""
        return max(1, min(RESIDENT, SHARED_OF_MULTIPROCESSOR // (self.bytes + SHARED_OF_DRIVER)))


def layout(half: bool, rank: int, n_rope: int, pairs: int, shared: int) -> Layout:
    """The layout of blocks that may have ``shared`` bytes of shared memory, for ``pairs`` pairs in all: with as many pairs as
    fit, and the fewest slices of which the most blocks fit on a multiprocessor.  Raises DeviceError for sizes that the kernel
    does not support."""
    per = 8 if half else 4
    if (rank + n_rope) % per or rank % 4 or n_rope % 4:
        raise DeviceError(
            f"latent attention on a GPU takes latents of a multiple of 4 and rows of a multiple of {per} elements, not "
            f"{rank} and {rank + n_rope}; use --device cpu."
        )
    vectors = (rank + n_rope) // per
    for parts in range(-(-pairs // MOST_TASKS), pairs + 1):
        tasks = WARPS * -(-pairs // (WARPS * parts))
        layouts = [Layout(half, rank, n_rope, tasks, n) for n in range(1, vectors + 1) if vectors % n == 0]
        fitting = [one for one in layouts if one.bytes <= shared]
        if fitting:
            return max(fitting, key=lambda one: (one.resident, -one.slices))
    raise DeviceError(f"latents of {rank} elements do not fit into the GPU's shared memory; use --device cpu.")


def geometry(
    rows: int,
    n_head: int,
    rank: int,
    n_rope: int,
    half: bool,
    n_slots: int,
    multiprocessors: int,
    shared: int,
    early: bool,
    slices: int = 0,
    together: int = GROUP,
) -> Geometry:
    """Launches for ``rows`` rows that each see up to ``n_slots`` chunks of a cache of float16 (``half``) or float32.

    ``shared``: bytes of shared memory that a block may have; ``early``: no kernel of the same chain writes the positions, so
    they are read before ``wait_for_inputs``; ``slices``: of a row, 0 to choose a good number; ``together``: chunks of a
    group.  Raises DeviceError for sizes that the kernel does not support.
    """
    if rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, not {rows}")
    of = layout(half, rank, n_rope, rows * n_head, shared)
    if slices:
        of = replace(of, slices=slices)
    parts = -(-rows * n_head // of.tasks)
    # No more blocks than are resident at once: the next kernel cannot begin before all have begun.
    splits = min(n_slots, max(1, of.resident * multiprocessors // parts))
    return Geometry(
        attend_latents(half, rank, n_rope, n_head, of.tasks, of.slices, rows == 1, early),
        # Blocks begin in this order, x first: those that read the same chunk are neighbours.
        (parts, splits, 1),
        THREADS,
        combine(rank, early, False, 0, False, together),
        (n_head, rows, padded(rank) // PART),
        COMBINE_THREADS,
        rank,
        early,
        gated=False,
        n_slots=n_slots,
        together=together,
    )


# --- one chunk -------------------------------------------------------------------------------------------------


def _make_stage(of: Layout) -> DeviceFunction:
    """The device function ``stage(rows, tile, thread)``: copy a slice of 64 rows, which begins at ``rows``, to the tile."""
    vectors, row_words, pitch = of.words // 4, of.words * of.slices, of.pitch
    n = CHUNK * vectors
    rounds, exact = -(-n // THREADS), n % THREADS == 0
    n_words = 4 * min(rounds, 9)

    def make(first: int, count: int) -> DeviceFunction:
        """Rounds first .. first + count - 1: all loads, then all stores."""

        @device
        def some(rows, tile, thread, words):  # type: ignore[no-untyped-def]
            for k in range(count):
                i = I(thread + (first + k) * THREADS)
                if exact or i < n:
                    vector = load4(rows, I(I(i // vectors) * row_words + 4 * I(i % vectors)))
                    for e in range(4):
                        words[4 * k + e] = vector[e]
            for k in range(count):
                i = I(thread + (first + k) * THREADS)
                if exact or i < n:
                    at = I(I(i // vectors) * pitch + 4 * I(i % vectors))
                    keep4(tile, at, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])

        return some

    runs = [make(first, min(9, rounds - first)) for first in range(0, rounds, 9)]

    def chained(runs: list[DeviceFunction]) -> DeviceFunction:
        one = runs[0]
        if len(runs) == 1:
            return one
        rest = chained(runs[1:])

        @device
        def both(rows, tile, thread, words):  # type: ignore[no-untyped-def]
            one(rows, tile, thread, words)
            rest(rows, tile, thread, words)

        return both

    copy = chained(runs)

    @device
    def stage(rows, tile, thread):  # type: ignore[no-untyped-def]
        words = cuda.local.array(n_words, np.uint32)
        copy(rows, tile, thread, words)

    return stage


def _make_floats(half: bool) -> DeviceFunction:
    """The device function ``floats(words, x, at)``: the elements of a vector of four words, as x[at], x[at + 1], ..."""

    @device
    def floats(words, x, at):  # type: ignore[no-untyped-def]
        for e in range(4):
            if half:
                x[at + 2 * e] = low_half(words[e])
                x[at + 2 * e + 1] = high_half(words[e])
            else:
                x[at + e] = bits_float(I(words[e]))

    return floats


def _make_score(of: Layout) -> DeviceFunction:
    """The device function ``score(tile, query, lane, total)``: add a slice of the elements to the scores of a warp's pairs
    and the lane's two positions, total [pairs, 2].  query: that of the first pair, from the slice on; the warp has every
    eighth pair."""
    per, pairs = 8 if of.half else 4, of.tasks // WARPS
    vectors, pitch, further = of.words // 4, of.pitch, WARPS * of.width
    n_keys, second = 2 * per, CHUNK // 2 * of.pitch
    floats = _make_floats(of.half)

    @device
    def score(tile, query, lane, total):  # type: ignore[no-untyped-def]
        keys = cuda.local.array(n_keys, np.float32)
        q = cuda.local.array(per, np.float32)
        row = advance(tile, I(lane * pitch))
        left = I(vectors)
        while left > 0:
            floats(vector4(row, I(0)), keys, 0)
            floats(vector4(row, I(second)), keys, per)
            for t in range(pairs):
                for k in range(per // 4):
                    take4(query, I(t * further + 4 * k), q, 4 * k)
                for e in range(per):
                    total[2 * t] = fma(q[e], keys[e], total[2 * t])
                    total[2 * t + 1] = fma(q[e], keys[per + e], total[2 * t + 1])
            row, query = advance(row, 4), advance(query, per)
            left = I(left - 1)

    return score


def _make_sum(of: Layout, masked: bool) -> DeviceFunction:
    """The device function ``add(value, p, total)``: add ``AT_ONCE`` positions to the weighted sums of a thread's two elements
    for ``summed`` pairs, total [pairs, 2].  ``masked``: but those whose weight is ``HIDDEN``."""
    half, summed, pitch, apart = of.half, of.summed, of.pitch, of.apart

    @device
    def add(value, p, total):  # type: ignore[no-untyped-def]
        weight = cuda.local.array(4, np.float32)
        for j in range(AT_ONCE):
            if half:
                word = value[j * pitch]
                a, b = low_half(word), high_half(word)
            else:
                both = vector2(value, I(j * pitch))
                a, b = bits_float(I(both[0])), bits_float(I(both[1]))
            for t in range(0, summed, 4):
                take4(p, I(j * apart + t), weight, 0)
                for k in range(4):
                    x = fma(weight[k], a, total[2 * (t + k)])
                    y = fma(weight[k], b, total[2 * (t + k) + 1])
                    if masked:
                        x = total[2 * (t + k)] if weight[k] < F(0.0) else x
                        y = total[2 * (t + k) + 1] if weight[k] < F(0.0) else y
                    total[2 * (t + k)] = x
                    total[2 * (t + k) + 1] = y

    return add


def _bytes(half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, *others: bool) -> int:
    return Layout(half, rank, n_rope, tasks, slices).bytes


def _resident(half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, *others: bool) -> int:
    return Layout(half, rank, n_rope, tasks, slices).resident


@kernel(
    *(F32P, U32P, I32P, F32P, F32P, i32, i32, i32, f32),
    threads=THREADS,
    blocks=_resident,
    shared=_bytes,
)
def attend_latents(
    half: bool, rank: int, n_rope: int, n_head: int, tasks: int, slices: int, single: bool, early: bool
) -> KernelCode:
    """Maximum, sum and weighted values of each visible chunk.

    Arguments: q, ring, positions, weights, sums, rows, chunks (of the ring), slots, scale.  ``tasks``: (row, head) pairs
    of a block, a multiple of 8; ``slices``: ``Layout``; ``single``: there is one row; ``early``: see ``geometry``.
    Grid: (ceil(rows * n_head / tasks), splits), blocks of ``THREADS``.
    """
    of = Layout(half, rank, n_rope, tasks, slices)
    width, pitch, apart = of.width, of.pitch, of.apart
    queries_at, scores_at, weights_at, places_at = of.queries, of.scores, of.weights, of.places
    per = 2 if half else 1
    slice_words, slice_width, row_words = of.words, of.words * per, width // per
    chunk_words = CHUNK * row_words
    own_tasks, n_scores, summed, n_sums = tasks // WARPS, 2 * (tasks // WARPS), of.summed, 2 * of.summed
    vectors = width // 4
    n_query, query_rounds = tasks * vectors, -(-tasks * vectors // THREADS)
    query_exact = n_query % THREADS == 0
    # The values of a slice in pairs of elements, some of which may belong to the rotated part.
    pairs_of_slice, value_step = slice_width // 2, 1 if half else 2
    sum_rounds = -(-pairs_of_slice // THREADS)
    stage, score = _make_stage(of), _make_score(of)
    add, add_masked = _make_sum(of, False), _make_sum(of, True)
    d_pad = padded(rank)
    steps, step_tile, step_p = CHUNK // AT_ONCE, AT_ONCE * pitch, AT_ONCE * apart

    @device
    def row_of(task):  # type: ignore[no-untyped-def]
        return I(0) if single else I(U(task) // U(n_head))

    @device
    def place_queries(q, shared, task0, n, thread, scale):  # type: ignore[no-untyped-def]
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
    def weigh(shared, places, weights, thread, task0, n, slots, chunk):  # type: ignore[no-untyped-def]
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
                at = advance(weights, (np.int64(task) * slots + chunk) * 2)
                at[0] = m
                at[1] = total

    @device
    def weighted_sum(shared, t0, places, sums, thread, task0, n, slots, chunk, first, whole):  # type: ignore[no-untyped-def]
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
                        at = advance(sums, (np.int64(task) * slots + chunk) * d_pad + d)
                        at[0] = total[2 * t]
                        at[1] = total[2 * t + 1]

    @cuda.jit
    def attend_latents(q, ring, positions, weights, sums, rows, chunks, slots, scale):  # type: ignore[no-untyped-def]
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
        if not early:
            wait_for_inputs()
        place = positions[min(lane, I(rows - 1))]
        lowest, highest = place, place
        if single:
            places[0] = place
        else:
            for k in range(5):
                lowest = min(lowest, lane_xor_int(lowest, I(1 << k)))
                highest = max(highest, lane_xor_int(highest, I(1 << k)))
            if thread < 32:
                places[thread] = U(place)
        if early:
            wait_for_inputs()
        chunk, last_chunk = I(cuda.blockIdx.y), I(highest >> 6)
        if chunk <= last_chunk:
            place_queries(q, shared, task0, n, thread, scale)
        while chunk <= last_chunk:
            here = advance(ring, np.int64(I(U(chunk) % U(chunks))) * chunk_words)
            for t in range(n_scores):
                total[t] = F(0.0)
            s = I(0)
            while s < slices:
                stage(advance(here, I(s * slice_words)), shared, thread)
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
            weigh(shared, places, weights, thread, task0, n, slots, chunk)
            cuda.syncthreads()
            whole = lowest >= I(chunk * CHUNK + CHUNK - 1)
            # The last slice is still there.
            while s > 0:
                s = I(s - 1)
                if s < slices - 1:
                    cuda.syncthreads()
                    stage(advance(here, I(s * slice_words)), shared, thread)
                    cuda.syncthreads()
                t0 = I(0)
                while t0 < n:
                    first = I(s * slice_width)
                    weighted_sum(shared, t0, places, sums, thread, task0, n, slots, chunk, first, whole)
                    t0 = I(t0 + summed)
            chunk = I(chunk + cuda.gridDim.y)
            if chunk <= last_chunk:
                cuda.syncthreads()

    return attend_latents
