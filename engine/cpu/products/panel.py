"""Products of float weights with many rows: eight weight rows become a panel, whose tiles stay in registers.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]), as in ``dense.py``.
Shapes: a panel float32 [parts, 8 / W, steps, W, lanes] holds eight weight rows of K columns; steps = ceil(K / 32), parts =
    32 / lanes.  Step s, part p and lane l have column 32 s + lanes p + l, zero from column K on.  chains float32
    [GROUP, parts, 8, lanes]; tails float32 [n, 32], the columns of x after the last multiple of 32, -0 from column K on.
Who owns what: a call owns eight weight rows; a tile is W of them, three rows of x and one part of the chains.
Reduction order: that of ``dense.py``: a lane is a chain, so the order is the same whatever the tile.  Tails change nothing:
    fma(0, -0, chain) = chain, whatever its sign.
Bytes moved: each weight once from memory, once into the panel and once per three rows out of it, from the first cache: a span
    of a tile has at most 32 KB; x once per eight weight rows, from the second cache.

A tile keeps 24 sums of 512 bits, or 12 of 256, in registers, and multiplies W + 3 vectors that it loads in each step:

    for each span of steps, part p, W rows of the panel, three rows of x:
        for each step s of the span:    chains[t, r] = fma(panel[p, r, s], x[t, s, p], chains[t, r])    W * 3 vectors
    then out[t, :] = the halving trees of eight weight rows at once
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.cpu.lanes import not_inlined
from engine.cpu.products.repack import ROWS
from engine.cpu.simd import F16, F32, I16, I32, I64, Code, Vec, data_of
from engine.gguf.quants import FLOAT_CHAINS

f32 = np.float32
i64 = np.int64

TILE = 3
"""Rows of x of a tile."""
SPAN = 48
"""The most steps that a tile is multiplied at a time."""
GROUP = 48
"""Rows of x whose chains are kept at a time, a multiple of ``TILE``."""
GROUP_FLOATS = GROUP * FLOAT_CHAINS * ROWS
"""Elements of the chains of so many rows."""
LINE = 16
"""Floats of a line of the CPU's caches."""
SIZES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a weight."""


def load_floats(code: Code, fmt: str, pointer: ir.Value, offset: ir.Value | int, n: int) -> Vec:
    """n weights from a byte offset on, converted exactly to float32."""
    if fmt == "F32":
        return code.load(pointer, offset, F32, n)
    if fmt == "F16":
        return code.load(pointer, offset, F16, n).to_float()
    return (code.load(pointer, offset, I16, n).unsigned(I32) << 16).view(F32)


def lanes_of(instructions: str) -> tuple[int, int]:
    """The number of lanes of a vector and of weight rows of a tile, so that its sums fit into registers."""
    return (16, 8) if instructions == "vnni512" else (8, 4)


@njit(cache=True)
def scratch_of(columns):
    """Memory for a panel and for chains.  Both begin at multiples of 64 bytes, so that no vector crosses a line of the CPU's
    caches."""
    floats = ROWS * ((columns + FLOAT_CHAINS - 1) // FLOAT_CHAINS) * FLOAT_CHAINS
    memory = np.empty(LINE + floats + GROUP_FLOATS, np.float32)
    first = (LINE - memory.ctypes.data // 4 % LINE) % LINE
    return memory[first : first + floats], memory[first + floats : first + floats + GROUP_FLOATS]


@functools.cache
def fill(fmt: str, instructions: str) -> Any:
    """The intrinsic ``fill(data, at, pitch, count, columns, panel)``: make a panel of the ``count`` weight rows from byte
    ``at`` on, ``pitch`` bytes apart; the last one stands for missing ones."""
    lanes, tile = lanes_of(instructions)

    @intrinsic
    def fill(typingctx, data, at, pitch, count, columns, panel):
        def codegen(context, builder, sig, args):
            code, n = Code(builder, instructions, lanes), ir.Constant(I64, FLOAT_CHAINS)
            source = code.at(data_of(context, builder, sig.args[0], args[0]), args[1])
            target = data_of(context, builder, sig.args[5], args[5])
            pitch, count, columns = args[2:5]
            last = builder.sub(count, ir.Constant(I64, 1))
            whole = builder.sdiv(columns, n)
            steps = builder.sdiv(builder.add(columns, ir.Constant(I64, FLOAT_CHAINS - 1)), n)
            step_bytes, part_bytes = 4 * lanes * tile, code.times(steps, 4 * lanes * ROWS)
            with code.loop(ROWS // tile) as j, code.loop(tile) as i:
                row = builder.add(code.times(j, tile), i)
                row = code.at(source, code.times(code.minimum(row, last), pitch))
                own = code.at(target, code.times(code.times(j, steps), step_bytes))
                own = code.at(own, code.times(i, 4 * lanes))
                with code.loop(whole) as s:
                    place = code.at(own, code.times(s, step_bytes))
                    weights = code.at(row, code.times(s, FLOAT_CHAINS * SIZES[fmt]))
                    code.prefetch(code.at(weights, code.times(pitch, ROWS)), FLOAT_CHAINS * SIZES[fmt])
                    for p in range(FLOAT_CHAINS // lanes):
                        w = load_floats(code, fmt, weights, lanes * p * SIZES[fmt], lanes)
                        code.store(w, place, code.times(part_bytes, p))
                with code.loop(steps, whole) as s:
                    rest = code.scratch(4 * FLOAT_CHAINS)
                    for p in range(FLOAT_CHAINS // lanes):
                        code.store(code.zeros(F32, lanes), rest, 4 * lanes * p)
                    begun = code.times(s, FLOAT_CHAINS)
                    with code.loop(builder.sub(columns, begun)) as k:
                        w = load_floats(code, fmt, row, code.times(builder.add(begun, k), SIZES[fmt]), 1)
                        code.store(w, rest, code.times(k, 4))
                    place = code.at(own, code.times(s, step_bytes))
                    for p in range(FLOAT_CHAINS // lanes):
                        code.store(code.load(rest, 4 * lanes * p, F32, lanes), place, code.times(part_bytes, p))
            return context.get_dummy_value()

        return types.void(data, *(types.int64,) * 4, panel), codegen

    return fill


def _has_elements(context, builder, kind, array) -> ir.Value:
    """Whether a vector of Numba is not empty."""
    length = builder.extract_value(context.make_array(kind)(context, builder, array).shape, 0)
    return builder.icmp_signed("!=", length, ir.Constant(I64, 0))


def _entry(code: Code, order: ir.Value, listed: ir.Value, t: ir.Value) -> ir.Value:
    """order[t] if ``listed``, else t."""
    place = code.place(I64)
    code.builder.store(t, place)
    with code.builder.if_then(listed):
        code.builder.store(code.load(order, code.times(t, 4), I32, 1).signed(I64).extract(0), place)
    return code.builder.load(place)


def emit_tile(
    code: Code, tile: int, w: ir.Value, x: list[ir.Value], steps: ir.Value, chains: list[ir.Value], fresh: ir.Value
) -> None:
    """Multiply ``tile`` rows of a panel from w on with rows that begin at x, and add to one part of their chains."""
    b, lanes = code.builder, code.lanes
    sums = [[code.variable(code.zeros(F32)) for _ in range(tile)] for _ in x]
    with b.if_then(b.not_(fresh)):
        for own, place in zip(sums, chains, strict=True):
            for i, total in enumerate(own):
                total.set(code.load(place, 4 * lanes * i, F32, lanes))
    with code.loop(steps) as s:
        at = code.times(s, 4 * FLOAT_CHAINS)
        factors = [code.load(row, at, F32, lanes) for row in x]
        weights = code.at(w, code.times(s, 4 * lanes * tile))
        for i in range(tile):
            weight = code.load(weights, 4 * lanes * i, F32, lanes)
            for own, factor in zip(sums, factors, strict=True):
                own[i].set(weight.fma(factor, own[i].get()))
    for own, place in zip(sums, chains, strict=True):
        for i, total in enumerate(own):
            code.store(total.get(), place, 4 * lanes * i)


@functools.cache
def make_multiply(instructions: str) -> Any:
    """The function ``multiply(panel, steps, first, stop, x, pitch, column, order, share, begin, end, chains)``.

    It multiplies steps [first, stop) of a panel of ``steps`` with rows [begin, end), and adds to their chains, which begin as
    zeros if first is 0.  Row t begins at element ``pitch * (order[t] // share) + column`` of x; without order, order[t] = t.
    """
    lanes, tile = lanes_of(instructions)
    parts, tiles = FLOAT_CHAINS // lanes, ROWS // tile

    @intrinsic
    def emit(typingctx, panel, steps, first, stop, x, pitch, column, order, share, begin, end, chains):
        def codegen(context, builder, sig, args):
            code = Code(builder, instructions, lanes)
            panel, x, order, chains = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 4, 7, 11))
            steps, first, stop, pitch, column, share, begin, end = (args[i] for i in (1, 2, 3, 5, 6, 8, 9, 10))
            listed = _has_elements(context, builder, sig.args[7], args[7])
            fresh = builder.icmp_signed("==", first, ir.Constant(I64, 0))
            count = builder.sub(stop, first)

            def row(t: ir.Value) -> ir.Value:
                own = builder.sdiv(_entry(code, order, listed, t), share)
                return code.at(x, code.times(builder.add(code.times(own, pitch), column), 4))

            with code.loop(parts) as p, code.loop(tiles) as j:
                w = builder.add(code.times(builder.add(code.times(p, tiles), j), steps), first)
                w = code.at(panel, code.times(w, 4 * lanes * tile))
                from_: ir.Value = begin
                for size in (TILE, 1):
                    n = builder.sub(end, from_)
                    until = builder.add(from_, code.times(builder.sdiv(n, ir.Constant(I64, size)), size))
                    with code.loop(until, from_, size) as t:
                        each = [builder.add(t, ir.Constant(I64, i)) for i in range(size)]
                        rows = [code.at(row(own), code.times(p, 4 * lanes)) for own in each]
                        places = []
                        for own in each:
                            at = builder.add(code.times(builder.sub(own, begin), parts), p)
                            at = builder.add(code.times(at, ROWS), code.times(j, tile))
                            places.append(code.at(chains, code.times(at, 4 * lanes)))
                        emit_tile(code, tile, w, rows, count, places, fresh)
                    from_ = until
            return context.get_dummy_value()

        n = types.int64
        return types.void(panel, n, n, n, x, n, n, order, n, n, n, chains), codegen

    @njit(error_model="numpy")
    def multiply(panel, steps, first, stop, x, pitch, column, order, share, begin, end, chains):
        not_inlined()
        emit(panel, steps, first, stop, x, pitch, column, order, share, begin, end, chains)

    return multiply


def emit_trees(code: Code, chains: ir.Value) -> Vec:
    """The halving trees of eight weight rows for one row of x, whose chains begin at a pointer: float32 [8]."""
    lanes, parts = code.lanes, FLOAT_CHAINS // code.lanes

    def load(p: int, i: int) -> Vec:
        return code.load(chains, 4 * lanes * (ROWS * p + i), F32, lanes)

    vectors = []
    for i in range(ROWS):
        own = [load(p, i) for p in range(parts)]
        while len(own) > 1:
            half = len(own) // 2
            own = [a + b for a, b in zip(own[:half], own[half:], strict=True)]
        vectors += own
    width = lanes
    # A vector holds the chains of several rows, ``width`` of each.
    while width > 1:
        half, n = width // 2, min(len(vectors), 2)
        low, high = ([lane for lane in range(n * lanes) if lane // half % 2 == k] for k in (0, 1))
        groups = [vectors[i : i + n] for i in range(0, len(vectors), n)]
        vectors = [own[0].shuffle(low, own[-1]) + own[0].shuffle(high, own[-1]) for own in groups]
        width = half
    return vectors[0]


@functools.cache
def finish(instructions: str) -> Any:
    """The intrinsic ``finish(chains, n, residual, added, out, at, rows, order, begin, count)``: store the sums of n rows from
    t = ``begin`` on, for ``count`` weight rows, to out from element ``rows * order[t] + at`` on (without order, order[t] =
    t), with the residual added if ``added`` is not 0."""
    lanes, _ = lanes_of(instructions)

    @intrinsic
    def finish(typingctx, chains, n, residual, added, out, at, rows, order, begin, count):
        def codegen(context, builder, sig, args):
            code = Code(builder, instructions, lanes)
            chains, residual, out, order = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 2, 4, 7))
            n, added, at, rows, begin, count = (args[i] for i in (1, 3, 5, 6, 8, 9))
            listed = _has_elements(context, builder, sig.args[7], args[7])
            added = builder.icmp_signed("!=", added, ir.Constant(I64, 0))
            whole = builder.icmp_signed("==", count, ir.Constant(I64, ROWS))
            with code.loop(n) as i:
                total = emit_trees(code, code.at(chains, code.times(i, 4 * FLOAT_CHAINS * ROWS)))
                own = _entry(code, order, listed, builder.add(begin, i))
                start = code.times(builder.add(code.times(own, rows), at), 4)
                target, before = code.at(out, start), code.at(residual, start)
                with builder.if_else(whole) as (yes, no):
                    with yes, builder.if_else(added) as (sum_, plain):
                        with sum_:
                            code.store(code.load(before, 0, F32, ROWS) + total, target)
                        with plain:
                            code.store(total, target)
                    with no:
                        values = code.scratch(4 * ROWS)
                        code.store(total, values)
                        with code.loop(code.times(count, 4), 0, 4) as k:
                            value = code.load(values, k, F32, 1)
                            with builder.if_else(added) as (sum_, plain):
                                with sum_:
                                    code.store(code.load(before, k, F32, 1) + value, target, k)
                                with plain:
                                    code.store(value, target, k)
            return context.get_dummy_value()

        n = types.int64
        return types.void(chains, n, residual, n, out, n, n, order, n, n), codegen

    return finish


@functools.cache
def make_panel_product(fmt: str, instructions: str) -> Callable[..., None]:
    """The function ``product(data, at, pitch, count, x, tails, order, share, begin, end, residual, out, r, panel, chains)``.

    It multiplies the ``count`` weight rows from byte ``at`` of data on, ``pitch`` bytes apart, with the rows ``order[t] //
    share`` of x, begin <= t < end, and stores the results in rows order[t] of out, columns r .. r + count - 1.  An empty
    order means order[t] = t; tails are :func:`tails_of` x.  panel and chains are :func:`scratch_of` K.
    """
    fill_panel, multiply, finish_rows = fill(fmt, instructions), make_multiply(instructions), finish(instructions)

    @njit(error_model="numpy")
    def product(data, at, pitch, count, x, tails, order, share, begin, end, residual, out, r, panel, chains):
        columns = x.shape[1]
        steps, whole = (columns + FLOAT_CHAINS - 1) // FLOAT_CHAINS, columns // FLOAT_CHAINS
        fill_panel(data, at, pitch, count, columns, panel)
        rows, added = out.shape[1], i64(residual.shape[0] > 0)
        for t in range(begin, end, GROUP):
            stop = min(end, t + GROUP)
            for s in range(0, whole, SPAN):
                span = min(whole, s + SPAN)
                multiply(panel, steps, s, span, x, columns, s * FLOAT_CHAINS, order, share, t, stop, chains)
            if whole < steps:
                multiply(panel, steps, whole, steps, tails, FLOAT_CHAINS, 0, order, share, t, stop, chains)
            finish_rows(chains, stop - t, residual, added, out, r, rows, order, t, count)

    return product


@njit(cache=True)
def tails_of(x):
    """The columns of x float32 [n, K] after the last multiple of 32, float32 [n, 32], -0 after them; [0, 32] if there are
    none."""
    columns = x.shape[1]
    whole = columns // FLOAT_CHAINS * FLOAT_CHAINS
    tails = np.full((x.shape[0] if whole < columns else 0, FLOAT_CHAINS), f32(-0.0), np.float32)
    for t in range(tails.shape[0]):
        for k in range(whole, columns):
            tails[t, k - whole] = x[t, k]
    return tails
