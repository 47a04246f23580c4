"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token by token, as Qwen3.5 uses it.

Formula, for the token at position p, with x_p the channels (q, k, v) before the convolution:
    y = silu(sum_j w[j] * x_(p - n_conv + 1 + j)), x of positions before 0 being 0;
    q = y_q * r(y_q) * scale, k = y_k * r(y_k) per head, r(y) = 1 / sqrt(sum(y^2) + eps), scale = 1 / sqrt(d); v = y_v;
    per value head h, with the queries and keys of head h % n_k and the state M [d, d], row j for element j of the value:
    e = exp(a * softplus(alpha + dt)), beta' = sigmoid(beta);
    M = M * e;  delta_j = (v_j - M_j . k) * beta';  M_ji = M_ji + delta_j * k_i;  out_j = M_j . q.
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d: q, k, v; alpha, beta float32 [rows, n_v]; weight float32 [C, n_conv]; ring
    float32 [length, C], x of position p in row p % length; states float32 [slots, n_v, d, d], the state after position p in
    slot p % slots; out float32 [rows, n_v d].  d is a multiple of 32.
Who owns what: a thread owns value heads; the convolution and the norms are one call, one thread.
Reduction order: convolution: one fma per tap from 0, the oldest first.  sum(y^2): the tree of ``engine/cpu/rms_norm.py``.
    M_j . k: chain c of 32 owns i with i % 32 == c, one fma each in rising i, from 0; then with s_l = (c_4l + c_4l+2) +
    (c_4l+1 + c_4l+3) the halving tree over s_0 .. s_7: (s_0 + s_4, ...), (0 + 2, ...), (0 + 1).
    M_ji = fma(delta_j, k_i, M_ji * e).  A row is finished before the next begins, in any number of rows.
Bytes moved: 4 d^2 n_v read, and as many written for each of the last ``slots`` rows.
"""

import math

import numpy as np
from numba import njit, prange

from engine.cpu.fold import fold
from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms, squares
from engine.numerics import exp, fma, sigmoid, silu, softplus

f32 = np.float32
DOT_CHAINS = 32


@njit(cache=True, error_model="numpy")
def causal_conv(x, positions, weight, ring, y):  # type: ignore[no-untyped-def]
    """y = silu of the convolution of x with the earlier rows, which ``ring`` holds; then x is stored there too."""
    rows, channels = x.shape
    taps, length = weight.shape[1], ring.shape[0]
    nothing = np.zeros(channels, np.float32)
    # Channels are contiguous in memory, for each tap and token.
    by_tap = weight.T.copy()
    for t in range(rows):
        out = y[t]
        out[:] = f32(0.0)
        for j in range(taps):
            back = taps - 1 - j
            row = nothing
            if t >= back:
                row = x[t - back]
            elif positions[t] >= back:
                row = ring[(positions[t] - back) % length]
            w = by_tap[j]
            for c in range(channels):
                out[c] = fma(row[c], w[c], out[c])
        for c in range(channels):
            out[c] = silu(out[c])
    for t in range(max(0, rows - length), rows):
        ring[positions[t] % length] = x[t]


@njit(cache=True, error_model="numpy")
def l2_norm(y, eps, scale):  # type: ignore[no-untyped-def]
    """y [n, d] in place: each row times 1 / sqrt(sum(y^2) + eps), then times ``scale``."""
    chains = np.empty(NORM_CHAINS, np.float32)
    for t in range(y.shape[0]):
        row = y[t]
        r = f32(1.0) / f32(math.sqrt(f32(squares(row, chains) + eps)))
        for i in range(row.size):
            row[i] = row[i] * r * scale


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


@njit(cache=True, parallel=True, error_model="numpy")
def delta_rule(q, k, v, alpha, beta, a, dt, positions, shares, states, out):  # type: ignore[no-untyped-def]
    """Run the rule over all rows: q, k [rows, n_k, d], normalized; v, out [rows, n_v, d]; alpha, beta [rows, n_v]; a, dt
    [n_v]."""
    rows, n_v, d = v.shape
    n_k, slots = q.shape[1], states.shape[0]
    step = (n_v + shares - 1) // shares
    for share in prange(shares):
        state = np.empty((d, d), np.float32)
        chains = np.empty(DOT_CHAINS, np.float32)
        for h in range(share * step, min((share + 1) * step, n_v)):
            state[:] = f32(0.0)
            if positions[0] > 0:
                state[:] = states[(positions[0] - 1) % slots, h]
            for t in range(rows):
                e = exp(a[h] * softplus(alpha[t, h] + dt[h]))
                delta_step(state, q[t, h % n_k], k[t, h % n_k], v[t, h], e, sigmoid(beta[t, h]), chains, out[t, h])
                if t >= rows - slots:
                    states[positions[t] % slots, h] = state


@njit(cache=True, error_model="numpy")
def gated_norm(x, weight, gate, eps, y):  # type: ignore[no-untyped-def]
    """y = ((x * r) * weight) * silu(gate), over each run of weight.size elements; r as in ``engine/cpu/rms_norm.py``."""
    chains = np.empty(NORM_CHAINS, np.float32)
    n = weight.size
    for t in range(x.shape[0]):
        r = inverse_rms(x[t], eps, chains)
        for i in range(n):
            y[t, i] = x[t, i] * r * weight[i] * silu(gate[t, i])
