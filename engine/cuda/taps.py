"""What a network that reads several layers of another model needs beside its own layers (EAGLE-3, Li et al. 2025).

Formula: ``engine/cpu/taps.py``.
Shapes: rings float32 [slots, length, n]; positions, sequences (slots) int32 [rows]; x float32 [rows, n], out [rows, columns];
    logits float32 [rows, n_draft], index int32 [n_vocab], out [rows, n_vocab].  mixed: 1: each row has its own slot; 0: all
    have that of the first row.
Who owns what: a thread owns one element of out.
Reduction order: none.
Bytes moved: 8 n per row; 8 n_vocab per row for logits, and the index.
"""

import numpy as np
from numba import cuda

from engine.cpu.taps import UNKNOWN
from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, i32, I32P, I32P, i32, i32, F32P, threads=256)
def rows_before() -> KernelCode:
    """Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def rows_before(rings, length, positions, sequences, mixed, n, out):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            before = I(positions[t] - 1)
            row = I(I(sequences[t * mixed] * length) + I(before + length) % length)
            out[t * np.int64(n) + i] = rings[row * np.int64(n) + i] if before >= 0 else f32(0.0)

    return rows_before


@kernel(F32P, i32, i32, i32, F32P, threads=256)
def place_columns() -> KernelCode:
    """Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def place_columns(x, n, begin, columns, out):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            out[t * np.int64(columns) + I(begin + i)] = x[t * np.int64(n) + i]

    return place_columns


@kernel(F32P, i32, I32P, i32, F32P, threads=256)
def spread_logits() -> KernelCode:
    """Grid: (ceil(n_vocab / 256), rows)."""

    @cuda.jit
    def spread_logits(logits, n_draft, index, n_vocab, out):
        let_next_begin()
        t, v = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if v < n_vocab:
            at = I(index[v])
            out[t * np.int64(n_vocab) + v] = logits[t * np.int64(n_draft) + at] if at >= 0 else UNKNOWN

    return spread_logits
