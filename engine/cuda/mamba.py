"""The Mamba-2 recurrence (Dao and Gu 2024, "Transformers are SSMs") with its convolution and its gate.

Formula: ``engine/cpu/mamba.py``.
Shapes: as in ``engine/cpu/mamba.py``; n is a multiple of 32, d of 16, and n_head is even, so that rows of y are aligned.
    Without ``mixed`` all rows are a run: those of sequences[0] at positions[0] and after.
Who owns what: a thread of ``mamba_conv`` owns an element of a row of y.  If the rings have room for the rows beside what they
    read, it also stores the input and the element; otherwise ``keep_tokens`` does so for all rows afterwards.  A block of
    ``mamba_scan`` owns 16 rows of the state of one head, for one run: 8 lanes hold one of them, lane l the elements 4 l + 32
    m .. + 3, in registers from the state at the beginning of the run's segment to the last row.  In a mixed pass each row has
    blocks of its own: those of the first row of a run compute all of it, the others end at once.  A copy elsewhere of the
    first row of a run is a run that stores the same bits; in passes that are longer than the rings there must be none.
Reduction order: that of ``engine/cpu/mamba.py``.  Chain k of S_i . c is in lane k // 4.
Bytes moved, for each run: 4 n_head d n for the state, twice that if it ends a segment; for each row and each token of the
    segment before the run 4 width from memory, and 4 (2 n + 19) from caches for each block; 4 n_channels (taps + 2) per row
    for the convolution, of which 8 n_channels come from and go to memory.
"""

import numpy as np
from numba import cuda

from engine.cache.recurrent import SEGMENT
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    decay_of,
    fma,
    lane_xor,
    let_next_begin,
    load4,
    silu,
    softplus,
    store4,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.runs import make_find_run, make_overwritten
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

LANES = 8
"""Lanes that share one row of the state."""
COLUMNS = 16
"""Rows of the state, which are elements of a head, that a block owns."""
THREADS = LANES * COLUMNS


@kernel(*[F32P] * 5, i32, i32, I32P, I32P, i32, i32, *[F32P] * 3, threads=256)
def mamba_conv(taps: int, mixed: bool, keeps: bool) -> KernelCode:
    """Compute y; ``keeps``: also store what later passes read, for which the rings must have room beside what the rows read.

    Arguments: u, weight, bias, dt, a, channels, n_head, positions, sequences, length, token_length, inputs, tokens, y;
    token_length: 16 segments.  ``mixed``: rows may belong to several sequences, and copies of a row may follow it.  Grid:
    (ceil(width / 256), rows).
    """
    most = taps - 1
    find_run = make_find_run(mixed, most)

    @cuda.jit
    def mamba_conv(
        u, weight, bias, dt, a, channels, n_head, positions, sequences, length, token_length, inputs, tokens, y
    ):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        given, width = I(channels + n_head), I(channels + 2 * n_head)
        wait_for_inputs()
        if i >= width:
            return
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        if i < channels:
            own, since = find_run(positions, sequences, t, position, sequence)
            total = bias[i]
            for j in range(taps):
                back = most - j
                if position >= back:
                    if since >= back:
                        value = u[np.int64(own - back) * given + i]
                    else:
                        value = inputs[np.int64(sequence * length + (position - back) % length) * channels + i]
                    total = fma(value, weight[I(i * taps) + j], total)
            result = silu(total)
            if keeps:
                kept = u[np.int64(t) * given + i]
                inputs[np.int64(sequence * length + position % length) * channels + i] = kept
        else:
            h = I(i - channels) if i < given else I(i - given)
            step = u[np.int64(t) * given + I(channels + h)] + dt[h]
            result = softplus(step) if i < given else decay_of(a[h], step)
        y[np.int64(t) * width + i] = result
        if keeps:
            tokens[np.int64(sequence * token_length + position % token_length) * width + i] = result

    return mamba_conv


