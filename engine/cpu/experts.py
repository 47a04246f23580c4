"""Mixtures of experts (Shazeer et al. 2017): which experts a row uses, their matrix products, and the sum of their outputs.

Formula: of a row's logits l [n_expert] the n_used largest are chosen, the lower expert first where logits are equal; m is the
    largest; p_s = exp(l_s - m), w_s = p_s / (p_0 + ... + p_(n_used - 1)): the softmax over all, renormalized over the chosen;
    y = residual + (sum_s w_s * expert_s(x) (+ sigmoid(l_shared) * shared(x))).
Shapes: logits float32 [rows, n_expert (+ 1, the last one the shared network's)]; ids int32, weights float32 [rows, n_used],
    largest first.  A *pair* is a row and one of its experts: pair = row * n_used + s.  The matrices of all experts are
    stacked: rows [e R, (e + 1) R) are those of expert e.
Who owns what: ``route`` and ``join`` are one call, one thread; in a product a thread owns a run of every expert's rows, and
    reads each expert once for all pairs that use it.
Reduction order: p summed from the first to the last; products as in ``engine/cpu/matmul.py``;
    sum = fma(w_last, y_last, ... fma(w_0, y_0, 0)), then fma(sigmoid, shared, sum), then residual + that.
    The order is that of the row's own choice, so it does not depend on the experts that other rows use.
Bytes moved: the matrices of every expert in use, once.
"""

import numpy as np
from numba import njit, prange

from engine.cpu.matmul import matmul_rows
from engine.cpu.sample import pack
from engine.numerics import exp, fma, sigmoid

f32 = np.float32
u64 = np.uint64


@njit(cache=True, error_model="numpy")
def route(logits, n_expert, ids, weights):  # type: ignore[no-untyped-def]
    """The experts of each row, ids int32 [rows, n_used], and their weights float32 [rows, n_used], by logits [rows, ...]."""
    n_used = ids.shape[1]
    keys = np.empty(n_expert, np.uint64)
    for t in range(logits.shape[0]):
        for e in range(n_expert):
            keys[e] = pack(logits[t, e], e)
        total = f32(0.0)
        for s in range(n_used):
            best = 0
            for e in range(n_expert):
                if keys[e] > keys[best]:
                    best = e
            keys[best] = u64(0)
            ids[t, s] = best
            weights[t, s] = exp(logits[t, best] - logits[t, ids[t, 0]])
            total = total + weights[t, s]
        for s in range(n_used):
            weights[t, s] = weights[t, s] / total


@njit(cache=True, parallel=True, error_model="numpy")
def matmul_experts(  # type: ignore[no-untyped-def]
    fmt, unit, has_min, src, begins, n_rows, starts, q, da, s, shares, out
):
    """Multiply rows ``starts[g] .. starts[g + 1]`` of the quantized activations by the n_rows rows of src that begin at
    ``begins[g]``, into the same rows of out [n, n_rows]."""
    step = (n_rows + shares - 1) // shares
    step = (step + 3) // 4 * 4
    for c in prange(shares):
        first = c * step
        last = min(first + step, n_rows)
        if first < last:
            for g in range(begins.size):
                own = src[begins[g] : begins[g] + n_rows]
                a, b = starts[g], starts[g + 1]
                matmul_rows(fmt, unit, has_min, own, q[a:b], da[a:b], s[a:b], first, last, out[a:b])


@njit(cache=True, error_model="numpy")
def join(residual, y, weights, shared, gate, out):  # type: ignore[no-untyped-def]
    """out = residual + the weighted sum of y [rows, n_used, n] + shared, which sigmoid(gate [rows]) scales; residual and
    shared [rows, n] may have no rows, and are left out then."""
    rows, n_used, n = y.shape
    for t in range(rows):
        for i in range(n):
            total = f32(0.0)
            for s in range(n_used):
                total = fma(weights[t, s], y[t, s, i], total)
            if shared.shape[0] > 0:
                total = fma(sigmoid(gate[t]), shared[t, i], total)
            out[t, i] = residual[t, i] + total if residual.shape[0] > 0 else total
