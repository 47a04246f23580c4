# mypy: allow-untyped-defs
"""Attention 1. A block for each head.

    python examples/ladder/attention_1_block_per_head.py

One token attends to n positions, which are divided into chunks of 64.  For each chunk a block computes 64 scores, one for
each thread; their maximum m; the weights e**(score - m) and their sum s; and the sum o of the values with these weights, one
element for each thread.  The chunks are joined in groups of eight, and the groups are joined, in rising order.

It is slow because a GPU has 132 multiprocessors, and 32 heads are 32 blocks: three quarters of the GPU do nothing.  In a
block, everything waits for the chunk before.
"""

import numpy as np
from ladder import HEADS, attention
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import exp, fma, half_to_float
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, U16P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@device
def join(m, s, o, m1, s1, o1):
    """The maximum, the sum of weights and an element of two parts."""
    top = max(m, m1)
    a, b = exp(m - top), exp(m1 - top)
    return top, fma(s, a, b * s1), fma(o, a, b * o1)


@kernel(F32P, U16P, U16P, F32P, i32, threads=128)
def block_per_head(d: int, share: int):
    """out = sum_j softmax_j(q . k_j) v_j for each head; d: elements of a head; share: heads that share keys and values."""
    nothing = f32(-np.inf)

    @cuda.jit
    def block_per_head(queries, keys, values, out, n):
        scores, weights = cuda.shared.array(64, np.float32), cuda.shared.array(64, np.float32)
        sums = cuda.shared.array(1, np.float32)
        thread, head = I(cuda.threadIdx.x), I(cuda.blockIdx.x)
        begin = np.int64(head // share) * n
        m, s, o = nothing, f32(0), f32(0)
        group_m, group_s, group_o = nothing, f32(0), f32(0)
        for first in range(0, n, 64):
            if thread < 64:
                score = nothing
                if first + thread < n:
                    score = f32(0)
                    for i in range(d):
                        key = half_to_float(keys[(begin + first + thread) * d + i])
                        score = fma(queries[head * d + i], key, score)
                scores[thread] = score
            cuda.syncthreads()
            top = nothing
            for j in range(64):
                top = max(top, scores[j])
            if thread < 64:
                weights[thread] = exp(scores[thread] - top)
            cuda.syncthreads()
            if thread < 32:
                total = fold32(weights[thread] + weights[thread + 32])
                if thread == 0:
                    sums[0] = total
            element = f32(0)
            if thread < d:
                for j in range(min(64, n - first)):
                    element = fma(weights[j], half_to_float(values[(begin + first + j) * d + thread]), element)
            cuda.syncthreads()
            group_m, group_s, group_o = join(group_m, group_s, group_o, top, sums[0], element)
            if first % 512 == 448 or first + 64 >= n:  # the last chunk of a group
                m, s, o = join(m, s, o, group_m, group_s, group_o)
                group_m, group_s, group_o = nothing, f32(0), f32(0)
        if thread < d:
            out[head * d + thread] = o / s

    return block_per_head


if __name__ == "__main__":
    heads, kv, d, n = HEADS
    attention(__doc__, (block_per_head(d, heads // kv), (heads, 128), ("queries", "keys", "values", "out", "n")))
