"""Kimi delta attention (Kimi Team 2025, "Kimi Linear"): a delta rule whose decays are those of the elements of a key.

Formula, for the token at position p and head h:
    q, k, v = silu(sum_j w[j] * x_(p - taps + 1 + j)), j = 0 .. taps - 1, channel by channel; x = 0 before position 0;
    q = q * r(q) * scale, k = k * r(k), r(y) = 1 / sqrt(sum(y^2) + eps), scale = 1 / sqrt(d);
    e_m = exp(a * softplus(f_m + dt_m)) for each element m of the key, rate = sigmoid(b) for the head;
    S_im = e_m * S_im, with S = 0 before position 0;  u_i = (v_i - S_i . k) * rate;  S_im = u_i * k_m + S_im;
    out_i = S_i . q.
Shapes: xq, xk, xv, f float32 [rows, n_head d]: queries, keys and values before the convolutions, and the inputs of the
    decays; b float32 [rows, n_head]; positions, sequences int32 [rows]: the position of each row in its sequence, and the
    slot of the sequence; weight float32 [3 n_head d, taps]; a float32 [n_head], dt float32 [n_head d].  y float32 [rows,
    n_head d + width] is what the recurrence reads of each row: q, and behind it a token, k, v, e [n_head, d] each and rate
    [n_head].  The memory, ``engine/cache/mamba.py``: inputs float32 [sequences, length, 3 n_head d]: xq, xk, xv; states
    float32 [sequences, segments, n_head, d, d], row i for element i of the value; tokens float32 [sequences, 16 segments,
    width].  out float32 [rows, n_head d].  d is a multiple of 32.
Runs: consecutive rows of one sequence at consecutive positions are a run (``engine/cpu/runs.py``).  It sees what earlier
    passes have stored for its sequence and its own rows, nothing else.  Rows may be repeated as in
    ``engine/cpu/delta_net.py``: copies store the same bits in the same places.
Who owns what: an item of ``kda_conv`` or of ``kda_scan`` is a head, for all rows.  A scan continues from the state at the
    beginning of the segment of a run, and repeats the tokens of the segment before it.
Reduction order: convolution: one fma per tap from 0, the oldest first, those before position 0 left out.  sum(y^2): the tree
    of ``engine/cpu/rms_norm.py``.  e * S is rounded, and so is u; then one fma.  S_i . k and S_i . q have 32 chains: chain c
    adds the elements c, c + 32, ... with one fma each from 0; the chains t are joined as (t_0 + t_2) + (t_1 + t_3) for each
    four neighbours, and the eight results in the halving tree of ``engine/cpu/fold.py``.  The tokens of a sequence change the
    state one after another, in every pass.
Bytes moved, for each run: 4 n_head d^2 for the state, twice that if it ends a segment; 4 width for each token of its segment
    before it; 12 n_head d + 4 (n_head d + width) per row.
"""

import numpy as np
from numba import njit

from engine.cache.recurrent import SEGMENT
from engine.cpu.fold import fold_fours
from engine.cpu.rms_norm import NORM_CHAINS, squares
from engine.cpu.runs import find_runs, follows, overwritten
from engine.numerics import decay_of, fma, inverse_root, sigmoid, silu

f32 = np.float32
CHAINS = 32


@njit(cache=True, error_model="numpy")
def _convolve(x, h, d, weight, at, positions, sequences, own, since, inputs, y):
    """The d elements of y from ``at`` on = silu of the convolution of the channels of x of head h, which are those from
    ``at`` on in ``inputs`` and in ``weight``; then store these there, as far as the ring holds them."""
    rows, taps, length = x.shape[0], weight.shape[1], inputs.shape[1]
    channels, places = slice(h * d, (h + 1) * d), slice(at, at + d)
    w = np.empty((taps, d), np.float32)
    for j in range(taps):
        for i in range(d):
            w[j, i] = weight[at + i, j]
    for t in range(rows):
        out = y[t, places]
        out[:] = f32(0.0)
        for j in range(taps):
            back = taps - 1 - j
            if positions[t] < back:
                continue
            if since[t] >= back:
                given = x[own[t] - back, channels]
            else:
                given = inputs[sequences[t], (positions[t] - back) % length, places]
            of_tap = w[j]
            for i in range(d):
                out[i] = fma(given[i], of_tap[i], out[i])
        for i in range(d):
            out[i] = silu(out[i])
    for t in range(rows):
        if not overwritten(positions, sequences, t, length):
            inputs[sequences[t], positions[t] % length, places] = x[t, channels]


