"""The gated delta rule over the rows of a prompt: what does not depend on the state for all rows at once, then the rule.

Formula: ``engine/cuda/delta_net.py``.  ``convolve``: y = silu of the convolution, with q and k normalized and scaled; e and
    beta'.  ``couple``: G_t, D_i,15, D_it * (k_i . k_t) and D_it * (k_i . q_t) for the tokens i and t of each segment.
    ``delta_rule``: u, out and the next state, segment after segment.  None writes the ring of inputs, which may be shorter
    than the pass: the last rows are stored there afterwards (``engine/cuda/mtp.py``, ``keep_rows``).
Shapes: x float32 [rows, C], C = (2 n_k + n_v) d. The pass begins in a segment, at token ``at`` of it: row t is token at + t
    from the beginning of that segment. All rows belong to sequences[0], whose part of the memory is used. y float32 [padded,
    C] and gates float32 [n_v, padded, 2], e and beta', are by token; of the tokens before the pass they have k and e, from
    the lists. padded is a multiple of 16. If rows belong to several sequences, as ``runs`` (``engine.arrays.Batch``) says in
    place of sequences, all this holds for each of them, and each has segments of its own. records float32 [n_v, padded / 16,
    560]: of each segment, for each token i and lane l the weights of u_i in the sums of k for the tokens l and l + 8 and in
    those of q; then G, D_i,15 and beta' [16]. The others as in ``engine/cuda/delta_net.py``.
Who owns what: ``convolve``: a warp owns 16 rows of d channels, which are the queries, the keys or the values of a head,
    lane l channels l + 32 k; or the gates of 32 heads.  ``couple``: a block owns a segment and a key head, 8 lanes the key of
    a token, as in ``engine/cuda/delta_net.py``.  ``delta_rule``: a block owns 16 rows of the state of one head, with 8 lanes
    for every two of them, in registers from the first segment to the last: so what a lane reads of a token serves two rows.
    Lane l owns the sums of the tokens l and l + 8.  What a segment needs is copied to shared memory while the one before is
    computed.
Reduction order: that of ``engine/cpu/delta_net.py``.  The partial sums of 8 tokens are exchanged together, so that each lane
    gets the dots of its own tokens.
Bytes moved: ``convolve``: 8 C per row, and 4 C (n_conv - 1) more per 16 rows; ``couple``: 8 n_k d per row, and 140 n_v per
    row for the records; ``delta_rule``: 4 C + 8 d n_v per row from and to memory (queries, keys and records go to d / 16
    blocks of a head, from the L2 cache), and 4 d^2 n_v for the state.
"""

import numpy as np
from numba import cuda

from engine.cache.recurrent import SEGMENT
from engine.cuda.attention.tile import make_each
from engine.cuda.delta_net import COLUMNS, LANES, THREADS, make_dot
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    copy4,
    decay_of,
    fma,
    inverse_root,
    lane_from,
    lane_xor,
    let_next_begin,
    pointer,
    settled,
    sigmoid,
    silu,
    store4,
    stream4,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runs import make_find_part, make_first_part, parts_of_runs
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.limits import MOST_TOGETHER

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

WARPS = 8
"""Warps of a block of ``convolve``, each for 16 rows."""
APART = COLUMNS // 2
"""The distance between the two rows of the state of which a lane of ``delta_rule`` has a part."""
RULE_THREADS = APART * LANES
WEIGHTS = 2 * SEGMENT * SEGMENT
RECORD = WEIGHTS + 3 * SEGMENT
"""Floats of a segment and a head that ``couple`` computes: weights, and three numbers per token."""


SPARE = 2
"""The most segments that a sequence touches with a number of rows, beyond one for every 16 rows of whole segments."""


