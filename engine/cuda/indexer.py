"""The indexer: which positions or compressed rows a token attends to.

Formula: ``engine/cpu/indexer.py``.
Shapes: q float32 [rows, n_head, d]; w float32 [rows, n_head]; keys float32 or float16 [pages, d, 64], with the table int32
    [sequences, stride], stride the chunks of a context; positions, sequences int32 [rows]; scores float32 [rows, 64 stride];
    chosen int32 [rows, top_k].
Who owns what: ``score``: a block of 256 threads owns a row of the pass and every ``PARTS``-th chunk; a lane two compressed
    rows of a chunk, a warp up to eight heads at a time, then a thread the sum over heads of one compressed row; ``choose``: a
    block owns a row of the pass, a thread every 1024th compressed row to count, and a run of them to store; in
    ``append_keys`` a thread owns an element of a key, in ``ends`` a row.
Reduction order: that of ``engine/cpu/indexer.py``: one chain over d, one over heads.  Counts are integers, whose order does
    not matter.
Bytes moved: d * element size per visible row, 4 n for the scores; about 80 n, from the cache of a multiprocessor, for the
    choice.
"""

import math

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cpu.sample import order_key
from engine.cuda.elements import setter
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    finite,
    fma,
    lanes_sum,
    let_next_begin,
    load2,
    pointer,
    rectified,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device, high_half, low_half
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode
from engine.errors import DeviceError

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

PARTS = 128
"""Blocks that share the chunks of a row."""

WARPS = 8
"""Warps of a block that scores."""

FLOATS = 8192
"""The most numbers of the queries that it has in shared memory."""

THREADS = 1024
"""Threads of the block that chooses."""


ENDS = 128
"""Threads of a block of ``ends``."""


