"""Layer normalization (Ba, Kiros and Hinton 2016): plain, and on the way to int8.

Formula: y[i] = fma((x[i] - m) * r, weight[i], bias[i]), or ((x[i] - m) * r) * weight[i] without a bias, with m = sum(x) / n
    and r = 1 / sqrt(sum((x - m)^2) / n + eps), NaN where a sum overflows.
Shapes: x float32 [rows, n], weight, bias float32 [n], y float32 [rows, n] or int8 as in
    ``engine/cuda/products/quantize.py``.  Without a bias, weight may be [m, n]: row t uses row t mod m of it.
Who owns what: a block of 256 threads owns a row, or one of several parts of the work on a row once m and r are known: each
    part computes them again.  A thread holds its chain's elements of the row in registers.
Reduction order: that of ``engine/cpu/rms_norm.py`` for both sums.  Chain c of 256 owns i with i % 256 == c, in rising i: one
    chain + x each, then one fma(x - m, x - m, chain) each; then the halving tree (c0 + c128, c1 + c129, ...), (0 + 64, ...),
    ..., (0 + 1).  Rows of at most 128 use the least power of two of chains.
Bytes moved: 8 n per row (about 5 n to int8), and 4 n or 8 n for the weights.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import advance, fma, inverse_root, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.rms_norm import make_row
from engine.cuda.runtime.compiler import F32P, U16P, U32P, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


def _make_moments(n: int) -> DeviceFunction:
    """``moments(x, eps, chains)``: m and r of a row, in every thread of the block.

    x: the thread's elements of the row, from ``own`` of :func:`engine.cuda.rms_norm.make_row`.
    chains: shared memory, float32 [256].
    """
    width = norm_width.py_func(n)
    n_x = -(-n // width)
    exact = n % width == 0 and width == NORM_CHAINS

    @device
    def moments(x, eps, chains):
        thread = I(cuda.threadIdx.x & 255)
        total = f32(0.0)
        for k in range(n_x):
            total = total + x[k]
        mean = f32(fold256(total, chains) / f32(n))
        cuda.syncthreads()
        total = f32(0.0)
        for k in range(n_x):
            # x is 0 past the end of the row, but 0 - m is not.
            if exact or (thread < width and thread + k * width < n):
                d = x[k] - mean
                total = fma(d, d, total)
        return mean, inverse_root(fold256(total, chains), f32(n), eps)

    return moments


def _make_apply(biased: bool) -> DeviceFunction:
    """``apply(x, mean, r, weight, bias)``: the normalized element."""

    @device
    def apply(x, mean, r, weight, bias):
        if biased:
            return fma((x - mean) * r, weight, bias)
        return (x - mean) * r * weight

    return apply


@kernel(F32P, F32P, F32P, f32_t, F32P, threads=256)
def layer_norm(n: int, biased: bool, m: int = 1) -> KernelCode:
    """y = normalized x, with weights [m, n].  Grid: (rows,)."""
    n_x, own_of, _ = make_row(n)
    width = norm_width.py_func(n)
    moments, apply = _make_moments(n), _make_apply(biased)

    @cuda.jit
    def layer_norm(x, weight, bias, eps, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        own = cuda.local.array(n_x, np.float32)
        row = np.int64(cuda.blockIdx.x) * n
        wait_for_inputs()
        own_of(advance(x, row), own)
        mean, r = moments(own, eps, chains)
        if m > 1:
            weight = advance(weight, I(cuda.blockIdx.x % m) * n)
        thread = I(cuda.threadIdx.x)
        if thread < width:
            for k in range(n_x):
                i = I(thread + k * width)
                if i < n:
                    shift = f32(0.0)
                    if biased:
                        shift = bias[i]
                    y[row + i] = apply(own[k], mean, r, weight[i], shift)

    return layer_norm


@kernel(F32P, F32P, F32P, f32_t, U32P, F32P, U16P, threads=256)
def layer_norm_quantize(unit: int, n: int, biased: bool, layout: int = NARROW) -> KernelCode:
    """Normalized x as int8 with one scale per ``unit`` values.

    Grid: (ceil(n / 256), rows); a block quantizes a run of 256 positions.
    """
    store = make_store(unit, layout)
    n_x, own_of, _ = make_row(n)
    moments, apply = _make_moments(n), _make_apply(biased)

    @cuda.jit
    def layer_norm_quantize(x, weight, bias, eps, q, d, sums):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        own = cuda.local.array(n_x, np.float32)
        thread = I(cuda.threadIdx.x)
        t, run = I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        row = advance(x, t * n)
        i = I(run * RUN + thread)
        inside = i < n
        value, factor, shift = f32(0.0), f32(0.0), f32(0.0)
        if inside:
            factor = weight[i]
            if biased:
                shift = bias[i]
        wait_for_inputs()
        own_of(row, own)
        if inside:
            value = row[i]
        mean, r = moments(own, eps, chains)
        store(apply(value, mean, r, factor, shift), inside, t, run, n, tops, q, d, sums)

    return layer_norm_quantize
