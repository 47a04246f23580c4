"""Matrix products on tensor cores: 16 weight rows by up to 16 activation rows at a time, weights read once.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ bias[r]) (+ residual[t, r]).
Shapes: weights as records (``engine/cuda/products/repack.py``), activations in the layout of
    ``engine/cuda/products/quantize.py``; out float32 [rows, R].
    Up to three matrices with the same activations and columns are multiplied in one launch, each with its own output.
    ``matmul_give`` also gives the results to other GPUs, as packets (``engine/cuda/gather.py``).
Who owns what: a block owns 16 weight rows (a tile), its warp c the units of chain c, or, in a kernel of a single unit per
    warp, unit c (``engine/cuda/products/chain.py``); lane 4 g + t sums rows g and g + 8 for activation rows 2 t and 2 t
    + 1 of each 8.
Reduction order: units u = 0 .. U-1; chain c owns units [c L, (c+1) L), L = ceil(U / 8);
    chain_c = fma(da_u, value_u, ... fma(da_first, value_first, 0)),  value_u = fma(dm_u, M_u, d_u * I_u)
    (value_u = d_u * I_u where the format has no minimum), I_u and M_u exact integers;
    out = ((((0 + chain_0) + chain_1) + ...) + chain_7) (+ bias) (+ residual).
Bytes moved: each record once from memory, the activations once per block from the cache; ``matmul_give``: 8 per result for
    each owner, over the links to the others.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.gather import PEERS, make_give
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    float_bits,
    fma,
    give_packet,
    half_to_float,
    let_next_begin,
    pointer,
    prefetch,
    wait_for_inputs,
)
from engine.cuda.products.chain import make_chain
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS, FORMATS

f32 = np.float32
u16 = np.uint16
u32 = np.uint32
I = np.int32  # noqa: E741

SINGLE_WARPS = 16
"""Warps with a single unit each that fit on a multiprocessor at once, with up to 128 registers per thread."""


def compiled_rows(rows: int) -> int:
    """The number of rows that the kernel for ``rows`` rows is compiled for: one, or whole tiles of 8."""
    return 1 if rows == 1 else -(-rows // 8) * 8


def warps(units: int, single: bool) -> int:
    """Warps of a block: the number of chains that have units, or, with a single unit per warp, of units."""
    return units if single else -(-units // -(-units // CHAINS))


def threads(
    formats: tuple[str, ...],
    most: int,
    add: bool,
    deep: bool,
    single: int = 0,
    biased: bool = False,
    n_peers: int = 0,
) -> int:
    """Threads of the largest block of ``matmul_quantized``."""
    return 32 * (single or CHAINS)


def resident(
    formats: tuple[str, ...],
    most: int,
    add: bool,
    deep: bool,
    single: int = 0,
    biased: bool = False,
    n_peers: int = 0,
) -> int:
    """Blocks per multiprocessor: three if 80 registers per thread are enough."""
    if single:
        return SINGLE_WARPS // single
    return 2 if deep or most > 8 or len(set(formats)) > 1 or {"Q5_K", "IQ4_XS", "Q5_1"} & set(formats) else 3


def make_store_result(give: DeviceFunction | None = None) -> DeviceFunction:
    """The device function ``store(out, n_rows, rows, m, t, r, x, to)``: result (t, r) of matrix m is x.

    give: that of ``engine/cuda/gather.py`` if the result is also packet [m, t, first + r] of all owners; then ``to`` is n,
        first, number, the own packets, and those of the others.
    """

    @device
    def store(out, n_rows, rows, m, t, r, x, to):
        out[t * np.int64(n_rows) + r] = x

    if give is None:
        return store

    @device
    def store_and_give(out, n_rows, rows, m, t, r, x, to):
        store(out, n_rows, rows, m, t, r, x, to)
        n, first, number, here, peers = to
        at = I(I(m * rows + t) * n + first + r)
        give(peers, at, x, number)
        give_packet(here, at, float_bits(x), number)

    return store_and_give


def make_product(
    store: DeviceFunction, formats: tuple[str, ...], most: int, add: bool, deep: bool, single: int, biased: bool
) -> DeviceFunction:
    """The device function of a block of :func:`matmul_quantized`, whose arguments it takes, and ``to`` for
    :func:`make_store_result`."""
    kinds = [T[name] for name in formats]
    distinct = list(dict.fromkeys(kinds))
    several, three = len(kinds) > 1, len(kinds) > 2
    mixed, third = len(distinct) > 1, len(distinct) > 2
    chain0, chain1, chain2 = ([make_chain(kind, most, deep, single > 0) for kind in distinct] * 3)[:3]
    kind0, kind1, kind2 = ([distinct.index(kind) for kind in kinds] * 3)[:3]
    size0, size1, size2 = ([4 * FORMATS[kind].unit_bytes for kind in kinds] * 3)[:3]
    tiles, columns = -(-most // 8), min(most, 2)
    n_acc, n_columns = 4 * tiles + 2, 1 if most == 1 else 8 * tiles
    n_parts, n_scales = (single or CHAINS) * 16 * n_columns, single * n_columns or 1
    own_length = -(-single // CHAINS)

    @device
    def product(
        w0, w1, w2, out0, out1, out2, residual, end0, end1, rows0, rows1, rows2, units, q, d, s, rows, bias, to
    ):
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        length = I(1) if single else I((units + CHAINS - 1) // CHAINS)
        first = I(warp * length)
        last = min(I(first + length), units)
        tile, m = I(cuda.blockIdx.x), I(0)
        w, out, n_rows, kind, size = w0, out0, rows0, I(kind0), I(size0)
        if several and tile >= end0:
            if three and tile >= end1:
                tile, m = I(tile - end1), I(2)
                w, out, n_rows, kind, size = w2, out2, rows2, I(kind2), I(size2)
            else:
                tile, m = I(tile - end0), I(1)
                w, out, n_rows, kind, size = w1, out1, rows1, I(kind1), I(size1)
        acc = cuda.local.array(n_acc, np.float32)
        for k in range(n_acc):
            acc[k] = f32(0.0)
        p = advance(w, np.int64(I(tile * units + first)) * size)
        if not mixed or kind == 0:
            chain0(p, first, last, units, rows, q, d, s, acc)
        elif not third or kind == 1:
            chain1(p, first, last, units, rows, q, d, s, acc)
        else:
            chain2(p, first, last, units, rows, q, d, s, acc)
        before, shift = f32(0.0), f32(0.0)
        if biased:
            shift = bias[min(I(tile * 16 + (thread & 15)), I(n_rows - 1))]
        if add:
            t = I(0) if columns == 1 else min(I(thread >> 4), I(rows - 1))
            before = residual[t * np.int64(n_rows) + min(I(tile * 16 + (thread & 15)), I(n_rows - 1))]
        parts = pointer(cuda.shared.array(n_parts, np.float32))
        scales = pointer(cuda.shared.array(n_scales, np.float32))
        pair = I(2 * (lane & 3))
        if columns > 1 or pair == 0:
            mine = advance(parts, I(warp * (16 * n_columns) + 16 * pair + (lane >> 2)))
            for n in range(tiles):
                for c in range(columns):
                    mine[(8 * n + c) * 16] = acc[4 * n + c]
                    mine[(8 * n + c) * 16 + 8] = acc[4 * n + 2 + c]
            if single and lane < 4:
                for c in range(columns):
                    scales[warp * n_columns + pair + c] = acc[4 + c]
        cuda.syncthreads()
        i = thread
        while i < 16 * rows:
            t, r = I(0) if columns == 1 else I(i >> 4), I(tile * 16 + (i & 15))
            if r < n_rows:
                total, chain = f32(0.0), f32(0.0)
                if single:
                    for u in range(single):
                        chain = fma(scales[u * n_columns + t], parts[u * (16 * n_columns) + i], chain)
                        if (u + 1) % own_length == 0 or u + 1 == single:
                            total = total + chain
                            chain = f32(0.0)
                else:
                    for c in range(CHAINS):
                        if c * 32 < cuda.blockDim.x:
                            total = total + parts[c * (16 * n_columns) + i]
                if biased:
                    total = total + shift
                if add:
                    total = total + (before if columns == 1 or i == thread else residual[t * np.int64(n_rows) + r])
                store(out, n_rows, rows, m, t, r, total, to)
            if columns == 1:
                break
            i = I(i + cuda.blockDim.x)

    return product


PRODUCT = (*(U32P, U32P, U32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32), *(i32, U32P, F32P, U32P, i32, F32P))
"""The types of the arguments of ``matmul_quantized``."""


@kernel(*PRODUCT, threads=threads, blocks=resident)
def matmul_quantized(
    formats: tuple[str, ...], most: int, add: bool, deep: bool, single: int = 0, biased: bool = False
) -> KernelCode:
    """Up to three matrices times the same activations: matrix m has format ``formats[m]``, row tiles up to ends[m] (running
    over all three), rows[m] rows, and its own output; ``most``: activation rows, 1, 8 or 16; ``add``: the residual is added;
    ``deep``: see ``engine/cuda/products/chain.py``; ``single``: units of a row if each has a warp of its own, else 0;
    ``biased``: the bias is added.

    Grid: ends[last] blocks of 32 * ``warps(units, single)`` threads.
    """
    product = make_product(make_store_result(), formats, most, add, deep, single, biased)

    @cuda.jit
    def matmul_quantized(
        w0, w1, w2, out0, out1, out2, residual, end0, end1, rows0, rows1, rows2, units, q, d, s, rows, bias
    ):
        let_next_begin()
        product(w0, w1, w2, out0, out1, out2, residual, end0, end1, rows0, rows1, rows2, units, q, d, s, rows, bias, ())

    return matmul_quantized


@kernel(*PRODUCT, i32, i32, i32, *[U32P] * (1 + PEERS), threads=threads, blocks=resident)
def matmul_give(
    formats: tuple[str, ...],
    most: int,
    add: bool,
    deep: bool,
    single: int = 0,
    biased: bool = False,
    n_peers: int = 1,
) -> KernelCode:
    """``matmul_quantized`` that also gives its results to ``n_peers`` other owners: out[t, r] of matrix m is packet
    [m, t, first + r], uint32 [matrices, rows, n, 2].

    Further arguments: n, first, and the number of the exchange; the own packets, and those of the others.
    """
    product = make_product(make_store_result(make_give(n_peers)), formats, most, add, deep, single, biased)

    @cuda.jit
    def matmul_give(
        w0,
        w1,
        w2,
        out0,
        out1,
        out2,
        residual,
        end0,
        end1,
        rows0,
        rows1,
        rows2,
        units,
        q,
        d,
        s,
        rows,
        bias,
        n,
        first,
        number,
        here,
        p0,
        p1,
        p2,
        p3,
        p4,
        p5,
        p6,
    ):
        let_next_begin()
        to = n, first, number, here, (p0, p1, p2, p3, p4, p5, p6)
        product(w0, w1, w2, out0, out1, out2, residual, end0, end1, rows0, rows1, rows2, units, q, d, s, rows, bias, to)

    return matmul_give


# --- float formats ---------------------------------------------------------------------------------------------


def make_load_float(type_: T) -> DeviceFunction:
    """The device function ``load_float(words, i)``: weight i of a float format, converted exactly."""
    if type_ == T.F32:

        @device
        def load_f32(p, i):
            return bits_float(I(p[i]))

        return load_f32
    half = type_ == T.F16

    @device
    def load_16(p, i):
        word = p[i >> 1]
        bits = u32(word >> u32(16)) if i & 1 else u32(word & u32(0xFFFF))
        return half_to_float(u16(bits)) if half else bits_float(I(bits << u32(16)))

    return load_16


def make_load_step(type_: T) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(words from a weight to the one 32 further on, first, load) for the weights of a lane, which are 32 apart.

    ``first(i)``: the word of weight i, and by how many bits it is shifted in that word; ``load(word, shift)``: the weight.
    """
    if type_ == T.F32:

        @device
        def first_f32(i):
            return i, u32(0)

        @device
        def load_f32(word, shift):
            return bits_float(I(word))

        return 32, first_f32, load_f32
    half = type_ == T.F16

    @device
    def first_16(i):
        return i >> 1, u32((i & 1) << 4)

    @device
    def load_16(word, shift):
        bits = u32(word >> shift)
        return half_to_float(u16(bits)) if half else bits_float(I(bits << u32(16)))

    return 16, first_16, load_16


