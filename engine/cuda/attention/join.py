"""Joining the chunks of each group, so that few results are left where a row sees many chunks.

Formula: that of ``engine/cuda/attention/combine.py`` within a group: M_i = max(M_(i-1), m_i), L_i = L_(i-1) exp(M_(i-1) -
    M_i) + l_i exp(m_i - M_i), O likewise.
Shapes: float32 weights [rows, n_head, partials, 2] (m, l), sums [rows, n_head, partials, d_v]; partial 0 of a row is that
    of the first chunk that it sees, which may be any of its group; the results the same with the groups that the row sees
    in place of chunks.
Who owns what: a block owns every 32nd run of 32 chunks of a head of a row, counted from the beginning of the first group;
    each of its warps 32 of the head's elements.  No grid depends on a position.
Reduction order: that of the mirror (``engine/cpu/attention.py``): (((0 + chunk) + chunk) + ...) in rising order.  The maximum
    over earlier ones is exact in any order, so a lane computes the factors of a chunk.
Bytes moved: 8 + 4 d_v per (row, head, chunk) in, as many per group out.
"""

import numpy as np
from numba import cuda

from engine.cache.types import GROUP
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
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741

LANES = 32
"""Chunks that a warp processes at a time, one per lane."""
RUNS = 32
"""The most blocks of a head of a row."""
AT_ONCE = 4
"""Chunks that are joined without a check of how many there are."""


# --- the chunks of a warp --------------------------------------------------------------------------------------


