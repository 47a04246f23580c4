"""Rounding to floats of 8 or 4 bits, as ds4 and DeepSeek's own implementation round what DeepSeek-V4 stores.

Formula: ``engine/cpu/rounding.py``.
Shapes: x, y float32 [rows, heads, d]; stored float32 [pages, 64, d], or for keys [pages, d, 64], with the table int32
    [sequences, stride]; positions, sequences int32 [rows].
Who owns what: a block of 128 threads owns a head of a row, or a block of tokens that the pass may complete, or in a mixed
    pass a row that may complete one; a thread every 128th element, and in turn every 128th pair and every 128th block of
    elements that share a scale.
Reduction order: that of ``engine/cpu/rounding.py``.
Bytes moved: 8 per element.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cpu.rounding import EIGHT, FOUR
from engine.cuda.compressor import make_completed
from engine.cuda.intrinsics import (
    advance,
    half_to_float,
    let_next_begin,
    pointer,
    round_to_bits,
    scale_exponent,
    stored_half,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741

THREADS = 128


def make_round(d: int, four: bool) -> DeviceFunction:
    """The device function ``round_head(x, exponents, n_rot)``: all threads of a block round x [d] in shared memory;
    exponents: int32 [d / 32] of shared memory.  Threads must be together before, and may read any element after."""
    block, largest, floor, kept, least = FOUR if four else EIGHT
    factor, bits, normal = F(1.0 / np.sqrt(np.float64(d))), I(kept), I(least)

    @device
    def round_head(x, exponents, n_rot):
        thread = I(cuda.threadIdx.x)
        if four:
            stride = I(1)
            while stride < d:
                k = thread
                while k < d // 2:
                    i = I(k + I(k & ~I(stride - 1)))
                    a, b = x[i], x[i + stride]
                    x[i] = a + b
                    x[i + stride] = a - b
                    k = I(k + THREADS)
                stride = I(stride * 2)
                cuda.syncthreads()
            j = thread
            while j < d:
                x[j] = x[j] * factor
                j = I(j + THREADS)
            cuda.syncthreads()
        n = I(d) if four else I(d - n_rot)
        k = thread
        while k * block < n:
            most = floor
            for i in range(k * block, min(n, I(I(k + 1) * block))):
                most = max(most, abs(x[i]))
            exponents[k] = scale_exponent(most, largest)
            k = I(k + THREADS)
        cuda.syncthreads()
        j = thread
        while j < d:
            value = x[j]
            if j < n:
                value = round_to_bits(value, exponents[j // block], bits, normal)
            if not four:
                value = half_to_float(stored_half(value))
            x[j] = value
            j = I(j + THREADS)
        cuda.syncthreads()

    return round_head


@kernel(F32P, i32, F32P, threads=THREADS)
def round_heads(d: int, four: bool) -> KernelCode:
    """y = x rounded.  Grid: (heads, rows)."""
    round_head, n_blocks = make_round(d, four), -(-d // 32)

    @cuda.jit
    def round_heads(x, n_rot, y):
        let_next_begin()
        own = cuda.shared.array(d, np.float32)
        exponents = cuda.shared.array(n_blocks, np.int32)
        at = (np.int64(cuda.blockIdx.y) * I(cuda.gridDim.x) + I(cuda.blockIdx.x)) * d
        wait_for_inputs()
        x, y = advance(x, at), advance(y, at)
        j = I(cuda.threadIdx.x)
        while j < d:
            own[j] = x[j]
            j = I(j + THREADS)
        cuda.syncthreads()
        round_head(pointer(own), pointer(exponents), n_rot)
        j = I(cuda.threadIdx.x)
        while j < d:
            y[j] = own[j]
            j = I(j + THREADS)

    return round_heads


@kernel(I32P, I32P, i32, i32, i32, I32P, i32, F32P, threads=THREADS)
def round_rows(d: int, four: bool, mixed: bool) -> KernelCode:
    """Round the rows of the blocks that a pass completes; keys, if ``four``, are transposed.  ``mixed``: rows of the pass may
    belong to several sequences.  Grid: (``compressor.items``,)."""
    round_head, n_blocks, completed = make_round(d, four), -(-d // 32), make_completed(mixed)

    @cuda.jit
    def round_rows(positions, sequences, rows, ratio, n_rot, table, stride, stored):
        let_next_begin()
        own = cuda.shared.array(d, np.float32)
        exponents = cuda.shared.array(n_blocks, np.int32)
        wait_for_inputs()
        item = I(cuda.blockIdx.x)
        r = completed(positions, sequences, rows, ratio, item)
        if r < 0:
            return
        sequence = I(sequences[item if mixed else I(0)])
        stored = advance(stored, np.int64(table[I(sequence * stride) + r // CHUNK]) * (CHUNK * d))
        lane = I(r % CHUNK)
        j = I(cuda.threadIdx.x)
        while j < d:
            own[j] = stored[I(j * CHUNK + lane) if four else I(lane * d + j)]
            j = I(j + THREADS)
        cuda.syncthreads()
        round_head(pointer(own), pointer(exponents), n_rot)
        j = I(cuda.threadIdx.x)
        while j < d:
            stored[I(j * CHUNK + lane) if four else I(lane * d + j)] = own[j]
            j = I(j + THREADS)

    return round_rows
