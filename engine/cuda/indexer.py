"""The indexer: which compressed rows a token attends to.

Formula: ``engine/cpu/indexer.py``.
Shapes: q float32 [rows, n_head, d]; w float32 [rows, n_head]; keys float32 or float16 [chunks, d, 64]; scores float32 [rows,
    64 chunks]; chosen int32 [rows, top_k].
Who owns what: ``score``: a block of 64 threads owns a row of the pass and every ``PARTS``-th chunk, a thread one compressed
    row of a chunk; ``choose``: a block of 256 threads owns a row of the pass, and a thread a run of consecutive compressed
    rows.
Reduction order: that of ``engine/cpu/indexer.py``.  Counts are integers, whose order does not matter.
Bytes moved: d * element size per visible row and four heads; 20 n for the choice.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cpu.sample import order_key
from engine.cuda.elements import getter
from engine.cuda.intrinsics import advance, fma, let_next_begin, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

PARTS = 128
"""Blocks that share the chunks of a row."""

HEADS = 4
"""Heads that are multiplied with a key at once."""

THREADS = 256
"""Threads of the block that chooses."""


@device
def positive(x):  # type: ignore[no-untyped-def]
    """x, or 0 if that is larger."""
    return x if x > f32(0.0) else f32(0.0)


@kernel(F32P, F32P, f32_t, F32P, I32P, i32, i32, i32, i32, F32P, threads=CHUNK)
def score(n_head: int, d: int, half: bool) -> KernelCode:
    """The scores of all compressed rows that rows see, for rows that see more than top_k.  Grid: (parts, rows)."""
    get = getter(half)

    @cuda.jit
    def score(q, w, factor, keys, positions, ratio, top_k, parts, stride, scores):  # type: ignore[no-untyped-def]
        let_next_begin()
        dots = cuda.local.array(HEADS, np.float32)
        t, lane = I(cuda.blockIdx.y), I(cuda.threadIdx.x)
        queries = advance(q, np.int64(t) * (n_head * d))
        wait_for_inputs()
        n = I(I(positions[t] + 1) // ratio)
        if n > top_k:
            chunk = I(cuda.blockIdx.x)
            while chunk * CHUNK < n:
                key = np.int64(chunk) * (CHUNK * d) + lane
                total = f32(0.0)
                for h in range(0, n_head, HEADS):
                    for k in range(HEADS):
                        dots[k] = f32(0.0)
                    for i in range(d):
                        x = get(keys, key + i * CHUNK)
                        for k in range(HEADS):
                            if h + k < n_head:
                                dots[k] = fma(queries[(h + k) * d + i], x, dots[k])
                    for k in range(HEADS):
                        if h + k < n_head:
                            total = fma(w[t * n_head + h + k] * factor, positive(dots[k]), total)
                scores[np.int64(t) * stride + chunk * CHUNK + lane] = total
                chunk = I(chunk + parts)

    return score


@device
def key_of(x):  # type: ignore[no-untyped-def]
    """A uint32 that orders as the score x does."""
    return u32(order_key(x)) ^ u32(0x80000000)


@kernel(F32P, i32, I32P, i32, i32, I32P, threads=THREADS)
def choose() -> KernelCode:
    """The chosen rows of each row of the pass.  Grid: (rows,)."""

    @cuda.jit
    def choose(scores, stride, positions, ratio, top_k, chosen):  # type: ignore[no-untyped-def]
        let_next_begin()
        counts = cuda.shared.array(THREADS, np.int32)
        equals = cuda.shared.array(THREADS, np.int32)
        t, thread = I(cuda.blockIdx.x), I(cuda.threadIdx.x)
        own, out = advance(scores, np.int64(t) * stride), advance(chosen, np.int64(t) * top_k)
        wait_for_inputs()
        n = I(I(positions[t] + 1) // ratio)
        if n <= top_k:
            r = thread
            while r < top_k:
                out[r] = r if r < n else I(-1)
                r = I(r + THREADS)
            return
        # The key of the last chosen row, eight bits at a time from the highest; ``left`` of its rows are chosen.
        least, left = u32(0), I(top_k)
        for step in range(4):
            shift = u32(24 - 8 * step)
            cuda.syncthreads()
            counts[thread] = I(0)
            cuda.syncthreads()
            r = thread
            while r < n:
                key = key_of(own[r])
                if step == 0 or (key >> (shift + u32(8))) == least:
                    cuda.atomic.add(counts, I((key >> shift) & u32(255)), I(1))
                r = I(r + THREADS)
            cuda.syncthreads()
            digit, above = I(255), I(0)
            while above + counts[digit] < left:
                above = I(above + counts[digit])
                digit = I(digit - 1)
            least, left = (least << u32(8)) | u32(digit), I(left - above)
        # Each thread counts its run, then stores behind the runs before it.
        each = I((n + THREADS - 1) // THREADS)
        begin = min(n, I(thread * each))
        end = min(n, I(begin + each))
        larger, equal = I(0), I(0)
        for r in range(begin, end):
            key = key_of(own[r])
            larger = I(larger + I(key > least))
            equal = I(equal + I(key == least))
        cuda.syncthreads()
        counts[thread] = larger
        equals[thread] = equal
        cuda.syncthreads()
        before, same = I(0), I(0)
        for k in range(thread):
            before = I(before + counts[k])
            same = I(same + equals[k])
        for r in range(begin, end):
            key = key_of(own[r])
            if key > least or (key == least and same < left):
                out[before + min(same, left)] = r
            if key > least:
                before = I(before + 1)
            if key == least:
                same = I(same + 1)

    return choose
