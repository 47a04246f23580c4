"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token by token, as Qwen3-Next and Qwen3.5 use it.

Formula, for the token at position p, with x_p the channels (q, k, v) before the convolution:
    y = silu(sum_j w[j] * x_(p - n_conv + 1 + j)), x of positions before 0 being 0;
    q = y_q * r(y_q) * scale, k = y_k * r(y_k) per head, r(y) = 1 / sqrt(sum(y^2) + eps), scale = 1 / sqrt(d); v = y_v;
    per value head h, with the queries and keys of head h % n_k, or h // (n_v / n_k) if they are ``grouped``, and the state
    M [d, d], row j for element j of the value:
    e = exp(a * softplus(alpha + dt)), beta' = sigmoid(beta);
    M = M * e;  delta_j = (v_j - M_j . k) * beta';  M_ji = M_ji + delta_j * k_i;  out_j = M_j . q.
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d: q, k, v; alpha, beta float32 [rows, n_v]; weight float32 [C, n_conv]; ring
    float32 [length, C], x of position p in row p % length; states float32 [slots, n_v, d, d], the state after position p in
    slot p % slots; out float32 [rows, n_v d].  d is a multiple of 32.
Who owns what: an item of the convolution is a block of 64 channels, of the norms a head of a row, of the rule a value head.
Reduction order: convolution: one fma per tap from 0, the oldest first.  sum(y^2): the tree of ``engine/cpu/rms_norm.py``.
    M_j . k: chain c of 32 owns i with i % 32 == c, one fma each in rising i, from 0; then with s_l = (c_4l + c_4l+2) +
    (c_4l+1 + c_4l+3) the halving tree over s_0 .. s_7: (s_0 + s_4, ...), (0 + 2, ...), (0 + 1).
    M_ji = fma(delta_j, k_i, M_ji * e).  A row is finished before the next begins, in any number of rows.
