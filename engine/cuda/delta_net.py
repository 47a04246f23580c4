"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks") for the rows of a step, and the gated norm that follows.

Formula: that of ``engine/cpu/delta_net.py``: the state S before a segment of 16 positions, and of the tokens i since then the
    normalized key k_i, the delta u_i and the decay e_i; for token t
    u_tj = (v_tj - (G_t * (S_j . k_t) + sum_i (D_it * (k_i . k_t)) * u_ij)) * beta'_t;
    out_tj = G_t * (S_j . q_t) + sum_i (D_it * (k_i . q_t)) * u_ij, i = t included;
    after the segment, S_jm = G_15 * S_jm + sum_i (D_i,15 * u_ij) * k_im.
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d: q, k, v; alpha, beta float32 [rows, n_v], rows ``stride`` elements apart;
    weight float32 [C, n_conv]; a, dt float32 [n_v]; positions, sequences int32 [rows]: the position of each row, which is
    that of the first and the rows before it, and its sequence, which all have in common; out float32 [rows, n_v d].  d is a
    multiple of 32, up to 128; rows is at most 16, so that a pass ends at most one segment.  The memory has a part for each
    sequence: ring float32 [sequences, length, C], x of position p in row p % length, length >= rows + n_conv - 1; states
    float32 [sequences, segments, n_v, d, d], segments >= 2, the state before segment n at index n % segments; keys float32
    [sequences, 16 segments, n_k, d], deltas float32 [sequences, 16 segments, n_v, d], decays float32 [sequences, 16 segments,
    n_v]: what position p adds in row p % (16 segments).  Rows of several sequences: ``engine/cuda/delta_steps.py``.
Who owns what: a block owns 16 rows of the state of one head.  8 lanes hold one of them, lane l the elements 4 l + 32 m .. +
    3, and in the same way the key of one of the 16 tokens of the segment.  What earlier passes have stored is in flight
    before ``wait_for_inputs``.  What all rows of a state need of a token, each block computes again: q and k by a thread per
    channel, their norms by a warp each; v by the lanes of its row, a token each; e and beta' of all tokens by a warp each;
    the dots of its key with those of the tokens by the lanes that hold it.
Reduction order: that of ``engine/cpu/delta_net.py``; the sums over tokens are computed in each of the 8 lanes.  Chain c of a
    dot is element c % 4 of lane c // 4.
Bytes moved: 4 d^2 n_v read, and as many written if the pass ends a segment; d / 16 times the lists of the segment, read from
    the L2 cache: 4 n_v d for keys and as many for deltas of each token.
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
    keep4,
    lane_from,
    lane_xor,
    let_next_begin,
    pointer,
    sigmoid,
    silu,
    store4,
    stream4,
    vector2,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
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
"""Tokens whose inputs a thread loads at a time."""


@device
def around(i, n):
    """i modulo n, for -n <= i < 2 n."""
    if i < 0:
        return I(i + n)
    return I(i - n) if i >= n else i


def make_take(d: int, load: DeviceFunction) -> DeviceFunction:
    """The device function ``take(x, z)``: x = the lane's d / 8 elements of a vector, of which ``load`` reads four at a time;
    z: the vector from element 4 l on."""
    n_runs = d // 32

    @device
    def take(x, z):
        for m in range(n_runs):
            words = load(z, 32 * m)
            for k in range(4):
                x[4 * m + k] = bits_float(I(words[k]))

    return take


def make_put(d: int) -> DeviceFunction:
    """The device function ``put(to, x)``: store the lane's d / 8 elements of a vector; to: from element 4 l on."""
    n_runs = d // 32

    @device
    def put(to, x):
        for m in range(n_runs):
            store4(to, 32 * m, x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3])

    return put


def make_part(d: int, load: DeviceFunction = vector4) -> DeviceFunction:
    """The device function ``part(row, z, chains)``: what a lane adds to the dot product of a row, d / 8 elements in each of 8
    lanes, and a vector that ``load`` reads, by default from shared memory: the sum of its 4 chains; z: the vector from
    element 4 l on; chains [4]: registers."""
    n_runs = d // 32

    @device
    def part(row, z, chains):
        for k in range(4):
            chains[k] = F(0.0)
        for m in range(n_runs):
            words = load(z, 32 * m)
            for k in range(4):
                chains[k] = fma(row[4 * m + k], bits_float(I(words[k])), chains[k])
        return (chains[0] + chains[2]) + (chains[1] + chains[3])

    return part


