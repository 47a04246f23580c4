# mypy: allow-untyped-defs
"""Attention 2. A block for each chunk.

    python examples/ladder/attention_2_block_per_chunk.py

Against step 1: no chunk needs another one, so each has a block of its own, which stores a maximum, a sum and d elements.  A
second kernel joins them.  Chunks begin at multiples of 64 and are joined in a fixed order, so the bits are those of step 1.
(Kernels that divide the positions by the number of multiprocessors have other bits on each GPU.)

Bytes: each chunk is stored and read once more, 8 + 4 d bytes beside the 256 d of its keys and values.
Latency: 4096 blocks at depth 8192 instead of 32.
"""

import numpy as np
from attention_1_block_per_head import join
from ladder import HEADS, Launch, attention
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import exp, fma, half_to_float
from engine.cuda.runtime.compiler import F32P, U16P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, U16P, U16P, F32P, i32, i32, threads=128)
def block_per_chunk(d: int, share: int):
    """The state of each chunk of each head: d elements, the maximum, the sum of weights."""

    @cuda.jit
    def block_per_chunk(queries, keys, values, states, n, chunks):
        scores, weights = cuda.shared.array(64, np.float32), cuda.shared.array(64, np.float32)
        thread = I(cuda.threadIdx.x)
        head, chunk = I(cuda.blockIdx.x // chunks), I(cuda.blockIdx.x % chunks)
        begin, first = np.int64(head // share) * n, I(64 * chunk)
        state = np.int64(cuda.blockIdx.x) * (d + 2)
        if thread < 64:
            score = f32(-np.inf)
            if first + thread < n:
                score = f32(0)
                for i in range(d):
                    score = fma(queries[head * d + i], half_to_float(keys[(begin + first + thread) * d + i]), score)
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

    return block_per_chunk


@kernel(F32P, F32P, i32, threads=128)
def join_chunks_in_turn(d: int):
    """The result of each head from the states of its chunks; a block has a head, a thread an element."""
    nothing = f32(-np.inf)

    @cuda.jit
    def join_chunks_in_turn(states, out, chunks):
        thread, head = I(cuda.threadIdx.x), I(cuda.blockIdx.x)
        if thread < d:
            m, s, o = nothing, f32(0), f32(0)
            group_m, group_s, group_o = nothing, f32(0), f32(0)
            for c in range(chunks):
                state = np.int64(I(head * chunks + c)) * (d + 2)
                group_m, group_s, group_o = join(
                    group_m, group_s, group_o, states[state + d], states[state + d + 1], states[state + thread]
                )
                if c % 8 == 7 or c + 1 == chunks:
                    m, s, o = join(m, s, o, group_m, group_s, group_o)
                    group_m, group_s, group_o = nothing, f32(0), f32(0)
            out[head * d + thread] = o / s

    return join_chunks_in_turn


heads, kv, d, n = HEADS
JOIN: Launch = (join_chunks_in_turn(d), (heads, 128), ("states", "out", "chunks"))

if __name__ == "__main__":
    arguments = ("queries", "keys", "values", "states", "n", "chunks")
    attention(__doc__, (block_per_chunk(d, heads // kv), (heads * -(-n // 64), 128), arguments), JOIN)