@kernel(F32P, i32, I32P, I32P, I32P, i32, F32P, threads=128)
def append_keys(half: bool, mixed: bool) -> KernelCode:
    """Store keys x [rows, d] at their positions; ``mixed``: rows may belong to several sequences.

    Arguments: x, d, positions, sequences, table, stride, keys [pages, d, 64].  Grid: (ceil(d / 128), rows).
    """
    put = setter(half)

    @cuda.jit
    def append_keys(x, d, positions, sequences, table, stride, keys):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 128 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < d:
            p, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
            page = I(table[I(sequence * stride) + p // CHUNK])
            put(keys, (np.int64(page) * d + i) * CHUNK + p % CHUNK, x[np.int64(t) * d + i])

    return append_keys


@kernel(I32P, i32, i32, I32P, threads=ENDS)
def ends() -> KernelCode:
    """The number of the last chosen position of each row.  Arguments: positions, top_k, rows, out.  Grid: (ceil(rows /
    ``ENDS``),)."""

    @cuda.jit
    def ends(positions, top_k, rows, out):
        let_next_begin()
        t = I(cuda.blockIdx.x * ENDS + cuda.threadIdx.x)
        wait_for_inputs()
        if t < rows:
            out[t] = min(I(positions[t]), I(top_k - 1))

    return ends


def heads_at_once(d: int) -> int:
    """Heads of a warp that are multiplied with keys of d elements at once: 8, 4, 2 or 1.  Raises DeviceError if the queries
    of one head per warp do not fit into shared memory."""
    for heads in (8, 4, 2, 1):
        if heads * WARPS * d <= FLOATS:
            return heads
    most = FLOATS // WARPS
    raise DeviceError(f'an indexer on a GPU takes keys of at most {most} elements, not {d}; use device="cpu".')


@kernel(F32P, F32P, f32_t, U32P, I32P, I32P, I32P, i32, i32, i32, i32, F32P, threads=32 * WARPS)
def score(n_head: int, d: int, half: bool, mixed: bool) -> KernelCode:
    """The scores of all compressed rows that rows see, for rows that see more than top_k.

    Arguments: q, w, factor, keys (as words), positions, sequences, table, stride, ratio, top_k, parts, scores.  ``mixed``:
    rows of the pass may belong to several sequences.  Grid: (parts, rows).
    """
    own = heads_at_once(d)
    together, n_dots, n_query = WARPS * own, 2 * own, WARPS * own * d
    # Queries are stored by columns; with this distance of rows eight lanes store to different banks.
    pitch = together + 4
    n_shared = max(d * pitch, together * CHUNK)
    words, rounds, step = CHUNK // 2 if half else CHUNK, -(-n_head // together), math.gcd(d, 8)
    n_values = 2 * step

    @device
    def place_queries(queries, shared, first, thread):
        """Queries of the heads from ``first`` on, [d, pitch], to shared memory; 0 for heads that do not exist."""
        i = thread
        while i < n_query:
            h = I(first + i // d)
            shared[I(i % d) * pitch + i // d] = queries[h * d + i % d] if h < n_head else f32(0.0)
            i = I(i + 32 * WARPS)

    @device
    def multiply(keys, shared, warp, lane, dots):
        """The products of a warp's heads with the lane's two rows, dots [heads, 2]."""
        values = cuda.local.array(n_values, np.float32)
        for k in range(n_dots):
            dots[k] = f32(0.0)
        for i in range(0, d, step):
            # All loads first: they take long.
            for e in range(step):
                if half:
                    word = keys[I((i + e) * words + lane)]
                    values[2 * e], values[2 * e + 1] = low_half(word), high_half(word)
                else:
                    both = load2(keys, I((i + e) * words + 2 * lane))
                    values[2 * e], values[2 * e + 1] = bits_float(I(both[0])), bits_float(I(both[1]))
            for e in range(step):
                of_heads = advance(shared, I((i + e) * pitch + warp * own))
                for k in range(own):
                    dots[2 * k] = fma(of_heads[k], values[2 * e], dots[2 * k])
                    dots[2 * k + 1] = fma(of_heads[k], values[2 * e + 1], dots[2 * k + 1])

    @cuda.jit
    def score(q, w, factor, keys, positions, sequences, table, stride, ratio, top_k, parts, scores):
        let_next_begin()
        shared = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        dots = cuda.local.array(n_dots, np.float32)
        t, thread = I(cuda.blockIdx.y), I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        queries, weights = advance(q, np.int64(t) * (n_head * d)), advance(w, np.int64(t) * n_head)
        wait_for_inputs()
        n = I(I(positions[t] + 1) // ratio)
        if n <= top_k:
            return
        chunk = I(cuda.blockIdx.x)
        if chunk * CHUNK >= n:
            return
        pages = advance(table, I(I(sequences[t if mixed else I(0)]) * stride))
        page = I(pages[chunk])
        while chunk * CHUNK < n:
            own_keys = advance(keys, np.int64(page) * (words * d))
            # The next one is there when it is needed.
            following = I(chunk + parts)
            if following * CHUNK < n:
                page = I(pages[following])
            total = f32(0.0)
            for r in range(rounds):
                cuda.syncthreads()
                place_queries(queries, shared, I(r * together), thread)
                cuda.syncthreads()
                multiply(own_keys, shared, warp, lane, dots)
                cuda.syncthreads()
                # The same memory, [heads, 64].
                for k in range(own):
                    to = I(I(warp * own + k) * CHUNK + 2 * lane)
                    shared[to] = rectified(dots[2 * k])
                    shared[to + 1] = rectified(dots[2 * k + 1])
                cuda.syncthreads()
                if thread < CHUNK:
                    for h in range(min(together, I(n_head - r * together))):
                        total = fma(weights[r * together + h] * factor, shared[h * CHUNK + thread], total)
            if thread < CHUNK:
                scores[np.int64(t) * stride * CHUNK + chunk * CHUNK + thread] = finite(total)
            chunk = following

    return score


NAN_KEY = u32(0xFFFFFFFF)
"""The key of NaN, above those of all numbers."""


@device
def key_of(x):
    """A uint32 that orders as the score x does."""
    return u32(order_key(x)) ^ u32(0x80000000)


@kernel(F32P, i32, I32P, i32, i32, I32P, threads=lambda threads: threads)
def choose(threads: int) -> KernelCode:
    """The chosen rows of each row of the pass.

    Arguments: scores, stride (of a row of scores), positions, ratio, top_k, chosen.  Grid: (rows,), blocks of ``threads``, a
    multiple of 32 up to 1024.
    """
    n_warps = threads // 32

    @device
    def over_block(count, partial, warp, lane):
        """The sum of a count of all threads; two calls in turn need different memory ``partial`` [32]."""
        count = lanes_sum(count)
        if lane == 0:
            partial[warp] = count
        cuda.syncthreads()
        return lanes_sum(partial[lane] if lane < n_warps else I(0))

    @device
    def before(count, counts, partial, thread, warp, lane):
        """The sum of a count of the threads before this one; counts [threads]."""
        counts[thread] = count
        of_warp = lanes_sum(count)
        if lane == 0:
            partial[warp] = of_warp
        cuda.syncthreads()
        total = lanes_sum(partial[lane] if lane < warp else I(0))
        for k in range(I(warp * 32), thread):
            total = I(total + counts[k])
        return total

    @cuda.jit
    def choose(scores, stride, positions, ratio, top_k, chosen):
        let_next_begin()
        counts = cuda.shared.array(threads, np.int32)
        equals = cuda.shared.array(threads, np.int32)
        partials = cuda.shared.array(64, np.int32)
        even, odd = pointer(partials), advance(pointer(partials), 32)
        t, thread = I(cuda.blockIdx.x), I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        own, out = advance(scores, np.int64(t) * stride), advance(chosen, np.int64(t) * top_k)
        wait_for_inputs()
        n = I(I(positions[t] + 1) // ratio)
        if n <= top_k:
            r = thread
            while r < top_k:
                out[r] = r if r < n else I(-1)
                r = I(r + threads)
            return
        # The largest key that at least top_k rows reach, bit by bit: the key of the last chosen row.
        least, bit, exact = u32(0), I(31), False
        while bit >= 0 and not exact:
            candidate = least | (u32(1) << u32(bit))
            count, r = I(0), thread
            while r < n:
                count = I(count + I(key_of(own[r]) >= candidate))
                r = I(r + threads)
            if bit & 1:
                count = over_block(count, odd, warp, lane)
            else:
                count = over_block(count, even, warp, lane)
            if count >= top_k:
                least = candidate
            exact = count == top_k
            bit = I(bit - 1)
        # Each thread counts its run, then stores behind the runs before it.
        each = I(I(n + threads - 1) // threads)
        begin = min(n, I(thread * each))
        end = min(n, I(begin + each))
        larger, equal = I(0), I(0)
        for r in range(begin, end):
            key = key_of(own[r])
            larger = I(larger + I(key > least))
            equal = I(equal + I(key == least))
        cuda.syncthreads()
        place = before(larger, counts, even, thread, warp, lane)
        same = before(equal, equals, odd, thread, warp, lane)
        cuda.syncthreads()
        left = I(top_k - over_block(larger, even, warp, lane))
        not_finite = False
        for r in range(begin, end):
            key = key_of(own[r])
            if key > least or (key == least and same < left):
                out[place + min(same, left)] = r
                not_finite |= key == NAN_KEY
            if key > least:
                place = I(place + 1)
            if key == least:
                same = I(same + 1)
        # The first place belongs to another thread.
        cuda.syncthreads()
        if not_finite:
            out[0] = I(-1)

    return choose
