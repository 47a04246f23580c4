"""What multi-token prediction needs beside a layer: the trunk's outputs by position, and the input of the layer.

Formula: ``engine/cpu/mtp.py``.
Shapes: x, e float32 [rows, n]; ring float32 [slots, length, n]; positions, sequences (slots) int32 [rows]; weights float32
    [n]; out float32 [rows, 2 n].  With s streams: ring [slots, length, s n], out [rows * s, 2 n].  mixed: 1: each row has its
    own slot; 0: all have that of the first row; for ``keep_rows`` also 2: each has its own, those of a slot are consecutive,
    and none is a copy.
Who owns what: ``keep_rows``: a thread owns one element; ``mtp_input``: a block of 256 threads owns one half of a row.
Reduction order: that of ``engine/cuda/rms_norm.py``.
Bytes moved: 8 n per row; 16 n for the input.
"""

import math

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS
from engine.cuda.intrinsics import advance, let_next_begin, wait_for_inputs
from engine.cuda.rms_norm import inverse_rms
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, F32P, i32, I32P, I32P, i32, i32, i32, threads=256)
def keep_rows() -> KernelCode:
    """Store x[t] in row positions[t] % length of its sequence's ring; if a sequence has more rows than that, the last ones
    stay.

    Grid: (ceil(n / 256), rows).
    """

    @cuda.jit
    def keep_rows(ring, x, length, positions, sequences, mixed, rows, n):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        stays = True
        # With no more rows than a ring has, each has a place of its own.
        if rows > length:
            if mixed == 1:
                for u in range(rows):
                    if sequences[u] == sequence and positions[u] >= position + length:
                        stays = False
            else:
                later = I(t + length)
                stays = later >= rows or (mixed and sequences[later] != sequence)
        if i < n and stays:
            row = I(sequence * length + position % length)
            ring[row * np.int64(n) + i] = x[t * np.int64(n) + i]

    return keep_rows


@kernel(F32P, F32P, i32, I32P, I32P, i32, i32, i32, F32P, threads=256)
def beside() -> KernelCode:
    """out[t] = e[t], n elements, followed by its sequence's row of ``hiddens`` for the position before, m elements.

    Grid: (ceil((n + m) / 256), rows).
    """

    @cuda.jit
    def beside(e, hiddens, length, positions, sequences, mixed, n, m, out):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            out[t * np.int64(n + m) + i] = e[t * np.int64(n) + i]
        elif i < n + m:
            row = I(I(sequences[t * mixed] * length) + I(I(positions[t] - 1 + length) % length))
            out[t * np.int64(n + m) + i] = hiddens[row * np.int64(m) + I(i - n)]

    return beside


@kernel(F32P, F32P, F32P, i32, F32P, I32P, I32P, i32, f32_t, i32, F32P, threads=256)
def mtp_input(streams: int = 1) -> KernelCode:
    """out[t] = normalized e[t], followed by its sequence's normalized row of ``hiddens`` for the position before, or by
    one of the streams of that row.

    Grid: (2, rows * streams).
    """

    @cuda.jit
    def mtp_input(e, e_norm, hiddens, length, h_norm, positions, sequences, mixed, eps, n, out):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        half, place = I(cuda.blockIdx.x), I(cuda.blockIdx.y)
        t, stream = I(place // streams), I(place % streams)
        weight = e_norm if half == 0 else h_norm
        x, row, there = e, t, True
        wait_for_inputs()
        if half == 1:
            before = I(positions[t] - 1)
            there = before >= 0
            kept = I(I(sequences[t * mixed] * length) + before % length)
            x, row = hiddens, I(kept * streams + stream) if there else I(0)
        x = advance(x, row * np.int64(n))
        # The norm of zeros is known.
        r = inverse_rms(x, n, eps, chains) if there else f32(1.0) / f32(math.sqrt(eps))
        out = advance(out, I(2 * place + half) * np.int64(n))
        i = I(cuda.threadIdx.x)
        while i < n:
            value = x[i] if there else f32(0.0)
            out[i] = value * r * weight[i]
            i = I(i + 256)

    return mtp_input
