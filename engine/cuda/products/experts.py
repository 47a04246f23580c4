"""Products with the experts that rows have chosen, and the sum of their outputs (Shazeer et al. 2017).

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: a *pair* is a row and one of its experts, pair = row * n_used + s; ids int32, weights float32 [rows, n_used].
    The matrices of all experts form one of n_expert * R rows: rows [e R, (e + 1) R) are those of expert e.  Outputs float32
    [pairs, R]; if a network that every row uses takes part, ``rows`` more follow: [pairs + rows, R].  Activations are int8 in
    the layout of ``engine/cuda/products/quantize.py``: for gate and up one row per row, for down one per output.
Who owns what: ``matmul_experts``: a block owns 16 rows of the matrix of a pair's expert, and multiplies them by all pairs of
    that expert if its own is the first of them; otherwise it exits.  So an expert is read once, however many rows use it.
    ``matmul_join``: a block owns 16 outputs of a single row, a warp one unit of one expert, whose activations it first
    computes.  ``join``: a thread owns an element.
Reduction order: that of ``engine/cuda/products/matmul.py``, then sum = fma(w_last, y_last, ... fma(w_0, y_0, 0)),
    fma(sigmoid(l_shared), y_shared, sum), residual + that if there is one.
Bytes moved: the matrices of every expert in use, once.

Which weights are needed is known only when the inputs are complete, except for the network that every row uses: its blocks
come first, and have loaded theirs by then.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
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
    silu,
    wait_for_inputs,
)
from engine.cuda.products.chain import ZERO, make_chain, make_gather, make_parts, n_places
from engine.cuda.products.matmul import make_load_float
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.router import make_route
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS, FORMATS, TINY

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

MOST_WARPS = 24
"""Warps of the largest block of ``matmul_join``: 80 registers a thread."""

AREA = 76
"""Words of a unit of 256 activations of one row: 64 of int8, 12 of sums."""


def tiles(n_rows: int) -> int:
    """Records of 16 rows that the matrix of an expert touches; if R is not a multiple of 16, it may begin inside a record."""
    return n_rows // 16 if n_rows % 16 == 0 else (n_rows + 30) // 16


# --- products --------------------------------------------------------------------------------------------------


def resident(formats: tuple[str, ...], most: int, *others: DeviceFunction) -> int:
    """Blocks per multiprocessor: three if 80 registers per thread are enough."""
    small = {"Q2_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ4_XS"}.isdisjoint(formats) and len(set(formats)) == 1
    return 3 if most == 1 and small else 2


@kernel(
    *(U32P, U32P, U32P, U32P, F32P, F32P, I32P, F32P, F32P, F32P),
    *(i32, i32, i32, i32, U32P, F32P, U32P),
    threads=32 * CHAINS,
    blocks=resident,
)
def matmul_experts(
    formats: tuple[str, ...],
    most: int,
    n_used: int,
    shared: bool,
    down: bool,
    n_expert: int = 0,
    scaled: bool = False,
) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of ``formats``, times the activations of all pairs; ``shared``: s0 and
    s1 are those of a network that every row uses; ``down``: activations are one row per output, not one per row.

    most: rows, 1, 8 or 16.  n_expert: for a single row, the kernel itself chooses among that many by ``logits``, and writes
    ids and weights, with the experts' ``scales`` if ``scaled``.
    Grid: (matrices * ``tiles(R)``, pairs + ``shared``) blocks of 32 * ``matmul.warps(units, False)`` threads.
    """
    kinds = [T[name] for name in formats]
    two, mixed = len(kinds) > 1, len(set(kinds)) > 1
    chain0, chain1 = ([make_chain(kind, most, False, False, True) for kind in dict.fromkeys(kinds)] * 2)[:2]
    size0, size1 = ([4 * FORMATS[kind].block_bytes for kind in kinds] * 2)[:2]
    gather = make_gather(FORMATS[kinds[0]].unit, most)
    row_tiles, columns = -(-most // 8), min(most, 2)
    n_acc, n_columns = 4 * row_tiles, 1 if most == 1 else 8 * row_tiles
    n_parts, n_where = CHAINS * 16 * n_columns, n_places(most)
    single, first_pair, chooses = most == 1, int(shared), n_expert > 0
    choose, share = make_route(max(n_expert, 1), n_used, scaled)

    @cuda.jit
    def matmul_experts(  # type: ignore[no-untyped-def]
        w0, w1, s0, s1, out0, out1, ids, weights, logits, scales, rows, n_tiles, n_rows, units, q, d, s
    ):
        let_next_begin()
        parts = pointer(cuda.shared.array(n_parts, np.float32))
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
        second = two and tile >= n_tiles
        w, common, out, size = w0, s0, out0, I(size0)
        if second:
            tile = I(tile - n_tiles)
            w, common, out, size = w1, s1, out1, I(size1)
        origin, count = I(0), I(1)
        if shared and pair < 0:
            w, count = common, rows
            if not single and thread < rows:
                listed[thread] = I(pairs + thread)
                inputs[thread] = I(pairs + thread) if down else thread
        else:
            wait_for_inputs()
            if chooses:
                last_block = pair == n_used - 1 and cuda.blockIdx.x == 0
                mine, p = choose(logits, I(pair + 1))
                # Every lane needs the value of lane ``pair``.
                origin = I(lanes_max(mine if lane == pair else I(-1)) * n_rows)
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
        # The tile's first row, negative if the expert begins inside a record.
        low = I(16 * tile - (origin & 15))
        if low >= n_rows:
            wait_for_inputs()
            return
        alone = pair if pair >= 0 else I(n_used)
        if single:
            gather(alone if down else I(0), count, units, places)
        else:
            cuda.syncthreads()
            gather(inputs, count, units, places)
        for k in range(n_acc):
            acc[k] = f32(0.0)
        records = advance(w, np.int64(I(I(I((origin >> 4) + tile) * units) + first)) * size)
        if not mixed or not second:
            chain0(records, first, last, units, places, q, d, s, acc)
        else:
            chain1(records, first, last, units, places, q, d, s, acc)
        column = I(2 * (lane & 3))
        if columns > 1 or column == 0:
            own_parts = advance(parts, I(warp * (16 * n_columns) + 16 * column + (lane >> 2)))
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
                        total = total + parts[c * (16 * n_columns) + i]
                t = alone if single else listed[i >> 4]
                out[np.int64(t) * n_rows + r] = total
            i = I(i + cuda.blockDim.x)

    return matmul_experts


@kernel(U32P, F32P, I32P, i32, i32, F32P, threads=256)
def matmul_experts_float(format: str, n_used: int, down: bool) -> KernelCode:
    """A matrix of a float format of every expert, times float32 activations.

    Who owns what, and the order: ``matmul_float`` of ``engine/cuda/products/matmul.py``.  Grid: (pairs, ceil(R / 8)),
    of 8 warps.
    """
    load_float = make_load_float(T[format])

    @cuda.jit
    def matmul_experts_float(weight, x, ids, columns, n_rows, out):  # type: ignore[no-untyped-def]
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
            if lane == 0:
                out[pair * np.int64(n_rows) + r] = total

    return matmul_experts_float


# --- sums ------------------------------------------------------------------------------------------------------


@kernel(F32P, F32P, F32P, F32P, F32P, i32, i32, F32P, threads=256)
def join(n_used: int, shared: bool, add: bool) -> KernelCode:
    """out = the sum of y [pairs, n] by the experts' weights, plus, if ``shared``, common [rows, n] by the last of each row's
    logits, one every ``stride``, plus residual if ``add``.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def join(residual, y, weights, common, logits, stride, n, out):  # type: ignore[no-untyped-def]
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
                last, gate = common[t * n + i], logits[t * stride + (stride - 1)]
            total = f32(0.0)
            for s in range(n_used):
                total = fma(factors[s], values[s], total)
            if shared:
                total = fma(sigmoid(gate), last, total)
            out[t * n + i] = before + total if add else total

    return join


# --- a single row ----------------------------------------------------------------------------------------------


def join_threads(format: str, units: int, n_used: int, shared: bool) -> int:
    """Threads of a block of ``matmul_join``: a warp for each unit."""
    return 32 * units * (n_used + shared)


def can_join(format: str, units: int, n_rows: int, n_used: int, shared: bool) -> bool:
    """Whether ``matmul_join`` supports a matrix of n_rows rows."""
    few = join_threads(format, units, n_used, shared) <= 32 * MOST_WARPS
    return FORMATS[T[format]].unit == 256 and n_rows % 16 == 0 and few


@device
def swiglu_area(gate, up, area):  # type: ignore[no-untyped-def]
    """silu(gate) * up of 256 positions, quantized to int8 by one warp as in ``engine/cuda/products/quantize.py``;
    returns the scale.

    area, words [76] in shared memory: word (v, i, 2 h + k) holds positions 64 v + 32 h + 16 k + 4 i .. + 3, followed by the
    int16 sums of each 16 and of each 32.
    """
    lane = I(cuda.threadIdx.x & 31)
    x = cuda.local.array(8, np.float32)
    for half in range(2):
        g, u = load4(gate, 128 * half + 4 * lane), load4(up, 128 * half + 4 * lane)
        for k in range(4):
            x[4 * half + k] = silu(bits_float(I(g[k]))) * bits_float(I(u[k]))
    bits = I(0)
    for k in range(8):
        bits = max(bits, I(float_bits(x[k]) & I(0x7FFFFFFF)))
    amax = bits_float(lanes_max(bits))
    inverse = f32(127.0) / amax
    if amax < TINY:
        amax = f32(0.0)
        inverse = f32(0.0)
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
def four(p, i):  # type: ignore[no-untyped-def]
    """Four words of shared memory."""
    return u32(p[i]), u32(p[i + 1]), u32(p[i + 2]), u32(p[i + 3])


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, F32P, F32P, F32P, i32, F32P),
    threads=join_threads,
    blocks=1,
)
def matmul_join(format: str, units: int, n_used: int, shared: bool) -> KernelCode:
    """out [R] = residual + the mixture, from gate and up float32 [pairs + shared, 256 units] of a single row: SwiGLU, its
    int8 quantization, the product with w (``common``: that of the network that every row uses), and the join (``logit``: its
    gate).

    R is a multiple of 16.  Grid: R / 16 blocks of ``join_threads``.
    """
    parts = make_parts(T[format], 1, True, read=four)
    fmt, load, multiply, load_sums, close = parts.fmt, parts.load, parts.multiply, parts.load_sums, parts.close
    header, block, sums, factors = fmt.header, fmt.block, fmt.sums, fmt.factors
    size, n_words = parts.size, parts.n_words
    n_groups = n_used + int(shared)
    n_area, n_sums, n_scales = AREA * units * n_groups, 16 * units * n_groups, units * n_groups
    n_outputs, length = 16 * n_groups, -(-units // CHAINS)

    @cuda.jit
    def matmul_join(w, common, gate, up, ids, weights, logit, residual, n_rows, out):  # type: ignore[no-untyped-def]
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
        wait_for_inputs()
        factor = f32(0.0)
        if u == 0 and lane == 0:
            factor = logit[0] if everyone else weights[group]
        r = I(I(cuda.blockIdx.x) * 16 + (thread & 15))
        before = residual[r]
        area = advance(areas, I(warp * AREA))
        at = I(warp * 256)
        da = swiglu_area(advance(gate, at), advance(up, at), area)
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
                mix[group] = sigmoid(factor) if everyone else factor
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
            outputs[thread] = total
        cuda.syncthreads()
        if thread < 16:
            total = f32(0.0)
            for k in range(n_groups):
                total = fma(mix[k], outputs[16 * k + thread], total)
            out[r] = before + total

    return matmul_join