LONG, SHORT = 32, 8
"""Steps of a chain that are loaded at once, in a long run of steps and after it."""


@kernel(U32P, U32P, U32P, i32, i32, i32, F32P, i32, i32, F32P, F32P, F32P, F32P, threads=256)
def matmul_float(format: str, add: bool) -> KernelCode:
    """Up to three matrices of a float format times the float32 activations of a few rows.

    Arguments: the matrices, their rows, x, rows, columns, residual, the outputs; a matrix that does not exist has no rows.
    Who owns what: a warp owns a weight row and an activation row, lane c the chain of k % 32 == c; the warps of a weight row
    are neighbours.
    Grid: as many warps as there are results, in blocks of up to 8.
    Reduction order: one fma per k in rising order in each of 32 chains, then the tree of ``fold32``.
    """
    words, first_of, load = make_load_step(T[format])
    n_bytes = 4 if format == "F32" else 2

    def make_steps(n: int) -> DeviceFunction:
        """n steps of a lane's chain: all loads first, because they take long."""

        @device
        def steps(own, shift, x, total):
            given = cuda.local.array(n, np.uint32)
            values = cuda.local.array(n, np.float32)
            for j in range(n):
                given[j] = own[words * j]
                values[j] = x[32 * j]
            for j in range(n):
                total = fma(load(given[j], shift), values[j], total)
            return total

        return steps

    long_run, short_run, one = make_steps(LONG), make_steps(SHORT), make_steps(1)

    @cuda.jit
    def matmul_float(w0, w1, w2, n0, n1, n2, x, rows, columns, residual, out0, out1, out2):
        let_next_begin()
        lane = I(cuda.threadIdx.x & 31)
        at = I(cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5))
        # The last block is a whole one, too.
        inside = at < rows * I(n0 + n1 + n2)
        weight, n_rows, out = w0, n0, out0
        if at >= rows * n0 and n1 > 0:
            at = I(at - rows * n0)
            weight, n_rows, out = w1, n1, out1
            if at >= rows * n1 and n2 > 0:
                at = I(at - rows * n1)
                weight, n_rows, out = w2, n2, out2
        r, t = I(min(I(at // rows), I(n_rows - 1))), I(at % rows)
        begin = np.int64(r) * columns
        word, shift = first_of(begin + lane)
        own = advance(weight, word)
        x = advance(x, np.int64(t) * columns + lane)
        if lane == 0 and (columns * n_bytes) & 15 == 0:
            # Into the L2 cache while the kernel before this one ends.
            prefetch(weight, begin * n_bytes // 4, I(columns * n_bytes))
        wait_for_inputs()
        total = f32(0.0)
        left = I(I(columns - lane + 31) >> 5)
        while left >= LONG:
            total = long_run(own, shift, x, total)
            own, x, left = advance(own, LONG * words), advance(x, LONG * 32), I(left - LONG)
        while left >= SHORT:
            total = short_run(own, shift, x, total)
            own, x, left = advance(own, SHORT * words), advance(x, SHORT * 32), I(left - SHORT)
        while left > 0:
            total = one(own, shift, x, total)
            own, x, left = advance(own, words), advance(x, 32), I(left - 1)
        total = fold32(total)
        if lane == 0 and inside:
            place = np.int64(t) * n_rows + r
            if add:
                total = total + residual[place]
            out[place] = total

    return matmul_float


WIDE_SHAPES = (16, 4), (8, 1), (4, 1)
"""The activation rows and the weight rows of a warp of ``matmul_float_wide``."""


@kernel(U32P, F32P, i32, i32, i32, F32P, F32P, threads=256)
def matmul_float_wide(format: str, most: int, add: bool, each: int) -> KernelCode:
    """A matrix of a float format times the float32 activations of many rows.

    Who owns what: a warp owns ``each`` weight rows and ``most`` activation rows, lane c the chain of k % 32 == c.
    Grid: ``wide_grid``, blocks of 8 warps.
    Reduction order: one fma per k in rising order in each of 32 chains, then the tree of ``fold32``.
    """
    words, first_of, load = make_load_step(T[format])
    n_sums, several = most * each, 2 if most + each > 16 else 8

    def make_steps(n: int) -> DeviceFunction:
        """n steps of the lane's chains: all loads first, because they take long."""
        n_given, n_values = n * each, n * most

        @device
        def steps(weight, places, shifts, x, columns, sums):
            given = cuda.local.array(n_given, np.uint32)
            values = cuda.local.array(n_values, np.float32)
            for s in range(n):
                for j in range(each):
                    given[s * each + j] = weight[places[j] + words * s]
                for t in range(most):
                    values[s * most + t] = x[t * columns + 32 * s]
            for s in range(n):
                for j in range(each):
                    w = load(given[s * each + j], shifts[j])
                    for t in range(most):
                        sums[t * each + j] = fma(w, values[s * most + t], sums[t * each + j])

        return steps

    run, one = make_steps(several), make_steps(1)

    @cuda.jit
    def matmul_float_wide(weight, x, rows, columns, n_rows, residual, out):
        let_next_begin()
        lane = I(cuda.threadIdx.x & 31)
        r = I(I(cuda.blockIdx.y * 8 + (cuda.threadIdx.x >> 5)) * each)
        # The last block is a whole one, too: some rows are computed twice, with the same result.
        first = I(min(I(cuda.blockIdx.x * most), I(rows - most)))
        x = advance(x, np.int64(first) * columns + lane)
        sums = cuda.local.array(n_sums, np.float32)
        places = cuda.local.array(each, np.int64)
        shifts = cuda.local.array(each, np.uint32)
        for i in range(n_sums):
            sums[i] = f32(0.0)
        wait_for_inputs()
        if r < n_rows:
            for j in range(each):
                places[j], shifts[j] = first_of(np.int64(min(I(r + j), I(n_rows - 1))) * columns + lane)
            left = I(I(columns - lane + 31) >> 5)
            while left >= several:
                run(weight, places, shifts, x, columns, sums)
                weight, x, left = advance(weight, several * words), advance(x, several * 32), I(left - several)
            if several == 2:
                if left > 0:
                    one(weight, places, shifts, x, columns, sums)
            else:
                while left > 0:
                    one(weight, places, shifts, x, columns, sums)
                    weight, x, left = advance(weight, words), advance(x, 32), I(left - 1)
            for t in range(most):
                for j in range(each):
                    total = fold32(sums[t * each + j])
                    if lane == 0 and r + j < n_rows:
                        at = np.int64(first + t) * n_rows + (r + j)
                        if add:
                            total = total + residual[at]
                        out[at] = total

    return matmul_float_wide


def wide_grid(rows: int, n_rows: int, most: int, each: int) -> tuple[int, int]:
    """The grid of ``matmul_float_wide``; blocks that share weight rows are neighbours."""
    return -(-rows // most), -(-n_rows // (8 * each))


def wide_shape(rows: int, n_rows: int, multiprocessors: int) -> tuple[int, int]:
    """``most`` and ``each`` of ``matmul_float_wide``: the largest with which blocks occupy three quarters of the
    multiprocessors, if any do."""
    for most, each in WIDE_SHAPES:
        x, y = wide_grid(rows, n_rows, most, each)
        if 4 * x * y >= 3 * multiprocessors:
            return most, each
    return WIDE_SHAPES[-1]
