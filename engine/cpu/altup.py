"""Alternating updates of four streams (AltUp, Baykal et al. 2023), as Gemma 3n has them: a layer computes one stream, and
predicts and corrects all of them.

Formula, for streams x_0 .. x_3 and t_k = tanh(m_k), m four products of a matrix:
    enter: x_0 = x, x_s = a_s * rho(x, a_s), a_s a projection of x;
    predict: p_d = x_d + sum_s C_ds x_s, C_ds = sum_k coef[4 d + s, k] t_k, m computed from x_0;
    active: u = (p_0 + c_0 (y - p_0)) * scale, c_d = 1 + sum_k coef[d, k] t_k, y the result of the layer, m computed from it;
    correct: x'_d = p_d + c_d (y - p_0), and + first for d > 0, first being what the per-layer embedding adds;
    leave: (x_0 + sum_s a_s * rho(x_0, a_s)) / 4, a_s a projection of x_s;
    rho(x, a) = sqrt(sum(x^2) / n) / sqrt(max(sum(a^2) / n, 1e-5)), so that all streams are as long as x; NaN if a overflows.
Shapes: m float32 [rows, 4]; coef [16, 4] or [4, 4]; scale [n]; x, y, u, first float32 [rows, n]; a float32 [rows, 3 n];
    streams float32 [rows, 5 n]: x_0 to x_3 one after another, then n elements of which the kernels read nothing.  A mixer
    puts its result there (``engine/models/families/gemma3n.py``); elsewhere they are 0.
Who owns what: an item is a row.
Reduction order: sums of squares as in ``engine/cpu/rms_norm.py``; a sum over k from 0, one fma each in rising k; p_d from
    x_d, fma(C_ds, x_s, p_d) in rising s; fma(y - p_0, c_d, p_d), then the sum with first; leave ((x_0 + a_1 rho) + a_2 rho)
    + a_3 rho, one fma each.
Bytes moved: 36 n per row to predict, 24 n for u, 44 n to correct, 36 n to enter, 20 n to leave.
"""

import numpy as np
from numba import njit

from engine.cpu.rms_norm import NORM_CHAINS, squares
from engine.limits import STREAMS
from engine.numerics import fma, magnitude_ratio, tanh

f32 = np.float32


@njit(cache=True)
def columns(x, begin, out, first, last):
    """out [rows, n] = x [rows, width] from column ``begin`` on, for the rows [first, last)."""
    for t in range(first, last):
        for i in range(out.shape[1]):
            out[t, i] = x[t, begin + i]


@njit(cache=True, error_model="numpy")
def coefficients(m, coef, out):
    """out [n] = coef [n, 4] tanh(m [4])."""
    for j in range(out.size):
        out[j] = f32(0.0)
    for k in range(STREAMS):
        t = tanh(m[k])
        for j in range(out.size):
            out[j] = fma(coef[j, k], t, out[j])


@njit(cache=True, error_model="numpy")
def altup_enter(x, a, out, first, last):
    """out [rows, 5 n] = the streams of x [rows, n] with its projections a [rows, 3 n], for the rows [first, last)."""
    chains, n = np.empty(NORM_CHAINS, np.float32), x.shape[1]
    for t in range(first, last):
        wanted = squares(x[t], chains)
        out[t, :n] = x[t]
        for s in range(1, STREAMS):
            given, own = a[t, (s - 1) * n : s * n], out[t, s * n : (s + 1) * n]
            ratio = magnitude_ratio(wanted, squares(given, chains), f32(n))
            for i in range(n):
                own[i] = given[i] * ratio
        out[t, STREAMS * n :] = f32(0.0)


@njit(cache=True, error_model="numpy")
def altup_predict(x, m, coef, out, first, last):
    """out [rows, 5 n] = p for the streams x [rows, 5 n] and the rows [first, last)."""
    c, n = np.empty(STREAMS * STREAMS, np.float32), x.shape[1] // (STREAMS + 1)
    for t in range(first, last):
        coefficients(m[t], coef, c)
        for d in range(STREAMS):
            total = out[t, d * n : (d + 1) * n]
            total[:] = x[t, d * n : (d + 1) * n]
            for s in range(STREAMS):
                weight, stream = c[STREAMS * d + s], x[t, s * n : (s + 1) * n]
                for i in range(n):
                    total[i] = fma(weight, stream[i], total[i])
        out[t, STREAMS * n :] = f32(0.0)


@njit(cache=True, error_model="numpy")
def altup_active(p, y, m, coef, scale, out, first, last):
    """out [rows, n] = u for the predictions p [rows, 5 n] and the rows [first, last)."""
    c, n = np.empty(STREAMS, np.float32), y.shape[1]
    for t in range(first, last):
        coefficients(m[t], coef, c)
        weight = c[0] + f32(1.0)
        for i in range(n):
            out[t, i] = fma(y[t, i] - p[t, i], weight, p[t, i]) * scale[i]


@njit(cache=True, error_model="numpy")
def altup_correct(p, y, m, coef, added, out, first, last):
    """out [rows, 5 n] = x' for the predictions p [rows, 5 n] and the rows [first, last); added: ``first`` of the formula."""
    c, n = np.empty(STREAMS, np.float32), y.shape[1]
    for t in range(first, last):
        coefficients(m[t], coef, c)
        for d in range(STREAMS):
            weight, own, stream = c[d] + f32(1.0), out[t, d * n : (d + 1) * n], p[t, d * n : (d + 1) * n]
            for i in range(n):
                own[i] = fma(y[t, i] - p[t, i], weight, stream[i])
            if d > 0:
                for i in range(n):
                    own[i] = own[i] + added[t, i]
        out[t, STREAMS * n :] = f32(0.0)


@njit(cache=True, error_model="numpy")
def altup_leave(x, a, out, first, last):
    """out [rows, n] = the mean of x_0 of x [rows, 5 n] and the projections a [rows, 3 n], for the rows [first, last)."""
    chains, n = np.empty(NORM_CHAINS, np.float32), out.shape[1]
    for t in range(first, last):
        wanted = squares(x[t, :n], chains)
        out[t] = x[t, :n]
        for s in range(1, STREAMS):
            given = a[t, (s - 1) * n : s * n]
            ratio = magnitude_ratio(wanted, squares(given, chains), f32(n))
            for i in range(n):
                out[t, i] = fma(given[i], ratio, out[t, i])
        for i in range(n):
            out[t, i] = out[t, i] * f32(0.25)
