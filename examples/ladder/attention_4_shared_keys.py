# mypy: allow-untyped-defs
"""Attention 4. Heads that share keys share a block.

    python examples/ladder/attention_4_shared_keys.py

Against step 3: four query heads read the same keys and values.  Before, four blocks read them, at different times.  Here one
block has all four heads, 64 threads each.  The first head that reads a word brings it into the L1 cache, where the others
find it.  A thread also computes two elements instead of one, so that a load of values is a word.

Bytes: a quarter, from the L2 cache or from memory.
Instructions: half as many loads of values and weights.
"""

import numpy as np
from attention_2_block_per_chunk import JOIN
from ladder import HEADS, attention
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import exp, fma
from engine.cuda.products.lanes import high_half, low_half
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, U32P, U32P, F32P, i32, i32, threads=lambda d, share: 64 * share)
def shared_keys(d: int, share: int):
    """The state of each chunk of each head.  A block has a chunk of a KV head: 64 threads for each of its ``share`` heads."""
    n_scores = 64 * share

    @cuda.jit
    def shared_keys(queries, pairs, values, states, n, chunks):
        scores, weights = cuda.shared.array(n_scores, np.float32), cuda.shared.array(n_scores, np.float32)
        thread, lane = I(cuda.threadIdx.x), I(cuda.threadIdx.x & 63)
        kv, chunk = I(cuda.blockIdx.x // chunks), I(cuda.blockIdx.x % chunks)
        mine = I(thread - lane)  # where the scores of the thread's head begin
        head, first = I(kv * share + (thread >> 6)), I(64 * chunk)
        state = np.int64(I(head * chunks + chunk)) * (d + 2)
        score = f32(-np.inf)
        if first + lane < n:
            score, at = f32(0), np.int64(cuda.blockIdx.x) * (d // 2 * 64) + lane
            for i in range(d // 2):
                word = pairs[at + 64 * i]
                score = fma(queries[head * d + 2 * i], low_half(word), score)
                score = fma(queries[head * d + 2 * i + 1], high_half(word), score)
        scores[thread] = score
        cuda.syncthreads()
        top = f32(-np.inf)
        for j in range(64):
            top = max(top, scores[mine + j])
        weights[thread] = exp(score - top)
        cuda.syncthreads()
        if lane < 32:
            total = fold32(weights[thread] + weights[thread + 32])
            if lane == 0:
                states[state + d] = top
                states[state + d + 1] = total
        if lane < d // 2:
            low, high = f32(0), f32(0)
            at = (np.int64(kv) * n + first) * (d // 2) + lane
            for j in range(min(64, n - first)):
                word = values[at + d // 2 * j]
                low = fma(weights[mine + j], low_half(word), low)
                high = fma(weights[mine + j], high_half(word), high)
            states[state + 2 * lane] = low
            states[state + 2 * lane + 1] = high

    return shared_keys


heads, kv, d, n = HEADS
ATTEND = (
    shared_keys(d, heads // kv),
    (kv * -(-n // 64), 64 * heads // kv),
    ("queries", "pairs", "values", "states", "n", "chunks"),
)

if __name__ == "__main__":
    attention(__doc__, ATTEND, JOIN)
