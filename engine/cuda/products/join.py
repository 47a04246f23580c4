"""The sum of the outputs of the experts that rows have chosen, and for a single row what leads from gate and up to it.

Formula: ``engine/cpu/products/experts.py`` (``join``), ``engine/numerics.py`` (activations),
    ``engine/cpu/products/quantize.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs and the matrices of all experts as in ``engine/cuda/products/experts.py``; ids int32, weights float32 [rows,
    n_used]; y float32 [pairs, n]; residual, out float32 [rows, n].
Who owns what: ``join``: a thread owns an element.  ``matmul_join``: a block owns 16 outputs of a single row, a warp one unit
    of one expert, whose activations it first computes.
Reduction order: products as in ``engine/cuda/products/matmul.py``, then fma(y, factor, bias), y * factor or y + bias where
    experts have factors or biases; sum = fma(w_last, y_last, ... fma(w_0, y_0, 0)); with a shared network
    fma(sigmoid(l_shared), y_shared, sum), or fma(1, y_shared, sum) without a gate; then residual + that if there is one.
Bytes moved: ``join``: 4 n (n_used + 2) for a row, 4 n more with a shared network; ``matmul_join``: the matrices of the
    experts in use once, gate and up once per 16 outputs, from the L2 cache.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    ACTIVATIONS,
    advance,
    bits_float,
    float_bits,
    fma,
    lane_xor_int,
    lanes_max,
    let_next_begin,
    load4,
    pointer,
    round_product,
    sigmoid,
    wait_for_inputs,
)
from engine.cuda.products.chain import ZERO, make_parts
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.quantize import ALIGNED, unit_scale
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS, FORMATS
from engine.ops.activation import KINDS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

MOST_WARPS = 24
"""Warps of the largest block of ``matmul_join``: 80 registers a thread."""

AREA = 76
"""Words of a unit of 256 activations of one row: 64 of int8, 12 of sums."""


# --- sums ------------------------------------------------------------------------------------------------------


@kernel(F32P, F32P, F32P, F32P, F32P, i32, i32, F32P, threads=256)
def join(n_used: int, shared: bool, add: bool, gated: bool = True) -> KernelCode:
    """out = the sum of y [pairs, n] by the experts' weights, plus, if ``shared``, common [rows, n], by the last of each row's
    logits, one every ``stride``, if it is ``gated``, plus residual if ``add``.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def join(residual, y, weights, common, logits, stride, n, out):
        let_next_begin()
        values = cuda.local.array(n_used, np.float32)
        factors = cuda.local.array(n_used, np.float32)
        t = np.int64(cuda.blockIdx.y)
        i = I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            for s in range(n_used):
                values[s] = y[(t * n_used + s) * n + i]
                factors[s] = weights[t * n_used + s]
            before, last, gate = f32(0.0), f32(0.0), f32(0.0)
            if add:
                before = residual[t * n + i]
            if shared:
                last = common[t * n + i]
                if gated:
                    gate = logits[t * stride + (stride - 1)]
            total = f32(0.0)
            for s in range(n_used):
                total = fma(factors[s], values[s], total)
            if shared:
                total = fma(sigmoid(gate) if gated else f32(1.0), last, total)
            out[t * n + i] = before + total if add else total

    return join


# --- a single row ----------------------------------------------------------------------------------------------


def join_threads(
    format: str,
    units: int,
    n_used: int,
    shared: bool,
    kind: str = "swiglu",
    gated: bool = True,
    finish: Finish = NOTHING,
) -> int:
    """Threads of a block of ``matmul_join``: a warp for each unit."""
    return 32 * units * (n_used + shared)


def can_join(format: str, units: int, n_rows: int, n_used: int, shared: bool) -> bool:
    """Whether ``matmul_join`` supports a matrix of n_rows rows."""
    few = join_threads(format, units, n_used, shared) <= 32 * MOST_WARPS
    return FORMATS[T[format]].unit == 256 and n_rows % 16 == 0 and few