@njit(cache=True, error_model="numpy")
def kda_conv(xq, xk, xv, f, b, positions, sequences, weight, a, dt, eps, scale, inputs, y, first, last):
    """Compute y for the heads [first, last), then store the inputs of the convolutions in their ring, as far as it holds
    them."""
    rows, n_head = b.shape
    inner = xq.shape[1]
    d = inner // n_head
    chains = np.empty(NORM_CHAINS, np.float32)
    own, since = find_runs(positions, sequences)
    for h in range(first, last):
        for n in range(3):
            x = xq if n == 0 else xk if n == 1 else xv
            at = n * inner + h * d
            _convolve(x, h, d, weight, at, positions, sequences, own, since, inputs, y)
            if n == 2:
                continue
            factor = scale if n == 0 else f32(1.0)
            for t in range(rows):
                row = y[t, at : at + d]
                r = inverse_root(squares(row, chains), f32(1.0), eps)
                for i in range(d):
                    row[i] = row[i] * r * factor
        for t in range(rows):
            for i in range(h * d, (h + 1) * d):
                y[t, 3 * inner + i] = decay_of(a[h], f[t, i] + dt[i])
            y[t, 4 * inner + h] = sigmoid(b[t, h])


@njit(forceinline=True, error_model="numpy")
def _advance(state, token, h, n_head, chains):
    """The state [d, d] of head h, changed by a token."""
    d = state.shape[0]
    inner = n_head * d
    k, v = token[h * d : (h + 1) * d], token[inner + h * d : inner + (h + 1) * d]
    e, rate = token[2 * inner + h * d : 2 * inner + (h + 1) * d], token[3 * inner + h]
    for i in range(d):
        row = state[i]
        chains[:] = f32(0.0)
        for m in range(0, d, CHAINS):
            # Loops of a length that the compiler knows become vector operations.
            part, decays, keys = row[m : m + CHAINS], e[m : m + CHAINS], k[m : m + CHAINS]
            for c in range(CHAINS):
                part[c] = decays[c] * part[c]
                chains[c] = fma(part[c], keys[c], chains[c])
        u = (v[i] - fold_fours(chains, CHAINS)) * rate
        for m in range(d):
            row[m] = fma(u, k[m], row[m])


@njit(forceinline=True, error_model="numpy")
def _answer(state, q, chains, out):
    """out [d] = state q."""
    d = state.shape[0]
    for i in range(d):
        chains[:] = f32(0.0)
        for m in range(0, d, CHAINS):
            row, part = state[i, m : m + CHAINS], q[m : m + CHAINS]
            for c in range(CHAINS):
                chains[c] = fma(row[c], part[c], chains[c])
        out[i] = fold_fours(chains, CHAINS)


@njit(cache=True, error_model="numpy")
def kda_scan(y, positions, sequences, tokens, states, out, first, last):
    """out, and the states at the ends of segments, for the heads [first, last)."""
    rows, segments, n_head, d = y.shape[0], states.shape[1], states.shape[2], states.shape[3]
    inner = n_head * d
    state, chains = np.empty((d, d), np.float32), np.empty(CHAINS, np.float32)
    for h in range(first, last):
        span = slice(h * d, (h + 1) * d)
        for t in range(rows):
            if follows(positions, sequences, t, 0):
                # A copy of the row before it.
                out[t, span] = out[t - 1, span]
                continue
            kept, n, at = states[sequences[t]], positions[t] // SEGMENT, positions[t] % SEGMENT
            if not follows(positions, sequences, t, 1):
                # A run begins.
                if n == 0:
                    state[:] = f32(0.0)
                else:
                    state[:] = kept[n % segments, h]
                base = SEGMENT * (n % segments)
                for i in range(at):
                    _advance(state, tokens[sequences[t], base + i], h, n_head, chains)
            _advance(state, y[t, inner:], h, n_head, chains)
            _answer(state, y[t, span], chains, out[t, span])
            if at == SEGMENT - 1:
                kept[(n + 1) % segments, h] = state


@njit(cache=True, error_model="numpy")
def kda_keep(y, positions, sequences, tokens, first, last):
    """Store the tokens of the rows [first, last) of y, as far as the ring holds them, when all heads have read those
    before."""
    length, width = tokens.shape[1], tokens.shape[2]
    for t in range(first, last):
        if not overwritten(positions, sequences, t, length):
            tokens[sequences[t], positions[t] % length] = y[t, y.shape[1] - width :]
