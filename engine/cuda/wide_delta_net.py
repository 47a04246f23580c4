"""The gated delta rule over the rows of a prompt: what does not depend on the state for all rows at once, then the rule.

Formula, arguments: ``engine/cuda/delta_net.py``.  ``convolve``: y = silu of the convolution, with q and k normalized and
    scaled; e and beta'.  ``delta_rule``: M, delta and out of each token.  Neither writes the ring of inputs, which may be
    shorter than the pass: the last rows are stored there afterwards (``engine/cuda/mtp.py``, ``keep_rows``).
Shapes: x, y float32 [rows, C], C = (2 n_k + n_v) d; gates float32 [n_v, padded, 2]: e and beta' of each token, padded a
    multiple of 8; the others as in ``engine/cuda/delta_net.py``.
Who owns what: ``convolve``: a warp owns 16 rows of d channels, which are the queries, the keys or the values of a head,
    lane l channels l + 32 k; or the gates of 32 heads.  ``delta_rule``: as in ``engine/cuda/delta_net.py``, a block owns 16
    rows of the state of one head, with 8 lanes per row, in registers from the first token to the last; what eight tokens
    need is copied to shared memory while the sixteen before are computed.
Reduction order: that of ``engine/cuda/delta_net.py``.
Bytes moved: ``convolve``: 8 C per row, and 4 C (n_conv - 1) more per 16 rows; ``delta_rule``: 4 C + 4 d n_v per row from and
    to memory (queries and keys go to n_v d / 16 blocks, from the L2 cache), and 4 d^2 n_v for the state.
"""

import math

import numpy as np
from numba import cuda

from engine.cuda.delta_net import COLUMNS, LANES, THREADS, join
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait_but_one,
    copy4,
    exp,
    fma,
    let_next_begin,
    pointer,
    sigmoid,
    silu,
    softplus,
    store4,
    stream4,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

SPAN = 16
"""Rows that a warp of ``convolve`` processes."""
WARPS = 8
"""Warps of a block of ``convolve``."""
TOKENS = LANES
"""Tokens of a stage in shared memory: each lane of a row of the state writes the result of one."""
STAGES = 3


