"""Products with the experts that rows have chosen (Shazeer et al. 2017); ``join.py`` adds their outputs.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: a *pair* is a row and one of its experts, pair = row * n_used + s; ids int32, weights float32 [rows, n_used].
    The matrices of all experts form one of n_expert * R rows: rows [e R, (e + 1) R) are those of expert e.  Outputs float32
    [pairs, R]; if a network that every row uses takes part, ``rows`` more follow: [pairs + rows, R].  Activations are int8 in
    the layout of ``engine/cuda/products/quantize.py``: for gate and up one row per row, for down one per output.
Who owns what: ``matmul_experts``: a block owns a run of tiles of 16 rows of the matrix of a pair's expert, and multiplies
    them by all pairs of that expert if its own is the first of them; otherwise it exits.  So an expert is read once, however
    many rows use it.
Reduction order: that of ``engine/cuda/products/matmul.py``, then fma(y, factor, bias), y * factor or y + bias where experts
    have factors or biases.
Bytes moved: the matrices of every expert in use, once.

Which weights are needed is known only when the inputs are complete, except for the network that every row uses: its blocks
come first, and have loaded theirs by then.
"""

from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    fma,
    lane_xor_int,
    lanes_max,
    let_next_begin,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.chain import make_chain, make_gather, n_places
from engine.cuda.products.matmul import make_load_float
from engine.cuda.products.router import USUAL, make_route
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS, FORMATS
from engine.ops.experts import Routing

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


MOST_TILES = 8
"""The most tiles of a block."""

ROUNDS = 4
"""Blocks own several tiles only if each place for a block on the GPU gets at least so many blocks in turn."""


def tiles(n_rows: int) -> int:
    """Records of 16 rows that the matrix of an expert touches; if R is not a multiple of 16, it may begin inside a record."""
    return n_rows // 16 if n_rows % 16 == 0 else (n_rows + 30) // 16


