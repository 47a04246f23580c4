"""What the gated delta rule needs of the tokens of several sequences, before ``engine/cuda/delta_steps.py``.

Formula: that of ``engine/cuda/delta_net.py``: q and k, the convolution of x, normalized and scaled; v; beta' and G_t; D_it *
    (k_i . k_t) and D_it * (k_i . q_t) for the tokens i of the segment of each token t.
Shapes: x, alpha, beta, weight, a, dt, positions, sequences and the memory as in ``engine/cuda/delta_net.py``; a run has at
    most 16 rows.  vectors float32 [rows, n_k, 2 d]: q and k; values float32 [rows, n_v, d]; records float32 [rows, n_v, 52]:
    of each token t the weights of u_i in the sum of k and in that of q, for the tokens i of its segment, [16, 2], in which a
    token that is not before t has -0; D_i,15 [16], if t is the last token of its segment; then G_t, beta' and the weight of
    u_t in the sum of q.
Runs: consecutive rows of one sequence at consecutive positions.  Each row has blocks of its own: those of the first row of a
    run compute all of it, the others end at once.  Rows may be repeated as in ``engine/cpu/delta_net.py``: copies of the last
    row of a run directly after it belong to it, and get its result; a copy elsewhere of the first row of a run is a run that
    computes and stores the same bits.  Both may be computed at the same time, because a run stores at its own positions and
    in the next segment, and reads what precedes it.
Who owns what: a block owns the queries and keys of a key head for one run, or the values of a head; in the same way as in a
    block of ``delta_net``, a thread owns channels, a warp norms, and 8 lanes the key of one of the 16 tokens of the segment;
    a thread owns the weights of a token i for one of the heads that share the key.  What earlier passes have stored is in
    flight before ``wait_for_inputs``.
Reduction order: that of ``engine/cpu/delta_net.py``.
Bytes moved, for each run: the keys of the segment, 4 n_k d for each token; 12 C and 208 n_v for each row.
"""

import numpy as np
from numba import cuda

from engine.cache.recurrent import SEGMENT
from engine.cuda.delta_net import BATCH, LANES, THREADS, around, make_part, make_spread
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    decay_of,
    fma,
    inverse_root,
    let_next_begin,
    pointer,
    sigmoid,
    silu,
    store4,
    stream4,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runs import rows_of_run
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode
from engine.limits import DECODE_ROWS

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

WEIGHTS = 2 * SEGMENT
LEFT = WEIGHTS
"""Where a record has D_i,15."""
NUMBERS = LEFT + SEGMENT
"""Where it has G, beta', and the weight of the token itself."""
RECORD = NUMBERS + 4
"""Floats of a token and a head; the last is unused."""


def grid(n_k: int, n_v: int, rows: int) -> tuple[int, int]:
    """The grid of ``delta_inputs``."""
    return n_k + n_v, rows