def padded(rows: int) -> int:
    """The number of rows of the gates: ``rows`` rounded up."""
    return -(-rows // TOKENS) * TOKENS


def convolve_grid(n_k: int, n_v: int, rows: int) -> tuple[int, int]:
    """The grid of ``convolve``."""
    return -(-(2 * n_k + n_v + -(-n_v // 32)) // WARPS), -(-rows // SPAN)


@kernel(*[F32P] * 3, i32, *[F32P] * 3, I32P, f32_t, f32_t, *[i32] * 5, *[F32P] * 3, threads=32 * WARPS)
def convolve(d: int, n_conv: int) -> KernelCode:
    """Compute everything that the rule needs of each token except the state.

    Arguments: x, alpha, beta, stride, weight, a, dt, positions, eps, scale, n_k, n_v, rows, padded, length, ring, y, gates.
    Grid: ``convolve_grid(n_k, n_v, rows)``.
    """
    back = n_conv - 1
    n_runs = d // 32
    n_taps, n_before = n_runs * n_conv, n_runs * max(1, back)
    squares = make_squares(d)

    @cuda.jit
    def convolve(  # type: ignore[no-untyped-def]
        x, alpha, beta, stride, weight, a, dt, positions, eps, scale, n_k, n_v, rows, padded, length, ring, y, gates
    ):
        let_next_begin()
        taps = cuda.local.array(n_taps, np.float32)
        before = cuda.local.array(n_before, np.float32)
        new = cuda.local.array(n_runs, np.float32)
        part = cuda.local.array(n_runs, np.float32)
        lane, warp = I(cuda.threadIdx.x & 31), I((cuda.threadIdx.x >> 5) & (WARPS - 1))
        task = I((cuda.blockIdx.x & 0xFFFF) * WARPS + warp)
        t = I((cuda.blockIdx.y & 0xFFFF) * SPAN)
        end = min(I(t + SPAN), rows)
        n_vectors = I(2 * n_k + n_v)
        width, channel = I(n_vectors * d), I(task * d + lane)
        if task < n_vectors:
            for k in range(n_runs):
                for j in range(n_conv):
                    taps[k * n_conv + j] = weight[I(I(channel + 32 * k) * n_conv) + j]
        wait_for_inputs()
        if task >= n_vectors:
            head = I(I(task - n_vectors) * 32 + lane)
            if head < n_v:
                speed, offset = a[head], dt[head]
                while t < end:
                    at = I(2 * I(I(head * padded) + t))
                    gates[at] = exp(speed * softplus(alpha[I(t * stride) + head] + offset))
                    gates[at + 1] = sigmoid(beta[I(t * stride) + head])
                    t = I(t + 1)
            return
        place = positions[0]
        for j in range(back):
            row = I(t - back + j)
            there = place + row >= 0
            source, at = x, row
            if row < 0:
                source, at = ring, I(U(place + row) % U(length))
            for k in range(n_runs):
                before[k * back + j] = source[I(at * width) + I(channel + 32 * k)] if there else F(0.0)
        for k in range(n_runs):
            new[k] = x[I(t * width) + I(channel + 32 * k)]
        factor = scale if task < n_k else F(1.0)
        while t < end:
            for k in range(n_runs):
                total = F(0.0)
                for j in range(back):
                    total = fma(before[k * back + j], taps[k * n_conv + j], total)
                part[k] = fma(new[k], taps[k * n_conv + back], total)
                for j in range(back - 1):
                    before[k * back + j] = before[k * back + j + 1]
                if back > 0:
                    before[k * back + back - 1] = new[k]
            after = I(t + 1)
            if after < end:
                for k in range(n_runs):
                    new[k] = x[I(after * width) + I(channel + 32 * k)]
            for k in range(n_runs):
                part[k] = silu(part[k])
            if task < 2 * n_k:
                r = F(1.0) / F(math.sqrt(F(squares(part) + eps)))
                for k in range(n_runs):
                    part[k] = part[k] * r * factor
            for k in range(n_runs):
                y[I(t * width) + I(channel + 32 * k)] = part[k]
            t = after

    return convolve


def _make_step(d: int) -> DeviceFunction:
    """The device function ``step(stage, b, own, column, state, key, chains)``: token b of a stage: replaces the state by the
    next one and returns the token's result, in each lane of a row; key [d / 8], chains [4]: registers."""
    n_runs = d // 32
    values, rates = TOKENS * 2 * d, TOKENS * (2 * d + COLUMNS)

    @device
    def step(stage, b, own, column, state, key, chains):  # type: ignore[no-untyped-def]
        query = I(b * (2 * d) + 4 * own)
        value = stage[values + b * COLUMNS + column]
        e, rate = stage[rates + 2 * b], stage[rates + 2 * b + 1]
        for k in range(4):
            chains[k] = F(0.0)
        for m in range(n_runs):
            words = vector4(stage, I(query + d + 32 * m))
            for k in range(4):
                key[4 * m + k] = bits_float(I(words[k]))
                state[4 * m + k] = state[4 * m + k] * e
                chains[k] = fma(state[4 * m + k], key[4 * m + k], chains[k])
        delta = (value - join(chains)) * rate
        for k in range(4):
            chains[k] = F(0.0)
        for m in range(n_runs):
            words = vector4(stage, I(query + 32 * m))
            for k in range(4):
                state[4 * m + k] = fma(delta, key[4 * m + k], state[4 * m + k])
                chains[k] = fma(state[4 * m + k], bits_float(I(words[k])), chains[k])
        return join(chains)

    return step


def _make_steps(step: DeviceFunction, first: int, n: int) -> DeviceFunction:
    """The device function ``steps(stage, own, column, state, key, chains, mine)``: n tokens of a stage from ``first`` on,
    without a branch, so that the end of one and the beginning of the next overlap; returns the result of token ``own`` if it
    is among them, else ``mine``."""
    if n > 1:
        low, high = _make_steps(step, first, n // 2), _make_steps(step, first + n // 2, n // 2)

        @device
        def steps(stage, own, column, state, key, chains, mine):  # type: ignore[no-untyped-def]
            mine = low(stage, own, column, state, key, chains, mine)
            return high(stage, own, column, state, key, chains, mine)

        return steps

    @device
    def one_step(stage, own, column, state, key, chains, mine):  # type: ignore[no-untyped-def]
        result = step(stage, I(first), own, column, state, key, chains)
        return result if own == first else mine

    return one_step


@kernel(F32P, F32P, I32P, *[i32] * 4, F32P, F32P, threads=THREADS)
def delta_rule(d: int, grouped: bool = False) -> KernelCode:
    """Update the state of each head token by token, and write its results.

    Arguments: y, gates, positions, n_k, rows, padded, slots, states, out.  ``grouped``: neighbouring heads share a key.
    No kernel of the same chain writes the positions or the states: they are read before ``wait_for_inputs``.
    Grid: ``delta_net.grid(d, n_v)``.
    """
    n_runs = d // 32
    n_state = 4 * n_runs
    pieces = d // 2
    values, rates = TOKENS * 2 * d, TOKENS * (2 * d + COLUMNS)
    n_stage = rates + 2 * TOKENS
    n_shared = STAGES * n_stage
    step = _make_step(d)
    steps = _make_steps(step, 0, TOKENS)

    @device
    def fetch(stage, y, gates, first, rows, width, query, apart, thread):  # type: ignore[no-untyped-def]
        """Start copying what tokens first .. first + 7 need.  y: the values of the block in row 0; query: the offset of the
        query from there; apart: the distance from the query to the key."""
        for n in range(n_runs):
            i = I(thread + n * THREADS)
            b, piece = I(U(i) // U(pieces)), I(U(i) % U(pieces))
            at = I(I(I(first + b) * width) + I(query + 4 * piece))
            if piece >= pieces // 2:
                at = I(at + apart)
            copy4(stage, I(4 * i), y, at, I(first + b < rows))
        if thread < 4 * TOKENS:
            b, piece = I(thread >> 2), I(thread & 3)
            at = I(I(I(first + b) * width) + 4 * piece)
            copy4(stage, I(values + 4 * thread), y, at, I(first + b < rows))
        elif thread < 4 * TOKENS + TOKENS // 2:
            piece = I(thread - 4 * TOKENS)
            copy4(stage, I(rates + 4 * piece), gates, I(2 * first + 4 * piece), I(first < rows))

    @cuda.jit
    def delta_rule(y, gates, positions, n_k, rows, padded, slots, states, out):  # type: ignore[no-untyped-def]
        let_next_begin()
        shared = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        state = cuda.local.array(n_state, np.float32)
        key = cuda.local.array(n_state, np.float32)
        chains = cuda.local.array(4, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        own, column = I(thread & (LANES - 1)), I(thread >> 3)
        head, n_v = I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y)
        first_column = I((cuda.blockIdx.x & 0xFFFF) * COLUMNS)
        share = I(U(n_v) // U(n_k)) if grouped else I(1)
        group = I(U(head) // U(share) if grouped else U(head) % U(n_k))
        width = I(I(2 * n_k + n_v) * d)
        value = I(I(2 * n_k + head) * d + first_column)
        query, apart = I(group * d - value), I(I(n_k - 1) * d)
        y, gates = advance(y, value), advance(gates, I(2 * I(head * padded)))
        out = advance(out, I(head * d + I(first_column + column)))
        place = positions[0]
        slot_size = np.int64(I(n_v * (d * d)))
        states = advance(states, I(head * (d * d) + I(I(first_column + column) * d + 4 * own)))
        for k in range(n_state):
            state[k] = F(0.0)
        if place > 0:
            latest = advance(states, slot_size * I(U(place - 1) % U(slots)))
            for m in range(n_runs):
                words = stream4(latest, 32 * m)
                for k in range(4):
                    state[4 * m + k] = bits_float(I(words[k]))

        wait_for_inputs()
        fetch(shared, y, gates, I(0), rows, width, query, apart, thread)
        copies_commit()
        fetch(advance(shared, n_stage), y, gates, I(TOKENS), rows, width, query, apart, thread)
        copies_commit()
        first, turn = I(0), I(0)
        while first < rows:
            copies_wait_but_one()
            # The copies of all threads have arrived, and all have finished the stage before, whose buffer is used next.
            cuda.syncthreads()
            stage = advance(shared, I(turn * n_stage))
            turn = I(0) if turn == STAGES - 1 else I(turn + 1)
            free = I(0) if turn == STAGES - 1 else I(turn + 1)
            later = I(first + 2 * TOKENS)
            if later < rows:
                fetch(advance(shared, I(free * n_stage)), y, gates, later, rows, width, query, apart, thread)
            copies_commit()
            if first + TOKENS <= rows - slots:
                result = steps(stage, own, column, state, key, chains, F(0.0))
                out[I(I(I(first + own) * n_v) * d)] = result
            else:
                t = first
                while t < min(I(first + TOKENS), rows):
                    result = step(stage, I(t - first), own, column, state, key, chains)
                    if t >= rows - slots:
                        to = advance(states, slot_size * I(U(place + t) % U(slots)))
                        for m in range(n_runs):
                            store4(to, 32 * m, state[4 * m], state[4 * m + 1], state[4 * m + 2], state[4 * m + 3])
                    if own == 0:
                        out[I(I(t * n_v) * d)] = result
                    t = I(t + 1)
            first = I(first + TOKENS)

    return delta_rule