@kernel(F32P, F32P, F32P, I32P, I32P, *[i32] * 5, *[F32P] * 3, threads=THREADS)
def mamba_scan(n: int, mixed: bool) -> KernelCode:
    """Compute out and the states at the ends of segments; n: the number of elements of a row of the state.

    Arguments: y, z, skip, positions, sequences, d, n_head, n_group, rows, segments, tokens, states, out.  ``mixed``: rows may
    belong to several sequences, and copies of a row may follow it.  Grid: ``grid(d, n_head, rows)``, blocks of ``THREADS``.
    """
    n_parts = n // 32
    n_state = 4 * n_parts

    @device
    def change(state, token, x_at, b_at, step_at, decay_at):
        """Change the lane's elements of a row of the state by a token, a row of y."""
        delta, decay = token[step_at] * token[x_at], token[decay_at]
        for m in range(n_parts):
            words = load4(token, I(b_at + 32 * m))
            for k in range(4):
                state[4 * m + k] = fma(delta, bits_float(I(words[k])), decay * state[4 * m + k])

    @cuda.jit
    def mamba_scan(y, z, skip, positions, sequences, d, n_head, n_group, rows, segments, tokens, states, out):
        let_next_begin()
        state = cuda.local.array(n_state, np.float32)
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
        group, inner = I(U(head) // U(U(n_head) // U(n_group))), I(n_head * d)
        x_at, b_at = I(I(head * d) + i), I(inner + I(group * n) + 4 * own)
        c_at, step_at = I(b_at + I(n_group * n)), I(I(inner + 2 * I(n_group * n)) + head)
        decay_at, width = I(step_at + n_head), I(I(inner + 2 * I(n_group * n)) + 2 * n_head)
        of_head = skip[head]
        segment, at = I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
        index = I(U(segment) % U(segments))
        state_size, first_segment = np.int64(inner) * n, np.int64(sequence) * segments
        states = advance(states, state_size * first_segment + np.int64(I(x_at * n) + 4 * own))
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
            change(state, advance(known, I(token * width)), x_at, b_at, step_at, decay_at)
        t, position, result = begin, I(place - 1), F(0.0)
        while t < rows:
            if mixed:
                ahead = I(positions[t] - position)
                if sequences[t] != sequence or ahead < 0 or ahead > 1:
                    break
            else:
                ahead = I(1)
            if ahead == 1:
                row = advance(y, np.int64(t) * width)
                change(state, row, x_at, b_at, step_at, decay_at)
                for k in range(4):
                    chains[k] = F(0.0)
                for m in range(n_parts):
                    words = load4(row, I(c_at + 32 * m))
                    for k in range(4):
                        chains[k] = fma(state[4 * m + k], bits_float(I(words[k])), chains[k])
                total = (chains[0] + chains[2]) + (chains[1] + chains[3])
                total = total + lane_xor(total, I(4))
                total = total + lane_xor(total, I(2))
                total = total + lane_xor(total, I(1))
                result = fma(of_head, row[x_at], total) * silu(z[np.int64(t) * inner + x_at])
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

    return mamba_scan


def grid(d: int, n_head: int, runs: int = 1) -> tuple[int, int, int]:
    """The grid of ``mamba_scan``; runs: the number of rows of a mixed pass, each of which may begin a run; otherwise 1."""
    return d // COLUMNS, n_head, runs


@kernel(F32P, F32P, *[i32] * 3, I32P, I32P, i32, i32, F32P, F32P, threads=256)
def keep_tokens(mixed: bool) -> KernelCode:
    """Store the inputs of the convolution and y of each row in the rings of its sequence; if a run has more rows than they
    hold, the last ones stay.

    Arguments: u, y, rows, channels, n_head, positions, sequences, length, token_length, inputs, tokens; token_length: 16
    segments.  ``mixed``: rows may belong to several sequences.  Grid: (ceil(width / 256), rows).
    """

    overwritten = make_overwritten(mixed)

    @cuda.jit
    def keep_tokens(u, y, rows, channels, n_head, positions, sequences, length, token_length, inputs, tokens):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        given, width = I(channels + n_head), I(channels + 2 * n_head)
        wait_for_inputs()
        if i >= width:
            return
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        if i < channels and not overwritten(positions, sequences, rows, t, position, sequence, length):
            kept = u[np.int64(t) * given + i]
            inputs[np.int64(sequence * length + position % length) * channels + i] = kept
        if not overwritten(positions, sequences, rows, t, position, sequence, token_length):
            kept = y[np.int64(t) * width + i]
            tokens[np.int64(sequence * token_length + position % token_length) * width + i] = kept

    return keep_tokens
