"""Pairs of rows and experts sorted by expert, for the products of ``engine/cuda/products/stream_experts.py``.

Formula: listed: the pairs of the first expert, those of the second, and so on, of each in a fixed order; items: expert, where
    its pairs begin in the list, the number of them, at most the columns of a product, and the number of all items.
Shapes: ids int32 [pairs]; listed int32 [pairs]; items int32 [``n_items``, 4], of which as many are written as there are.
Who owns what: a block owns an expert, and counts the pairs of all experts; a thread lists the pairs that it has found, after
    those of the threads before it.
Reduction order: none; the counts are integers.
Bytes moved: the ids twice per expert, from the L2 cache; and the first records of every expert that has pairs, from memory
    to the L2 cache, while nothing else reads memory.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, lane_xor_int, let_next_begin, pointer, prefetch, wait_for_inputs
from engine.cuda.runtime.compiler import I32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

u32 = np.uint32
I = np.int32  # noqa: E741

THREADS = 256
MOST_EXPERTS = 1024

AHEAD = 64 << 10
"""Bytes of an expert that are read ahead: about as many as memory gives until its product begins."""


def n_items(pairs: int, n_expert: int, columns: int) -> int:
    """The most items of ``columns`` pairs."""
    return min(pairs, pairs // columns + n_expert)


@kernel(I32P, i32, I32P, I32P, U32P, i32, i32, i32, threads=THREADS)
def list_pairs(columns: int) -> KernelCode:
    """List pairs by expert, and items of up to ``columns`` of them.

    w: the matrices of all experts; stride: the words of 16 of their rows; n_rows: rows of an expert; n_bytes: of its matrix
    that are read ahead.  Grid: n_expert blocks.
    """
    warps = THREADS // 32

    @cuda.jit
    def list_pairs(ids, pairs, listed, items, w, stride, n_rows, n_bytes):
        let_next_begin()
        counts = cuda.shared.array(MOST_EXPERTS, np.int32)
        # Pairs of experts before this one, items of those, and items of all.
        sums = cuda.shared.array(3, np.int32)
        owns = pointer(cuda.shared.array(warps, np.int32))
        thread, expert, n_expert = I(cuda.threadIdx.x), I(cuda.blockIdx.x), I(cuda.gridDim.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        i = thread
        while i < n_expert:
            counts[i] = I(0)
            i = I(i + THREADS)
        if thread < 3:
            sums[thread] = I(0)
        cuda.syncthreads()
        wait_for_inputs()
        own, i = I(0), thread
        while i < pairs:
            other = ids[i]
            cuda.atomic.add(counts, other, I(1))
            own = I(own + (I(1) if other == expert else I(0)))
            i = I(i + THREADS)
        # place: where the thread's own pairs go, after those of all threads before it.
        place, total = I(0), own
        for k in range(5):
            others = lane_xor_int(total, I(1 << k))
            if lane & (1 << k):
                place = I(place + others)
            total = I(total + others)
        if lane == 0:
            owns[warp] = total
        cuda.syncthreads()
        count = counts[expert]
        if thread == 0 and count > 0 and n_bytes > 0:
            prefetch(w, np.int64(I(expert * n_rows) >> 4) * stride, n_bytes)
        i = thread
        while i < n_expert:
            n = counts[i]
            n_own = I(u32(n + (columns - 1)) // u32(columns))
            if i < expert:
                cuda.atomic.add(sums, 0, n)
                cuda.atomic.add(sums, 1, n_own)
            cuda.atomic.add(sums, 2, n_own)
            i = I(i + THREADS)
        cuda.syncthreads()
        start = sums[0]
        place = I(place + start)
        for k in range(warps):
            if k < warp:
                place = I(place + owns[k])
        if own > 0:
            i = thread
            while i < pairs:
                if ids[i] == expert:
                    listed[place] = i
                    place = I(place + 1)
                i = I(i + THREADS)
        j = thread
        while j * columns < count:
            item = advance(items, I(4 * I(sums[1] + j)))
            item[0] = expert
            item[1] = I(start + j * columns)
            item[2] = min(I(columns), I(count - j * columns))
            item[3] = sums[2]
            j = I(j + THREADS)

    return list_pairs
