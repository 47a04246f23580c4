"""The experts of a single row, in formats with units of 32 weights: two launches from the router's logits to the outputs.

Formula: ``engine/cpu/products/experts.py``, ``engine/numerics.py`` (activations), ``engine/cpu/products/quantize.py``.
Shapes: pairs, ids, weights and the matrices of all experts as in ``engine/cuda/products/experts.py``, for one row, with a
    multiple of 32 rows each.  Activations as in ``engine/cuda/products/quantize.py``: one row for gate and up, one per expert
    for down.
    If a network that every row uses takes part, its output follows those of the experts.
Who owns what: ``gate_up``: a block owns 32 rows of gate and of up of one expert, which are one unit of down's activations;
    two warps share the chains of 16 rows.  ``down``: a block owns 16 rows for every 1, 2 or 4 of its warps, which share
    their chains.
Reduction order: ``engine/cuda/products/matmul.py``, then fma(y, factor, bias), y * factor or y + bias where experts have
    factors or biases.
Bytes moved: the matrices of the experts in use once.

Blocks are so large that a GPU holds all of them at once.  So the time before the first weights of a block arrive, in which it
chooses its expert, counts only once.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import ACTIVATIONS, advance, lanes_max, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.columns import make_columns_chains
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.quantize import ALIGNED, WARPS, make_store
from engine.cuda.products.router import USUAL, make_route
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import Constant, DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS, FORMATS, Format
from engine.ops.experts import Routing

f32 = np.float32
I = np.int32  # noqa: E741

UNIT = 32
"""Rows of a matrix that a block owns: the positions of a unit."""

THREADS = 32 * CHAINS
"""Threads of a block."""


def resident_gate_up(format: str, *others: Constant) -> int:
    """Blocks of ``gate_up`` per multiprocessor: three if 80 registers per thread are enough."""
    return 3 if format in ("MXFP4", "Q4_0", "IQ4_NL") else 2


def resident_down(format: str, *others: Constant) -> int:
    """Blocks of ``down`` per multiprocessor."""
    return 2 if format == "Q8_0" else 3


def make_tiles(format: str, parts: int) -> DeviceFunction:
    """The device function tiles(w, row, units, column, q, d, s, sums): a block's products with tiles of 16 rows.

    There are CHAINS / ``parts`` tiles, with ``parts`` warps each, which compute a part of the chains each.  w and row: the
    matrix and its first row, for the tile of this warp; column: as in ``columns.py``; sums float32 [tiles, CHAINS, 16], in
    shared memory.
    """
    size, each = 4 * FORMATS[T[format]].block_bytes, CHAINS // parts
    chains = make_columns_chains(T[format])

    @device
    def tiles(w, row, units, column, q, d, s, sums):
        warp = I(cuda.threadIdx.x >> 5)
        length = I((units + CHAINS - 1) // CHAINS)
        first = I(I(warp % parts) * each * length)
        last = min(I(first + each * length), units)
        records = advance(w, np.int64(I(I(row >> 4) * units + first)) * size)
        chains(records, first, last, length, column, q, d, s, advance(sums, I(warp * (16 * each))))
        cuda.syncthreads()

    return tiles


@device
def total_of(sums, units, i):
    """The sum of the chains of row i of a block, for ``make_tiles``."""
    length, total = I((units + CHAINS - 1) // CHAINS), f32(0.0)
    for c in range(CHAINS):
        if c * length < units:
            total = total + sums[I(i >> 4) * (16 * CHAINS) + 16 * c + (i & 15)]
    return total


@kernel(
    *(U32P, U32P, U32P, U32P, I32P, F32P, F32P, F32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P),
    *(f32_t, f32_t, f32_t, f32_t, i32, i32, U32P, F32P, U32P, U32P, F32P, U16P),
    threads=THREADS,
    blocks=resident_gate_up,
    cached=True,
)
def gate_up(
    format: str,
    n_used: int,
    shared: bool,
    n_expert: int,
    scaled: bool,
    kind: str,
    routing: Routing = USUAL,
    finish: Finish = NOTHING,
) -> KernelCode:
    """The choice of experts by ``logits`` and the law ``routing``, with the experts' ``scales`` if ``scaled``; gate w0 and up
    w1 of the chosen ones, with factors f0 and f1 [n_expert] and biases b0 and b1 [n_expert, R]; the activation ``kind`` of
    both, with the parameters p0 to p3, as int8: qo, do, so.  ``shared``: s0 and s1 are those of a network for every row.

    Grid: (R / 32, n_used + ``shared``) blocks.
    """
    choose, share = make_route(n_expert, n_used, scaled, routing)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)
    tiles, store, of = make_tiles(format, 2), make_store(UNIT), ACTIVATIONS[kind]
    n_sums, n_values, first_pair = 4 * CHAINS * 16, 2 * UNIT, int(shared)

    @cuda.jit
    def gate_up(
        w0,
        w1,
        s0,
        s1,
        ids,
        weights,
        logits,
        scales,
        router_bias,
        selection_bias,
        table,
        tokens,
        f0,
        f1,
        b0,
        b1,
        p0,
        p1,
        p2,
        p3,
        n_rows,
        units,
        q,
        d,
        s,
        qo,
        do,
        so,
    ):
        let_next_begin()
        sums = pointer(cuda.shared.array(n_sums, np.float32))
        values = pointer(cuda.shared.array(n_values, np.float32))
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        chosen = pointer(cuda.shared.array(1, np.int32))
        thread, unit, pair = I(cuda.threadIdx.x), I(cuda.blockIdx.x), I(I(cuda.blockIdx.y) - first_pair)
        warp, lane = I(thread >> 5), I(thread & 31)
        row = I(unit * UNIT + 16 * I((warp >> 1) & 1))
        w = w1 if warp >= 4 else w0
        factor, bias = f32(1.0), f32(0.0)
        if shared and pair < 0:
            w = s1 if warp >= 4 else s0
        else:
            wait_for_inputs()
            if warp == 0:
                mine, p = choose(logits, (router_bias, selection_bias, table, tokens), I(pair + 1))
                # Every lane needs the value of lane ``pair``.
                expert = lanes_max(mine if lane == pair else I(-1))
                if lane == 0:
                    chosen[0] = expert
                if unit == 0 and pair == n_used - 1:
                    p = share(p, mine, scales)
                    if lane < n_used:
                        ids[lane] = mine
                        weights[lane] = p
            cuda.syncthreads()
            expert = chosen[0]
            row = I(row + expert * n_rows)
            if finishes and thread < n_values:
                r = I(unit * UNIT + lane)
                factor, bias = load_finish(f1 if warp else f0, b1 if warp else b0, expert, r, n_rows)
        tiles(w, row, units, I(0), q, d, s, sums)
        if thread < n_values:
            total = total_of(sums, units, thread)
            values[thread] = apply_finish(total, factor, bias) if finishes and pair >= 0 else total
        cuda.syncthreads()
        if warp == unit & (WARPS - 1):
            x = of(values[lane], values[UNIT + lane], p0, p1, p2, p3)
            store(x, True, pair if pair >= 0 else I(n_used), I(unit // WARPS), n_rows, tops, qo, do, so)

    return gate_up


@kernel(
    *(U32P, U32P, I32P, F32P, F32P, i32, i32, U32P, F32P, U32P, F32P),
    threads=THREADS,
    blocks=resident_down,
    cached=True,
)
def down(format: str, n_used: int, shared: bool, parts: int, finish: Finish = NOTHING) -> KernelCode:
    """The matrix of each pair's expert times its activations, with factors f [n_expert] and biases b [n_expert, R]: out
    float32 [pairs + ``shared``, R].  ``shared``: s0 is that of a network for every row; ``parts``: warps for 16 rows.

    Grid: (R / ``rows_of(parts)``, n_used + ``shared``) blocks.
    """
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)
    tiles, rows, first_pair = make_tiles(format, parts), rows_of(parts), int(shared)
    n_sums = rows * CHAINS

    @cuda.jit
    def down(w, s0, ids, f, b, n_rows, units, q, d, s, out):
        let_next_begin()
        sums = pointer(cuda.shared.array(n_sums, np.float32))
        thread, pair, begin = I(cuda.threadIdx.x), I(I(cuda.blockIdx.y) - first_pair), I(I(cuda.blockIdx.x) * rows)
        row = I(begin + 16 * I(thread // I(32 * parts)))
        place = pair
        factor, bias = f32(1.0), f32(0.0)
        if shared and pair < 0:
            w, place = s0, I(n_used)
        else:
            wait_for_inputs()
            expert = ids[pair]
            row = I(row + expert * n_rows)
            if finishes and thread < rows:
                factor, bias = load_finish(f, b, expert, I(begin + thread), n_rows)
        tiles(w, row, units, I(I(place >> 3) * units * 8 + (place & 7)), q, d, s, sums)
        if thread < rows:
            total = total_of(sums, units, thread)
            if finishes and pair >= 0:
                total = apply_finish(total, factor, bias)
            out[place * np.int64(n_rows) + begin + thread] = total

    return down


def rows_of(parts: int) -> int:
    """Rows of a block in which ``parts`` warps share the chains of 16 rows."""
    return 16 * CHAINS // parts


def parts_for(format: str, n_rows: int, outputs: int, multiprocessors: int) -> int:
    """The number of warps that share the chains of 16 rows, for ``outputs`` products with n_rows rows, a multiple of 32: the
    most with which all blocks are on the GPU at once."""
    fitting = [parts for parts in (4, 2, 1) if n_rows % rows_of(parts) == 0]
    at_once = resident_down(format) * multiprocessors
    return next((parts for parts in fitting if n_rows // rows_of(parts) * outputs <= at_once), fitting[-1])


def usable(format: Format, n_rows: int) -> bool:
    """Whether these kernels support a matrix of this format with n_rows rows for each expert."""
    return format.quantized and format.unit == UNIT and n_rows % UNIT == 0
