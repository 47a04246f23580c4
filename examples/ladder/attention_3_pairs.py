# mypy: allow-untyped-defs
"""Attention 3. Keys as threads read them.

    python examples/ladder/attention_3_pairs.py

Against step 2: there, neighbouring threads read keys that are 2 d bytes apart, like the first step of the product.  Here a
chunk of keys is stored with the elements first and the positions last.  Two elements of a position are a word, and the 64
words of a chunk are neighbours.  The cache can be stored in this order from the beginning, since the kernel that appends a
key may write it anywhere.

Bytes: a load of a warp is 128 neighbouring bytes, all used.
Instructions: one load for two elements.
The values were already in the right order: there, neighbouring threads have neighbouring elements.
"""

import numpy as np
from attention_2_block_per_chunk import JOIN
from ladder import HEADS, attention
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import exp, fma, half_to_float
from engine.cuda.products.lanes import high_half, low_half
from engine.cuda.runtime.compiler import F32P, U16P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, U32P, U16P, F32P, i32, i32, threads=128)
def pairs(d: int, share: int):
    """The state of each chunk of each head: d elements, the maximum, the sum of weights."""

    @cuda.jit
    def pairs(queries, pairs, values, states, n, chunks):
        scores, weights = cuda.shared.array(64, np.float32), cuda.shared.array(64, np.float32)
        thread = I(cuda.threadIdx.x)
        head, chunk = I(cuda.blockIdx.x // chunks), I(cuda.blockIdx.x % chunks)
        kv, first = I(head // share), I(64 * chunk)
        begin = np.int64(kv) * n
        state = np.int64(cuda.blockIdx.x) * (d + 2)
        if thread < 64:
            score = f32(-np.inf)
            if first + thread < n:
                score, at = f32(0), np.int64(I(kv * chunks + chunk)) * (d // 2 * 64) + thread
                for i in range(d // 2):
                    word = pairs[at + 64 * i]
                    score = fma(queries[head * d + 2 * i], low_half(word), score)
                    score = fma(queries[head * d + 2 * i + 1], high_half(word), score)
            scores[thread] = score
        cuda.syncthreads()
        top = f32(-np.inf)
        for j in range(64):
            top = max(top, scores[j])
        if thread < 64:
            weights[thread] = exp(scores[thread] - top)
        cuda.syncthreads()
        if thread < 32:
            total = fold32(weights[thread] + weights[thread + 32])
            if thread == 0:
                states[state + d] = top
                states[state + d + 1] = total
        if thread < d:
            element = f32(0)
            for j in range(min(64, n - first)):
                element = fma(weights[j], half_to_float(values[(begin + first + j) * d + thread]), element)
            states[state + thread] = element

    return pairs


if __name__ == "__main__":
    heads, kv, d, n = HEADS
    arguments = ("queries", "pairs", "values", "states", "n", "chunks")
    attention(__doc__, (pairs(d, heads // kv), (heads * -(-n // 64), 128), arguments), JOIN)