def _make_block(pitch: int, group: int, apart: int, first: int, n: int) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions, without a loop, for chunks first .. first + n - 1, all of one group, of the 32 of a warp
    (``make_groups``).

    ``fetch(sums, begin, count, x)``: start loading the thread's element of the chunks into x [32].
    ``join(sums, count, more, factor, share, term, x, element, total)``: join the chunks while the next ones are loaded;
    returns element and total.
    """
    if n > AT_ONCE:
        fetch_low, join_low = _make_block(pitch, group, apart, first, n // 2)
        fetch_high, join_high = _make_block(pitch, group, apart, first + n // 2, n // 2)

        @device
        def fetch(sums, begin, count, x):
            fetch_low(sums, begin, count, x)
            fetch_high(sums, begin, count, x)

        @device
        def join(sums, count, more, factor, share, term, x, element, total):
            element, total = join_low(sums, count, more, factor, share, term, x, element, total)
            return join_high(sums, count, more, factor, share, term, x, element, total)

        return fetch, join

    leading = first < group
    place = first // group * (apart * group) + first % group
    further = place - first

    @device
    def fetch_few(sums, begin, count, x):
        for k in range(first, first + n):
            x[k] = F(0.0)
        if place < count:
            for k in range(first, first + n):
                if k + further < count and (not leading or k >= begin):
                    x[k] = sums[(k + further) * pitch]

    @device
    def join_few(sums, count, more, factor, share, term, x, element, total):
        if place < count:
            for k in range(first, first + n):
                element = fma(element, factor[k], share[k] * x[k])
                total = fma(total, factor[k], term[k])
        if place < more:
            fetch_few(sums, I(0), more, x)
        return element, total

    return fetch_few, join_few


def make_groups(
    pitch: int, group: int, apart: int, first: int = 0, n: int = LANES
) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions, without a loop, for chunks first .. first + n - 1 of the 32 that a warp processes at a time:
    those of groups 0, ``apart``, 2 ``apart`` and so on; group 0 begins at the pointers that are passed.

    ``fetch(sums, begin, count, x)``: start loading the thread's element of each chunk into x [32], ``pitch`` from chunk to
    chunk; 0 for those of group 0 before chunk ``begin``, and for all from chunk ``count`` on.
    ``join(sums, count, more, factor, share, term, x, elements, totals)``: join the chunks before ``count`` of each group,
    from zeros, while the chunks at sums, before ``more``, are loaded; the results go to elements and totals [32 / group].
    ``group`` 1: what is joined already is left as it is.
    """
    if n > group:
        fetch_low, join_low = make_groups(pitch, group, apart, first, n // 2)
        fetch_high, join_high = make_groups(pitch, group, apart, first + n // 2, n // 2)

        @device
        def fetch(sums, begin, count, x):
            fetch_low(sums, begin, count, x)
            fetch_high(sums, begin, count, x)

        @device
        def join(sums, count, more, factor, share, term, x, elements, totals):
            join_low(sums, count, more, factor, share, term, x, elements, totals)
            join_high(sums, count, more, factor, share, term, x, elements, totals)

        return fetch, join

    fetch_group, join_some = _make_block(pitch, group, apart, first, group)
    number, alone = first // group, group == 1

    @device
    def join_group(sums, count, more, factor, share, term, x, elements, totals):
        # Zeros, not what a factor of 0 makes of the group before: that may be -0.
        own = x[first]
        element, total = join_some(sums, count, more, factor, share, term, x, F(0.0), F(0.0))
        elements[number] = own if alone else element
        totals[number] = total

    return fetch_group, join_group


def make_rising_max(each: int, width: int) -> DeviceFunction:
    """The device function ``rising_max(x, lane)``: the largest x of lanes lane, lane - each, lane - 2 each and so on, as far
    as they belong to the same ``width`` lanes."""
    steps = (width // each).bit_length() - 1

    @device
    def rising_max(x, lane):
        for k in range(steps):
            below = lane_from(x, max(I(lane - (each << k)), I(0)))
            if lane & (width - 1) >= each << k:
                x = max(x, below)
        return x

    return rising_max


def make_factors(group: int) -> DeviceFunction:
    """The device function ``find_factors(m, mass, inside, lane, factor, share, term)``: write what joins the chunk of a lane
    to those before it in its group to factor, share and term [32], and return the largest m of the group.  ``inside``:
    whether there is such a chunk; m is -inf where there is none."""
    rising_max = make_rising_max(1, group)

    @device
    def find_factors(m, mass, inside, lane, factor, share, term):
        top = rising_max(m, lane)
        before = lane_from(top, max(I(lane - 1), I(0)))
        if lane & (group - 1) == 0:
            before = F(-np.inf)
        a = exp(before - top)
        b = exp(m - top)
        # What is no chunk leaves every sum unchanged, even -0.
        factor[lane] = a if inside else F(1.0)
        share[lane] = b if inside else F(-0.0)
        term[lane] = b * mass if inside else F(-0.0)
        return lane_from(top, I(lane | (group - 1)))

    return find_factors


# --- the groups of a row ---------------------------------------------------------------------------------------


def group_partials(partials: int, group: int = GROUP) -> int:
    """The most groups of ``group`` chunks that a row sees part of, if it sees up to ``partials`` chunks."""
    return (partials + group - 2) // group + 1


def grid(partials: int, n_head: int, rows: int, group: int = GROUP) -> tuple[int, int, int]:
    """The grid of ``join_chunks``."""
    return n_head, rows, min(RUNS, -(-group_partials(partials, group) * group // LANES))


@kernel(F32P, F32P, I32P, F32P, F32P, i32, i32, i32, threads=lambda d_v, *_: d_v)
def join_chunks(d_v: int, early: bool, group: int = GROUP, spans: bool = False) -> KernelCode:
    """Join the chunks of each group of ``group``, a power of two up to 32; d_v: a multiple of 32.

    Arguments: weights, sums, positions, weights and sums of the groups, partials, partials of groups, window; ``early``: no
    kernel of the same chain writes the positions; ``spans``: positions are spans.
    Grid: ``grid``, blocks of d_v.
    """
    n_shared, n_groups, last = d_v, LANES // group, group - 1
    fetch, join = make_groups(d_v, group, 1)
    find_factors = make_factors(group)
    first_visible, last_visible, _ = sight(spans)

    @cuda.jit
    def join_chunks(weights, sums, positions, group_weights, group_sums, partials, group_partials, window):
        let_next_begin()
        factors = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        x = cuda.local.array(LANES, np.float32)
        elements = cuda.local.array(n_groups, np.float32)
        totals = cuda.local.array(n_groups, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & 0x1FF)
        lane, of_warp = I(thread & 31), I(thread & ~31)
        head = I(I(cuda.blockIdx.y * cuda.gridDim.x) + I(cuda.blockIdx.x))
        if not early:
            wait_for_inputs()
        place = positions[cuda.blockIdx.y]
        first_chunk = I(first_visible(place, window) >> 6)
        # Chunks are counted from the beginning of a group, which the row may not see.
        hidden, before = I(first_chunk & last), I(cuda.blockIdx.z * LANES)
        n = I((last_visible(place) >> 6) - first_chunk + 1 + hidden)
        if early:
            wait_for_inputs()
        weights = advance(weights, np.int64(I(I(head * partials) - hidden)) * 2)
        sums = advance(sums, np.int64(I(I(head * partials) - hidden)) * d_v + thread)
        to = np.int64(I(head * group_partials))
        group_weights, group_sums = advance(group_weights, 2 * to), advance(group_sums, to * d_v + thread)
        factor, share, term = advance(factors, of_warp), advance(shares, of_warp), advance(terms, of_warp)
        while before < n:
            begin, count = I(hidden - before), I(n - before)
            pair = load2(weights, I(2 * I(before + min(max(lane, begin), I(count - 1)))))
            own = advance(sums, np.int64(before) * d_v)
            fetch(own, begin, count, x)
            inside = lane >= begin and lane < count
            m = bits_float(I(pair[0])) if inside else F(-np.inf)
            top = find_factors(m, bits_float(I(pair[1])), inside, lane, factor, share, term)
            cuda.syncwarp()
            join(own, count, I(0), factor, share, term, x, elements, totals)
            first = I(before // group)
            for g in range(n_groups):
                if g * group < count:
                    group_sums[np.int64(I(first + g)) * d_v] = elements[g]
                    if thread == g * group:
                        group_weights[I(2 * I(first + g))], group_weights[I(2 * I(first + g)) + 1] = top, totals[g]
            cuda.syncwarp()
            before = I(before + cuda.gridDim.z * LANES)

    return join_chunks
