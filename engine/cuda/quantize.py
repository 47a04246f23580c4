"""Activations to int8, in the order in which tensor cores take them.

Formula: per unit d = amax / 127, q = round(x * (127 / amax)), ties to even; a unit with amax < 2**-100 counts as zero
    (``engine/cpu/matmul.py``, ``quantize_unit``).  The kernels differ in where x comes from: memory, or a gate and what it
    multiplies (``swiglu``, ``geglu``); ``engine/cuda/rms_norm.py`` has one that normalizes first.
Shapes: x float32 [rows, K]; rows go in groups of 8, the columns of a tensor-core tile.  Row t is column c = t % 8 of
    tile n = t // 8.
    unit 256: q words [tiles, K / 256, 4, 32, 4], d float32 [tiles, K / 256, 8], sums words [tiles, K / 256, 8, 12]:
        word (v, 4 c + i, 2 h + k) of a unit holds positions 64 v + 32 h + 16 k + 4 i .. + 3 of column c;
        sums: 16 int16 sums of 16 positions each, then 8 of 32.
    unit 32: q words [tiles, K / 32, 32, 2], d float32 [tiles, K / 32, 8], sums int32 [tiles, K / 32, 8].
Who owns what: a warp owns a run of 256 positions of a row, each lane 8 of them.
Reduction order: none; maxima and integer sums are exact in any order.
Bytes moved: 4 K in (8 K for a gate), about 1.2 K out per row.
"""

from typing import Any

import numpy as np
from numba import cuda

from engine.cuda.compiler import F32P, U32P, i32, kernel
from engine.cuda.intrinsics import (
    bits_float,
    float_bits,
    gelu,
    lane_xor_int,
    let_next_begin,
    load4,
    round_product,
    silu,
    wait_for_inputs,
)
from engine.cuda.unpack import device
from engine.quants import TINY

RUN = 256
"""Positions of a row that one warp quantizes."""

WARPS = 8
"""Warps of a block."""

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


@device
def load8(p, at, x):  # type: ignore[no-untyped-def]
    """x[:8] = p[at : at + 8], float32, at a multiple of 4."""
    first, second = load4(p, at), load4(p, at + 4)
    for k in range(4):
        x[k] = bits_float(I(first[k]))
        x[4 + k] = bits_float(I(second[k]))


def make_store(unit: int) -> Any:
    """The device function ``store(x, t, run, columns, q, d, sums)``: quantize the warp's run; x holds the lane's 8 values."""

    @device
    def store(x, t, run, columns, q, d, sums):  # type: ignore[no-untyped-def]
        lane = I(cuda.threadIdx.x & 31)
        bits = I(0)
        for k in range(8):
            bits = max(bits, I(float_bits(x[k]) & I(0x7FFFFFFF)))
        bits = max(bits, lane_xor_int(bits, I(1)))
        bits = max(bits, lane_xor_int(bits, I(2)))
        if unit == 256:
            bits = max(bits, lane_xor_int(bits, I(4)))
            bits = max(bits, lane_xor_int(bits, I(8)))
            bits = max(bits, lane_xor_int(bits, I(16)))
        amax = bits_float(bits)
        inverse = f32(127.0) / amax
        if amax < TINY:
            amax = f32(0.0)
            inverse = f32(0.0)
        first, second = u32(0), u32(0)
        total = I(0)
        for k in range(4):
            v = round_product(x[k], inverse)
            w = round_product(x[4 + k], inverse)
            total = I(total + v + w)
            first = u32(first | u32(u32(v & I(255)) << u32(8 * k)))
            second = u32(second | u32(u32(w & I(255)) << u32(8 * k)))
        sum16 = I(total + lane_xor_int(total, I(1)))
        other16 = lane_xor_int(sum16, I(2))
        sum32 = I(sum16 + other16)
        n, column = I(t >> 3), I(t & 7)
        block = I(lane >> 2)
        half, i = I((lane >> 1) & 1), I(2 * (lane & 1))
        if unit == 256:
            units = I(columns // 256)
            base = I(n * units + run)
            at = I(I(base * 4 + (block >> 1)) * 128 + (column * 4 + i) * 4 + (block & 1) * 2 + half)
            q[at] = first
            q[at + 4] = second
            other32 = lane_xor_int(sum32, I(4))
            row = I(I(base * 8 + column) * 12)
            if lane & 3 == 0:
                sums[row + block] = u32(u32(sum16 & I(0xFFFF)) | u32(u32(other16 & I(0xFFFF)) << u32(16)))
            if lane & 7 == 0:
                sums[row + 8 + (block >> 1)] = u32(u32(sum32 & I(0xFFFF)) | u32(u32(other32 & I(0xFFFF)) << u32(16)))
            if lane == 0:
                d[base * 8 + column] = amax / f32(127.0)
        else:
            units = I(columns // 32)
            u = I(run * 8 + block)
            if u < units:
                base = I(n * units + u)
                at = I(base * 64 + (column * 4 + i) * 2 + half)
                q[at] = first
                q[at + 2] = second
                if lane & 3 == 0:
                    sums[base * 8 + column] = u32(sum32)
                    d[base * 8 + column] = amax / f32(127.0)

    return store


@kernel(F32P, F32P, i32, U32P, F32P, U32P, threads=32 * WARPS)
def quantize(unit: int, source: str) -> Any:
    """x = ``source``(gate, up) to int8: "plain" takes the first alone, "swiglu" silu(gate) * up, "geglu" gelu(gate) * up.

    Grid: (ceil(K / 2048), rows), blocks of 8 warps.
    """
    store = make_store(unit)
    swiglu, geglu = source == "swiglu", source == "geglu"

    @cuda.jit
    def quantize(gate, up, columns, q, d, sums):  # type: ignore[no-untyped-def]
        let_next_begin()
        t = I(cuda.blockIdx.y)
        run = I(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        wait_for_inputs()
        if run * RUN < columns:
            x = cuda.local.array(8, np.float32)
            at = I(I(t * columns) + run * RUN + 8 * (cuda.threadIdx.x & 31))
            inside = I(run * RUN + 8 * (cuda.threadIdx.x & 31)) < columns
            for k in range(8):
                x[k] = f32(0.0)
            if inside:
                load8(gate, at, x)
                if swiglu or geglu:
                    y = cuda.local.array(8, np.float32)
                    load8(up, at, y)
                    for k in range(8):
                        x[k] = (silu(x[k]) if swiglu else gelu(x[k])) * y[k]
            store(x, t, run, columns, q, d, sums)

    return quantize


def activation_words(unit: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Sizes of (q, d, sums) in words, for ``rows`` activation rows."""
    tiles, units = -(-rows // 8), columns // unit
    return (tiles * columns * 2, tiles * units * 8, tiles * units * (96 if unit == 256 else 8))
