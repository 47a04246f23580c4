"""The Mamba-2 recurrence (Dao and Gu 2024, "Transformers are SSMs") with its convolution and its gate.

Formula, for the token at position p, head h and its group g = h // (n_head / n_group):
    x, b, c = silu(bias + sum_j w[j] * v_(p - taps + 1 + j)), j = 0 .. taps - 1, channel by channel; v = 0 before position 0;
    s = softplus(step + dt), e = exp(a * s), for each head;
    S_i = (s * x_i) * b + e * S_i, with S = 0 before position 0;
    y_i = (S_i . c + skip * x_i) * silu(z_i).
Shapes: u float32 [rows, n_channels + n_head]: v and step of each row; z, out float32 [rows, n_head d]; positions, sequences
    int32 [rows]: the position of each row in its sequence, and the slot of the sequence; weight float32 [n_channels, taps],
    bias float32 [n_channels]; dt, a, skip float32 [n_head].  y float32 [rows, width] is what the recurrence reads of each
    row: x [n_head, d], b [n_group, n], c [n_group, n], s [n_head], e [n_head].  The memory, ``engine/cache/mamba.py``: inputs
    float32 [sequences, length, n_channels], states float32 [sequences, segments, n_head, d, n], tokens float32 [sequences, 16
    segments, width].  n is a multiple of 32.
Runs: consecutive rows of one sequence at consecutive positions are a run (``engine/cpu/runs.py``).  It sees what earlier
    passes have stored for its sequence and its own rows, nothing else.  Rows may be repeated as in
    ``engine/cpu/delta_net.py``: copies store the same bits in the same places.
Who owns what: an item of ``mamba_conv`` is a block of 64 elements of y, for all rows; an item of ``mamba_scan`` is a head.
    It continues from the state at the beginning of the segment of a run, and repeats the tokens of the segment before it.
Reduction order: the convolution starts with the bias, one fma per tap, the oldest first, those before position 0 left out.
    The state: e * S rounded, (s * x) rounded, one fma.  S_i . c has 32 chains: chain k adds the elements k, k + 32, ... with
    one fma each from 0; the chains t are joined as (t_0 + t_2) + (t_1 + t_3) for each four neighbours, and the eight results
    in the halving tree of ``engine/cpu/fold.py``.  Then one fma with skip * x, and the product with silu(z).  The tokens of a
    sequence change the state one after another, in every pass.
Bytes moved, for each run: 4 n_head d n for the state, twice that if it ends a segment; 4 width for each token of its segment
    before it; 8 n_channels + 4 width per row.
"""

import numpy as np
from numba import njit

from engine.cache.recurrent import SEGMENT
from engine.cpu.fold import fold_fours
from engine.cpu.runs import find_runs, follows, overwritten
from engine.numerics import decay_of, fma, silu, softplus

f32 = np.float32
ELEMENTS = 64
CHAINS = 32


@njit(cache=True, error_model="numpy")
def mamba_conv(u, positions, sequences, weight, bias, dt, a, inputs, y, first, last):
    """Compute y for the blocks [first, last) of 64 elements, then store the inputs of the convolution in their ring, as far
    as it holds them."""
    rows, channels, taps, length = y.shape[0], weight.shape[0], weight.shape[1], inputs.shape[1]
    n_head = a.size
    begin, end = ELEMENTS * first, min(ELEMENTS * last, y.shape[1])
    stop = max(begin, min(end, channels))
    w = np.empty((taps, stop - begin), np.float32)
    for j in range(taps):
        for i in range(stop - begin):
            w[j, i] = weight[begin + i, j]
    own, since = find_runs(positions, sequences)
    for t in range(rows):
        out = y[t, begin:stop]
        out[:] = bias[begin:stop]
        for j in range(taps):
            back = taps - 1 - j
            if positions[t] < back:
                continue
            if since[t] >= back:
                given = u[own[t] - back, begin:stop]
            else:
                given = inputs[sequences[t], (positions[t] - back) % length, begin:stop]
            of_tap = w[j]
            for i in range(out.size):
                out[i] = fma(given[i], of_tap[i], out[i])
        for i in range(out.size):
            out[i] = silu(out[i])
        for i in range(max(begin, channels), end):
            h = (i - channels) % n_head
            step = u[t, channels + h] + dt[h]
            y[t, i] = softplus(step) if i < channels + n_head else decay_of(a[h], step)
    for t in range(rows):
        if not overwritten(positions, sequences, t, length):
            inputs[sequences[t], positions[t] % length, begin:stop] = u[t, begin:stop]


@njit(forceinline=True, error_model="numpy")
def _advance(state, token, h, n_head, n_group):
    """The state [d, n] of head h, changed by a token, a row of y."""
    d, n = state.shape
    b_at = n_head * d + h // (n_head // n_group) * n
    gates = n_head * d + 2 * n_group * n
    b, step, decay = token[b_at : b_at + n], token[gates + h], token[gates + n_head + h]
    for i in range(d):
        row, delta = state[i], step * token[h * d + i]
        for m in range(n):
            row[m] = fma(delta, b[m], decay * row[m])


@njit(forceinline=True, error_model="numpy")
def _answer(state, token, h, n_head, n_group, skip, z, chains, out):
    """out [d] = (state . c + skip * x) * silu(z), for head h and a token, a row of y."""
    d, n = state.shape
    c_at = n_head * d + (n_group + h // (n_head // n_group)) * n
    c = token[c_at : c_at + n]
    for i in range(d):
        chains[:] = f32(0.0)
        for m in range(0, n, CHAINS):
            # Loops of a length that the compiler knows become vector operations.
            row, part = state[i, m : m + CHAINS], c[m : m + CHAINS]
            for k in range(CHAINS):
                chains[k] = fma(row[k], part[k], chains[k])
        out[i] = fma(skip, token[h * d + i], fold_fours(chains, CHAINS)) * silu(z[i])


@njit(cache=True, error_model="numpy")
def mamba_scan(y, z, skip, n_group, positions, sequences, tokens, states, out, first, last):
    """out, and the states at the ends of segments, for the heads [first, last)."""
    rows, segments, n_head, d = y.shape[0], states.shape[1], states.shape[2], states.shape[3]
    state, chains = np.empty((d, states.shape[4]), np.float32), np.empty(CHAINS, np.float32)
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
                    _advance(state, tokens[sequences[t], base + i], h, n_head, n_group)
            _advance(state, y[t], h, n_head, n_group)
            _answer(state, y[t], h, n_head, n_group, skip[h], z[t, span], chains, out[t, span])
            if at == SEGMENT - 1:
                kept[(n + 1) % segments, h] = state


@njit(cache=True, error_model="numpy")
def keep_tokens(y, positions, sequences, tokens, first, last):
    """Store the rows [first, last) of y, as far as the ring holds them, when all heads have read those before."""
    length = tokens.shape[1]
    for t in range(first, last):
        if not overwritten(positions, sequences, t, length):
            tokens[sequences[t], positions[t] % length] = y[t]
