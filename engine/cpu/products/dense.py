"""Matrix products of float weights.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: weights uint8 [R, K * size], the rows of F32, F16 or BF16 as in the file; x float32 [n, K]; residual float32 [n, R],
    or [0, R] for none; out float32 [n, R].
Who owns what: an item is a weight row, for all activation rows.
Reduction order: chain c of 32 owns k with k % 32 == c, one fma each in rising k; then the halving tree
    (c0 + c16, c1 + c17, ...), (0 + 8, ...), ..., (0 + 1).
Bytes moved: each weight row once from memory; 4 n K bytes of activations from the cache per row.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.compile.family import family
from engine.cpu.products.panel import SIZES, load_floats, make_panel_product, scratch_of, tails_of
from engine.cpu.products.repack import ROWS
from engine.cpu.simd import F32, I64, Code, Vec, data_of, host
from engine.gguf.quants import FLOAT_CHAINS

TILE = 4
"""Activation rows that share the conversion of a weight row."""


def emit_dots(code: Code, fmt: str, row: ir.Value, columns: ir.Value, x: list[ir.Value]) -> list[Vec]:
    """The dot products, float32 [1], of a weight row with rows of activations."""
    n = FLOAT_CHAINS
    whole = code.builder.and_(columns, ir.Constant(I64, -n))
    chains = [code.variable(code.zeros(F32, n)) for _ in x]
    with code.loop(whole, 0, n) as k:
        w = load_floats(code, fmt, row, code.times(k, SIZES[fmt]), n)
        for chain, pointer in zip(chains, x, strict=True):
            chain.set(w.fma(code.load(pointer, code.times(k, 4), F32, n), chain.get()))
    rest = code.scratch(4 * n)
    sums = []
    for chain, pointer in zip(chains, x, strict=True):
        code.store(chain.get(), rest)
        with code.loop(columns, whole) as k:
            at = code.times(code.builder.sub(k, whole), 4)
            w = load_floats(code, fmt, row, code.times(k, SIZES[fmt]), 1)
            code.store(w.fma(code.load(pointer, code.times(k, 4), F32, 1), code.load(rest, at, F32, 1)), rest, at)
        total = code.load(rest, 0, F32, n)
        while total.lanes > 1:
            half = total.lanes // 2
            total = total.shuffle(range(half)) + total.shuffle(range(half, 2 * half))
        sums.append(total)
    return sums


@functools.cache
def dots(fmt: str, n: int) -> Any:
    """The intrinsic ``dots(data, at, x, columns, t_0, ..., t_(n - 1), sums)``, n = 1 or 4: the weight row at byte ``at``
    times rows t_i of x, into float32 sums [n]."""

    def make(data, x, sums):
        def codegen(context, builder, sig, args):
            code = Code(builder, host())
            w, rows, out = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 2, len(args) - 1))
            columns = args[3]
            places = [code.at(rows, code.times(code.times(t, columns), 4)) for t in args[4:-1]]
            for i, total in enumerate(emit_dots(code, fmt, code.at(w, args[1]), columns, places)):
                code.store(total, out, 4 * i)
            return context.get_dummy_value()

        return types.void(data, types.int64, x, *(types.int64,) * (1 + n), sums), codegen

    # intrinsic() reads the number of arguments from the signature, so each is spelled out.
    if n == 1:

        @intrinsic
        def one(typingctx, data, at, x, columns, t, sums):
            return make(data, x, sums)

        return one

    @intrinsic
    def four(typingctx, data, at, x, columns, t, t1, t2, t3, sums):
        return make(data, x, sums)

    return four


@family
def matmul_float(fmt: str) -> Any:
    """The kernel for weights of a float format (its name)."""
    one, four = dots(fmt, 1), dots(fmt, TILE)

    @njit(cache=True, error_model="numpy")
    def matmul_float(data, x, residual, out, first, last):
        """An item is a weight row."""
        n, columns = x.shape
        added = residual.shape[0] > 0
        sums = np.empty(TILE, np.float32)
        for r in range(first, last):
            at = r * data.shape[1]
            t = 0
            while t < n:
                count = TILE if t + TILE <= n else 1
                if count == TILE:
                    four(data, at, x, columns, t, t + 1, t + 2, t + 3, sums)
                else:
                    one(data, at, x, columns, t, sums)
                for i in range(count):
                    out[t + i, r] = residual[t + i, r] + sums[i] if added else sums[i]
                t += count

    return matmul_float


@family
def matmul_float_rows(fmt: str, instructions: str) -> Any:
    """The kernel for any number of activation rows, faster than the other one from five on."""
    product = make_panel_product(fmt, instructions)

    @njit(cache=True, error_model="numpy")
    def matmul_float_rows(data, x, residual, out, first, last):
        """An item is a weight row; ranges that begin and end at multiples of eight are the fastest."""
        n, row_bytes = x.shape[0], data.shape[1]
        panel, chains = scratch_of(x.shape[1])
        tails, every = tails_of(x), np.empty(0, np.int32)
        for r in range(first, last, ROWS):
            count = min(ROWS, last - r)
            product(data, r * row_bytes, row_bytes, count, x, tails, every, 1, 0, n, residual, out, r, panel, chains)

    return matmul_float_rows
