"""Compressed rows: each is made of the tokens of a block, and perhaps of the block before it.

Formula: ``engine/cpu/compressor.py``.
Shapes: values, scores float32 [rows, overlap * d] of the pass; ape float32 [ratio, overlap * d]; norm float32 [d]; pending
    float32 [length, 2, overlap * d]; stored float32 or float16 [chunks, 64, d], or transposed, [chunks, d, 64].
Who owns what: ``compress``: a block of 256 threads owns a block of tokens that the pass may complete, a thread every 256th
    element; ``keep``: a thread owns an element of a row.
Reduction order: that of ``engine/cpu/compressor.py``.
Bytes moved: 8 overlap d per token that a row is made of; 16 overlap d per row of the pass.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cpu.rms_norm import NORM_CHAINS
from engine.cuda.elements import setter
from engine.cuda.intrinsics import advance, exp, fma, let_next_begin, pointer, wait_for_inputs
from engine.cuda.rms_norm import inverse_rms
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(
    *(F32P, F32P, i32, F32P, F32P, f32_t, i32, i32, I32P, F32P, i32, F32P, i32, F32P),
    threads=256,
)
def compress(d: int, half: bool, transposed: bool) -> KernelCode:
    """Store the rows of the blocks that the pass completes.  Grid: (ceil(rows / ratio),)."""
    put = setter(half)

    @cuda.jit
    def compress(  # type: ignore[no-untyped-def]
        values, scores, rows, ape, norm, eps, ratio, overlap, positions, table, n_rot, pending, length, stored
    ):
        let_next_begin()
        x = cuda.shared.array(d, np.float32)
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        width, thread = I(overlap * d), I(cuda.threadIdx.x)
        wait_for_inputs()
        start = I(positions[0])
        r = I(start // ratio + I(cuda.blockIdx.x))
        end = I(I(r + 1) * ratio)
        if end > start + rows:
            return
        begin = max(I(0), I(end - overlap * ratio))
        j = thread
        while j < d:
            most, total, sum_ = f32(-np.inf), f32(0.0), f32(0.0)
            for step in range(2):
                for p in range(begin, end):
                    # The second half of what the last block has, the first half of what the one before it has.
                    at = I(j + (I(I(overlap - 1) * d) if p >= r * ratio else I(0)))
                    place, old = np.int64(p - start) * width + at, np.int64(p % length) * 2 * width + at
                    b = scores[place] if p >= start else pending[old + width]
                    s = b + ape[I(p % ratio) * width + at]
                    if step == 0:
                        most = max(most, s)
                    else:
                        a = values[place] if p >= start else pending[old]
                        e = exp(s - most)
                        total = total + e
                        sum_ = fma(e, a, sum_)
            x[j] = sum_ / total
            j = I(j + 256)
        cuda.syncthreads()
        factor = inverse_rms(pointer(x), I(d), eps, chains)
        angles = advance(table, np.int64(r * ratio) * n_rot)
        chunk = np.int64(r // CHUNK) * (CHUNK * d)
        lane, tail = I(r % CHUNK), I(d - n_rot)
        j = thread
        while j < d:
            value = x[j] * factor * norm[j]
            if j >= tail:
                # The pair of this element, (a, b), and its angle.
                k = I(I(j - tail) // 2)
                first = I(tail + 2 * k)
                a, b = x[first] * factor * norm[first], x[first + 1] * factor * norm[first + 1]
                cos, sin = angles[k], angles[n_rot // 2 + k]
                value = fma(a, cos, -(b * sin)) if j == first else fma(a, sin, b * cos)
            place = I(j * CHUNK + lane) if transposed else I(lane * d + j)
            put(stored, chunk + place, value)
            j = I(j + 256)

    return compress


@kernel(F32P, F32P, i32, i32, I32P, i32, F32P, threads=256)
def keep() -> KernelCode:
    """Store values and scores in the ring; if there are more rows than it holds, the last ones stay.  Grid: (ceil(width /
    256), rows)."""

    @cuda.jit
    def keep(values, scores, rows, width, positions, length, pending):  # type: ignore[no-untyped-def]
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < width and t >= rows - length:
            place = np.int64(positions[t] % length) * 2 * width + i
            pending[place] = values[t * np.int64(width) + i]
            pending[place + width] = scores[t * np.int64(width) + i]

    return keep
