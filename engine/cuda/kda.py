"""Kimi delta attention (Kimi Team 2025, "Kimi Linear"): a delta rule whose decays are those of the elements of a key.

Formula: ``engine/cpu/kda.py``.
Shapes: as in ``engine/cpu/kda.py``; d is a multiple of 32, up to 128, and n_head of 4, so that rows of y are aligned. Without
    ``mixed`` all rows are a run: those of sequences[0] at positions[0] and after.
Who owns what: a warp of ``kda_conv`` owns of a row of y the queries, the keys, the values or the decays of a head, lane l the
    elements l + 32 k, or the rates of 32 heads.  If the rings have room for the rows beside what they read, it also stores
    the inputs and the tokens; otherwise ``kda_keep`` does so for all rows afterwards.  A block of ``kda_scan`` owns 16 rows
    of the state of one head, for one run: 8 lanes hold one of them, lane l the elements 4 l + 32 m .. + 3, in registers from
    the state at the beginning of the run's segment to the last row.  In a mixed pass each row has blocks of its own: those of
    the first row of a run compute all of it, the others end at once.  A copy elsewhere of the first row of a run is a run
    that stores the same bits; in passes that are longer than the rings there must be none.
Reduction order: that of ``engine/cpu/kda.py``.  Chain c of S_i . k and S_i . q is in lane c // 4.
Bytes moved, for each run: 4 n_head d^2 for the state, twice that if it ends a segment; for each row and each token of the
    segment before the run 4 width from memory, and 4 (3 d + 17) from caches for each block; 12 n_head d (taps + 2) per row
    for the convolutions, of which 24 n_head d come from and go to memory.
"""

import numpy as np
from numba import cuda

from engine.cache.recurrent import SEGMENT
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    decay_of,
    fma,
    inverse_root,
    lane_xor,
    let_next_begin,
    load4,
    sigmoid,
    silu,
    store4,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.runs import make_find_run, make_overwritten
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

WARPS = 8
"""Warps of a block of ``kda_conv``."""
LANES = 8
"""Lanes that share one row of the state."""
COLUMNS = 16
"""Rows of the state, which are elements of the value, that a block owns."""
THREADS = LANES * COLUMNS


