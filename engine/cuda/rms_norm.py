"""Root-mean-square normalization (Zhang and Sennrich 2019): plain, of groups, added to a residual, on the way to int8, and
both.

Formula: y[i] = (x[i] * r) * weight[i], r = 1 / sqrt(sum(x^2) / n + eps), NaN where the sum overflows; added: y[i] =
    fma(x[i] * r, weight[i], residual[i]) * scale.
Shapes: x float32 [rows, n], weight float32 [n], y float32 [rows, n] or int8 as in ``engine/cuda/products/quantize.py``; of
    groups: x, y float32 [rows, groups n], weight float32 [groups n].
Who owns what: a block of 256 threads owns a row, or a group of one, or one of several parts of the work on a row once r is
    known: each part computes r again, which is cheaper than waiting for another.
Reduction order: chain c of 256 owns i with i % 256 == c, one fma(x, x, chain) each in rising i; then the halving tree
    (c0 + c128, c1 + c129, ...), (0 + 64, ...), ..., (0 + 1).  Rows of at most 128 use the least power of two of chains.
Bytes moved: 8 n per row (12 n with a residual, about 5 n to int8, 13 n for both), and 4 n for the weights.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import advance, fma, inverse_root, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import F32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


AT_ONCE = 8
"""Elements of a chain that are loaded at once, because loads take long."""

LONG = 4096
"""Elements of a row that one block stores; a longer row has more blocks, which all compute r."""


@device
def inverse_rms(x, n, eps, chains):
    """r of the row at x, in every thread of the block."""
    values = cuda.local.array(AT_ONCE, np.float32)
    thread = I(cuda.threadIdx.x)
    width = I(norm_width(n))
    total = f32(0.0)
    if thread < width:
        i = thread
        while i + (AT_ONCE - 1) * width < n:
            for k in range(AT_ONCE):
                values[k] = x[i + k * width]
            for k in range(AT_ONCE):
                total = fma(values[k], values[k], total)
            i = I(i + AT_ONCE * width)
        while i < n:
            total = fma(x[i], x[i], total)
            i = I(i + width)
    return inverse_root(fold256(total, chains), f32(n), eps)


@kernel(F32P, F32P, f32_t, i32, F32P, threads=256)
def rms_norm() -> KernelCode:
    """y = normalized x.  Grid: (parts, rows)."""

    @cuda.jit
    def rms_norm(x, weight, eps, n, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        row = np.int64(cuda.blockIdx.y) * n
        wait_for_inputs()
        r = inverse_rms(advance(x, row), n, eps, chains)
        i = I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        while i < n:
            y[row + i] = x[row + i] * r * weight[i]
            i = I(i + cuda.gridDim.x * 256)

    return rms_norm


@kernel(F32P, F32P, f32_t, i32, F32P, threads=256)
def rms_norm_groups() -> KernelCode:
    """y = x, of which each run of n elements is normalized.  Grid: (groups, rows)."""

    @cuda.jit
    def rms_norm_groups(x, weight, eps, n, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        own = I(cuda.blockIdx.x * n)
        row = np.int64(cuda.blockIdx.y) * (cuda.gridDim.x * n) + own
        wait_for_inputs()
        r = inverse_rms(advance(x, row), n, eps, chains)
        i = I(cuda.threadIdx.x)
        while i < n:
            y[row + i] = x[row + i] * r * weight[own + i]
            i = I(i + 256)

    return rms_norm_groups


@kernel(F32P, F32P, F32P, f32_t, f32_t, i32, F32P, threads=256)
def rms_norm_add() -> KernelCode:
    """y = (residual + normalized x) * scale.  Grid: (parts, rows)."""

    @cuda.jit
    def rms_norm_add(residual, x, weight, eps, scale, n, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        row = np.int64(cuda.blockIdx.y) * n
        wait_for_inputs()
        r = inverse_rms(advance(x, row), n, eps, chains)
        i = I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        while i < n:
            y[row + i] = fma(x[row + i] * r, weight[i], residual[row + i]) * scale
            i = I(i + cuda.gridDim.x * 256)

    return rms_norm_add


def make_row(n: int) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(n_x, own, inverse) of a row of n whose chains are the block's threads, in registers, without a loop.

    ``own(p, x)``: x [n_x] = the thread's elements of the row at p, 0 past its end.
    ``inverse(x, eps, chains)``: r of the row, in every thread of the block; chains: shared memory, float32 [256].
    """
    width = norm_width.py_func(n)
    n_x = -(-n // width)
    exact = n % width == 0 and width == NORM_CHAINS

    @device
    def own(p, x):
        thread = I(cuda.threadIdx.x & 255)
        for k in range(n_x):
            x[k] = f32(0.0)
            if exact or (thread < width and thread + k * width < n):
                x[k] = p[thread + k * width]

    @device
    def inverse(x, eps, chains):
        total = f32(0.0)
        for k in range(n_x):
            total = fma(x[k], x[k], total)
        return inverse_root(fold256(total, chains), f32(n), eps)

    return n_x, own, inverse


def runs_of(rows: int) -> int:
    """The runs of a row that a block of ``rms_norm_quantize`` quantizes: several where there are enough rows to fill a GPU,
    because each block of a row reads all of it to compute r."""
    return 1 if rows <= NARROW_ROWS else 4 if rows <= 128 else 16


@kernel(F32P, F32P, f32_t, U32P, F32P, U16P, threads=256)
def rms_norm_quantize(unit: int, n: int, layout: int = NARROW, runs: int = 1) -> KernelCode:
    """Normalized x as int8 with one scale per ``unit`` values.

    Grid: (ceil(n / (256 runs)), rows); a block quantizes ``runs`` runs of 256 positions.
    """
    store, n_tops = make_store(unit, layout), WARPS * min(runs, 2)
    n_x, own_of, inverse = make_row(n)

    @cuda.jit
    def rms_norm_quantize(x, weight, eps, q, d, sums):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        tops = pointer(cuda.shared.array(n_tops, np.int32, ALIGNED))
        own = cuda.local.array(n_x, np.float32)
        values = cuda.local.array(runs, np.float32)
        factors = cuda.local.array(runs, np.float32)
        thread = I(cuda.threadIdx.x)
        t, first = I(cuda.blockIdx.y), I(cuda.blockIdx.x * runs)
        row = advance(x, t * n)
        i = I(first * RUN + thread)
        for j in range(runs):
            factors[j] = f32(0.0)
            if I(i + j * RUN) < n:
                factors[j] = weight[I(i + j * RUN)]
        wait_for_inputs()
        own_of(row, own)
        for j in range(runs):
            values[j] = f32(0.0)
            if I(i + j * RUN) < n:
                values[j] = row[I(i + j * RUN)]
        r = inverse(own, eps, chains)
        for j in range(runs):
            run = I(first + j)
            if runs == 1 or I(run * RUN) < n:
                # Slow warps may still read what they have found in the run before.
                own_tops = advance(tops, WARPS * (j & 1))
                store(values[j] * r * factors[j], I(i + j * RUN) < n, t, run, n, own_tops, q, d, sums)

    return rms_norm_quantize


@kernel(F32P, F32P, F32P, f32_t, f32_t, F32P, f32_t, F32P, U32P, F32P, U16P, threads=256)
def rms_norm_add_quantize(unit: int, n: int, normed: bool, layout: int = NARROW) -> KernelCode:
    """y = (residual + normalized x) * scale, and y as int8 with one scale per ``unit`` values; ``normed``: y normalized
    again.

    Arguments: residual, x, weight, eps, scale, second_weight, second_eps, y, q, d, sums.
    Grid: (ceil(n / 256), rows); a block computes all of a row, and stores and quantizes a run of 256 positions.
    """
    store = make_store(unit, layout)
    n_x, own_of, inverse = make_row(n)

    @cuda.jit
    def rms_norm_add_quantize(residual, x, weight, eps, scale, second_weight, second_eps, y, q, d, sums):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        own = cuda.local.array(n_x, np.float32)
        weights = cuda.local.array(n_x, np.float32)
        before = cuda.local.array(n_x, np.float32)
        thread = I(cuda.threadIdx.x)
        t, run = I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        x, residual = advance(x, t * n), advance(residual, t * n)
        i = I(run * RUN + thread)
        inside = i < n
        value, old, factor, second_factor = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        if inside:
            factor = weight[i]
            if normed:
                second_factor = second_weight[i]
        if normed:
            own_of(weight, weights)
        wait_for_inputs()
        own_of(x, own)
        if normed:
            own_of(residual, before)
        if inside:
            value, old = x[i], residual[i]
        r = inverse(own, eps, chains)
        value = fma(value * r, factor, old) * scale
        if inside:
            y[I(t * n) + i] = value
        if normed:
            for k in range(n_x):
                own[k] = fma(own[k] * r, weights[k], before[k]) * scale
            cuda.syncthreads()
            value = value * inverse(own, second_eps, chains) * second_factor
        store(value, inside, t, run, n, tops, q, d, sums)

    return rms_norm_add_quantize
