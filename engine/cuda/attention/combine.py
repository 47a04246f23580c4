"""Joining the chunks of attention: the per-chunk results of ``engine/cuda/attention/attend.py`` become the final result.

Formula: over the chunks i that a row sees, with maxima m_i, sums l_i and weighted values o_i:
    M_i = max(M_(i-1), m_i), L_i = L_(i-1) exp(M_(i-1) - M_i) + l_i exp(m_i - M_i), O likewise; a head's sink s joins last,
    with m = s, l = 1, o = 0; out = O / L, rotated back where values are quantized (``engine/cpu/quantized_cache.py``), times
    sigmoid(gate) where heads are gated (Qiu et al. 2025; ``engine/cpu/attention.py``, ``engine/cpu/glu.py``).
Shapes: float32 weights [rows, n_head, slots, 2] (m, l), sums [rows, n_head, slots, d_pad], d_pad = d_v rounded up to 32; slot
    0 of a row is the first chunk that it sees; gate float32 [rows, n_head, 2, d_v], only [:, :, 1] is read; sink float32
    [n_head]; out float32 [rows, n_head, d_v], or int8 as in ``engine/cuda/products/quantize.py``.
Who owns what: ``combine``: a block owns 32 elements of one head of one row; ``combine_quantize``: a thread owns one element,
    a block 256 of a row.  No grid depends on a position.
Reduction order: that of the mirror, chunks in rising order.  The maximum over the earlier chunks is exact in any order, so
    the factors a_i = exp(M_(i-1) - M_i), b_i = exp(m_i - M_i) are computed in parallel, and only L = fma(L, a_i, b_i l_i) and
    O = fma(O, a_i, b_i o_i) sequentially.  A sink: M' = max(M, s), a = exp(M - M'), L' = fma(L, a, exp(s - M')), O' = O a.
Bytes moved: 8 + 4 d_pad per (row, head, chunk) in, 4 per element of the result, or about 1.2 if it becomes int8, and 4
    for its gate.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    fma,
    lane_from,
    let_next_begin,
    load2,
    load4,
    pointer,
    sigmoid,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.quantized_cache import rotate
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

COMBINE_THREADS = 128
TILE = 128
"""Chunks that ``combine`` processes at a time."""
JOINED = 16
"""Chunks that it joins without a loop."""
PART = 32
"""Elements of a head owned by a block of ``combine``, or by a warp of ``combine_quantize``."""
AT_ONCE = 4
"""Chunks that ``combine_quantize`` joins without a check of how many there are."""


def padded(d_v: int) -> int:
    """Elements from one chunk's weighted values to the next."""
    return -(-d_v // PART) * PART


@device
def first_visible(position, window):  # type: ignore[no-untyped-def]
    """The first position that the row at ``position`` sees."""
    return max(I(0), I(position - window + 1)) if window > 0 else I(0)


@device
def join_sink(maximum, total, s):  # type: ignore[no-untyped-def]
    """Join a sink to the chunks of a head, whose maximum and sum are given: (the factor of their values, the new sum)."""
    joined = max(maximum, s)
    a = exp(maximum - joined)
    return a, fma(total, a, exp(s - joined))


# --- as float32 ------------------------------------------------------------------------------------------------


@kernel(F32P, U32P, I32P, F32P, F32P, F32P, i32, i32, threads=COMBINE_THREADS)
def combine(d_v: int, early: bool, gated: bool, rotated: bool = False, sinks: bool = False) -> KernelCode:
    """Join the chunks of a row in rising order; the result is float32.

    Arguments: weights, sums (as words), positions, gate (not read unless ``gated``), sink (not read unless ``sinks``: heads
    have them), out, slots, window; ``early``: no kernel of the same chain writes the positions; ``rotated``: values are
    quantized, d_v a multiple of 32.
    Grid: (n_head, rows, d_pad / 32), blocks of ``COMBINE_THREADS``.
    """
    d_pad = padded(d_v)
    n_vectors = TILE * PART // 4 // COMBINE_THREADS
    each = TILE // n_vectors
    n_loaded = 4 * n_vectors
    n_warps = COMBINE_THREADS // 32
    tile_words = TILE * PART

    @device
    def fetch(sums, first, n, thread, words):  # type: ignore[no-untyped-def]
        """Start loading the sums of slots first .. first + 127: a thread takes 4 elements of every 16th slot."""
        for k in range(n_vectors):
            if first + k * each < n:
                slot = min(I(first + k * each + (thread >> 3)), I(n - 1))
                vector = load4(sums, np.int64(slot) * d_pad + (thread & 7) * 4)
                for e in range(4):
                    words[4 * k + e] = vector[e]

    @cuda.jit
    def combine(weights, sums, positions, gate, sink, out, slots, window):  # type: ignore[no-untyped-def]
        let_next_begin()
        factors = pointer(cuda.shared.array(TILE, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(TILE, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(TILE, np.float32, ALIGNED))
        parts = pointer(cuda.shared.array(tile_words, np.float32, ALIGNED))
        tops = pointer(cuda.shared.array(n_warps, np.float32, ALIGNED))
        words = cuda.local.array(n_loaded, np.uint32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        n_head = I(cuda.gridDim.x)
        head = I(cuda.blockIdx.y * n_head + cuda.blockIdx.x)
        s = F(0.0)
        if sinks:
            s = sink[cuda.blockIdx.x]
        if not early:
            wait_for_inputs()
        place = positions[cuda.blockIdx.y]
        n = I((place >> 6) - (first_visible(place, window) >> 6) + 1)
        if early:
            wait_for_inputs()
        weights = advance(weights, np.int64(head) * slots * 2)
        column = I(cuda.blockIdx.z * PART + lane)
        sums = advance(sums, np.int64(head) * slots * d_pad + cuda.blockIdx.z * PART)
        own = min(thread, I(n - 1))
        m, mass = weights[2 * own], weights[2 * own + 1]
        fetch(sums, I(0), n, thread, words)
        opening = F(0.0)
        if gated and warp == 0 and column < d_v:
            opening = gate[np.int64(head) * (2 * d_v) + d_v + column]
        maximum = F(-np.inf)
        total = F(0.0)
        element = F(0.0)
        first = I(0)
        while first < n:
            if first + thread >= n:
                m = F(-np.inf)
            # The largest m of slots first .. first + thread, within the warp.
            top = m
            for k in range(5):
                below = lane_from(top, max(I(lane - (1 << k)), I(0)))
                if lane >= 1 << k:
                    top = max(top, below)
            before = lane_from(top, max(I(lane - 1), I(0)))
            if lane == 0:
                before = F(-np.inf)
            if lane == 31:
                tops[warp] = top
            cuda.syncthreads()
            carried = maximum
            for k in range(n_warps):
                if k < warp:
                    carried = max(carried, tops[k])
                maximum = max(maximum, tops[k])
            before = max(carried, before)
            joined = max(carried, top)
            a = exp(before - joined)
            b = exp(m - joined)
            # The padding at the end of a tile leaves every sum unchanged, even -0.
            inside = first + thread < n
            factors[thread] = a if inside else F(1.0)
            terms[thread] = b * mass if inside else F(-0.0)
            shares[thread] = b if inside else F(-0.0)
            cuda.syncthreads()
            for k in range(n_vectors):
                if first + k * each < n:
                    slot = I(k * each + (thread >> 3))
                    share = shares[slot]
                    for e in range(4):
                        x = bits_float(I(words[4 * k + e]))
                        if first + slot >= n:
                            x = F(0.0)
                        parts[slot * PART + (thread & 7) * 4 + e] = share * x
            after = I(first + TILE)
            if after < n:
                own = min(I(after + thread), I(n - 1))
                m, mass = weights[2 * own], weights[2 * own + 1]
                fetch(sums, after, n, thread, words)
            cuda.syncthreads()
            if warp == 0:
                count = min(I(n - first), I(TILE))
                k = I(0)
                while k < count:
                    factor, term, part = advance(factors, k), advance(terms, k), advance(parts, k * PART + lane)
                    for e in range(JOINED):
                        element = fma(element, factor[e], part[e * PART])
                        total = fma(total, factor[e], term[e])
                    k = I(k + JOINED)
            first = after
            cuda.syncthreads()
        if warp == 0 and column < d_v:
            if sinks:
                a, total = join_sink(maximum, total, s)
                element = element * a
            element = element / total
            if rotated:
                element = rotate(element)
            if gated:
                element = element * sigmoid(opening)
            out[np.int64(head) * d_v + column] = element

    return combine


# --- ... on the way to int8 ------------------------------------------------------------------------------------


def _make_join(d_v: int, first: int, n: int) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions, without a loop, for chunks first .. first + n - 1 of the 32 that a warp processes at a time.

    ``fetch(sums, count, x)``: start loading the thread's element of each of ``count`` chunks into x [32], 0 past the last.
    ``join(sums, count, more, factor, share, term, x, element, total)``: join ``count`` chunks while the ``more`` chunks at
    sums are loaded; returns element and total.
    """
    if n > AT_ONCE:
        fetch_low, join_low = _make_join(d_v, first, n // 2)
        fetch_high, join_high = _make_join(d_v, first + n // 2, n // 2)

        @device
        def fetch(sums, count, x):  # type: ignore[no-untyped-def]
            fetch_low(sums, count, x)
            fetch_high(sums, count, x)

        @device
        def join(sums, count, more, factor, share, term, x, element, total):  # type: ignore[no-untyped-def]
            element, total = join_low(sums, count, more, factor, share, term, x, element, total)
            return join_high(sums, count, more, factor, share, term, x, element, total)

        return fetch, join

    @device
    def fetch_few(sums, count, x):  # type: ignore[no-untyped-def]
        for k in range(first, first + n):
            x[k] = F(0.0)
        if first < count:
            for k in range(first, first + n):
                if k < count:
                    x[k] = sums[k * d_v]

    @device
    def join_few(sums, count, more, factor, share, term, x, element, total):  # type: ignore[no-untyped-def]
        if first < count:
            for k in range(first, first + n):
                element = fma(element, factor[k], share[k] * x[k])
                total = fma(total, factor[k], term[k])
        if first < more:
            fetch_few(sums, more, x)
        return element, total

    return fetch_few, join_few


@kernel(F32P, F32P, I32P, F32P, F32P, U32P, F32P, U16P, i32, i32, i32, threads=RUN)
def combine_quantize(
    unit: int, d_v: int, early: bool, gated: bool, rotated: bool = False, sinks: bool = False
) -> KernelCode:
    """Join the chunks of a row in rising order and quantize the result to int8, one scale per ``unit`` values.

    Arguments: weights, sums, positions, gate, sink, q, d, sums_of_q (as int16), columns (n_head * d_v), slots, window.
    ``early``: no kernel of the same chain writes the positions; ``gated``: gate is read; ``rotated``: values are quantized;
    ``sinks``: heads have sinks, and sink is read; d_v is a multiple of 32.
    A warp processes 32 chunks at a time: a lane computes the factors of one chunk, and joins all 32 for its own element.
    Grid: (ceil(columns / 256), rows), blocks of 256.
    """
    n_shared, n_tops = RUN, WARPS
    fetch, join = _make_join(d_v, 0, 32)
    store = make_store(unit)

    @cuda.jit
    def combine_quantize(  # type: ignore[no-untyped-def]
        weights, sums, positions, gate, sink, q, d, sums_of_q, columns, slots, window
    ):
        let_next_begin()
        factors = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(n_shared, np.float32, ALIGNED))
        tops = pointer(cuda.shared.array(n_tops, np.int32, ALIGNED))
        x = cuda.local.array(32, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (RUN - 1))
        lane = I(thread & 31)
        row = I(cuda.blockIdx.y & 0xFFFF)
        at = I(I((cuda.blockIdx.x & 0xFFFF) * RUN) + (thread & ~31))
        inside = at < columns
        head = I(I(row * I(U(columns) // U(d_v))) + at // d_v)
        pairs = I(head * slots)
        weights = advance(weights, 2 * pairs)
        sums = advance(sums, np.int64(pairs) * d_v + I(at % d_v + lane))
        s = F(0.0)
        if sinks and inside:
            s = sink[I(at // d_v)]
        if not early:
            wait_for_inputs()
        place = positions[row]
        n = I((place >> 6) - (first_visible(place, window) >> 6) + 1)
        if early:
            wait_for_inputs()
        element = F(0.0)
        if inside:
            pair = load2(weights, 2 * min(lane, I(n - 1)))
            fetch(sums, n, x)
            opening = F(0.0)
            if gated:
                opening = gate[I(head * (2 * d_v) + d_v) + I(at % d_v + lane)]
            factor, share, term = (
                advance(factors, thread & ~31),
                advance(shares, thread & ~31),
                advance(terms, thread & ~31),
            )
            maximum, total = F(-np.inf), F(0.0)
            while n > 0:
                count = min(n, I(32))
                m = bits_float(I(pair[0]))
                if lane >= count:
                    m = F(-np.inf)
                # The largest m up to this lane's chunk; lane 0 is among all of them.
                top = m
                for k in range(5):
                    if count > 1 << k:
                        top = max(top, lane_from(top, max(I(lane - (1 << k)), I(0))))
                before = lane_from(top, max(I(lane - 1), I(0)))
                before = max(maximum, before) if lane > 0 else maximum
                joined = max(maximum, top)
                maximum = lane_from(joined, I(count - 1))
                a = exp(before - joined)
                b = exp(m - joined)
                # The padding of a group leaves every sum unchanged, even -0.
                factor[lane] = a if lane < count else F(1.0)
                share[lane] = b if lane < count else F(-0.0)
                term[lane] = b * bits_float(I(pair[1])) if lane < count else F(-0.0)
                cuda.syncwarp()
                n = I(n - 32)
                weights, sums = advance(weights, 64), advance(sums, 32 * d_v)
                if n > 0:
                    pair = load2(weights, 2 * min(lane, I(n - 1)))
                element, total = join(sums, count, n, factor, share, term, x, element, total)
                cuda.syncwarp()
            if sinks:
                a, total = join_sink(maximum, total, s)
                element = element * a
            element = element / total
            if rotated:
                element = rotate(element)
            if gated:
                element = element * sigmoid(opening)
        store(element, inside, row, I(cuda.blockIdx.x), columns, tops, q, d, sums_of_q)

    return combine_quantize