def run_of(n_tiles: int, pairs: int, n_matrices: int, at_once: int) -> int:
    """The number of tiles that a block owns, a power of two, of ``n_tiles`` ones of each of ``n_matrices`` matrices of an
    expert.

    Finding the pairs of an expert takes about as long as a tile, for each of ``pairs`` pairs, so a block should own several
    tiles; but the last blocks should not be few.  at_once: the blocks that are resident on the GPU.
    """
    size = MOST_TILES
    while size > 1 and pairs * n_matrices * -(-n_tiles // size) < ROUNDS * at_once:
        size //= 2
    return size


# --- factors and biases ----------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """What is done with the products of experts: whether they have factors, and biases."""

    scaled: bool = False
    biased: bool = False


NOTHING = Finish()


def make_finish(finish: Finish) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions: load(factors, biases, expert, r, n_rows) gives the factor and the bias of row r, or of
    the next row that exists; apply(y, factor, bias) is y * factor + bias, with what there is."""
    scaled, biased = finish

    @device
    def load(factors, biases, expert, r, n_rows):
        factor, bias = f32(1.0), f32(0.0)
        if scaled:
            factor = factors[expert]
        if biased:
            bias = biases[np.int64(expert) * n_rows + max(I(0), min(r, I(n_rows - 1)))]
        return factor, bias

    @device
    def apply(y, factor, bias):
        if scaled and biased:
            return fma(y, factor, bias)
        return y * factor if scaled else y + bias

    return load, apply


@kernel(F32P, F32P, F32P, F32P, i32, threads=256)
def weigh_products(gated: bool) -> KernelCode:
    """gate, if ``gated``, and up float32 [pairs, n] times the weights [pairs], in place, and ones [pairs] = 1.

    Grid: (pairs, ceil(n / 256)).
    """

    @cuda.jit
    def weigh_products(gate, up, weights, ones, n):
        let_next_begin()
        pair, i = I(cuda.blockIdx.x), I(cuda.blockIdx.y * 256 + cuda.threadIdx.x)
        at = np.int64(pair) * n + i
        wait_for_inputs()
        weight = weights[pair]
        if i == 0:
            ones[pair] = f32(1.0)
        if i < n:
            if gated:
                gate[at] = gate[at] * weight
            up[at] = up[at] * weight

    return weigh_products


# --- products --------------------------------------------------------------------------------------------------


def resident(formats: tuple[str, ...], most: int, *others: DeviceFunction) -> int:
    """Blocks per multiprocessor: three if 80 registers per thread are enough."""
    if len(set(formats)) > 1:
        return 2
    if most > 1:
        return 3 if formats[0] in ("Q4_0", "Q8_0", "MXFP4") else 2
    return 2 if formats[0] in ("Q2_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ3_XXS", "IQ4_XS") else 3


@kernel(
    *(U32P, U32P, U32P, U32P, F32P, F32P, I32P, F32P, F32P, F32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P),
    *(i32, i32, i32, i32, i32, U32P, F32P, U32P),
    threads=32 * CHAINS,
    blocks=resident,
    cached=True,
)
def matmul_experts(
    formats: tuple[str, ...],
    most: int,
    n_used: int,
    shared: bool,
    down: bool,
    n_expert: int = 0,
    scaled: bool = False,
    routing: Routing = USUAL,
    finish: Finish = NOTHING,
) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of ``formats``, times the activations of all pairs; ``shared``: s0 and
    s1 are those of a network that every row uses; ``down``: activations are one row per output, not one per row.

    most: rows, 1, 8 or 16.  n_expert: for a single row, the kernel itself chooses among that many by ``logits`` and the law
    ``routing``, and writes ids and weights, with the experts' ``scales`` if ``scaled``.
    finish: what is done with the products of experts: factors f0 and f1 [n_expert], biases b0 and b1 [n_expert, R].
    run: the tiles of a block, a power of two; 1 for a single row.
    Grid: (matrices * ceil(``tiles(R)`` / run), pairs + ``shared``) blocks of 32 * ``matmul.warps(units, False)`` threads.
    """
    kinds = [T[name] for name in formats]
    two, mixed = len(kinds) > 1, len(set(kinds)) > 1
    chain0, chain1 = ([make_chain(kind, most, False, False, True) for kind in dict.fromkeys(kinds)] * 2)[:2]
    size0, size1 = ([4 * FORMATS[kind].unit_bytes for kind in kinds] * 2)[:2]
    gather = make_gather(FORMATS[kinds[0]].unit, most)
    row_tiles, columns = -(-most // 8), min(most, 2)
    n_acc, n_columns = 4 * row_tiles, 1 if most == 1 else 8 * row_tiles
    n_parts, n_where = CHAINS * 16 * n_columns, n_places(most)
    n_all_parts = n_parts if most == 1 else 2 * n_parts
    single, first_pair, chooses = most == 1, int(shared), n_expert > 0
    choose, share = make_route(max(n_expert, 1), n_used, scaled, routing)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @cuda.jit
    def matmul_experts(
        w0,
        w1,
        s0,
        s1,
        out0,
        out1,
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
        rows,
        n_runs,
        run,
        n_rows,
        units,
        q,
        d,
        s,
    ):
        let_next_begin()
        parts = pointer(cuda.shared.array(n_all_parts, np.float32))
        listed = pointer(cuda.shared.array(n_columns, np.int32))
        inputs = pointer(cuda.shared.array(n_columns, np.int32))
        places = cuda.local.array(n_where, np.int32)
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        length = I((units + CHAINS - 1) // CHAINS)
        first = I(warp * length)
        last = min(I(first + length), units)
        tile, pair = I(cuda.blockIdx.x), I(I(cuda.blockIdx.y) - first_pair)
        pairs = I(rows * n_used)
        second = two and tile >= n_runs
        w, common, out, size, factors, biases = w0, s0, out0, I(size0), f0, b0
        if second:
            tile = I(tile - n_runs)
            w, common, out, size, factors, biases = w1, s1, out1, I(size1), f1, b1
        origin, count, expert = I(0), I(1), I(0)
        if shared and pair < 0:
            w, count = common, rows
            if not single and thread < rows:
                listed[thread] = I(pairs + thread)
                inputs[thread] = I(pairs + thread) if down else thread
        else:
            wait_for_inputs()
            if chooses:
                last_block = pair == n_used - 1 and cuda.blockIdx.x == 0
                mine, p = choose(logits, (router_bias, selection_bias, table, tokens), I(pair + 1))
                # Every lane needs the value of lane ``pair``.
                expert = lanes_max(mine if lane == pair else I(-1))
                origin = I(expert * n_rows)
                if last_block:
                    p = share(p, mine, scales)
                    if thread < n_used:
                        ids[thread] = mine
                        weights[thread] = p
            else:
                expert = ids[pair]
                origin = I(expert * n_rows)
            if not single:
                # A row uses an expert once, so lane t looks for the pair of row t, and the rows' bits say all.
                own = I(-1)
                if lane < rows:
                    for k in range(n_used):
                        at = I(lane * n_used + k)
                        if ids[at] == expert:
                            own = at
                bits = I(I(1) << lane) if own >= 0 else I(0)
                for k in range(5):
                    bits = I(bits | lane_xor_int(bits, I(1 << k)))
                if bits & I(I(I(1) << I(pair // n_used)) - 1):
                    return
                count = I(cuda.popc(bits))
                if own >= 0:
                    j = I(cuda.popc(I(bits & I(I(I(1) << lane) - 1))))
                    listed[j] = own
                    inputs[j] = own if down else lane
        alone = pair if pair >= 0 else I(n_used)
        if not single:
            tile = I(tile * run)
            cuda.syncthreads()
        while True:
            # The tile's first row, negative if the expert begins inside a record.
            low = I(16 * tile - (origin & 15))
            if low >= n_rows:
                wait_for_inputs()
                return
            factor, bias = f32(1.0), f32(0.0)
            if finishes and pair >= 0:
                factor, bias = load_finish(factors, biases, expert, I(low + (thread & 15)), n_rows)
            # What a tile needs is computed again for each: it would take registers meanwhile.
            if single:
                gather(alone if down else I(0), count, units, places)
            else:
                gather(inputs, count, units, places)
            for k in range(n_acc):
                acc[k] = f32(0.0)
            records = advance(w, np.int64(I(I(I((origin >> 4) + tile) * units) + first)) * size)
            if not mixed or not second:
                chain0(records, first, last, units, places, q, d, s, acc)
            else:
                chain1(records, first, last, units, places, q, d, s, acc)
            # Two sets of parts in turn, so that a warp may begin the next tile while others still read these.
            begin = I(0) if single else I(I(tile & 1) * n_parts)
            column = I(2 * (lane & 3))
            if columns > 1 or column == 0:
                own_parts = advance(parts, I(begin + warp * (16 * n_columns) + 16 * column + (lane >> 2)))
                for n in range(row_tiles):
                    for c in range(columns):
                        own_parts[(8 * n + c) * 16] = acc[4 * n + c]
                        own_parts[(8 * n + c) * 16 + 8] = acc[4 * n + 2 + c]
            cuda.syncthreads()
            i = thread
            while i < 16 * count:
                r = I(low + (i & 15))
                if r >= 0 and r < n_rows:
                    total = f32(0.0)
                    for c in range(CHAINS):
                        if c * 32 < cuda.blockDim.x:
                            total = total + parts[begin + c * (16 * n_columns) + i]
                    t = alone if single else listed[i >> 4]
                    if finishes and pair >= 0:
                        total = apply_finish(total, factor, bias)
                    out[np.int64(t) * n_rows + r] = total
                i = I(i + cuda.blockDim.x)
            tile = I(tile + 1)
            if single or tile & I(run - 1) == 0:
                return

    return matmul_experts


@kernel(U32P, F32P, I32P, F32P, F32P, i32, i32, F32P, threads=256)
def matmul_experts_float(format: str, n_used: int, down: bool, finish: Finish = NOTHING) -> KernelCode:
    """A matrix of a float format of every expert, times float32 activations.

    finish: what is done with the products: ``factors`` [n_expert], ``biases`` [n_expert, R].
    Who owns what, and the order: ``matmul_float`` of ``engine/cuda/products/matmul.py``.  Grid: (pairs, ceil(R / 8)),
    of 8 warps.
    """
    load_float = make_load_float(T[format])
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @cuda.jit
    def matmul_experts_float(weight, x, ids, factors, biases, columns, n_rows, out):
        let_next_begin()
        lane, pair = I(cuda.threadIdx.x & 31), I(cuda.blockIdx.x)
        r = I(cuda.blockIdx.y * 8 + (cuda.threadIdx.x >> 5))
        wait_for_inputs()
        if r < n_rows:
            base = np.int64(I(ids[pair] * n_rows + r)) * columns
            x = advance(x, I(pair if down else I(pair // n_used)) * np.int64(columns))
            acc = f32(0.0)
            for k in range(lane, columns, 32):
                acc = fma(load_float(weight, base + k), x[k], acc)
            total = fold32(acc)
            if finishes:
                factor, bias = load_finish(factors, biases, ids[pair], r, n_rows)
                total = apply_finish(total, factor, bias)
            if lane == 0:
                out[pair * np.int64(n_rows) + r] = total

    return matmul_experts_float