def make_area(kind: str) -> DeviceFunction:
    """The device function area_of(gate, up, p, area): the activation ``kind`` of 256 positions, with the parameters p,
    quantized to int8 by one warp as in ``engine/cuda/products/quantize.py``; returns the scale.

    area, words [76] in shared memory: word (v, i, 2 h + k) holds positions 64 v + 32 h + 16 k + 4 i .. + 3, followed by the
    int16 sums of each 16 and of each 32.
    """
    of, gated = ACTIVATIONS[kind], KINDS[kind][0]

    @device
    def activate(gate, up, p, x):
        lane = I(cuda.threadIdx.x & 31)
        for half in range(2):
            g = load4(gate, 128 * half + 4 * lane) if gated else ZERO
            u = load4(up, 128 * half + 4 * lane)
            for k in range(4):
                x[4 * half + k] = of(bits_float(I(g[k])), bits_float(I(u[k])), p[0], p[1], p[2], p[3])

    @device
    def area_of(gate, up, p, area):
        x = cuda.local.array(8, np.float32)
        activate(gate, up, p, x)
        return quantize_area(x, area)

    return area_of


@device
def quantize_area(x, area):
    """Quantize the lane's x float32 [8], for ``make_area``."""
    lane = I(cuda.threadIdx.x & 31)
    bits = I(0)
    for k in range(8):
        bits = max(bits, I(float_bits(x[k]) & I(0x7FFFFFFF)))
    amax, inverse = unit_scale(lanes_max(bits))
    place = I(I(I(lane >> 4) * 16) + I(I(lane & 3) * 4) + I(I(lane >> 2) & 3))
    for half in range(2):
        word, total = I(0), I(0)
        for k in range(4):
            value = round_product(x[4 * half + k], inverse)
            word = I(word | I(I(value & I(255)) << I(8 * k)))
            total = I(total + value)
        area[32 * half + place] = u32(word)
        total = I(total + lane_xor_int(total, I(1)))
        total = I(total + lane_xor_int(total, I(2)))
        next16 = lane_xor_int(total, I(4))
        total32 = I(total + next16)
        next32 = lane_xor_int(total32, I(8))
        if lane & 7 == 0:
            area[64 + 4 * half + (lane >> 3)] = u32(I(I(total & I(0xFFFF)) | I(next16 << I(16))))
        if lane & 15 == 0:
            area[72 + 2 * half + (lane >> 4)] = u32(I(I(total32 & I(0xFFFF)) | I(next32 << I(16))))
    return amax / f32(127.0)


@device
def four(p, i):
    """Four words of shared memory."""
    return u32(p[i]), u32(p[i + 1]), u32(p[i + 2]), u32(p[i + 3])