def make_dot(d: int, load: DeviceFunction = vector4) -> DeviceFunction:
    """The device function ``dot(row, z, chains)``: the dot product of a row, d / 8 elements in each of 8 lanes, and a vector
    that ``load`` reads, by default from shared memory, in each of the lanes; z: the vector from element 4 l on; chains [4]:
    registers."""
    part = make_part(d, load)

    @device
    def dot(row, z, chains):
        total = part(row, z, chains)
        total = total + lane_xor(total, I(4))
        total = total + lane_xor(total, I(2))
        return total + lane_xor(total, I(1))

    return dot


def make_spread(n: int, bit: int = 4) -> DeviceFunction:
    """The device function ``spread(x, own)``: the sums over 8 lanes of n values x, 4 or 8, each added as in ``make_dot``;
    lane ``own`` returns that of value own * n // 8.  In each step a lane keeps half of its values, gives the others to the
    lane that differs in ``bit``, and receives what it keeps of that lane's."""
    half, rest = n // 2, make_spread(max(1, n // 2), bit // 2) if bit > 1 else None

    @device
    def spread(x, own):
        if half > 0:
            upper = own & bit != 0
            for k in range(half):
                low, high = x[k], x[half + k]
                given = low if upper else high
                kept = high if upper else low
                x[k] = kept + lane_xor(given, I(bit))
        else:
            x[0] = x[0] + lane_xor(x[0], I(bit))
        if rest is None:
            return x[0]
        return rest(x, own)

    return spread


