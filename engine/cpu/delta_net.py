"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks") in segments of 16 tokens, as Qwen3-Next and Qwen3.5 use it.

Formula, for the token at position p, with x_p the channels (q, k, v) before the convolution:
    y = silu(sum_j w[j] * x_(p - n_conv + 1 + j)), x of positions before 0 being 0;
    q = y_q * r(y_q) * scale, k = y_k * r(y_k) per head, r(y) = 1 / sqrt(sum(y^2) + eps), scale = 1 / sqrt(d); v = y_v;
    per value head h, with the queries and keys of head h % n_k, or h // (n_v / n_k) if they are ``grouped``:
    e = exp(a * softplus(alpha + dt)), beta' = sigmoid(beta).
    Segment n holds the positions 16 n .. 16 n + 15.  S [d, d] is the state before it, row j for element j of the value, and 0
    for segment 0.  For token t of the segment and the tokens i before it in the segment, with G_t = e_0 * .. * e_t and
    D_it = e_(i+1) * .. * e_t (D_ii = 1):
    u_tj = (v_tj - x_tj) * beta'_t,  x_tj = G_t * (S_j . k_t) + sum_i (D_it * (k_i . k_t)) * u_ij;
    out_tj = G_t * (S_j . q_t) + sum_i (D_it * (k_i . q_t)) * u_ij, i = t included.
    The state after the segment is S_jm = G_15 * S_jm + sum_i (D_i,15 * u_ij) * k_im.
    This is M = e * M;  u = (v - M k) * beta';  M = M + u k^T;  out = M q, token by token, with M written as S and the tokens
    since.
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d: q, k, v; alpha, beta float32 [rows, n_v]; weight float32 [C, n_conv];
    sequences, positions int32 [rows]: the sequence of each row, and its position there; out float32 [rows, n_v d].  d is a
    multiple of 32.  The memory has a part for each sequence: ring float32 [sequences, length, C], x of position p in row p
    % length; states float32 [sequences, segments, n_v, d, d], segments >= 2, S of segment n at index n % segments; keys
    float32 [sequences, 16 segments, n_k, d], deltas float32 [sequences, 16 segments, n_v, d], decays float32 [sequences, 16
    segments, n_v]: k, u and e of position p in row p % (16 segments).
Runs: consecutive rows of one sequence at consecutive positions are a run.  It sees what earlier passes have stored for its
    sequence and its own rows, nothing else.  Rows may be repeated, if the first one stays where it is: copies of the last
    row of a run may follow it, and a run of at most 16 rows may begin again elsewhere.  Copies store the same bits in the
    same places.  Nothing that a run reads is overwritten by another that begins at the same position: both read only what
    precedes it.  So a copy of another row, elsewhere, would be wrong: it reads what the run stores.
Who owns what: an item of the convolution is a block of 64 channels, of the norms a head of a row, of the rule a value head.
Reduction order: convolution: one fma per tap from 0, the oldest first.  sum(y^2): the tree of ``engine/cpu/rms_norm.py``.
    G_t = (..(e_0 * e_1) * ..) * e_t and D_it = (..(e_(i+1) * e_(i+2)) * ..) * e_t, rounded at each step.
    Dots, such as S_j . k: chain c of 32 owns m with m % 32 == c, one fma each in rising m, from 0; then with s_l = (c_4l +
    c_4l+2) + (c_4l+1 + c_4l+3) the halving tree over s_0 .. s_7: (s_0 + s_4, ...), (0 + 2, ...), (0 + 1).
    Sums over tokens: ((G A + w_0 u_0) + w_1 u_1) + .., G A and the weights w rounded, one fma per token in rising i.
    Everything depends on S and the tokens of the segment up to t only: not on the division of the rows into passes.
Bytes moved: 4 d^2 n_v read per segment that the pass touches, and as many written per segment that it ends; 4 (n_k + n_v) d
    for each token that is read from the lists or written to them.