@kernel(
    *(U32P, U32P, F32P, F32P, f32_t, f32_t, f32_t, f32_t, I32P, F32P, F32P, F32P, F32P, F32P, i32, F32P),
    threads=join_threads,
    blocks=1,
)
def matmul_join(
    format: str,
    units: int,
    n_used: int,
    shared: bool,
    kind: str = "swiglu",
    gated: bool = True,
    finish: Finish = NOTHING,
) -> KernelCode:
    """out [R] = residual + the mixture, from gate and up float32 [pairs + shared, 256 units] of a single row: the activation
    ``kind`` with parameters p0 to p3, its int8 quantization, the product with w (``common``: that of the network that every
    row uses), factors and biases, and the join (``logit``: the gate of that network if it is ``gated``).

    R is a multiple of 16.  Grid: R / 16 blocks of ``join_threads``.
    """
    parts = make_parts(T[format], 1, True, read=four)
    fmt, load, multiply, load_sums, close = parts.fmt, parts.load, parts.multiply, parts.load_sums, parts.close
    header, block, sums, factors, fill = fmt.header, fmt.block, fmt.sums, fmt.factors, fmt.make_fill()
    size, n_words = parts.size, parts.n_words
    n_groups = n_used + int(shared)
    n_area, n_sums, n_scales = AREA * units * n_groups, 16 * units * n_groups, units * n_groups
    n_outputs, length = 16 * n_groups, -(-units // CHAINS)
    area_of = make_area(kind)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @cuda.jit
    def matmul_join(w, common, gate, up, p0, p1, p2, p3, ids, weights, logit, factors_, biases, residual, n_rows, out):
        let_next_begin()
        areas = pointer(cuda.shared.array(n_area, np.uint32, ALIGNED))
        unit_sums = pointer(cuda.shared.array(n_sums, np.float32))
        scales = pointer(cuda.shared.array(n_scales, np.float32))
        outputs = pointer(cuda.shared.array(n_outputs, np.float32))
        mix = pointer(cuda.shared.array(n_groups, np.float32))
        words = cuda.local.array(n_words, np.uint32)
        dots = cuda.local.array(4, np.int32)
        acc = cuda.local.array(6, np.float32)
        thread, tile = I(cuda.threadIdx.x), I(cuda.blockIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        group = I(warp // units)
        u = I(warp - group * units)
        everyone = shared and group == n_used
        if everyone:
            w = common
        else:
            wait_for_inputs()
            tile = I(tile + ids[group] * I(n_rows >> 4))
        load(advance(w, np.int64(I(tile * units + u)) * size), lane, words)
        fill()
        wait_for_inputs()
        factor = f32(0.0)
        if u == 0 and lane == 0:
            if everyone:
                factor = logit[0] if gated else f32(1.0)
            else:
                factor = weights[group]
        r = I(I(cuda.blockIdx.x) * 16 + (thread & 15))
        before = residual[r]
        end_factor, end_bias = f32(1.0), f32(0.0)
        if finishes and thread < 16 * n_used:
            end_factor, end_bias = load_finish(factors_, biases, ids[thread >> 4], r, n_rows)
        area = advance(areas, I(warp * AREA))
        at = I(warp * 256)
        da = area_of(advance(gate, at), advance(up, at), (p0, p1, p2, p3), area)
        cuda.syncwarp()
        y = (ZERO, ZERO, ZERO, ZERO)
        if lane < 4:
            y = four(area, 4 * lane), four(area, 16 + 4 * lane), four(area, 32 + 4 * lane), four(area, 48 + 4 * lane)
        h, f = header(words), factors(words)
        low, high = sums(h, 0), sums(h, 1)
        for k in range(4):
            dots[k] = I(0)
        multiply(block(words, 0), block(words, 1), y[0], 0, h, 0, dots)
        multiply(block(words, 2), block(words, 3), y[1], 1, h, 0, dots)
        multiply(block(words, 4), block(words, 5), y[2], 2, h, 0, dots)
        multiply(block(words, 6), block(words, 7), y[3], 3, h, 0, dots)
        close(low, high, f, load_sums(area, 64), da, 0, 0, dots, acc)
        if lane & 3 == 0:
            unit_sums[warp * 16 + (lane >> 2)] = acc[0]
            unit_sums[warp * 16 + 8 + (lane >> 2)] = acc[2]
        if lane == 0:
            scales[warp] = da
            if u == 0:
                mix[group] = sigmoid(factor) if everyone and gated else factor
        cuda.syncthreads()
        if thread < n_outputs:
            group = I(thread >> 4)
            total, chain = f32(0.0), f32(0.0)
            for k in range(units):
                at = I(group * units + k)
                chain = fma(scales[at], unit_sums[at * 16 + (thread & 15)], chain)
                if (k + 1) % length == 0 or k + 1 == units:
                    total = total + chain
                    chain = f32(0.0)
            if finishes and thread < 16 * n_used:
                total = apply_finish(total, end_factor, end_bias)
            outputs[thread] = total
        cuda.syncthreads()
        if thread < 16:
            total = f32(0.0)
            for k in range(n_groups):
                total = fma(mix[k], outputs[16 * k + thread], total)
            out[r] = before + total

    return matmul_join
