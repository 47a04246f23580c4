# mypy: allow-untyped-defs
"""Attention 5. Factors before sums.

    python examples/ladder/attention_5_factors_first.py

Against step 4: the second kernel joined chunk after chunk, each with two powers, and each power waited for the chunk before.
But the maximum of the first chunks of a group needs no sums.  So 128 threads first compute the factors of 128 chunks, all at
once.  What is left for each chunk is one ``fma``, whose operands were loaded before.  Eight chunks are loaded at a time, and
one thread more adds the weights as another one adds an element.

Latency: a chunk costs the time of one ``fma`` instead of two powers and a load.
"""

import numpy as np
from attention_1_block_per_head import join
from attention_4_shared_keys import ATTEND
from ladder import HEADS, Launch, attention
from numba import cuda

from engine.cuda.intrinsics import exp, fma
from engine.cuda.runtime.compiler import F32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, F32P, i32, threads=160)
def factors_first(d: int):
    """The result of each head from the states of its chunks.  A block has a head; thread d has the sum of weights."""
    nothing = f32(-np.inf)

    @cuda.jit
    def factors_first(states, out, chunks):
        tops = cuda.shared.array(128, np.float32)  # the maximum of a group up to a chunk
        before, own = cuda.shared.array(128, np.float32), cuda.shared.array(128, np.float32)  # the factors of a chunk
        sums = cuda.shared.array(1, np.float32)
        x = cuda.local.array(8, np.float32)
        thread, head = I(cuda.threadIdx.x), I(cuda.blockIdx.x)
        place = I(thread if thread < d else d + 1)
        m, o = nothing, f32(0)
        for first in range(0, chunks, 128):
            cuda.syncthreads()
            if thread < 128 and first + thread < chunks:
                last, top = nothing, nothing
                for c in range(I(thread & -8), I(thread + 1)):
                    last, top = top, max(top, states[np.int64(I(head * chunks + first + c)) * (d + 2) + d])
                own_top = states[np.int64(I(head * chunks + first + thread)) * (d + 2) + d]
                tops[thread], before[thread], own[thread] = top, exp(last - top), exp(own_top - top)
            cuda.syncthreads()
            for group in range(0, min(128, chunks - first), 8):
                count = min(8, chunks - first - group)
                for k in range(8):
                    if k < count:
                        x[k] = states[np.int64(I(head * chunks + first + group + k)) * (d + 2) + place]
                group_o = f32(0)
                for k in range(8):
                    if k < count:
                        group_o = fma(group_o, before[group + k], own[group + k] * x[k])
                m, _, o = join(m, f32(0), o, tops[group + count - 1], f32(0), group_o)
        if thread == d:
            sums[0] = o
        cuda.syncthreads()
        if thread < d:
            out[head * d + thread] = o / sums[0]

    return factors_first


heads, kv, d, n = HEADS
JOIN: Launch = (factors_first(d), (heads, 160), ("states", "out", "chunks"))

if __name__ == "__main__":
    attention(__doc__, ATTEND, JOIN)