"""

import numpy as np
from numba import njit

from engine.cache.recurrent import SEGMENT
from engine.cpu.fold import fold_fours
from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms, squares
from engine.cpu.runs import find_runs, follows, overwritten
from engine.numerics import decay_of, fma, inverse_root, sigmoid, silu

f32 = np.float32
DOT_CHAINS = 32
CHANNELS = 64
FEW = 3
"""Fewer tokens of a segment than that have their dots computed one after another; more, side by side."""


@njit(cache=True, error_model="numpy")
def causal_conv(x, positions, sequences, weight, ring, y, first, last):
    """y = silu of the convolution of x with the earlier rows of its run and, before them, those that ``ring`` holds; then x
    is stored there too.  For the blocks [first, last) of 64 channels."""
    rows, channels = x.shape
    taps, length = weight.shape[1], ring.shape[1]
    begin, end = CHANNELS * first, min(CHANNELS * last, channels)
    w = np.empty(end - begin, np.float32)
    own, since = find_runs(positions, sequences)
    y[:, begin:end] = f32(0.0)
    for j in range(taps):
        for c in range(end - begin):
            w[c] = weight[begin + c, j]
        back = taps - 1 - j
        for t in range(rows):
            if positions[t] < back:
                continue  # the channels before position 0 are 0
            row = x[own[t] - back] if since[t] >= back else ring[sequences[t], (positions[t] - back) % length]
            given, out = row[begin:end], y[t, begin:end]
            for c in range(end - begin):
                out[c] = fma(given[c], w[c], out[c])
    for t in range(rows):
        out = y[t, begin:end]
        for c in range(out.size):
            out[c] = silu(out[c])
    for t in range(rows):
        if not overwritten(positions, sequences, t, length):
            ring[sequences[t], positions[t] % length, begin:end] = x[t, begin:end]


@njit(cache=True, error_model="numpy")
def l2_norm(y, heads, d, eps, scale, first, last):
    """Normalize the queries and the keys, the first 2 * heads runs of d channels of each row of y [rows, C], in place: times
    1 / sqrt(sum(y^2) + eps), and queries then times ``scale``.  Item: row * 2 * heads + run."""
    chains = np.empty(NORM_CHAINS, np.float32)
    for item in range(first, last):
        t, run = item // (2 * heads), item % (2 * heads)
        row = y[t, run * d : (run + 1) * d]
        r = inverse_root(squares(row, chains), f32(1.0), eps)
        factor = scale if run < heads else f32(1.0)
        for i in range(d):
            row[i] = row[i] * r * factor


@njit(cache=True, error_model="numpy")
def dots(rows, k, q, t, products, chains):
    """products[j, t] = rows[j] . k, products[j, 16 + t] = rows[j] . q: rows [n, d], k, q [d]; chains [2, 32] is scratch."""
    n, d = rows.shape
    of_key, of_query = chains[0], chains[1]
    for j in range(n):
        of_key[:] = f32(0.0)
        of_query[:] = f32(0.0)
        for i in range(0, d, DOT_CHAINS):
            # Loops of a length that the compiler knows become vector operations.
            row, key, query = rows[j, i : i + DOT_CHAINS], k[i : i + DOT_CHAINS], q[i : i + DOT_CHAINS]
            for c in range(DOT_CHAINS):
                of_key[c] = fma(row[c], key[c], of_key[c])
                of_query[c] = fma(row[c], query[c], of_query[c])
        products[j, t] = fold_fours(of_key, DOT_CHAINS)
        products[j, SEGMENT + t] = fold_fours(of_query, DOT_CHAINS)


@njit(forceinline=True, error_model="numpy")
def _all_dots(rows, x, products, sums, n_runs):
    for j in range(rows.shape[0]):
        for g in range(DOT_CHAINS // 4):
            for t in range(2 * SEGMENT):
                c0, c1, c2, c3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
                for m in range(n_runs):
                    i = DOT_CHAINS * m + 4 * g
                    c0 = fma(rows[j, i], x[i, t], c0)
                    c1 = fma(rows[j, i + 1], x[i + 1, t], c1)
                    c2 = fma(rows[j, i + 2], x[i + 2, t], c2)
                    c3 = fma(rows[j, i + 3], x[i + 3, t], c3)
                sums[g, t] = (c0 + c2) + (c1 + c3)
        for t in range(2 * SEGMENT):
            even = (sums[0, t] + sums[4, t]) + (sums[2, t] + sums[6, t])
            odd = (sums[1, t] + sums[5, t]) + (sums[3, t] + sums[7, t])
            products[j, t] = even + odd


@njit(cache=True, error_model="numpy")
def all_dots(rows, x, products, sums):
    """products[j, t] = rows[j] . x[:, t], those of a row side by side: rows [n, d], x [d, 32]; sums [8, 32] is scratch."""
    if rows.shape[1] == 4 * DOT_CHAINS:
        # The usual number of runs, as a constant: the loop over them is unrolled, and the one around it becomes vectors.
        _all_dots(rows, x, products, sums, 4)
    else:
        _all_dots(rows, x, products, sums, rows.shape[1] // DOT_CHAINS)


@njit(cache=True, error_model="numpy")
def couple(e, products, at, end, weights, decayed, left):
    """How tokens of a segment act on the tokens [at, end): weights[0, i, t] = D_it * c_it, weights[1, i, t] = D_it * s_it,
    with products [end, 32] = c, s; decayed[t] = G_t and left[i] = D_i,end-1.  e [end]: the decays."""
    total = f32(1.0)
    for t in range(end):
        total = total * e[t]
        decayed[t] = total
    for i in range(end):
        decay = f32(1.0)
        for t in range(i, end):
            if t > i:
                decay = decay * e[t]
            if t >= at:
                weights[0, i, t] = decay * products[i, t]
                weights[1, i, t] = decay * products[i, SEGMENT + t]
        left[i] = decay


@njit(forceinline=True, error_model="numpy")
def _add_tokens(x, weights, t, deltas, base, h, n):
    """x [d] = fma(weights[i, t], u_i, x) for i = 0 .. n - 1, with u_i = deltas[base + i, h]."""
    for i in range(n):
        w, u = weights[i, t], deltas[base + i, h]
        for j in range(x.size):
            x[j] = fma(w, u[j], x[j])


@njit(cache=True, error_model="numpy")
def token(t, products, weights, decayed, deltas, base, h, v, beta, x, out):
    """u_t of a head, stored in deltas[base + t, h], and out [d], from those of the tokens before in the segment; products
    [d, 32] = A, B; v [d]; x [d] is scratch."""
    d = v.size
    for j in range(d):
        x[j] = decayed[t] * products[j, t]
    _add_tokens(x, weights[0], t, deltas, base, h, t)
    u = deltas[base + t, h]
    for j in range(d):
        u[j] = (v[j] - x[j]) * beta
    for j in range(d):
        out[j] = decayed[t] * products[j, SEGMENT + t]
    _add_tokens(out, weights[1], t, deltas, base, h, t + 1)


@njit(cache=True, error_model="numpy")
def next_state(state, k, deltas, base, h, left, decay, parts, new):
    """new [d, d], the state after a segment that began with ``state``: k [16, d] are its keys, decay is G of its last token;
    parts [16] is scratch."""
    d = state.shape[0]
    for j in range(d):
        for i in range(SEGMENT):
            parts[i] = left[i] * deltas[base + i, h, j]
        for m in range(d):
            x = state[j, m] * decay
            for i in range(SEGMENT):
                x = fma(parts[i], k[i, m], x)
            new[j, m] = x


@njit(cache=True, error_model="numpy")
def delta_rule(
    y, n_k, grouped, alpha, beta, beta_at, a, dt, positions, sequences, states, keys, deltas, decays, out, first, last
):
    """Run the rule over all rows for the items [first, last): value heads, those of a key head one after another.

    y float32 [rows, C], queries and keys normalized; out [rows, n_v, d]; alpha [rows, n_v or more], beta [rows, beta_at +
    n_v], of which column beta_at + h belongs to head h; a, dt [n_v].  ``keys`` is only read: see ``keep_keys``.
    """
    rows, n_v, d = out.shape
    share, segments, length = n_v // n_k, states.shape[1], keys.shape[1]
    k, e = np.empty((SEGMENT, d), np.float32), np.empty(SEGMENT, np.float32)
    side, sums = np.zeros((d, 2 * SEGMENT), np.float32), np.empty((DOT_CHAINS // 4, 2 * SEGMENT), np.float32)
    chains = np.empty((2, DOT_CHAINS), np.float32)
    of_keys, of_state = np.empty((SEGMENT, 2 * SEGMENT), np.float32), np.empty((d, 2 * SEGMENT), np.float32)
    weights = np.empty((2, SEGMENT, SEGMENT), np.float32)
    decayed, left, parts = np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.float32)
    x = np.empty(d, np.float32)
    item = first
    while item < last:
        g = item // share
        stop = min(last, (g + 1) * share)
        q_at, k_at = g * d, (n_k + g) * d
        begin = 0
        while begin < rows:
            if follows(positions, sequences, begin, 0):
                # A copy of the row before it.
                for r in range(item - g * share, stop - g * share):
                    h = g * share + r if grouped else g + n_k * r
                    out[begin, h] = out[begin - 1, h]
                begin += 1
                continue
            # Tokens [at, end) of segment n are the rows of a run from ``begin`` on.
            n, at = positions[begin] // SEGMENT, positions[begin] % SEGMENT
            base, before = SEGMENT * n % length, begin - at
            end = at + 1
            while end < SEGMENT and before + end < rows and follows(positions, sequences, before + end, 1):
                end += 1
            own_states, own_keys = states[sequences[begin]], keys[sequences[begin]]
            own_deltas, own_decays = deltas[sequences[begin]], decays[sequences[begin]]
            wide = end - at >= FEW
            for i in range(at):
                k[i] = own_keys[base + i, g]
            for i in range(at, end):
                k[i] = y[before + i, k_at : k_at + d]
                if wide:
                    query = y[before + i, q_at : q_at + d]
                    for m in range(d):
                        side[m, i] = k[i, m]
                        side[m, SEGMENT + i] = query[m]
            if wide:
                all_dots(k[:end], side, of_keys, sums)
            else:
                for t in range(at, end):
                    dots(k[: t + 1], k[t], y[before + t, q_at : q_at + d], t, of_keys, chains)
            for r in range(item - g * share, stop - g * share):
                h = g * share + r if grouped else g + n_k * r
                v_at = (2 * n_k + h) * d
                for i in range(at):
                    e[i] = own_decays[base + i, h]
                for i in range(at, end):
                    e[i] = decay_of(a[h], alpha[before + i, h] + dt[h])
                    own_decays[base + i, h] = e[i]
                state = own_states[n % segments, h]
                if n == 0:
                    state[:] = f32(0.0)
                if wide:
                    all_dots(state, side, of_state, sums)
                else:
                    for t in range(at, end):
                        dots(state, k[t], y[before + t, q_at : q_at + d], t, of_state, chains)
                couple(e, of_keys, at, end, weights, decayed, left)
                for t in range(at, end):
                    row = before + t
                    v, rate = y[row, v_at : v_at + d], sigmoid(beta[row, beta_at + h])
                    token(t, of_state, weights, decayed, own_deltas, base, h, v, rate, x, out[row, h])
                if end == SEGMENT:
                    new = own_states[(n + 1) % segments, h]
                    next_state(state, k, own_deltas, base, h, left, decayed[SEGMENT - 1], parts, new)
            begin += end - at
        item = stop


@njit(cache=True, error_model="numpy")
def keep_keys(y, n_k, positions, sequences, keys, first, last):
    """Store the keys of the rows [first, last) of y in the list, as far as it holds them, when all heads have read those
    before."""
    length, d = keys.shape[1], keys.shape[3]
    for t in range(first, last):
        if overwritten(positions, sequences, t, length):
            continue
        for g in range(n_k):
            keys[sequences[t], positions[t] % length, g] = y[t, (n_k + g) * d : (n_k + g + 1) * d]


@njit(cache=True, error_model="numpy")
def gated_norm(x, weight, gate, eps, swish, y, first, last):
    """y = ((x * r) * weight) * silu(gate), or sigmoid(gate) unless ``swish``, over the runs [first, last) of weight.size
    elements; r as in ``engine/cpu/rms_norm.py``."""
    chains = np.empty(NORM_CHAINS, np.float32)
    n = weight.size
    for t in range(first, last):
        r = inverse_rms(x[t], eps, chains)
        given, z, out = x[t, :n], gate[t, :n], y[t, :n]
        if swish:
            for i in range(out.size):
                out[i] = given[i] * r * weight[i] * silu(z[i])
        else:
            for i in range(out.size):
                out[i] = given[i] * r * weight[i] * sigmoid(z[i])