def make_absorb(d: int, pitch: int, first: int = 0, n: int = SEGMENT) -> DeviceFunction:
    """The device function ``absorb(state, u, left, keys)``: state = fma(left[i] * u[i], key i, state) for n tokens from
    ``first`` on; keys: key 0 from element 4 l on, for lane l, in shared memory, with key i ``pitch`` * i elements later.  The
    calls make all indices constants."""
    n_runs = d // 32
    if n > 1:
        low, high = make_absorb(d, pitch, first, n // 2), make_absorb(d, pitch, first + n // 2, n // 2)

        @device
        def absorb(state, u, left, keys):
            low(state, u, left, keys)
            high(state, u, left, keys)

        return absorb

    @device
    def absorb_one(state, u, left, keys):
        delta = left[first] * u[first]
        for m in range(n_runs):
            words = vector4(keys, first * pitch + 32 * m)
            for k in range(4):
                state[4 * m + k] = fma(delta, bits_float(I(words[k])), state[4 * m + k])

    return absorb_one


def grid(d: int, n_v: int, runs: int = 1) -> tuple[int, int, int]:
    """The grid of ``delta_net``; runs: that of other kernels with blocks for so many runs."""
    return d // COLUMNS, n_v, runs


@kernel(
    *(*[F32P] * 3, i32, *[F32P] * 3, I32P, I32P, f32_t, f32_t, *[i32] * 4, *[F32P] * 6),
    threads=THREADS,
    cached=True,
)
def delta_net(d: int, n_conv: int, most: int, grouped: bool = False) -> KernelCode:
    """One layer of the gated delta rule for up to ``most`` rows; ``grouped``: neighbouring heads share a key.

    Arguments: x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, rows, length, segments, ring,
    states, keys, deltas, decays, out.  No kernel of the same chain writes the positions, the sequences, or what is stored for
    earlier positions: that is read before ``wait_for_inputs``.
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
    pair = 1 if single else 2  # tokens whose dots are computed at a time
    squares, part, spread, absorb = make_squares(d), make_part(d), make_spread(4 * pair), make_absorb(d, d)
    take, take_stored, put = make_take(d, vector4), make_take(d, stream4), make_put(d)
    n_dots = 4 * pair
    n_answers, n_weights, n_keys, n_before_deltas = (
        2 * COLUMNS * most,
        2 * SEGMENT * most,
        SEGMENT * d,
        COLUMNS * SEGMENT,
    )
    n_each = n_before_deltas // THREADS

    @device
    def fetch(x, first, rows, width, channels, thread, new):
        """Start loading x of the thread's channels of q and k, of rows first .. first + batch - 1."""
        for n in range(n_channels):
            for b in range(batch):
                new[n * batch + b] = F(0.0)
                if (exact or thread + n * THREADS < 2 * d) and (single or first + b < rows):
                    new[n * batch + b] = x[I(I(first + b) * width) + channels[n]]

    @cuda.jit
    def delta_net(
        x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, rows, length, segments, ring, states,
        keys, deltas, decays, out,
    ):  # fmt: skip
        let_next_begin()
        y = pointer(cuda.shared.array(n_y, np.float32, ALIGNED))
        new_decays = pointer(cuda.shared.array(most, np.float32, ALIGNED))
        rates = pointer(cuda.shared.array(most, np.float32, ALIGNED))
        answers = pointer(cuda.shared.array(n_answers, np.float32, ALIGNED))
        weights = pointer(cuda.shared.array(n_weights, np.float32, ALIGNED))
        own_weights = pointer(cuda.shared.array(most, np.float32, ALIGNED))
        before_deltas = pointer(cuda.shared.array(n_before_deltas, np.float32, ALIGNED))
        all_keys = pointer(cuda.shared.array(n_keys, np.float32, ALIGNED))
        left = pointer(cuda.shared.array(SEGMENT, np.float32, ALIGNED))
        state = cuda.local.array(n_state, np.float32)
        key = cuda.local.array(n_state, np.float32)
        u = cuda.local.array(SEGMENT, np.float32)
        chains = cuda.local.array(4, np.float32)
        dots = cuda.local.array(n_dots, np.float32)
        channels = cuda.local.array(n_channels, np.int32)
        taps = cuda.local.array(n_taps, np.float32)
        before = cuda.local.array(n_before, np.float32)
        new = cuda.local.array(n_new, np.float32)
        value_taps = cuda.local.array(n_conv, np.float32)
        value_inputs = cuda.local.array(n_value_taps, np.float32)
        values = cuda.local.array(n_values, np.float32)
        elements = cuda.local.array(n_runs, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane, own = I(thread >> 5), I(thread & 31), I(thread & (LANES - 1))
        head, n_v = I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y)
        # The row of the state, within the block, and the token of the segment that the lanes hold.
        mine = I(thread >> 3)
        first_column = I((cuda.blockIdx.x & 0xFFFF) * COLUMNS)
        column = I(first_column + mine)
        n_rows = I(1) if single else rows
        place, sequence = positions[0], sequences[0]
        share = I(U(n_v) // U(n_k)) if grouped else I(1)
        group = I(U(head) // U(share) if grouped else U(head) % U(n_k))
        width = I(I(2 * n_k + n_v) * d)
        # One of the heads that share a key stores what they share.
        stores = (U(head) % U(share) == 0 if grouped else head < n_k) and cuda.blockIdx.x == 0
        # Where the first row goes.
        ring_row, segment, at = I(U(place) % U(length)), I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
        index = I(U(segment) % U(segments))

        # What earlier passes have written for the sequence.
        state_size, first_segment = np.int64(I(n_v * (d * d))), np.int64(I(sequence * segments))
        first_token, ring_base = I(I(sequence * segments) * SEGMENT), I(sequence * length)
        states = advance(states, state_size * first_segment + np.int64(I(head * (d * d) + I(column * d + 4 * own))))
        keys = advance(keys, I(I(first_token * n_k) * d) + I(group * d + 4 * own))
        deltas, decays = (
            advance(deltas, I(I(I(first_token * n_v) + head) * d)),
            advance(decays, I(I(first_token * n_v) + head)),
        )
        for k in range(n_state):
            state[k], key[k] = F(0.0), F(0.0)
        if segment > 0:
            take_stored(state, advance(states, state_size * index))
        if mine < at:
            take_stored(key, advance(keys, I(I(index * SEGMENT + mine) * I(n_k * d))))
        for k in range(n_each):
            i = I(I(thread >> 4) + k * (THREADS // COLUMNS))
            value = F(0.0)
            if i < at:
                value = deltas[I(I(I(index * SEGMENT + i) * n_v) * d) + I(first_column + (thread & (COLUMNS - 1)))]
            before_deltas[I((thread & (COLUMNS - 1)) * SEGMENT + i)] = value
        # D of the lanes' token, and G, at the token before the pass.
        decay, total = F(1.0), F(1.0)
        for i in range(SEGMENT):
            u[i] = F(1.0)
            if i < at:
                u[i] = decays[I(I(index * SEGMENT + i) * n_v)]
        for i in range(SEGMENT):
            total = total * u[i]
            if i > mine:
                decay = decay * u[i]
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
                        row = around(I(ring_row - (back - j)), length)
                        before[n * back + j] = ring[I(I(ring_base + row) * width) + channels[n]]
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
                        row = around(I(ring_row + from_row), length)
                        value_inputs[k * n_conv + j] = ring[I(I(ring_base + row) * width) + value_channel]
        speed, offset = a[head], dt[head]

        wait_for_inputs()
        fetch(x, I(0), n_rows, width, channels, thread, new)
        gate = F(0.0)
        if warp >= n_warps - 2 and lane < n_rows:
            gates = alpha if warp == n_warps - 2 else beta
            gate = gates[I(lane * stride) + head]
        for k in range(n_values):
            t = I(0) if single else I(own + k * LANES)
            if t < n_rows:
                for j in range(n_conv):
                    from_row = I(t - (back - j))
                    if from_row >= 0:
                        value_inputs[k * n_conv + j] = x[I(from_row * width) + value_channel]
        for k in range(n_values):
            t = I(0) if single else I(own + k * LANES)
            total_of_taps = F(0.0)
            for j in range(n_conv):
                total_of_taps = fma(value_inputs[k * n_conv + j], value_taps[j], total_of_taps)
            values[k] = silu(total_of_taps)
            if t < n_rows and (not single or own == 0):
                row = around(I(ring_row + t), length)
                ring[I(I(ring_base + row) * width) + value_channel] = value_inputs[k * n_conv + back]

        # Queries and keys of all tokens.
        first = I(0)
        while first < n_rows:
            for n in range(n_channels):
                i = I(thread + n * THREADS)
                if exact or i < 2 * d:
                    for b in range(batch):
                        if single or first + b < n_rows:
                            total_of_taps = F(0.0)
                            for j in range(back):
                                total_of_taps = fma(before[n * back + j], taps[n * n_conv + j], total_of_taps)
                            total_of_taps = fma(new[n * batch + b], taps[n * n_conv + back], total_of_taps)
                            y[I(I(first + b) * (2 * d)) + i] = silu(total_of_taps)
                            for j in range(back - 1):
                                before[n * back + j] = before[n * back + j + 1]
                            if back > 0:
                                before[n * back + back - 1] = new[n * batch + b]
                            if stores:
                                row = around(I(ring_row + first + b), length)
                                ring[I(I(ring_base + row) * width) + channels[n]] = new[n * batch + b]
            first = I(first + batch)
            if not single and first < n_rows:
                fetch(x, first, n_rows, width, channels, thread, new)
        if lane < n_rows:
            if warp == n_warps - 2:
                new_decays[lane] = decay_of(speed, gate + offset)
            if warp == n_warps - 1:
                rates[lane] = sigmoid(gate)
        cuda.syncthreads()
        task = warp
        while task < 2 * n_rows:
            z = advance(y, I(I(task >> 1) * (2 * d)) + I((task & 1) * d + lane))
            for k in range(n_runs):
                elements[k] = z[32 * k]
            r = inverse_root(squares(elements), F(1.0), eps)
            factor = scale if task & 1 == 0 else F(1.0)
            for k in range(n_runs):
                z[32 * k] = elements[k] * r * factor
            task = I(task + n_warps)
        cuda.syncthreads()

        for i in range(0, SEGMENT, 4):
            words = vector4(before_deltas, I(mine * SEGMENT + i))
            for k in range(4):
                u[i + k] = bits_float(I(words[k]))
        first = I(0)
        while first < n_rows:
            # Rows first .. end - 1 are tokens of one segment, from token ``at`` on.
            end = min(n_rows, I(first + (SEGMENT - at)))
            t = first
            while t < end:
                token = I(at + (t - first))
                new_decay = decay
                for p in range(pair):
                    if t + p < end:
                        new_decay = decay * new_decays[t + p] if p == 0 else new_decay * new_decays[t + p]
                        if mine == token + p:
                            new_decay = F(1.0)
                            take(key, advance(y, I(I(t + p) * (2 * d)) + I(d + 4 * own)))
                            if stores:
                                put(advance(keys, I(I(index * SEGMENT + token + p) * I(n_k * d))), key)
                    if p == 0:
                        decay = new_decay
                # The dots of the keys and of the rows of the state with the tokens' keys and queries.
                for p in range(pair):
                    query = advance(y, I(I(t + p if t + p < end else t) * (2 * d)) + I(4 * own))
                    new_key = advance(query, d)
                    dots[4 * p], dots[4 * p + 1] = part(key, new_key, chains), part(key, query, chains)
                    dots[4 * p + 2], dots[4 * p + 3] = part(state, new_key, chains), part(state, query, chains)
                result = spread(dots, own)
                number = I(own * pair // 2)
                row = I(t + (number >> 2))
                if row < end:
                    to = I(I(2 * I(row * SEGMENT + mine)) + (number & 1))
                    if number & 2:
                        # There are as many rows of the state in a block as tokens in a segment.
                        answers[to] = result
                    else:
                        of_row, place_of_row = new_decay if number >= 4 else decay, I(token + (number >> 2))
                        product = of_row * result
                        if mine == place_of_row and number & 1:
                            own_weights[row] = product
                        # What is not before the token in its segment leaves every sum unchanged.
                        weights[to] = product if mine < place_of_row else F(-0.0)
                decay = new_decay
                t = I(t + pair)
            cuda.syncthreads()
            t = first
            while t < end:
                token, e = I(at + (t - first)), new_decays[t]
                value = values[0]
                if not single:
                    for k in range(1, n_values):
                        if t >= k * LANES:
                            value = values[k]
                    value = lane_from(value, I((lane & ~(LANES - 1)) | (t & (LANES - 1))))
                total = total * e
                both = vector2(answers, I(2 * I(t * COLUMNS + mine)))
                # Adding -0 changes nothing, and makes the product of the first token, which has no others before it, an fma.
                read = fma(total, bits_float(I(both[0])), F(-0.0))
                result = fma(total, bits_float(I(both[1])), F(-0.0))
                for i in range(0, SEGMENT, 2):
                    words = vector4(weights, I(2 * I(t * SEGMENT + i)))
                    for k in range(2):
                        read = fma(bits_float(I(words[2 * k])), u[i + k], read)
                        result = fma(bits_float(I(words[2 * k + 1])), u[i + k], result)
                delta = (value - read) * rates[t]
                for i in range(SEGMENT):
                    u[i] = delta if i == token else u[i]
                result = fma(own_weights[t], delta, result)
                if own == 0:
                    deltas[I(I(I(index * SEGMENT + token) * n_v) * d) + column] = delta
                    out[I(I(t * n_v + head) * d) + column] = result
                if thread == 0 and cuda.blockIdx.x == 0:
                    decays[I(I(index * SEGMENT + token) * n_v)] = e
                t = I(t + 1)
            if at + (end - first) == SEGMENT:
                # The segment ends: its tokens become part of the state.
                for m in range(n_runs):
                    to = I(mine * d + 4 * own + 32 * m)
                    keep4(all_keys, to, key[4 * m], key[4 * m + 1], key[4 * m + 2], key[4 * m + 3])
                if own == 0:
                    left[mine] = decay
                cuda.syncthreads()
                for k in range(n_state):
                    state[k] = state[k] * total
                absorb(state, u, left, advance(all_keys, 4 * own))
                index = around(I(index + 1), segments)
                put(advance(states, state_size * index), state)
                for i in range(SEGMENT):
                    u[i] = F(0.0)
                at, total = I(0), F(1.0)
            first = end

    return delta_net


# --- the norm of the results -----------------------------------------------------------------------------------


def make_gated_norm(d: int, swish: bool) -> DeviceFunction:
    """The device function ``gated_norm(x, gate, weight, eps, at)``: element at + lane of ((x * r) * weight) * silu(gate), or
    sigmoid(gate) unless ``swish``; r = 1 / sqrt(sum(x^2) / d + eps) over its run of d elements
    (``engine/cpu/delta_net.py``).

    A warp calls it before its inputs are complete, with ``at`` a multiple of 32; each warp computes r of its run again.
    """
    n_x = d // 32
    squares = make_squares(d)

    @device
    def gated_norm(x, gate, weight, eps, at):
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
        r = inverse_root(squares(whole), F(d), eps)
        return value * r * factor * (silu(opening) if swish else sigmoid(opening))

    return gated_norm


@kernel(F32P, F32P, F32P, f32_t, i32, F32P, threads=RUN)
def gated_norm(d: int, swish: bool = True) -> KernelCode:
    """y [n] = x [n], each run of d elements normalized, times silu(gate), or sigmoid(gate) unless ``swish``; d: a multiple of
    32.

    Arguments: x, weight [d], gate, eps, n, y.  Grid: ceil(n / 256), blocks of 256.
    """
    normalize = make_gated_norm(d, swish)

    @cuda.jit
    def gated_norm(x, weight, gate, eps, n, y):
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
def gated_norm_quantize(unit: int, d: int, layout: int = NARROW, swish: bool = True) -> KernelCode:
    """y, each run of d elements of x normalized, times silu(gate), or sigmoid(gate) unless ``swish``, as int8 with one scale
    per ``unit`` values.

    Rows have ``columns`` elements; the layout is that of ``engine/cuda/products/quantize.py``.

    Arguments: x, weight [d], gate, eps, columns, q, d, sums.  Grid: (ceil(columns / 256), rows), blocks of 256.
    """
    normalize = make_gated_norm(d, swish)
    store = make_store(unit, layout)

    @cuda.jit
    def gated_norm_quantize(x, weight, gate, eps, columns, q, scales, sums):
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