Bytes moved: 4 d^2 n_v read, and as many written for each of the last ``slots`` rows.
"""

import math

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms, squares
from engine.numerics import exp, fma, sigmoid, silu, softplus

f32 = np.float32
DOT_CHAINS = 32
CHANNELS = 64


@njit(cache=True, error_model="numpy")
def causal_conv(x, positions, weight, ring, y, first, last):  # type: ignore[no-untyped-def]
    """y = silu of the convolution of x with the earlier rows, which ``ring`` holds; then x is stored there too.  For the
    blocks [first, last) of 64 channels."""
    rows, channels = x.shape
    taps, length = weight.shape[1], ring.shape[0]
    begin, end = CHANNELS * first, min(CHANNELS * last, channels)
    w = np.empty(end - begin, np.float32)
    for t in range(rows):
        y[t, begin:end] = f32(0.0)
    for j in range(taps):
        for c in range(end - begin):
            w[c] = weight[begin + c, j]
        back = taps - 1 - j
        for t in range(rows):
            if t < back and positions[t] < back:
                continue  # the channels before position 0 are 0
            row = x[t - back] if t >= back else ring[(positions[t] - back) % length]
            given, out = row[begin:end], y[t, begin:end]
            for c in range(end - begin):
                out[c] = fma(given[c], w[c], out[c])
    for t in range(rows):
        out = y[t, begin:end]
        for c in range(out.size):
            out[c] = silu(out[c])
    for t in range(max(0, rows - length), rows):
        ring[positions[t] % length, begin:end] = x[t, begin:end]


@njit(cache=True, error_model="numpy")
def l2_norm(y, heads, d, eps, scale, first, last):  # type: ignore[no-untyped-def]
    """Normalize the queries and the keys, the first 2 * heads runs of d channels of each row of y [rows, C], in place: times
    1 / sqrt(sum(y^2) + eps), and queries then times ``scale``.  Item: row * 2 * heads + run."""
    chains = np.empty(NORM_CHAINS, np.float32)
    for item in range(first, last):
        t, run = item // (2 * heads), item % (2 * heads)
        row = y[t, run * d : (run + 1) * d]
        r = f32(1.0) / f32(math.sqrt(f32(squares(row, chains) + eps)))
        factor = scale if run < heads else f32(1.0)
        for i in range(d):
            row[i] = row[i] * r * factor


@njit(forceinline=True, error_model="numpy")
def _fold_dot(chains):  # type: ignore[no-untyped-def]
    """The sum of 32 chains: first each four neighbours, then the halving tree."""
    for g in range(DOT_CHAINS // 4):
        chains[g] = (chains[4 * g] + chains[4 * g + 2]) + (chains[4 * g + 1] + chains[4 * g + 3])
    return fold(chains, DOT_CHAINS // 4)


@njit(cache=True, error_model="numpy")
def delta_step(state, q, k, v, e, beta, chains, out):  # type: ignore[no-untyped-def]
    """One token of one head: updates state [d, d] in place; q, k, v, out [d]; chains [32] is scratch."""
    d = k.size
    for j in range(d):
        # Loops of a length that the compiler knows become vector operations.
        chains[:] = f32(0.0)
        for i in range(0, d, DOT_CHAINS):
            row, keys = state[j, i : i + DOT_CHAINS], k[i : i + DOT_CHAINS]
            for c in range(DOT_CHAINS):
                x = row[c] * e
                row[c] = x
                chains[c] = fma(x, keys[c], chains[c])
        delta = (v[j] - _fold_dot(chains)) * beta
        chains[:] = f32(0.0)
        for i in range(0, d, DOT_CHAINS):
            row, keys, query = state[j, i : i + DOT_CHAINS], k[i : i + DOT_CHAINS], q[i : i + DOT_CHAINS]
            for c in range(DOT_CHAINS):
                x = fma(delta, keys[c], row[c])
                row[c] = x
                chains[c] = fma(x, query[c], chains[c])
        out[j] = _fold_dot(chains)


@njit(cache=True, error_model="numpy")
def delta_rule(y, n_k, grouped, alpha, beta, beta_at, a, dt, positions, states, out, first, last):  # type: ignore[no-untyped-def]
    """Run the rule over all rows for the value heads [first, last): y float32 [rows, C], queries and keys normalized; out
    [rows, n_v, d]; alpha [rows, n_v or more], beta [rows, beta_at + n_v], of which column beta_at + h belongs to head h; a,
    dt [n_v]."""
    rows, n_v, d = out.shape
    slots = states.shape[0]
    state = np.empty((d, d), np.float32)
    chains = np.empty(DOT_CHAINS, np.float32)
    for h in range(first, last):
        state[:] = f32(0.0)
        if positions[0] > 0:
            state[:] = states[(positions[0] - 1) % slots, h]
        g = h // (n_v // n_k) if grouped else h % n_k
        q_at, k_at, v_at = g * d, (n_k + g) * d, (2 * n_k + h) * d
        for t in range(rows):
            e = exp(a[h] * softplus(alpha[t, h] + dt[h]))
            q, k, v = y[t, q_at : q_at + d], y[t, k_at : k_at + d], y[t, v_at : v_at + d]
            delta_step(state, q, k, v, e, sigmoid(beta[t, beta_at + h]), chains, out[t, h])
            if t >= rows - slots:
                states[positions[t] % slots, h] = state


@njit(cache=True, error_model="numpy")
def gated_norm(x, weight, gate, eps, y, first, last):  # type: ignore[no-untyped-def]
    """y = ((x * r) * weight) * silu(gate), over the runs [first, last) of weight.size elements; r as in
    ``engine/cpu/rms_norm.py``."""
    chains = np.empty(NORM_CHAINS, np.float32)
    n = weight.size
    for t in range(first, last):
        r = inverse_rms(x[t], eps, chains)
        given, z, out = x[t, :n], gate[t, :n], y[t, :n]
        for i in range(out.size):
            out[i] = given[i] * r * weight[i] * silu(z[i])
