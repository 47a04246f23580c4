"""Joining the chunks of attention: the per-chunk results of ``engine/cuda/attention/attend.py`` become the final result.

Formula: over the chunks i of a group that a row sees, with maxima m_i, sums l_i and weighted values o_i:
    M_i = max(M_(i-1), m_i), L_i = L_(i-1) exp(M_(i-1) - M_i) + l_i exp(m_i - M_i), O likewise; over the groups, with the last
    M, L and O of each, the same; a head's sink s joins last, with m = s, l = 1, o = 0; out = O / L, rotated back where values
    are quantized (``engine/cpu/quantized_cache.py``), times sigmoid(gate) where heads are gated (Qiu et al. 2025;
    ``engine/cpu/attention.py``, ``engine/cpu/glu.py``).
Shapes: float32 weights [rows, n_head, partials, 2] (m, l), sums [rows, n_head, partials, d_pad], d_pad = d_v rounded up to
    32; partial 0 of a row is that of the first chunk that it sees, which may be any of its group; gate float32 [rows,
    n_head, 2, d_v], only [:, :, 1] is read; sink float32 [n_head]; out float32 [rows, n_head, d_v], or int8 as in
    ``engine/cuda/products/quantize.py``.
Who owns what: ``combine``: a block owns 32 elements of one head of one row, each of its warps every fourth group;
    ``combine_quantize``: a thread owns one element, a block 256 of a row.  No grid depends on a position.
Reduction order: that of the mirror, chunks of a group in rising order, then groups in rising order.  The maximum over
    earlier ones is exact in any order, so factors a_i = exp(M_(i-1) - M_i), b_i = exp(m_i - M_i) are computed in parallel,
    and only L = fma(L, a_i, b_i l_i) and O = fma(O, a_i, b_i o_i) sequentially.  A sink: M' = max(M, s), a = exp(M - M'),
    L' = fma(L, a, exp(s - M')), O' = O a.
Bytes moved: 8 + 4 d_pad per (row, head, chunk) in, 4 per element of the result, or about 1.2 if it becomes int8, and 4
    for its gate.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.attention.join import LANES, make_factors, make_groups, make_rising_max
from engine.cuda.attention.sight import sight
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    fma,
    lane_from,
    let_next_begin,
    load2,
    pointer,
    sigmoid,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.quantized_cache import hadamard, rotate
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

COMBINE_THREADS = 128
PART = 32
"""Elements of a head owned by a block of ``combine``, or by a warp of ``combine_quantize``."""
TILE = 64
"""Groups whose sums ``combine`` keeps before it joins them."""
JOINED = 16
"""Groups that it joins without a loop."""


def padded(d_v: int) -> int:
    """Elements from one chunk's weighted values to the next."""
    return -(-d_v // PART) * PART


@device
def join_sink(maximum, total, s):
    """Join a sink to the chunks of a head, whose maximum and sum are given: (the factor of their values, the new sum)."""
    joined = max(maximum, s)
    a = exp(maximum - joined)
    return a, fma(total, a, exp(s - joined))


# --- rotation --------------------------------------------------------------------------------------------------


def _make_rotate(block: int) -> DeviceFunction:
    """The device function ``turn_back(exchange, own, lane)``: an element of a rotated block of 64 or 128, ``block``; exchange
    [block]: each 32 elements of it times the Hadamard matrix of 32 rows, in shared memory; the element is number ``lane`` of
    part ``own``."""
    unit, parts = F(1.0 / np.sqrt(max(1, block))), block // PART

    @device
    def turn_back(exchange, own, lane):
        # Every warp computes what it needs of the levels between the parts.
        a, b = exchange[lane], exchange[PART + lane]
        x = a - b if own & 1 else a + b
        if parts > 2:
            c, d = exchange[2 * PART + lane], exchange[3 * PART + lane]
            y = c - d if own & 1 else c + d
            x = x - y if own & 2 else x + y
        return x * unit

    return turn_back


# --- as float32 ------------------------------------------------------------------------------------------------


def threads_of(rotated: int) -> int:
    """Threads of a block of ``combine``, which owns whole blocks that are rotated."""
    return COMBINE_THREADS * max(1, rotated // PART)


@kernel(
    *(F32P, F32P, I32P, F32P, F32P, F32P, i32, i32),
    threads=lambda d_v, early, gated, rotated=0, *_: threads_of(rotated),
)
def combine(
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    spans: bool = False,
) -> KernelCode:
    """Join the chunks of a row, ``group`` of them at a time, and the groups; the result is float32.

    Arguments: weights, sums, positions, gate (not read unless ``gated``), sink (not read unless ``sinks``: heads have them),
    out, partials, window; ``early``: no kernel of the same chain writes the positions; ``rotated``: elements of a block of
    values that is rotated back, a power of two from 32 to 128, or 0; ``group``: a power of two up to 32; ``spans``: positions
    are spans.
    A lane computes the factors of one of the warp's 32 chunks, and joins all of them for its own element.  The sums of groups
    go to shared memory, where the first of four warps joins them.
    Grid: (n_head, rows, d_pad / 32), blocks of ``COMBINE_THREADS``.  Where blocks of more than 32 values are rotated, four
    warps for every 32 of them make up a block: (n_head, rows, d_v / rotated), ``threads_of(rotated)``.
    """
    d_pad, columns = padded(d_v), max(1, rotated // PART)
    turn_back, n_exchange = _make_rotate(rotated), PART * columns
    n_warps, n_groups = COMBINE_THREADS // 32, LANES // group
    n_shared, n_parts, n_tops = COMBINE_THREADS * columns, TILE * PART * columns, TILE * columns
    # In a round every warp processes 32 chunks.
    of_round, groups_of_round = n_warps * LANES, n_warps * n_groups
    rounds, joined_at_once = TILE // groups_of_round, min(JOINED, groups_of_round)
    last = group - 1
    fetch, join = make_groups(d_pad, group, n_warps)
    find_factors, rising_max = make_factors(group), make_rising_max(1, LANES)
    first_visible, last_visible, _ = sight(spans)

    @cuda.jit
    def combine(weights, sums, positions, gate, sink, out, partials, window):
        let_next_begin()
        factors = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        parts = pointer(cuda.shared.array(n_parts, np.float32, ALIGNED))
        tops = pointer(cuda.shared.array(n_tops, np.float32, ALIGNED))
        masses = pointer(cuda.shared.array(n_tops, np.float32, ALIGNED))
        exchange = pointer(cuda.shared.array(n_exchange, np.float32, ALIGNED))
        x = cuda.local.array(LANES, np.float32)
        elements = cuda.local.array(n_groups, np.float32)
        totals = cuda.local.array(n_groups, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (COMBINE_THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        part_of_block = I(0)
        if columns > 1:
            part_of_block = I(cuda.threadIdx.x // COMBINE_THREADS)
            first_thread, first_group = part_of_block * COMBINE_THREADS, part_of_block * TILE
            factors, shares, terms = (
                advance(factors, first_thread),
                advance(shares, first_thread),
                advance(terms, first_thread),
            )
            tops, masses, parts = (
                advance(tops, first_group),
                advance(masses, first_group),
                advance(parts, first_group * PART),
            )
        # The lane's chunk, counted from the warp's first group.
        own = I(I(lane // group) * (n_warps * group) + (lane & last))
        n_head = I(cuda.gridDim.x)
        head = I(cuda.blockIdx.y * n_head + cuda.blockIdx.x)
        s = F(0.0)
        if sinks:
            s = sink[cuda.blockIdx.x]
        if not early:
            wait_for_inputs()
        place = positions[cuda.blockIdx.y]
        first_chunk = I(first_visible(place, window) >> 6)
        # Chunks are counted from the beginning of a group, which the row may not see.
        begin = I(first_chunk & last)
        n = I((last_visible(place) >> 6) - first_chunk + 1 + begin)
        if early:
            wait_for_inputs()
        partial = np.int64(head) * partials + I(warp * group - begin)
        column = I(I(cuda.blockIdx.z * columns + part_of_block) * PART + lane)
        weights, sums = advance(weights, partial * 2), advance(sums, partial * d_pad + column)
        begin, left = I(begin - warp * group), I(n - warp * group)
        pair = load2(weights, 2 * min(max(own, begin), I(left - 1)))
        fetch(sums, begin, left, x)
        opening = F(0.0)
        if gated and warp == 0 and column < d_v:
            opening = gate[np.int64(head) * (2 * d_v) + d_v + column]
        of_warp = I(thread & ~31)
        factor, share, term = advance(factors, of_warp), advance(shares, of_warp), advance(terms, of_warp)
        maximum, total, element = F(-np.inf), F(0.0), F(0.0)
        while n > 0:
            turn = I(0)
            while turn < rounds and turn * of_round < n:
                inside = own >= begin and own < left
                m = bits_float(I(pair[0])) if inside else F(-np.inf)
                top = find_factors(m, bits_float(I(pair[1])), inside, lane, factor, share, term)
                cuda.syncwarp()
                count = left
                begin, left = I(begin - of_round), I(left - of_round)
                weights, sums = advance(weights, 2 * of_round), advance(sums, of_round * d_pad)
                if left > 0:
                    pair = load2(weights, 2 * min(own, I(left - 1)))
                join(sums, count, left, factor, share, term, x, elements, totals)
                # Groups that do not exist are zeros: their sums may be read below.
                to = I(turn * groups_of_round + warp)
                if lane & last == 0:
                    tops[I(to + I(lane // group) * n_warps)] = top
                for g in range(n_groups):
                    parts[I(to + g * n_warps) * PART + lane] = elements[g]
                    if lane == 0:
                        masses[to + g * n_warps] = totals[g]
                cuda.syncwarp()
                turn = I(turn + 1)
            cuda.syncthreads()
            if warp == 0:
                count = min(I(I(n + last) // group), I(TILE))
                k = I(0)
                while k < count:
                    inside = k + lane < count
                    m, mass = F(-np.inf), F(0.0)
                    if inside:
                        m, mass = tops[k + lane], masses[k + lane]
                    top = rising_max(m, lane)
                    before = lane_from(top, max(I(lane - 1), I(0)))
                    before = max(maximum, before) if lane > 0 else maximum
                    joined = max(maximum, top)
                    maximum = lane_from(joined, I(31))
                    a = exp(before - joined)
                    b = exp(m - joined)
                    # What is no group leaves every sum unchanged, even -0.
                    factor[lane] = a if inside else F(1.0)
                    share[lane] = b if inside else F(-0.0)
                    term[lane] = b * mass if inside else F(-0.0)
                    cuda.syncwarp()
                    end, e = min(I(count - k), I(LANES)), I(0)
                    while e < end:
                        f, sh, t = advance(factor, e), advance(share, e), advance(term, e)
                        part = advance(parts, I(k + e) * PART + lane)
                        for j in range(joined_at_once):
                            element = fma(element, f[j], sh[j] * part[j * PART])
                            total = fma(total, f[j], t[j])
                        e = I(e + joined_at_once)
                    cuda.syncwarp()
                    k = I(k + LANES)
            n = I(n - TILE * group)
            if n > 0:
                cuda.syncthreads()
        if warp == 0 and column < d_v:
            if sinks:
                a, total = join_sink(maximum, total, s)
                element = element * a
            element = element / total
        if columns > 1:
            # The first warps of all parts exchange their elements; the others only wait.
            if warp == 0:
                exchange[I(part_of_block * PART + lane)] = hadamard(element)
            cuda.syncthreads()
            if warp == 0:
                element = turn_back(exchange, part_of_block, lane)
        elif rotated and warp == 0 and column < d_v:
            element = rotate(element)
        if warp == 0 and column < d_v:
            if gated:
                element = element * sigmoid(opening)
            out[np.int64(head) * d_v + column] = element

    return combine


# --- ... on the way to int8 ------------------------------------------------------------------------------------


def make_attended(
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    ready: bool = False,
    spans: bool = False,
) -> DeviceFunction:
    """The device function ``attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window)``:
    element at + lane of a row of ``columns`` elements, n_head * d_v, with its chunks joined as in ``combine_quantize``, whose
    constants these are.

    All threads of a block of 256 call it, before their inputs are complete; ``at`` is a multiple of 32, the same for a warp,
    and the ``rotated`` elements that belong together are those of as many neighbouring threads; ``inside``: whether the
    elements of the warp exist.
    """
    shift = CHUNK.bit_length() - 1
    if ready:
        shift, group = shift + group.bit_length() - 1, 1
    n_shared, n_groups, last = RUN, LANES // group, group - 1
    turn_back, together = _make_rotate(rotated), rotated > PART
    fetch, join = make_groups(d_v, group, 1)
    find_factors, rising_max = make_factors(group), make_rising_max(group, LANES)
    first_visible, last_visible, _ = sight(spans)

    @device
    def attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window):
        factors = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        x = cuda.local.array(LANES, np.float32)
        elements = cuda.local.array(n_groups, np.float32)
        totals = cuda.local.array(n_groups, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (RUN - 1))
        lane = I(thread & 31)
        head = I(I(row * I(U(columns) // U(d_v))) + at // d_v)
        s = F(0.0)
        if sinks and inside:
            s = sink[I(at // d_v)]
        if not early:
            wait_for_inputs()
        place = positions[row]
        first_chunk = I(first_visible(place, window) >> shift)
        # Chunks are counted from the beginning of a group, which the row may not see.
        begin = I(first_chunk & last)
        n = I((last_visible(place) >> shift) - first_chunk + 1 + begin)
        if early:
            wait_for_inputs()
        element, opening = F(0.0), F(0.0)
        if inside:
            pairs = I(head * partials - begin)
            weights = advance(weights, 2 * pairs)
            sums = advance(sums, np.int64(pairs) * d_v + I(at % d_v + lane))
            pair = load2(weights, 2 * min(max(lane, begin), I(n - 1)))
            fetch(sums, begin, n, x)
            if gated:
                opening = gate[I(head * (2 * d_v) + d_v) + I(at % d_v + lane)]
            factor, share, term = (
                advance(factors, thread & ~31),
                advance(shares, thread & ~31),
                advance(terms, thread & ~31),
            )
            maximum, total = F(-np.inf), F(0.0)
            while n > 0:
                count = n
                there = lane >= begin and lane < count
                m = bits_float(I(pair[0])) if there else F(-np.inf)
                own = find_factors(m, bits_float(I(pair[1])), there, lane, factor, share, term)
                # The same for the groups: the largest m up to this lane's, which is -inf if there is no such group.
                top = own
                if count > group:
                    top = rising_max(own, lane)
                before = lane_from(top, max(I(lane - group), I(0)))
                before = max(maximum, before) if lane >= group else maximum
                joined = max(maximum, top)
                maximum = lane_from(joined, min(I(count - 1), I(LANES - 1)))
                a = exp(before - joined)
                b = exp(own - joined)
                a = a if lane & ~last < count else F(1.0)
                b = b if lane & ~last < count else F(-0.0)
                cuda.syncwarp()
                n, begin = I(n - LANES), I(0)
                weights, sums = advance(weights, 2 * LANES), advance(sums, LANES * d_v)
                if n > 0:
                    pair = load2(weights, 2 * min(lane, I(n - 1)))
                join(sums, count, n, factor, share, term, x, elements, totals)
                for g in range(n_groups):
                    of_group, of_new = lane_from(a, I(g * group)), lane_from(b, I(g * group))
                    element = fma(element, of_group, of_new * elements[g])
                    total = fma(total, of_group, of_new * totals[g])
                cuda.syncwarp()
            if sinks:
                a, total = join_sink(maximum, total, s)
                element = element * a
            element = element / total
        if together:
            exchange = pointer(cuda.shared.array(RUN, np.float32, ALIGNED))
            exchange[thread] = hadamard(element)
            cuda.syncthreads()
            own = I((thread & (rotated - 1)) >> 5)
            element = turn_back(advance(exchange, I(thread & ~(rotated - 1))), own, lane)
        elif rotated:
            element = rotate(element)
        if gated and inside:
            element = element * sigmoid(opening)
        return element

    return attended


@kernel(*(F32P, F32P, I32P, F32P, F32P, U32P, F32P, U16P, i32, i32, i32, i32), threads=RUN)
def combine_quantize(
    unit: int,
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    ready: bool = False,
    spans: bool = False,
    layout: int = NARROW,
) -> KernelCode:
    """Join the chunks of a row, ``group`` of them at a time, and the groups; quantize the result to int8, one scale per
    ``unit`` values.

    Arguments: weights, sums, positions, gate, sink, q, d, sums_of_q (as int16), columns (n_head * d_v), partials, window,
    first: the number of the first row in q, d and sums_of_q.
    ``early``: no kernel of the same chain writes the positions; ``gated``: gate is read; ``rotated``: elements of a block of
    values that is rotated back, a power of two from 32 to 128, or 0; ``sinks``: heads have sinks, and sink is read; d_v is a
    multiple of 32; ``group``: a power of two up to 32; ``ready``: the chunks of each group are joined already
    (``engine/cuda/attention/join.py``), and each counts as one; ``spans``: positions are spans; ``layout``:
    of the result.
    A warp processes 32 chunks at a time: a lane computes the factors of one chunk, and joins all 32 for its own element.
    Grid: (ceil(columns / 256), rows), blocks of 256.
    """
    attended = make_attended(d_v, early, gated, rotated, sinks, group, ready, spans)
    store = make_store(unit, layout)

    @cuda.jit
    def combine_quantize(weights, sums, positions, gate, sink, q, d, sums_of_q, columns, partials, window, first):
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        # The masks tell the compiler that nothing is negative.
        row = I(cuda.blockIdx.y & 0xFFFF)
        at = I(I((cuda.blockIdx.x & 0xFFFF) * RUN) + I(cuda.threadIdx.x & (RUN - 32)))
        inside = at < columns
        element = attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window)
        store(element, inside, I(first + row), I(cuda.blockIdx.x), columns, tops, q, d, sums_of_q)

    return combine_quantize