@kernel(*[F32P] * 3, i32, *[F32P] * 3, I32P, I32P, f32_t, f32_t, *[i32] * 5, *[F32P] * 6, threads=THREADS)
def delta_inputs(d: int, n_conv: int, share: int, grouped: bool = False) -> KernelCode:
    """Compute everything that the rule needs of each token except the state, and store inputs, keys and decays.  ``share``:
    the number of heads that share a key; ``grouped``: they are neighbours.

    Arguments: x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, n_v, rows, length, segments,
    ring, keys, decays, vectors, values, records.  No kernel of the same chain writes the positions, the sequences, or what is
    stored for earlier positions: that is read before ``wait_for_inputs``.
    Grid: ``grid(n_k, n_v, rows)``, blocks of ``THREADS``.
    """
    back, most = n_conv - 1, DECODE_ROWS
    n_channels = -(-2 * d // THREADS)
    n_taps, n_before, n_new = n_channels * n_conv, n_channels * max(1, back), n_channels * BATCH
    n_runs = d // 32
    n_key = 4 * n_runs
    # As many tokens of a segment as rows of a run.
    n_y, n_products, n_gates = most * 2 * d, most * 2 * SEGMENT, most * share
    n_own, n_warps = -(-share // LANES), THREADS // 32
    squares, part, spread = make_squares(d), make_part(d), make_spread(4)

    @device
    def fetch(x, first, rows, width, channels, thread, limit, new):
        """Start loading x of the thread's channels, of rows first .. first + BATCH - 1."""
        for n in range(n_channels):
            for b in range(BATCH):
                new[n * BATCH + b] = F(0.0)
                if thread + n * THREADS < limit and first + b < rows:
                    new[n * BATCH + b] = x[I(I(first + b) * width) + channels[n]]

    @cuda.jit
    def delta_inputs(
        x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, n_v, rows, length, segments, ring,
        keys, decays, vectors, values, records,
    ):  # fmt: skip
        let_next_begin()
        y = pointer(cuda.shared.array(n_y, np.float32, ALIGNED))
        products = pointer(cuda.shared.array(n_products, np.float32, ALIGNED))
        new_decays = pointer(cuda.shared.array(n_gates, np.float32, ALIGNED))
        rates = pointer(cuda.shared.array(n_gates, np.float32, ALIGNED))
        known_decays = pointer(cuda.shared.array(n_gates, np.float32, ALIGNED))
        key = cuda.local.array(n_key, np.float32)
        chains = cuda.local.array(4, np.float32)
        dots = cuda.local.array(4, np.float32)
        channels = cuda.local.array(n_channels, np.int32)
        taps = cuda.local.array(n_taps, np.float32)
        before = cuda.local.array(n_before, np.float32)
        new = cuda.local.array(n_new, np.float32)
        elements = cuda.local.array(n_runs, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane, own, mine = I(thread >> 5), I(thread & 31), I(thread & (LANES - 1)), I(thread >> 3)
        task, begin = I(cuda.blockIdx.x & 0xFFFF), I(cuda.blockIdx.y & 0xFFFF)
        n_rows = rows_of_run(positions, sequences, rows, begin, lane)
        if n_rows == 0:
            # The blocks of another row compute this one.
            wait_for_inputs()
            return
        place, sequence = positions[begin], sequences[begin]
        width = I(I(2 * n_k + n_v) * d)
        of_keys, group = task < n_k, task
        limit = I(2 * d) if of_keys else I(d)
        ring_row, segment, at = I(U(place) % U(length)), I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
        index = I(U(segment) % U(segments))
        base = I(I(sequence * segments) * SEGMENT)
        ring = advance(ring, np.int64(I(sequence * length)) * np.int64(width))

        # What earlier passes have written for the sequence.
        for k in range(n_key):
            key[k] = F(0.0)
        for n in range(n_channels):
            i = I(thread + n * THREADS)
            if of_keys:
                channels[n] = I(I(group * d + i) + (I(I(n_k - 1) * d) if i >= d else I(0)))
            else:
                channels[n] = I(I(n_k + task) * d + i)
            for j in range(back):
                before[n * back + j] = F(0.0)
            if i < limit:
                for j in range(n_conv):
                    taps[n * n_conv + j] = weight[I(channels[n] * n_conv) + j]
                for j in range(back):
                    if place >= back - j:
                        row = around(I(ring_row - (back - j)), length)
                        before[n * back + j] = ring[I(row * width) + channels[n]]
        if of_keys and mine < at:
            known = advance(keys, I(I(I(base + index * SEGMENT + mine) * n_k + group) * d) + 4 * own)
            for m in range(n_runs):
                words = stream4(known, 32 * m)
                for k in range(4):
                    key[4 * m + k] = bits_float(I(words[k]))
        if of_keys:
            place_of = thread
            while place_of < share * SEGMENT:
                r, i = I(place_of >> 4), I(place_of & (SEGMENT - 1))
                head = I(I(group * share) + r) if grouped else I(group + I(r * n_k))
                known_decays[place_of] = decays[I(I(base + index * SEGMENT + i) * n_v) + head] if i < at else F(1.0)
                place_of = I(place_of + THREADS)

        wait_for_inputs()
        x = advance(x, np.int64(begin) * np.int64(width))
        fetch(x, I(0), n_rows, width, channels, thread, limit, new)
        if of_keys:
            gate = warp
            while gate < 2 * share:
                r = I(gate >> 1)
                head = I(I(group * share) + r) if grouped else I(group + I(r * n_k))
                if lane < n_rows:
                    of_row = I(I(begin + lane) * stride) + head
                    if gate & 1 == 0:
                        new_decays[I(r * most) + lane] = decay_of(a[head], alpha[of_row] + dt[head])
                    else:
                        rates[I(r * most) + lane] = sigmoid(beta[of_row])
                gate = I(gate + n_warps)
        first = I(0)
        while first < n_rows:
            for n in range(n_channels):
                i = I(thread + n * THREADS)
                if i < limit:
                    for b in range(BATCH):
                        if first + b < n_rows:
                            total_of_taps = F(0.0)
                            for j in range(back):
                                total_of_taps = fma(before[n * back + j], taps[n * n_conv + j], total_of_taps)
                            total_of_taps = silu(fma(new[n * BATCH + b], taps[n * n_conv + back], total_of_taps))
                            for j in range(back - 1):
                                before[n * back + j] = before[n * back + j + 1]
                            if back > 0:
                                before[n * back + back - 1] = new[n * BATCH + b]
                            row = around(I(ring_row + first + b), length)
                            ring[I(row * width) + channels[n]] = new[n * BATCH + b]
                            if of_keys:
                                y[I(I(first + b) * (2 * d)) + i] = total_of_taps
                            else:
                                values[I(I(I(begin + first + b) * n_v + I(task - n_k)) * d) + i] = total_of_taps
            first = I(first + BATCH)
            if first < n_rows:
                fetch(x, first, n_rows, width, channels, thread, limit, new)
        if not of_keys:
            return
        cuda.syncthreads()
        norm = warp
        while norm < 2 * n_rows:
            z = advance(y, I(I(norm >> 1) * (2 * d)) + I((norm & 1) * d + lane))
            for k in range(n_runs):
                elements[k] = z[32 * k]
            r = inverse_root(squares(elements), F(1.0), eps)
            factor = scale if norm & 1 == 0 else F(1.0)
            to = I(I(I(I(begin + (norm >> 1)) * n_k + group) * (2 * d)) + I((norm & 1) * d + lane))
            for k in range(n_runs):
                normed = elements[k] * r * factor
                z[32 * k] = normed
                vectors[I(to + 32 * k)] = normed
            norm = I(norm + n_warps)
        cuda.syncthreads()

        # The dots of the keys of a segment with the keys and queries of the tokens, two at a time.
        first, start, of_segment = I(0), at, index
        while first < n_rows:
            # Rows first .. end - 1 are tokens of one segment, from token ``start`` on.
            end = min(n_rows, I(first + (SEGMENT - start)))
            t = first
            while t < end:
                for p in range(2):
                    if t + p < end and mine == start + (t + p - first):
                        z = advance(y, I(I(t + p) * (2 * d)) + I(d + 4 * own))
                        to = advance(keys, I(I(I(base + of_segment * SEGMENT + mine) * n_k + group) * d) + 4 * own)
                        for m in range(n_runs):
                            words = vector4(z, 32 * m)
                            for k in range(4):
                                key[4 * m + k] = bits_float(I(words[k]))
                            store4(to, 32 * m, key[4 * m], key[4 * m + 1], key[4 * m + 2], key[4 * m + 3])
                for p in range(2):
                    query = advance(y, I(I(t + p if t + p < end else t) * (2 * d)) + I(4 * own))
                    dots[2 * p], dots[2 * p + 1] = part(key, advance(query, d), chains), part(key, query, chains)
                result = spread(dots, own)
                # Two lanes have each of the four.
                row = I(t + (own >> 2))
                if row < end and own & 1 == 0:
                    products[I(2 * I(row * SEGMENT + mine)) + (own >> 1 & 1)] = result
                t = I(t + 2)
            first, start, of_segment = end, I(0), around(I(of_segment + 1), segments)
        cuda.syncthreads()

        # The weights of token ``mine`` for a head.
        for n in range(n_own):
            r = I(own + n * LANES)
            if r < share:
                head = I(I(group * share) + r) if grouped else I(group + I(r * n_k))
                decay, total = F(1.0), F(1.0)
                for i in range(SEGMENT):
                    e = known_decays[I(r * SEGMENT) + i]
                    total = total * e
                    if i > mine:
                        decay = decay * e
                token, of_segment = at, index
                for t in range(n_rows):
                    e = new_decays[I(r * most) + t]
                    total = total * e
                    decay = F(1.0) if mine == token else decay * e
                    record = advance(records, I(I(I(begin + t) * n_v + head) * RECORD))
                    of_key = decay * products[I(2 * I(t * SEGMENT + mine))]
                    of_query = decay * products[I(2 * I(t * SEGMENT + mine)) + 1]
                    # What is not before the token in its segment leaves every sum unchanged.
                    record[2 * mine] = of_key if mine < token else F(-0.0)
                    record[I(2 * mine) + 1] = of_query if mine < token else F(-0.0)
                    if mine == token:
                        record[NUMBERS], record[NUMBERS + 1], record[NUMBERS + 2] = (
                            total,
                            rates[I(r * most) + t],
                            of_query,
                        )
                        decays[I(I(base + of_segment * SEGMENT + token) * n_v) + head] = e
                    if token == SEGMENT - 1:
                        record[I(LEFT + mine)] = decay
                        token, of_segment, total = I(0), around(I(of_segment + 1), segments), F(1.0)
                    else:
                        token = I(token + 1)

    return delta_inputs
