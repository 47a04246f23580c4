"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token by token, and the gated norm that follows it.

Formula, for the token at position p, with x_p the channels (q, k, v) before the convolution (``engine/cpu/delta_net.py``):
    y = silu(sum_j w[j] * x_(p - n_conv + 1 + j)), x of positions before 0 being 0;
    q = y_q * r(y_q) * scale, k = y_k * r(y_k) per head, r(y) = 1 / sqrt(sum(y^2) + eps); v = y_v;
    per value head h, with the queries and keys of head h % n_k, or h // (n_v / n_k) if they are ``grouped``, and the state
    M [d, d], row j for element j of the value:
    e = exp(a * softplus(alpha + dt)), beta' = sigmoid(beta);
    M = M * e;  delta_j = (v_j - M_j . k) * beta';  M_ji = M_ji + delta_j * k_i;  out_j = M_j . q.
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d: q, k, v; alpha, beta float32 [rows, n_v], rows ``stride`` elements
    apart; weight float32 [C, n_conv]; a, dt float32 [n_v]; positions int32 [rows], consecutive; ring float32 [length, C],
    x of position p in row p % length, length >= rows + n_conv - 1; states float32 [slots, n_v, d, d], the state after
    position p in slot p % slots; out float32 [rows, n_v d].  d is a multiple of 32, up to 128.
Who owns what: a block owns 16 rows of the state of one head, with 8 lanes per row: lane l holds elements 4 l + 32 m .. +
    3, in registers from the first token to the last; their loads are in flight before ``wait_for_inputs``.  What all rows
    of a state need of a token, each block computes again: q and k by a thread per channel, their norms by a warp each,
    four tokens at a time; v by the lanes of its row, a token each; e and beta' of all tokens by a warp each.
Reduction order: convolution: one fma per tap from 0, the oldest first.  sum(y^2): ``engine/cpu/rms_norm.py``.
    M_j . k: chain c of 32 owns i with i % 32 == c, which is element c % 4 of lane c // 4, one fma each in rising i, from 0;
    then with s_l = (c_4l + c_4l+2) + (c_4l+1 + c_4l+3) the halving tree over s_0 .. s_7: (s_0 + s_4, ...), (0 + 2, ...),
    (0 + 1).  M_ji = fma(delta_j, k_i, M_ji * e).
