"""Activations of many rows to int8, in the layouts of the products of warpgroups: ``engine/cuda/products/quantize.py`` with a
unit of 256 for each warp.

Formula: that of ``quantize``.
Shapes: gate, up float32 [rows, K]; q in a layout of ``quantize.BLOCKS``, which also contains the scales and sums.
Who owns what: a block owns 256 positions of a tile of 8 rows, and a warp those of one row, lane l positions 4 l to 4 l + 3
    and 128 + 4 l to 131 + 4 l.  The words of a tile are put together in shared memory, and stored as whole lines.
Reduction order: none; maxima and integer sums are exact in any order.
Bytes moved: 4 K in (8 K for a gate), about 1.2 K out per row.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import ACTIVATIONS, bits_float, let_next_begin, load4, pointer, wait_for_inputs
from engine.cuda.products.quantize import (
    ALIGNED,
    RUN,
    TILE_SCALES_AT,
    TILE_SUMS_AT,
    TILE_WORDS,
    block_parts,
    quantize_row,
    write_word,
)
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.ops.activation import KINDS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

ROWS = 8
"""Rows of a block, those of a tile."""


def grid(rows: int, columns: int) -> tuple[int, int]:
    """The grid for ``rows`` rows of ``columns`` positions."""
    return -(-rows // ROWS), columns // RUN


def make_tile(source: str, layout: int, put: DeviceFunction = write_word) -> DeviceFunction:
    """The device function ``quantize_tile(gate, up, rows, p0, p1, p2, p3, tile, run, runs, unit, units, to)``: x =
    ``source``(gate, up) to int8, of the positions from 256 run of the 8 rows of a tile, of ``rows`` rows with ``runs`` runs.

    They become unit ``unit`` of ``units`` in a layout of ``quantize.BLOCKS``, of which ``put(to, at, word)`` stores a word.
    Rows past the last one are zeros.  All threads of a block of 256 call it, when their inputs are complete.
    """
    plain, gated = source == "plain", source != "plain" and KINDS[source][0]
    of = ACTIVATIONS.get(source)
    scales_at, sums_at, block_words = block_parts(layout)

    @device
    def quantize_tile(gate, up, rows, p0, p1, p2, p3, tile, run, runs, unit, units, to):
        words = pointer(cuda.shared.array(TILE_WORDS, np.uint32, ALIGNED))
        values = cuda.local.array(8, np.float32)
        gates = cuda.local.array(8, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (RUN - 1))
        c, lane = I(thread >> 5), I(thread & 31)
        t = I(8 * tile + c)
        i = I(I(t * runs + run) * RUN + 4 * lane)
        for k in range(8):
            values[k], gates[k] = f32(0.0), f32(0.0)
        if t < rows:
            for h in range(2):
                four = load4(up, I(i + 128 * h))
                for e in range(4):
                    values[4 * h + e] = bits_float(I(four[e]))
                if gated:
                    four = load4(gate, I(i + 128 * h))
                    for e in range(4):
                        gates[4 * h + e] = bits_float(I(four[e]))
            if not plain:
                for k in range(8):
                    values[k] = of(gates[k], values[k], p0, p1, p2, p3)
        quantize_row(values, c, words)
        cuda.syncthreads()
        block = I(tile // layout)
        of_block, base = I(tile - block * layout), I(I(block * units + unit) * block_words)
        # Neighbouring threads store neighbouring words: integers, then scales and sums.
        for k in range(3):
            place = I(RUN * k + thread)
            at = I(base + of_block * TILE_SCALES_AT + place)
            if place >= TILE_SUMS_AT:
                at = I(base + sums_at + of_block * (TILE_WORDS - TILE_SUMS_AT) + I(place - TILE_SUMS_AT))
            elif place >= TILE_SCALES_AT:
                at = I(base + scales_at + of_block * 8 + I(place - TILE_SCALES_AT))
            if place < TILE_WORDS:
                put(to, at, words[place])

    return quantize_tile


@kernel(F32P, F32P, i32, *[f32_t] * 4, U32P, threads=RUN, target=TARGET)
def wide_quantize(source: str, layout: int) -> KernelCode:
    """x = ``source``(gate, up) to int8 in a layout of ``quantize.BLOCKS``: "plain" takes up alone; any other is an activation
    (``ACTIVATIONS`` of ``engine/numerics.py``), with the parameters p0 to p3.

    Grid: ``grid(rows, K)``.
    """
    quantize_tile = make_tile(source, layout)

    @cuda.jit
    def wide_quantize(gate, up, rows, p0, p1, p2, p3, q):
        let_next_begin()
        # The masks tell the compiler that nothing is negative.
        tile, run, runs = I(cuda.blockIdx.x & 0xFFFFF), I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y & 0xFFFF)
        wait_for_inputs()
        quantize_tile(gate, up, rows, p0, p1, p2, p3, tile, run, runs, run, runs, q)

    return wide_quantize
