"""Mixtures of experts (Shazeer et al. 2017): which experts a row uses, their matrix products, and the sum of their outputs.

Formula: of a row's logits l [n_expert] the n_used largest are chosen, the lower expert first where logits are equal; m is the
    largest; p_s = exp(l_s - m), w_s = p_s / (p_0 + ... + p_(n_used - 1)): the softmax over all, renormalized over the chosen,
    times the factor of the expert where a model has such factors;
    y = residual + (sum_s w_s * expert_s(x) (+ sigmoid(l_shared) * shared(x), or + shared(x))).
    ``engine/cpu/products/router.py`` has other laws of the choice.  A product of an expert may have a scale and a bias:
    fma(product, scale, bias), product * scale, or product + bias.
    Where weights are those of inputs (Llama 4), the products with gate and up, which are linear, are multiplied by w_s, and
    the sum takes w_s = 1.
Shapes: logits float32 [rows, n_expert (+ 1, the last one the shared network's)]; ids int32, weights float32 [rows, n_used],
    largest first.  A *pair* is a row and one of its experts: pair = row * n_used + s.  ``order`` int32 [pairs] lists the
    pairs by expert; group g consists of those at [starts[g], starts[g + 1]), which use expert used[g].  The matrices of all
    experts are stacked (``Records.count``; rows of float formats).
Who owns what: a row, or in a product eight rows of an expert, for all pairs that use it, or in a sum a run of 256 columns.
Reduction order: p summed from the first to the last; products as in ``matmul.py`` and ``dense.py``;
    sum = fma(w_last, y_last, ... fma(w_0, y_0, 0)), then fma(sigmoid or 1, shared, sum), then residual + that.
    The order is that of the row's own choice, so it does not depend on the experts that other rows use.
Bytes moved: the matrices of every expert in use, once.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.compile.family import family
from engine.cpu.products.dense import dots
from engine.cpu.products.law import Law
from engine.cpu.products.matmul import FEW, Item, emit_rows, emit_step, item_of, scratch_bytes
from engine.cpu.products.panel import make_panel_product, scratch_of, tails_of
from engine.cpu.products.repack import ROWS
from engine.cpu.products.unpack import UNPACK
from engine.cpu.sample import pack
from engine.cpu.simd import I32, I64, Code, data_of
from engine.numerics import exp, finite, fma, sigmoid

f32 = np.float32
i64 = np.int64
u8 = np.uint8
u64 = np.uint64

RUN = 256
"""Columns of a row whose outputs of experts a thread adds at a time."""


@njit(cache=True, error_model="numpy")
def route(logits, n_expert, ids, weights, first, last):
    """The experts of rows [first, last) and their weights."""
    n_used = ids.shape[1]
    keys = np.empty(n_expert, np.uint64)
    for t in range(first, last):
        for e in range(n_expert):
            # NaN is above all numbers: a row with such a logit has it in the sum of its weights.
            keys[e] = pack(finite(logits[t, e]), e)
        total = f32(0.0)
        for s in range(n_used):
            best = 0
            for e in range(n_expert):
                if keys[e] > keys[best]:
                    best = e
            keys[best] = u64(0)
            ids[t, s] = best
            weights[t, s] = exp(finite(logits[t, best]) - finite(logits[t, ids[t, 0]]))
            total = total + weights[t, s]
        for s in range(n_used):
            weights[t, s] = weights[t, s] / total


@njit(cache=True, error_model="numpy")
def scale_weights(ids, scales, weights, first, last):
    """Multiply the weights of rows [first, last) by the factors of their experts, scales float32 [n_expert], in place."""
    for t in range(first, last):
        for s in range(ids.shape[1]):
            weights[t, s] = weights[t, s] * scales[ids[t, s]]


@njit(cache=True, error_model="numpy")
def finish_products(y, ids, scales, biases, first, last):
    """y = y * scale + bias of the pair's expert for the pairs [first, last), in place: y float32 [pairs, n]; scales float32
    [n_expert] or [0], biases float32 [n_expert, n] or [0, 0], where there are none."""
    for pair in range(first, last):
        e = ids[pair // ids.shape[1], pair % ids.shape[1]]
        own = y[pair]
        if scales.size > 0 and biases.size > 0:
            for i in range(own.size):
                own[i] = fma(own[i], scales[e], biases[e, i])
        elif scales.size > 0:
            for i in range(own.size):
                own[i] = own[i] * scales[e]
        else:
            for i in range(own.size):
                own[i] = own[i] + biases[e, i]


@njit(cache=True, error_model="numpy")
def weigh_products(gate, up, weights, ones, first, last):
    """gate and up times the weight of the pair for the pairs [first, last), in place, and the pair's element of ones is 1:
    gate, up float32 [pairs, n], gate [0, 0] if there is none; weights, ones float32 [rows, n_used]."""
    for pair in range(first, last):
        t, s = pair // weights.shape[1], pair % weights.shape[1]
        weight = weights[t, s]
        ones[t, s] = f32(1.0)
        if gate.size > 0:
            own = gate[pair]
            for i in range(own.size):
                own[i] = own[i] * weight
        own = up[pair]
        for i in range(own.size):
            own[i] = own[i] * weight


@njit(cache=True, error_model="numpy")
def group(ids, n_expert, order, used, starts, n_groups, first, last):
    """List the pairs by expert, in their order where the expert is the same; there is a single item.

    Writes order int32 [pairs], n_groups int32 [1], and the first n_groups of used int32 [min(n_expert, pairs)] and one more
    of starts int32 [min(n_expert, pairs) + 1].
    """
    n_used = ids.shape[1]
    for _ in range(first, last):
        places = np.zeros(n_expert, np.int64)
        for pair in range(ids.size):
            places[ids[pair // n_used, pair % n_used]] += 1
        groups = 0
        at = 0
        for e in range(n_expert):
            count = places[e]
            places[e] = at
            if count:
                used[groups] = e
                starts[groups] = at
                groups += 1
                at += count
        starts[groups] = at
        n_groups[0] = groups
        for pair in range(ids.size):
            e = ids[pair // n_used, pair % n_used]
            order[places[e]] = pair
            places[e] += 1


@functools.cache
def _product_of_pairs(fmt: str, instructions: str, emit: Callable[[Code, Item], None]) -> Any:
    """The intrinsic ``product`` of ``matmul.py`` for the n pairs from ``order[t]`` on; a pair reads row pair // share of the
    activations and writes its own row of out, without a residual."""
    law = Law(UNPACK[fmt], instructions)

    @intrinsic
    def product(typingctx, data, q, da, s, scratch, out, order, at, n, units, place, rows, count, t, share):
        def codegen(context, builder, sig, args):
            code = Code(builder, instructions)
            data, q, da, s, scratch, out, order = (data_of(context, builder, sig.args[i], args[i]) for i in range(7))
            at, n, units, place, rows, count, t, share = args[7:]
            order = code.at(order, code.times(t, 4))

            def places(i: ir.Value) -> tuple[ir.Value, ir.Value]:
                pair = code.load(order, code.times(i, 4), I32, 1).signed(I64).extract(0)
                return builder.sdiv(pair, share), pair

            numbers = [at, n, units, ir.Constant(I64, 0), place, rows, count]
            item = item_of(law, code, [data, q, da, s, scratch, out, out], numbers)
            emit(code, replace(item, places=places))
            return context.get_dummy_value()

        return types.void(data, q, da, s, scratch, out, order, *(types.int64,) * 8), codegen

    return product


@family
def matmul_experts(fmt: str, instructions: str) -> Any:
    """The kernel for stacked matrices of a quantized format (its name)."""
    if instructions == "vnni512":
        # An item has eight weight rows.
        instructions = "vnni"
    one = _product_of_pairs(fmt, instructions, emit_step)
    many = _product_of_pairs(fmt, instructions, emit_rows)
    unit_bytes = scratch_bytes(fmt, instructions)

    @njit(cache=True, error_model="numpy")
    def matmul_experts(data, q, da, s, order, share, used, starts, n_groups, out, first, last):
        """out[pair] = row pair // share of the activations times the matrix of the pair's expert: float32 [pairs, R].

        data uint8 [n_expert, groups of eight rows, bytes]; item g * data.shape[1] + i is group g of pairs and group i of
        rows.  Items with g >= n_groups[0] do nothing.
        """
        rows = out.shape[1]
        units = da.shape[1]
        scratch = np.empty(units * unit_bytes, u8)
        for item in range(first, last):
            g, i = item // data.shape[1], item % data.shape[1]
            if g >= n_groups[0]:
                break
            at = (used[g] * data.shape[1] + i) * data.shape[2]
            place = ROWS * i
            count = min(ROWS, rows - place)
            t = starts[g]
            n = starts[g + 1] - t
            if n == 1:
                one(data, q, da, s, scratch, out, order, at, n, units, place, rows, count, t, share)
            else:
                many(data, q, da, s, scratch, out, order, at, n, units, place, rows, count, t, share)

    return matmul_experts


@family
def matmul_float_experts(fmt: str, instructions: str) -> Any:
    """The kernel for stacked matrices of a float format (its name)."""
    one, many = dots(fmt, 1), make_panel_product(fmt, instructions)

    @njit(cache=True, error_model="numpy")
    def matmul_float_experts(data, begin, pitch, x, order, share, used, starts, n_groups, out, first, last):
        """As ``matmul_experts``, with row r of expert e at ``e * pitch + begin + r`` of data uint8 [n, row bytes]; item
        g * R + r is group g of pairs and row r."""
        rows, row_bytes = out.shape[1], data.shape[1]
        columns = x.shape[1]
        total = np.empty(1, np.float32)
        panel, chains = scratch_of(columns)
        tails, nothing = tails_of(x), np.empty((0, 0), np.float32)
        item = first
        while item < last:
            g, r = item // rows, item % rows
            if g >= n_groups[0]:
                break
            at = (used[g] * pitch + begin + r) * row_bytes
            start, stop = i64(starts[g]), i64(starts[g + 1])
            count = 1
            if stop - start > FEW:
                count = min(ROWS, last - item, rows - r)
                many(data, at, row_bytes, count, x, tails, order, share, start, stop, nothing, out, r, panel, chains)
            else:
                for i in range(start, stop):
                    one(data, at, x, columns, order[i] // share, total)
                    out[order[i], r] = total[0]
            item += count

    return matmul_float_experts


@njit(cache=True, error_model="numpy")
def join(residual, y, weights, shared, logits, out, first, last):
    """out = residual + the weighted sum of y [rows * n_used, n] + shared, which sigmoid(the last logit) scales if logits have
    rows; residual and shared [rows, n] may have no rows, and are left out then.  out is none of them.

    Item t * runs + i is the i-th of the runs of ``RUN`` columns of row t.
    """
    n_used = weights.shape[1]
    n = out.shape[1]
    runs = (n + RUN - 1) // RUN
    for item in range(first, last):
        t, begin = item // runs, item % runs * RUN
        end = min(begin + RUN, n)
        total = out[t, begin:end]
        for i in range(total.size):
            total[i] = f32(0.0)
        for s in range(n_used):
            weight = weights[t, s]
            part = y[t * n_used + s, begin:end]
            for i in range(total.size):
                total[i] = fma(weight, part[i], total[i])
        if shared.shape[0] > 0:
            weight = sigmoid(logits[t, logits.shape[1] - 1]) if logits.shape[0] > 0 else f32(1.0)
            part = shared[t, begin:end]
            for i in range(total.size):
                total[i] = fma(weight, part[i], total[i])
        if residual.shape[0] > 0:
            part = residual[t, begin:end]
            for i in range(total.size):
                total[i] = part[i] + total[i]