Bytes moved: 4 d^2 n_v read, and the same number written for each of the last ``slots`` rows.
"""

import math

import numpy as np
from numba import cuda

from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    fma,
    lane_from,
    lane_xor,
    let_next_begin,
    pointer,
    sigmoid,
    silu,
    softplus,
    store4,
    stream4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

LANES = 8
"""Lanes that share one row of the state."""
COLUMNS = 16
"""Rows of the state, which are elements of the value, that a block owns."""
THREADS = LANES * COLUMNS
BATCH = 4
"""Tokens whose queries and keys are computed at a time, while the states of the preceding ones are being written."""


@device
def join(chains):  # type: ignore[no-untyped-def]
    """The sum of the 32 chains of a row of the state, in each of its lanes."""
    total = (chains[0] + chains[2]) + (chains[1] + chains[3])
    total = total + lane_xor(total, I(4))
    total = total + lane_xor(total, I(2))
    return total + lane_xor(total, I(1))


def grid(d: int, n_v: int) -> tuple[int, int]:
    """The grid of ``delta_net``."""
    return d // COLUMNS, n_v


@kernel(*[F32P] * 3, i32, *[F32P] * 3, I32P, f32_t, f32_t, *[i32] * 4, *[F32P] * 3, threads=THREADS)
def delta_net(d: int, n_conv: int, most: int, grouped: bool = False) -> KernelCode:
    """One layer of the gated delta rule for up to ``most`` rows; ``grouped``: neighbouring heads share a key.

    Arguments: x, alpha, beta, stride, weight, a, dt, positions, eps, scale, n_k, rows, length, slots, ring, states, out.
    No kernel of the same chain writes the positions, the states, or rows of the ring for earlier positions: they are read
    before ``wait_for_inputs``.
    Grid: ``grid(d, n_v)``, blocks of ``THREADS``.
    """
    back = n_conv - 1
    single = most == 1
    batch = min(BATCH, most)
    n_channels = -(-2 * d // THREADS)
    exact = 2 * d % THREADS == 0
    n_taps, n_before, n_new = n_channels * n_conv, n_channels * max(1, back), n_channels * batch
    n_values = -(-most // LANES)
    n_value_taps = n_values * n_conv
    n_runs = d // 32
    n_state = 4 * n_runs
    n_y = most * 2 * d
    n_warps = THREADS // 32
    norm_rounds = -(-2 * batch // n_warps)
    squares = make_squares(d)

    @device
    def around(i, n):  # type: ignore[no-untyped-def]
        """i modulo n, for -n <= i < 2 n."""
        if i < 0:
            return I(i + n)
        return I(i - n) if i >= n else i

    @device
    def fetch(x, first, rows, width, channels, thread, new):  # type: ignore[no-untyped-def]
        """Start loading x of the thread's channels of q and k, of rows first .. first + batch - 1."""
        for n in range(n_channels):
            for b in range(batch):
                new[n * batch + b] = F(0.0)
                if (exact or thread + n * THREADS < 2 * d) and (single or first + b < rows):
                    new[n * batch + b] = x[I(I(first + b) * width) + channels[n]]

    @cuda.jit
    def delta_net(  # type: ignore[no-untyped-def]
        x, alpha, beta, stride, weight, a, dt, positions, eps, scale, n_k, rows, length, slots, ring, states, out
    ):
        let_next_begin()
        y = pointer(cuda.shared.array(n_y, np.float32, ALIGNED))
        decays = pointer(cuda.shared.array(most, np.float32, ALIGNED))
        rates = pointer(cuda.shared.array(most, np.float32, ALIGNED))
        state = cuda.local.array(n_state, np.float32)
        key = cuda.local.array(n_state, np.float32)
        chains = cuda.local.array(4, np.float32)
        channels = cuda.local.array(n_channels, np.int32)
        taps = cuda.local.array(n_taps, np.float32)
        before = cuda.local.array(n_before, np.float32)
        new = cuda.local.array(n_new, np.float32)
        value_taps = cuda.local.array(n_conv, np.float32)
        value_inputs = cuda.local.array(n_value_taps, np.float32)
        values = cuda.local.array(n_values, np.float32)
        part = cuda.local.array(n_runs, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane, own = I(thread >> 5), I(thread & 31), I(thread & (LANES - 1))
        head, n_v = I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y)
        column = I((cuda.blockIdx.x & 0xFFFF) * COLUMNS + (thread >> 3))
        if single:
            rows = I(1)
        share = I(U(n_v) // U(n_k)) if grouped else I(1)
        group = I(U(head) // U(share) if grouped else U(head) % U(n_k))
        width = I(I(2 * n_k + n_v) * d)
        place = positions[0]
        # Where the first row goes.
        ring_row, slot = I(U(place) % U(length)), I(U(place) % U(slots))

        # What earlier passes have written.
        slot_size = np.int64(I(n_v * (d * d)))
        states = advance(states, I(head * (d * d) + I(column * d + 4 * own)))
        for k in range(n_state):
            state[k] = F(0.0)
        if place > 0:
            latest = advance(states, slot_size * around(I(slot - 1), slots))
            for m in range(n_runs):
                words = stream4(latest, 32 * m)
                for k in range(4):
                    state[4 * m + k] = bits_float(I(words[k]))
        for n in range(n_channels):
            i = I(thread + n * THREADS)
            channels[n] = I(I(group * d + i) + (I(I(n_k - 1) * d) if i >= d else I(0)))
            for j in range(back):
                before[n * back + j] = F(0.0)
            if exact or i < 2 * d:
                for j in range(n_conv):
                    taps[n * n_conv + j] = weight[I(channels[n] * n_conv) + j]
                for j in range(back):
                    if place >= back - j:
                        at = around(I(ring_row - (back - j)), length)
                        before[n * back + j] = ring[I(at * width) + channels[n]]
        value_channel = I(I(2 * n_k + head) * d + column)
        for j in range(n_conv):
            value_taps[j] = weight[I(value_channel * n_conv) + j]
        for k in range(n_values):
            t = I(0) if single else I(own + k * LANES)
            for j in range(n_conv):
                value_inputs[k * n_conv + j] = F(0.0)
                if k * LANES < back - j:
                    from_row = I(t - (back - j))
                    if from_row < 0 and place + from_row >= 0:
                        at = around(I(ring_row + from_row), length)
                        value_inputs[k * n_conv + j] = ring[I(at * width) + value_channel]
        speed, offset = a[head], dt[head]

        wait_for_inputs()
        fetch(x, I(0), rows, width, channels, thread, new)
        gate = F(0.0)
        if warp >= n_warps - 2 and lane < rows:
            gates = alpha if warp == n_warps - 2 else beta
            gate = gates[I(lane * stride) + head]
        for k in range(n_values):
            t = I(0) if single else I(own + k * LANES)
            if t < rows:
                for j in range(n_conv):
                    from_row = I(t - (back - j))
                    if from_row >= 0:
                        value_inputs[k * n_conv + j] = x[I(from_row * width) + value_channel]
        for k in range(n_values):
            t = I(0) if single else I(own + k * LANES)
            total = F(0.0)
            for j in range(n_conv):
                total = fma(value_inputs[k * n_conv + j], value_taps[j], total)
            values[k] = silu(total)
            if t < rows and (not single or own == 0):
                at = around(I(ring_row + t), length)
                ring[I(at * width) + value_channel] = value_inputs[k * n_conv + back]

        first = I(0)
        while first < rows:
            for n in range(n_channels):
                i = I(thread + n * THREADS)
                if exact or i < 2 * d:
                    for b in range(batch):
                        if single or first + b < rows:
                            total = F(0.0)
                            for j in range(back):
                                total = fma(before[n * back + j], taps[n * n_conv + j], total)
                            total = fma(new[n * batch + b], taps[n * n_conv + back], total)
                            y[I(I(first + b) * (2 * d)) + i] = silu(total)
                            for j in range(back - 1):
                                before[n * back + j] = before[n * back + j + 1]
                            if back > 0:
                                before[n * back + back - 1] = new[n * batch + b]
                            # One of the heads that share a key stores its inputs.
                            if (U(head) % U(share) == 0 if grouped else head < n_k) and cuda.blockIdx.x == 0:
                                at = around(I(ring_row + first + b), length)
                                ring[I(at * width) + channels[n]] = new[n * batch + b]
            after = I(first + batch)
            if not single and after < rows:
                fetch(x, after, rows, width, channels, thread, new)
            cuda.syncthreads()
            for n in range(norm_rounds):
                task = I(warp + n * n_warps)
                t = I(first + (task >> 1))
                if task < 2 * batch and t < rows:
                    z = advance(y, I(t * (2 * d)) + I((task & 1) * d + lane))
                    for k in range(n_runs):
                        part[k] = z[32 * k]
                    r = F(1.0) / F(math.sqrt(F(squares(part) + eps)))
                    factor = scale if task & 1 == 0 else F(1.0)
                    for k in range(n_runs):
                        z[32 * k] = part[k] * r * factor
            if first == 0 and lane < rows:
                if warp == n_warps - 2:
                    decays[lane] = exp(speed * softplus(gate + offset))
                if warp == n_warps - 1:
                    rates[lane] = sigmoid(gate)
            cuda.syncthreads()
            t = first
            while t < min(after, rows):
                value = values[0]
                if not single:
                    for k in range(1, n_values):
                        if t >= k * LANES:
                            value = values[k]
                    value = lane_from(value, I((lane & ~(LANES - 1)) | (t & (LANES - 1))))
                e, rate = decays[t], rates[t]
                query = advance(y, I(t * (2 * d) + 4 * own))
                for k in range(4):
                    chains[k] = F(0.0)
                for m in range(n_runs):
                    for k in range(4):
                        key[4 * m + k] = query[d + 32 * m + k]
                        state[4 * m + k] = state[4 * m + k] * e
                        chains[k] = fma(state[4 * m + k], key[4 * m + k], chains[k])
                delta = (value - join(chains)) * rate
                for k in range(4):
                    chains[k] = F(0.0)
                for m in range(n_runs):
                    for k in range(4):
                        state[4 * m + k] = fma(delta, key[4 * m + k], state[4 * m + k])
                        chains[k] = fma(state[4 * m + k], query[32 * m + k], chains[k])
                if t >= rows - slots:
                    to = advance(states, slot_size * slot)
                    for m in range(n_runs):
                        store4(to, 32 * m, state[4 * m], state[4 * m + 1], state[4 * m + 2], state[4 * m + 3])
                result = join(chains)
                if own == 0:
                    out[I(I(t * n_v + head) * d) + column] = result
                slot = around(I(slot + 1), slots)
                t = I(t + 1)
            first = after

    return delta_net


# --- the norm of the results -----------------------------------------------------------------------------------


def _make_gated_norm(d: int) -> DeviceFunction:
    """The device function ``gated_norm(x, gate, weight, eps, at)``: element at + lane of ((x * r) * weight) * silu(gate), r =
    1 / sqrt(sum(x^2) / d + eps) over its run of d elements (``engine/cpu/delta_net.py``).

    A warp calls it before its inputs are complete, with ``at`` a multiple of 32; each warp computes r of its run again.
    """
    n_x = d // 32
    squares = make_squares(d)

    @device
    def gated_norm(x, gate, weight, eps, at):  # type: ignore[no-untyped-def]
        lane = I(cuda.threadIdx.x & 31)
        whole = cuda.local.array(n_x, np.float32)
        within = I(U(at) % U(d))
        factor = weight[I(within + lane)]
        wait_for_inputs()
        run = advance(x, I(at - within + lane))
        for k in range(n_x):
            whole[k] = run[32 * k]
        value = x[I(at + lane)]
        opening = gate[I(at + lane)]
        r = F(1.0) / F(math.sqrt(F(squares(whole) / F(d) + eps)))
        return value * r * factor * silu(opening)

    return gated_norm


@kernel(F32P, F32P, F32P, f32_t, i32, F32P, threads=RUN)
def gated_norm(d: int) -> KernelCode:
    """y [n] = x [n], each run of d elements normalized, times silu(gate); d: a multiple of 32.

    Arguments: x, weight [d], gate, eps, n, y.  Grid: ceil(n / 256), blocks of 256.
    """
    normalize = _make_gated_norm(d)

    @cuda.jit
    def gated_norm(x, weight, gate, eps, n, y):  # type: ignore[no-untyped-def]
        let_next_begin()
        thread = I(cuda.threadIdx.x & (RUN - 1))
        at = I(I(cuda.blockIdx.x * RUN) + (thread & ~31))
        if at >= n:
            wait_for_inputs()
            return
        value = normalize(x, gate, weight, eps, at)
        y[I(at + (thread & 31))] = value

    return gated_norm


@kernel(F32P, F32P, F32P, f32_t, i32, U32P, F32P, U16P, threads=RUN)
def gated_norm_quantize(unit: int, d: int, wide: bool = False) -> KernelCode:
    """y, each run of d elements of x normalized, times silu(gate), as int8 with one scale per ``unit`` values.

    Rows have ``columns`` elements; the layout is that of ``engine/cuda/products/quantize.py``.

    Arguments: x, weight [d], gate, eps, columns, q, d, sums.  Grid: (ceil(columns / 256), rows), blocks of 256.
    """
    normalize = _make_gated_norm(d)
    store = make_store(unit, wide)

    @cuda.jit
    def gated_norm_quantize(x, weight, gate, eps, columns, q, scales, sums):  # type: ignore[no-untyped-def]
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        row, run = I(cuda.blockIdx.y & 0xFFFF), I(cuda.blockIdx.x & 0xFFFF)
        at = I(I(run * RUN) + I(cuda.threadIdx.x & (RUN - 32)))
        inside = at < columns
        # A warp past the end of the row computes on data that exists, and its result is not used.
        begin = I(I(row * columns) + (at if inside else I(0)))
        value = normalize(x, gate, weight, eps, begin)
        store(value if inside else F(0.0), inside, row, run, columns, tops, q, scales, sums)

    return gated_norm_quantize
