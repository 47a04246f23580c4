"""Hyper-connections of four streams (Zhu et al. 2024; Xie et al. 2026): a residual stream of several rows, which are mixed
before and after each sub-layer with weights that depend on them.

Formula, for streams x_0 .. x_3 and m = fn (rms_norm of all of them), 24 products of a matrix:
    u = sum_s a_s x_s,  x'_d = b_d y + sum_s C_sd x_s,  y the output of the sub-layer for u;
    a_s = sigmoid(z_s) + epsilon, b_s = 2 sigmoid(z_(4 + s)), z_k = m_k * scale + base_k, scale one of three for a, b and C;
    C_sd = exp(z_(8 + 4 s + d) - max_d z) / sum_d exp(..) + epsilon, then columns and rows are divided by their sums + epsilon
    in turn: columns, then ``rounds`` - 1 times rows and columns, so that C is nearly doubly stochastic (Sinkhorn and Knopp
    1967). Of four products only, a.  An infinite z is NaN.
Shapes: m float32 [rows, 24], base [24], scale [3], or [rows, 4], [4], [1]; weights as m: a, b, C row by row; x float32
    [rows, 4 n], one stream after another; u, y float32 [rows, n].
Who owns what: an item is a row.
Reduction order: z = fma(m, scale, base); sums of four ((0 + 1) + 2) + 3, then + epsilon;
    u = fma(a_3, x_3, fma(a_2, x_2, fma(a_1, x_1, fma(a_0, x_0, 0)))); x'_d the same with C_sd, from b_d * y instead of 0.
Bytes moved: 20 n per row for u, 36 n for x'.
"""

import numpy as np
from numba import njit

from engine.limits import STREAMS
from engine.numerics import exp, finite, fma, sigmoid

f32 = np.float32


@njit(cache=True)
def repeat(x, n, out, first, last):
    """out [rows, n * width] = x [rows, width], n times, for the rows [first, last)."""
    width = x.shape[1]
    for t in range(first, last):
        for s in range(n):
            out[t, s * width : (s + 1) * width] = x[t]


@njit(cache=True, error_model="numpy")
def balance(c, epsilon, by_column):
    """Divide each column of c [4, 4], or each row, by its sum + epsilon."""
    for i in range(STREAMS):
        total = f32(0.0)
        for j in range(STREAMS):
            total = total + (c[j, i] if by_column else c[i, j])
        total = total + epsilon
        for j in range(STREAMS):
            if by_column:
                c[j, i] = c[j, i] / total
            else:
                c[i, j] = c[i, j] / total


@njit(cache=True, error_model="numpy")
def stream_weights(m, scale, base, epsilon, rounds, out, first, last):
    """The weights of the rows [first, last)."""
    n = STREAMS
    c = np.empty((n, n), np.float32)
    for t in range(first, last):
        z, own = m[t], out[t]
        for s in range(n):
            own[s] = sigmoid(fma(z[s], scale[0], base[s])) + epsilon
        if z.size == n:
            continue
        for s in range(n, 2 * n):
            own[s] = f32(2.0) * sigmoid(fma(z[s], scale[1], base[s]))
        for s in range(n):
            most = f32(-np.inf)
            for d in range(n):
                k = 2 * n + n * s + d
                c[s, d] = finite(fma(z[k], scale[2], base[k]))
                most = max(most, c[s, d])
            total = f32(0.0)
            for d in range(n):
                c[s, d] = exp(c[s, d] - most)
                total = total + c[s, d]
            for d in range(n):
                c[s, d] = c[s, d] / total + epsilon
        balance(c, epsilon, True)
        for _ in range(rounds - 1):
            balance(c, epsilon, False)
            balance(c, epsilon, True)
        for s in range(n):
            for d in range(n):
                own[2 * n + n * s + d] = c[s, d]


@njit(cache=True, error_model="numpy")
def collapse(x, weights, out, first, last):
    """out = u for the rows [first, last)."""
    n = out.shape[1]
    for t in range(first, last):
        total = out[t]
        total[:] = f32(0.0)
        for s in range(STREAMS):
            a, stream = weights[t, s], x[t, s * n : (s + 1) * n]
            for i in range(n):
                total[i] = fma(a, stream[i], total[i])


@njit(cache=True, error_model="numpy")
def expand(x, y, weights, out, first, last):
    """out = x' for the rows [first, last); out is not x."""
    n = y.shape[1]
    for t in range(first, last):
        for d in range(STREAMS):
            total, given, b = out[t, d * n : (d + 1) * n], y[t], weights[t, STREAMS + d]
            for i in range(n):
                total[i] = b * given[i]
            for s in range(STREAMS):
                c, stream = weights[t, 2 * STREAMS + STREAMS * s + d], x[t, s * n : (s + 1) * n]
                for i in range(n):
                    total[i] = fma(c, stream[i], total[i])