def padded(rows: int, several: bool = False) -> int:
    """The number of tokens of all segments that ``rows`` rows of one sequence, or of several, can touch."""
    if several:
        return parts_of_runs(rows, SEGMENT, SPARE) * SEGMENT
    return -(-(rows + SEGMENT - 1) // SEGMENT) * SEGMENT


def convolve_grid(n_k: int, n_v: int, rows: int, several: bool = False) -> tuple[int, int]:
    """The grid of ``convolve``; several: whether rows belong to several sequences."""
    parts = parts_of_runs(rows, SEGMENT) if several else -(-rows // SEGMENT)
    return -(-(2 * n_k + n_v + -(-n_v // 32)) // WARPS), parts


@kernel(*[F32P] * 3, i32, *[F32P] * 3, I32P, I32P, f32_t, f32_t, *[i32] * 6, *[F32P] * 5, threads=32 * WARPS)
def convolve(d: int, n_conv: int, several: bool = False) -> KernelCode:
    """Compute everything that the rule needs of each token except the state.

    Arguments: x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, n_v, rows, padded, length,
    segments, ring, keys, decays, y, gates.  ``several``: sequences are runs.  Grid: ``convolve_grid(n_k, n_v, rows,
    several)``.
    """
    find_part, segments_before = make_find_part(SEGMENT), make_first_part(SEGMENT, 1, SPARE)
    back = n_conv - 1
    n_runs = d // 32
    n_taps, n_before = n_runs * n_conv, n_runs * max(1, back)
    squares = make_squares(d)

    @cuda.jit
    def convolve(
        x, alpha, beta, stride, weight, a, dt, positions, sequences, eps, scale, n_k, n_v, rows, padded, length, segments,
        ring, keys, decays, y, gates,
    ):  # fmt: skip
        let_next_begin()
        taps = cuda.local.array(n_taps, np.float32)
        before = cuda.local.array(n_before, np.float32)
        new = cuda.local.array(n_runs, np.float32)
        part = cuda.local.array(n_runs, np.float32)
        lane, warp = I(cuda.threadIdx.x & 31), I((cuda.threadIdx.x >> 5) & (WARPS - 1))
        task, number = I((cuda.blockIdx.x & 0xFFFF) * WARPS + warp), I(cuda.blockIdx.y & 0xFFFF)
        n_vectors = I(2 * n_k + n_v)
        width, channel = I(n_vectors * d), I(task * d + lane)
        if task < n_vectors:
            for k in range(n_runs):
                for j in range(n_conv):
                    taps[k * n_conv + j] = weight[I(I(channel + 32 * k) * n_conv) + j]
        wait_for_inputs()
        sequence, begin, behind = I(sequences[0]), I(0), I(0)
        if several:
            begin, rows, sequence, number, run = find_part(sequences, number)
            if begin + number * SEGMENT >= rows:
                return
            # From here on, rows and tokens are those of the run.
            rows = I(rows - begin)
            behind = I(segments_before(sequences, run) * SEGMENT)
        t = I(number * SEGMENT)
        end = min(I(t + SEGMENT), rows)
        place = I(positions[begin])
        x, y = advance(x, np.int64(begin) * np.int64(width)), advance(y, np.int64(behind) * np.int64(width))
        alpha, beta, gates = (
            advance(alpha, I(begin * stride)),
            advance(beta, I(begin * stride)),
            advance(gates, I(2 * behind)),
        )
        # Tokens of the first segment before the pass, and the rows of the lists that have them.
        known = I(U(place) % U(SEGMENT))
        base = I(I(sequence * segments) * SEGMENT + I(U(U(place) // U(SEGMENT)) % U(segments) * U(SEGMENT)))
        ring = advance(ring, np.int64(I(sequence * length)) * np.int64(width))
        if task >= n_vectors:
            head = I(I(task - n_vectors) * 32 + lane)
            if head < n_v:
                speed, offset = a[head], dt[head]
                if t == 0:
                    for i in range(known):
                        gates[I(2 * I(I(head * padded) + i))] = decays[I(I(base + i) * n_v) + head]
                while t < end:
                    at = I(2 * I(I(head * padded) + I(known + t)))
                    gates[at] = decay_of(speed, alpha[I(t * stride) + head] + offset)
                    gates[at + 1] = sigmoid(beta[I(t * stride) + head])
                    t = I(t + 1)
            return
        if t == 0 and n_k <= task < 2 * n_k:
            for i in range(known):
                at = I(I(I(base + i) * n_k) * d) + I(channel - n_k * d)
                for k in range(n_runs):
                    y[I(i * width) + I(channel + 32 * k)] = keys[I(at + 32 * k)]
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
                r = inverse_root(squares(part), F(1.0), eps)
                for k in range(n_runs):
                    part[k] = part[k] * r * factor
            for k in range(n_runs):
                y[I(I(known + t) * width) + I(channel + 32 * k)] = part[k]
            t = after

    return convolve


def couple_grid(n_k: int, padded: int) -> tuple[int, int]:
    """The grid of ``couple``."""
    return padded // SEGMENT, n_k


@kernel(F32P, F32P, I32P, I32P, *[i32] * 5, *[F32P] * 3, threads=THREADS)
def couple(d: int, grouped: bool = False, several: bool = False) -> KernelCode:
    """Compute how the tokens of each segment act on each other, and store keys and decays of the pass in the lists.

    Arguments: y, gates, positions, sequences, n_k, n_v, rows, padded, segments, keys, decays, records.  ``grouped``:
    neighbouring heads share a key; ``several``: sequences are runs.  Grid: ``couple_grid(n_k, padded)``.
    """
    find_part = make_find_part(SEGMENT, 1, SPARE)
    n_runs = d // 32
    n_state = 4 * n_runs
    n_shared, n_products = SEGMENT * 2 * d, 2 * SEGMENT * SEGMENT
    pieces = d // 2
    dot = make_dot(d)

    @cuda.jit
    def couple(y, gates, positions, sequences, n_k, n_v, rows, padded, segments, keys, decays, records):
        let_next_begin()
        vectors = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        products = pointer(cuda.shared.array(n_products, np.float32, ALIGNED))
        e = pointer(cuda.shared.array(SEGMENT, np.float32, ALIGNED))
        key = cuda.local.array(n_state, np.float32)
        chains = cuda.local.array(4, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        own, mine = I(thread & (LANES - 1)), I(thread >> 3)
        segment, group = I(cuda.blockIdx.x & 0xFFFFFF), I(cuda.blockIdx.y & 0xFFFF)
        share, width = I(U(n_v) // U(n_k)), I(I(2 * n_k + n_v) * d)
        wait_for_inputs()
        sequence, begin = I(sequences[0]), I(0)
        if several:
            number = segment
            begin, rows, sequence, segment, _ = find_part(sequences, segment)
            if begin == rows:
                return
            # From here on, rows, tokens and segments are those of the run.
            rows = I(rows - begin)
            before = I(number - segment)
            y, gates = advance(y, np.int64(before * SEGMENT) * np.int64(width)), advance(gates, I(2 * SEGMENT * before))
            records = advance(records, np.int64(before) * RECORD)
        place, first = I(positions[begin]), I(segment * SEGMENT)
        at = I(U(place) % U(SEGMENT))
        n_tokens = I(at + rows)
        if first >= n_tokens:
            return
        # Tokens of the pass that the lists still hold when it has ended.
        least = max(at, I(n_tokens - segments * SEGMENT))
        base = I(
            I(sequence * segments) * SEGMENT + I(U(I(U(place) // U(SEGMENT)) + segment) % U(segments) * U(SEGMENT))
        )
        for n in range(2 * n_runs):
            i = I(thread + n * THREADS)
            b, piece = I(U(i) // U(pieces)), I(U(i) % U(pieces))
            from_row = I(I(first + b) * width) + I(group * d + 4 * piece)
            if piece >= pieces // 2:
                from_row = I(from_row + I(n_k - 1) * d)
            copy4(vectors, I(4 * i), y, from_row, I(first + b < n_tokens))
        copies_commit()
        copies_wait()
        cuda.syncthreads()
        for m in range(n_runs):
            words = vector4(vectors, I(mine * (2 * d) + d + 4 * own + 32 * m))
            for k in range(4):
                key[4 * m + k] = bits_float(I(words[k]))
        if first + mine >= least and first + mine < n_tokens:
            to = advance(keys, I(I(I(base + mine) * n_k + group) * d) + 4 * own)
            for m in range(n_runs):
                store4(to, 32 * m, key[4 * m], key[4 * m + 1], key[4 * m + 2], key[4 * m + 3])
        for t in range(SEGMENT):
            query = advance(vectors, I(t * (2 * d) + 4 * own))
            of_key, of_query = dot(key, advance(query, d), chains), dot(key, query, chains)
            if own == 0:
                to = I(2 * I(mine * SEGMENT + t))
                products[to], products[to + 1] = of_key, of_query
        for r in range(share):
            head = I(I(group * share) + r) if grouped else I(group + I(r * n_k))
            given = advance(gates, I(2 * I(I(head * padded) + first)))
            record = advance(records, I(I(I(head * I(U(padded) // U(SEGMENT))) + segment) * RECORD))
            # The products are complete, and all threads have finished with the decays of the head before.
            cuda.syncthreads()
            if thread < SEGMENT:
                token = I(first + thread)
                e[thread] = given[I(2 * thread)] if token < n_tokens else F(1.0)
                if token >= least and token < n_tokens:
                    decays[I(I(base + thread) * n_v) + head] = e[thread]
                record[I(WEIGHTS + 2 * SEGMENT + thread)] = given[I(2 * thread + 1)] if token < n_tokens else F(0.0)
            cuda.syncthreads()
            # Lane l has the weights of the tokens l and l + 8.
            decay, low, high = F(1.0), F(0.0), F(0.0)
            for t in range(SEGMENT):
                if t > mine:
                    decay = decay * e[t]
                if t >= mine:
                    if t == own:
                        low = decay
                    if t == own + LANES:
                        high = decay
            to = I(2 * I(mine * SEGMENT + own))
            store4(
                record, I(4 * thread), low * products[to], high * products[to + 2 * LANES],
                low * products[to + 1], high * products[to + 2 * LANES + 1],
            )  # fmt: skip
            if own == 0:
                record[I(WEIGHTS + SEGMENT + mine)] = decay
                decay = F(1.0)
                for t in range(SEGMENT):
                    if t <= mine:
                        decay = decay * e[t]
                record[I(WEIGHTS + mine)] = decay

    return couple


def _make_answer(d: int, token: int, distance: int = 1) -> DeviceFunction:
    """The device function ``answer(vectors, state, own, chains)``: for lane ``own`` of 8 the dot products of its two rows of
    the state and the vector of token ``token`` + own; vectors: that of token 0 from element 4 own on, in shared memory, with
    the next one 2 d elements later.  Each half of the lanes gives the other half its parts of the tokens that are not its
    own: first lanes 4 apart, then 2, then 1."""
    n_runs = d // 32
    n_state = 4 * n_runs
    if distance == LANES:

        @device
        def part(vectors, state, own, chains):
            for k in range(8):
                chains[k] = F(0.0)
            for m in range(n_runs):
                words = vector4(vectors, token * 2 * d + 32 * m)
                for k in range(4):
                    word = bits_float(I(words[k]))
                    chains[k] = fma(state[4 * m + k], word, chains[k])
                    chains[4 + k] = fma(state[n_state + 4 * m + k], word, chains[4 + k])
            one = (chains[0] + chains[2]) + (chains[1] + chains[3])
            return one, (chains[4] + chains[6]) + (chains[5] + chains[7])

        return part

    lower, upper = _make_answer(d, token, 2 * distance), _make_answer(d, token + distance, 2 * distance)

    @device
    def answer(vectors, state, own, chains):
        a, v = lower(vectors, state, own, chains)
        b, w = upper(vectors, state, own, chains)
        is_upper = own & distance != 0
        one = (b if is_upper else a) + lane_xor(a if is_upper else b, I(distance))
        return one, (w if is_upper else v) + lane_xor(v if is_upper else w, I(distance))

    return answer


def _make_absorb(d: int, first: int = 0, n: int = LANES) -> DeviceFunction:
    """The device function ``absorb(state, u, left, keys)``: state = fma(left[i] * u[i], key i, state) for the lane's two rows
    and n tokens from ``first`` on, u [.., 2]; keys: key 0 from element 4 l on, for lane l, in shared memory, with the next
    one 2 d elements later."""
    n_runs = d // 32
    n_state = 4 * n_runs
    if n > 1:
        low, high = _make_absorb(d, first, n // 2), _make_absorb(d, first + n // 2, n // 2)

        @device
        def absorb(state, u, left, keys):
            low(state, u, left, keys)
            high(state, u, left, keys)

        return absorb

    @device
    def absorb_one(state, u, left, keys):
        one, other = left[first] * u[2 * first], left[first] * u[2 * first + 1]
        for m in range(n_runs):
            words = vector4(keys, first * 2 * d + 32 * m)
            for k in range(4):
                word = bits_float(I(words[k]))
                state[4 * m + k] = fma(one, word, state[4 * m + k])
                state[n_state + 4 * m + k] = fma(other, word, state[n_state + 4 * m + k])

    return absorb_one


def _stage(d: int) -> int:
    """Floats of what ``delta_rule`` needs of a segment."""
    return SEGMENT * 2 * d + SEGMENT * COLUMNS + RECORD


@kernel(
    *(F32P, F32P, I32P, I32P, *[i32] * 4, *[F32P] * 3),
    threads=RULE_THREADS,
    blocks=3,
    shared=lambda d, *_: 8 * _stage(d),
)
def delta_rule(d: int, grouped: bool = False, several: bool = False) -> KernelCode:
    """Compute deltas and results of each head, segment by segment, and its state.

    Arguments: y, records, positions, sequences, n_k, rows, padded, segments, states, deltas, out.  ``grouped``: neighbouring
    heads share a key; ``several``: sequences are runs.  No kernel of the same chain writes the positions, the sequences, the
    states or the deltas: they are read before ``wait_for_inputs``.  Grid: ``delta_net.grid(d, n_v)``, or ``delta_net.grid(d,
    n_v, MOST_TOGETHER)`` if ``several``, blocks of ``RULE_THREADS``.
    """
    segments_before = make_first_part(SEGMENT, 1, SPARE)
    n_runs = d // 32
    n_state = 4 * n_runs
    n_rows = 2 * n_state
    pieces = d // 2
    values = SEGMENT * 2 * d
    weights = values + SEGMENT * COLUMNS
    rates = weights + WEIGHTS
    n_stage = _stage(d)
    n_record, n_u = RECORD // 4, 2 * SEGMENT
    answer, absorb = _make_answer(d, 0), _make_absorb(d)

    @device
    def take_token(i, weight, known, own, lane, low_rate, high_rate, of_low, of_high, low, high, sums, u):
        """The delta of token i, from the lane that owns it, and its share of the sums of later tokens, for both rows."""
        four = vector4(weight, 4 * LANES * i)
        for r in range(2):
            if i < LANES:
                delta = low[r] if i < known else (of_low[r * APART] - sums[r]) * low_rate
            else:
                delta = high[r] if i < known else (of_high[r * APART] - sums[2 + r]) * high_rate
            delta = lane_from(delta, I((lane & ~(LANES - 1)) | (i & (LANES - 1))))
            u[2 * i + r] = delta
            if i < LANES:
                sums[r] = fma(bits_float(I(four[0])), delta, sums[r])
                if own >= i:
                    sums[4 + r] = fma(bits_float(I(four[2])), delta, sums[4 + r])
                sums[6 + r] = fma(bits_float(I(four[3])), delta, sums[6 + r])
            elif own + LANES >= i:
                sums[6 + r] = fma(bits_float(I(four[3])), delta, sums[6 + r])
            sums[2 + r] = fma(bits_float(I(four[1])), delta, sums[2 + r])

    @device
    def choose_token(i, own, low, high, u):
        for r in range(2):
            low[r] = u[2 * i + r] if own == i else low[r]
            high[r] = u[2 * (i + LANES) + r] if own == i else high[r]

    take_tokens, choose_tokens = make_each(SEGMENT, take_token), make_each(LANES, choose_token)

    @device
    def fetch(stage, y, record, first, n_tokens, width, query, apart, thread):
        """Start copying what the segment with tokens first .. first + 15 needs.  y: the values of the block in row 0; query:
        the offset of the query from there; apart: the distance from the query to the key."""
        for n in range(SEGMENT * pieces // RULE_THREADS):
            i = I(thread + n * RULE_THREADS)
            b, piece = I(U(i) // U(pieces)), I(U(i) % U(pieces))
            at = I(I(I(first + b) * width) + I(query + 4 * piece))
            if piece >= pieces // 2:
                at = I(at + apart)
            copy4(stage, I(4 * i), y, at, I(first + b < n_tokens))
        b, piece = I(thread >> 2), I(thread & 3)
        copy4(stage, I(values + 4 * thread), y, I(I(I(first + b) * width) + 4 * piece), I(first + b < n_tokens))
        for n in range(-(-n_record // RULE_THREADS)):
            i = I(thread + n * RULE_THREADS)
            if i < n_record:
                copy4(stage, I(weights + 4 * i), record, I(4 * i), I(1))

    @cuda.jit
    def delta_rule(y, records, positions, sequences, n_k, rows, padded, segments, states, deltas, out):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.float32, ALIGNED))
        state = cuda.local.array(n_rows, np.float32)
        chains = cuda.local.array(8, np.float32)
        # By token and row.
        u = cuda.local.array(n_u, np.float32)
        # By row: of the lane's first token, and of its second.
        low, high = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        # The state read by the keys of both tokens, and by their queries, for each row.
        sums = cuda.local.array(8, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (RULE_THREADS - 1))
        own, column, lane = I(thread & (LANES - 1)), I(thread >> 3), I(thread & 31)
        head, n_v = I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y)
        first_column = I((cuda.blockIdx.x & 0xFFFF) * COLUMNS)
        share = I(U(n_v) // U(n_k)) if grouped else I(1)
        group = I(U(head) // U(share) if grouped else U(head) % U(n_k))
        width = I(I(2 * n_k + n_v) * d)
        value = I(I(2 * n_k + head) * d + first_column)
        query, apart = I(group * d - value), I(I(n_k - 1) * d)
        y = advance(y, value)
        records = advance(records, I(I(head * I(U(padded) // U(SEGMENT))) * RECORD))
        head_column = I(head * d + I(first_column + column))
        sequence, begin = I(sequences[0]), I(0)
        if several:
            run = I(cuda.blockIdx.z & 0xFFFF)
            begin, rows = I(sequences[run]), I(sequences[run + 1])
            if begin == rows:
                wait_for_inputs()
                return
            # From here on, rows, tokens and segments are those of the run.
            rows = I(rows - begin)
            sequence, before = I(sequences[run + MOST_TOGETHER + 1]), I(segments_before(sequences, run))
            y = advance(y, np.int64(before * SEGMENT) * np.int64(width))
            records, out = advance(records, np.int64(before) * RECORD), advance(out, np.int64(begin) * I(n_v * d))
        place, first_segment = I(positions[begin]), I(sequence * segments)
        segment, at = I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
        index = I(U(segment) % U(segments))
        state_size = np.int64(I(n_v * (d * d)))
        states = advance(states, state_size * np.int64(first_segment))
        states = advance(states, I(head * (d * d) + I(I(first_column + column) * d + 4 * own)))
        deltas, out = (
            advance(deltas, I(I(I(first_segment * SEGMENT) * n_v) * d) + head_column),
            advance(out, head_column),
        )
        for k in range(n_rows):
            state[k] = F(0.0)
        if segment > 0:
            latest = advance(states, state_size * index)
            for r in range(2):
                for m in range(n_runs):
                    words = stream4(latest, r * APART * d + 32 * m)
                    for k in range(4):
                        state[r * n_state + 4 * m + k] = bits_float(I(words[k]))
        # The deltas of the lane's tokens, if they precede the pass.
        for r in range(2):
            low[r], high[r] = F(0.0), F(0.0)
            if own < at:
                low[r] = deltas[I(I(I(index * SEGMENT + own) * n_v) * d) + r * APART]
            if own + LANES < at:
                high[r] = deltas[I(I(I(index * SEGMENT + own + LANES) * n_v) * d) + r * APART]
        n_tokens, known = I(at + rows), at
        # Tokens whose deltas the list still holds when the pass has ended, and segments whose states the ring does.
        least = max(at, I(n_tokens - segments * SEGMENT))
        least_segment = I(segment + I(U(n_tokens) // U(SEGMENT)) - segments)

        wait_for_inputs()
        fetch(shared, y, records, I(0), n_tokens, width, query, apart, thread)
        copies_commit()
        first, turn = I(0), I(0)
        while first < n_tokens:
            copies_wait()
            # The copies of all threads have arrived, and all have finished the segment before, whose buffer is used next.
            cuda.syncthreads()
            stage = advance(shared, I(turn * n_stage))
            turn = I(1 - turn)
            records = advance(records, RECORD)
            if first + SEGMENT < n_tokens:
                following = advance(shared, I(turn * n_stage))
                fetch(following, y, records, I(first + SEGMENT), n_tokens, width, query, apart, thread)
            copies_commit()
            queries = advance(stage, 4 * own)
            of_low, of_high = (
                advance(stage, I(values + own * COLUMNS + column)),
                advance(stage, I(values + (own + LANES) * COLUMNS + column)),
            )
            numbers = advance(stage, rates)
            low_decay, high_decay = numbers[own], numbers[own + LANES]
            low_rate, high_rate = numbers[2 * SEGMENT + own], numbers[2 * SEGMENT + own + LANES]
            # A loop, because the code of a segment has to fit into the instruction cache.  Registers have no computed index:
            # each turn moves the results of those before.
            for which in range(settled(I(4))):
                offset = I(I(which & 1) * (LANES * 2 * d)) + (I(0) if which > 1 else I(d))
                x, z = answer(advance(queries, offset), state, own, chains)
                for k in range(6):
                    sums[k] = sums[k + 2]
                sums[6], sums[7] = x, z
            # Adding -0 changes nothing, and makes the product of the first token, which has no others before it, an fma.
            for r in range(2):
                sums[r], sums[4 + r] = fma(low_decay, sums[r], F(-0.0)), fma(low_decay, sums[4 + r], F(-0.0))
                sums[2 + r], sums[6 + r] = fma(high_decay, sums[2 + r], F(-0.0)), fma(high_decay, sums[6 + r], F(-0.0))
            weight = advance(stage, I(weights + 4 * own))
            take_tokens(0, weight, known, own, lane, low_rate, high_rate, of_low, of_high, low, high, sums, u)
            for r in range(2):
                low[r], high[r] = u[r], u[2 * LANES + r]
            choose_tokens(0, own, low, high, u)
            for half in range(2):
                token = I(first + own + half * LANES)
                if token >= at and token < n_tokens:
                    for r in range(2):
                        to = I(I(I(token - at) * n_v) * d) + r * APART
                        out[to] = sums[6 + r] if half else sums[4 + r]
                        if token >= least:
                            to = I(I(I(index * SEGMENT + own + half * LANES) * n_v) * d) + r * APART
                            deltas[to] = high[r] if half else low[r]
            index = I(0) if index == segments - 1 else I(index + 1)
            segment = I(segment + 1)
            if first + SEGMENT <= n_tokens:
                total = numbers[SEGMENT - 1]
                for k in range(n_rows):
                    state[k] = state[k] * total
                for half in range(settled(I(2))):
                    tokens = I(half * LANES)
                    absorb(state, u, advance(numbers, I(SEGMENT + tokens)), advance(queries, I(d + tokens * (2 * d))))
                    for k in range(2 * LANES):
                        u[k] = u[k + 2 * LANES]
                if segment > least_segment:
                    to_state = advance(states, state_size * index)
                    for r in range(2):
                        for m in range(n_runs):
                            k = r * n_state + 4 * m
                            at_row = r * APART * d + 32 * m
                            store4(to_state, at_row, state[k], state[k + 1], state[k + 2], state[k + 3])
            first, known = I(first + SEGMENT), I(0)

    return delta_rule