def conv_grid(n_head: int, rows: int) -> tuple[int, int]:
    """The grid of ``kda_conv``."""
    return -(-(4 * n_head + -(-n_head // 32)) // WARPS), rows


@kernel(*[F32P] * 8, f32_t, f32_t, i32, I32P, I32P, i32, i32, *[F32P] * 3, threads=32 * WARPS)
def kda_conv(d: int, taps: int, mixed: bool, keeps: bool) -> KernelCode:
    """Compute y; ``keeps``: also store what later passes read, for which the rings must have room beside what the rows read.

    Arguments: xq, xk, xv, f, b, weight, a, dt, eps, scale, n_head, positions, sequences, length, token_length, inputs,
    tokens, y; token_length: 16 segments.  ``mixed``: rows may belong to several sequences, and copies of a row may follow it.
    Grid: ``conv_grid(n_head, rows)``.
    """
    most, n_runs = taps - 1, d // 32
    find_run, squares = make_find_run(mixed, most), make_squares(d)

    @cuda.jit
    def kda_conv(
        xq, xk, xv, f, b, weight, a, dt, eps, scale, n_head, positions, sequences, length, token_length, inputs, tokens, y
    ):  # fmt: skip
        let_next_begin()
        part = cuda.local.array(n_runs, np.float32)
        lane, t = I(cuda.threadIdx.x & 31), I(cuda.blockIdx.y)
        task = I(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        inner = I(n_head * d)
        width = I(3 * inner + n_head)
        wait_for_inputs()
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        row = advance(y, np.int64(t) * (inner + width))
        token = advance(tokens, np.int64(sequence * token_length + position % token_length) * width)
        if task >= 4 * n_head:
            head = I(I(task - 4 * n_head) * 32 + lane)
            if head < n_head:
                rate = sigmoid(b[np.int64(t) * n_head + head])
                row[I(4 * inner) + head] = rate
                if keeps:
                    token[I(3 * inner) + head] = rate
            return
        channel = I(task * d + lane)
        if task >= 3 * n_head:
            speed, first = a[I(task - 3 * n_head)], I(channel - 3 * inner)
            for k in range(n_runs):
                i = I(first + 32 * k)
                part[k] = decay_of(speed, f[np.int64(t) * inner + i] + dt[i])
        else:
            x, first = xq, channel
            if task >= n_head:
                x, first = xk, I(channel - inner)
            if task >= 2 * n_head:
                x, first = xv, I(channel - 2 * inner)
            own, since = find_run(positions, sequences, t, position, sequence)
            for k in range(n_runs):
                total = F(0.0)
                for j in range(taps):
                    back = most - j
                    if position >= back:
                        if since >= back:
                            value = x[np.int64(own - back) * inner + I(first + 32 * k)]
                        else:
                            place = np.int64(sequence * length + (position - back) % length) * (3 * inner)
                            value = inputs[place + I(channel + 32 * k)]
                        total = fma(value, weight[I(I(channel + 32 * k) * taps) + j], total)
                part[k] = silu(total)
            if keeps:
                place = np.int64(sequence * length + position % length) * (3 * inner)
                for k in range(n_runs):
                    inputs[place + I(channel + 32 * k)] = x[np.int64(t) * inner + I(first + 32 * k)]
            if task < 2 * n_head:
                r = inverse_root(squares(part), F(1.0), eps)
                factor = scale if task < n_head else F(1.0)
                for k in range(n_runs):
                    part[k] = part[k] * r * factor
        for k in range(n_runs):
            row[I(channel + 32 * k)] = part[k]
        if keeps and task >= n_head:
            for k in range(n_runs):
                token[I(channel - inner) + 32 * k] = part[k]

    return kda_conv


@kernel(F32P, I32P, I32P, *[i32] * 3, *[F32P] * 3, threads=THREADS)
def kda_scan(d: int, mixed: bool) -> KernelCode:
    """Compute out and the states at the ends of segments; d: the number of elements of a head.

    Arguments: y, positions, sequences, n_head, rows, segments, tokens, states, out.  ``mixed``: rows may belong to several
    sequences, and copies of a row may follow it.  Grid: ``grid(d, n_head, rows)``, blocks of ``THREADS``.
    """
    n_parts = d // 32
    n_state = 4 * n_parts

    @device
    def spread(chains):
        """The sum of the chains of 8 lanes, in each of them."""
        total = (chains[0] + chains[2]) + (chains[1] + chains[3])
        total = total + lane_xor(total, I(4))
        total = total + lane_xor(total, I(2))
        return total + lane_xor(total, I(1))

    @device
    def change(state, key, chains, token, k_at, v_at, e_at, rate_at):
        """Change the lane's elements of a row of the state by a token."""
        for k in range(4):
            chains[k] = F(0.0)
        for m in range(n_parts):
            decays, keys = load4(token, I(e_at + 32 * m)), load4(token, I(k_at + 32 * m))
            for k in range(4):
                key[4 * m + k] = bits_float(I(keys[k]))
                state[4 * m + k] = bits_float(I(decays[k])) * state[4 * m + k]
                chains[k] = fma(state[4 * m + k], key[4 * m + k], chains[k])
        delta = (token[v_at] - spread(chains)) * token[rate_at]
        for k in range(n_state):
            state[k] = fma(delta, key[k], state[k])

    @cuda.jit
    def kda_scan(y, positions, sequences, n_head, rows, segments, tokens, states, out):
        let_next_begin()
        state = cuda.local.array(n_state, np.float32)
        key = cuda.local.array(n_state, np.float32)
        chains = cuda.local.array(4, np.float32)
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        own, i = I(thread & (LANES - 1)), I(I(cuda.blockIdx.x * COLUMNS) + (thread >> 3))
        head, begin = I(cuda.blockIdx.y), I(cuda.blockIdx.z if mixed else 0)
        wait_for_inputs()
        place, sequence = I(positions[begin]), I(sequences[begin])
        if mixed and begin > 0 and sequences[begin - 1] == sequence:
            ahead = I(place - positions[begin - 1])
            if ahead == 0 or ahead == 1:
                # The blocks of another row compute this one.
                return
        inner = I(n_head * d)
        k_at, x_at = I(I(head * d) + 4 * own), I(I(head * d) + i)
        v_at, e_at = I(inner + x_at), I(I(2 * inner) + k_at)
        rate_at, width = I(I(3 * inner) + head), I(3 * inner + n_head)
        segment, at = I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
        index = I(U(segment) % U(segments))
        state_size, first_segment = np.int64(inner) * d, np.int64(sequence) * segments
        states = advance(states, state_size * first_segment + np.int64(I(x_at * d) + 4 * own))
        for k in range(n_state):
            state[k] = F(0.0)
        if segment > 0:
            latest = advance(states, state_size * index)
            for m in range(n_parts):
                words = load4(latest, 32 * m)
                for k in range(4):
                    state[4 * m + k] = bits_float(I(words[k]))
        known = advance(tokens, (first_segment + index) * SEGMENT * width)
        for token in range(at):
            change(state, key, chains, advance(known, np.int64(token) * width), k_at, v_at, e_at, rate_at)
        t, position, result = begin, I(place - 1), F(0.0)
        while t < rows:
            if mixed:
                ahead = I(positions[t] - position)
                if sequences[t] != sequence or ahead < 0 or ahead > 1:
                    break
            else:
                ahead = I(1)
            if ahead == 1:
                row = advance(y, np.int64(t) * (inner + width))
                change(state, key, chains, advance(row, inner), k_at, v_at, e_at, rate_at)
                for k in range(4):
                    chains[k] = F(0.0)
                for m in range(n_parts):
                    words = load4(row, I(k_at + 32 * m))
                    for k in range(4):
                        chains[k] = fma(state[4 * m + k], bits_float(I(words[k])), chains[k])
                result = spread(chains)
                position = I(position + 1)
                if I(position & (SEGMENT - 1)) == SEGMENT - 1:
                    index = I(index + 1) if index + 1 < segments else I(0)
                    # The states that a pass overwrites itself are not stored.
                    if mixed or t + SEGMENT * segments >= rows:
                        following = advance(states, state_size * index)
                        for m in range(n_parts):
                            store4(
                                following, 32 * m, state[4 * m], state[4 * m + 1], state[4 * m + 2], state[4 * m + 3]
                            )
            # Otherwise the row is a copy of the one before it.
            if own == 0:
                out[np.int64(t) * inner + x_at] = result
            t = I(t + 1)

    return kda_scan


def grid(d: int, n_head: int, runs: int = 1) -> tuple[int, int, int]:
    """The grid of ``kda_scan``; runs: the number of rows of a mixed pass, each of which may begin a run; otherwise 1."""
    return d // COLUMNS, n_head, runs


@kernel(*[F32P] * 4, *[i32] * 3, I32P, I32P, i32, i32, F32P, F32P, threads=256)
def kda_keep(mixed: bool) -> KernelCode:
    """Store the inputs of the convolutions and the token of each row in the rings of its sequence; if a run has more rows
    than they hold, the last ones stay.

    Arguments: xq, xk, xv, y, rows, inner, n_head, positions, sequences, length, token_length, inputs, tokens; inner: n_head
    times d; token_length: 16 segments.  ``mixed``: rows may belong to several sequences.  Grid: (ceil(width / 256), rows).
    """

    overwritten = make_overwritten(mixed)

    @cuda.jit
    def kda_keep(
        xq, xk, xv, y, rows, inner, n_head, positions, sequences, length, token_length, inputs, tokens
    ):  # fmt: skip
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        channels = I(3 * inner)
        width = I(channels + n_head)
        wait_for_inputs()
        if i >= width:
            return
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        if i < channels and not overwritten(positions, sequences, rows, t, position, sequence, length):
            x, of_part = xq, i
            if i >= inner:
                x, of_part = xk, I(i - inner)
            if i >= 2 * inner:
                x, of_part = xv, I(i - 2 * inner)
            kept = x[np.int64(t) * inner + of_part]
            inputs[np.int64(sequence * length + position % length) * channels + i] = kept
        if not overwritten(positions, sequences, rows, t, position, sequence, token_length):
            kept = y[np.int64(t) * (inner + width) + I(inner + i)]
            tokens[np.int64(sequence * token_length + position % token_length) * width + i] = kept

    return kda_keep
