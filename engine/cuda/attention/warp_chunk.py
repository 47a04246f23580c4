"""A chunk of quantized keys or values processed by one warp alone: if a block has several chunks, no warp waits for another.

Formula, order: ``engine/cpu/attention.py`` and ``engine/cpu/quantized_cache.py``; shapes: those of
    ``engine/cuda/attention/direct.py``, whose kernel these parts belong to.
Who owns what: a warp owns all (row, head) pairs of its block; scores: a lane owns two of every 16 positions, with the columns
    of a tensor-core tile; then four elements of the weighted sums of all pairs, and of the next 128 elements.  A value is
    unpacked once for all pairs.
Bytes moved: keys and values from memory directly into registers, through the L2 cache, into which they are prefetched.
"""

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CHUNK, CacheType
from engine.cuda.attention.combine import padded
from engine.cuda.attention.scores import make_own_keys, make_quantized_scores
from engine.cuda.attention.sight import sight
from engine.cuda.attention.weigh import make_weigh, warp_max
from engine.cuda.attention.weighted_values import OWNED, STEP, make_weighted_sum
from engine.cuda.intrinsics import advance, exp, halves, lane_xor, lanes_max, prefetch, softcap, store4
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


def make_prefetch(key_words: int, value_words: int) -> tuple[DeviceFunction, DeviceFunction]:
    """(prefetch_keys, prefetch_values): prefetch a page of so many words into the L2 cache, if ``seen``; what is written
    there meanwhile is seen.  Called with (keys or values, page, seen) by one lane."""

    def make(words: int) -> DeviceFunction:
        @device
        def prefetch_page(of, page, seen):
            if seen:
                prefetch(of, np.int64(page) * words, 4 * words)

        return prefetch_page

    return make(key_words), make(value_words)


def _make_scores(of: CacheType, d_k: int, tasks: int, pitch: int) -> DeviceFunction:
    """The device function ``score(keys, query, d, scores, lane)``: a warp's scores of all pairs, hidden or not; query, d:
    words and scales of all pairs in the layout of a tensor core."""
    n_key, n_scales, load_key, score_key = make_quantized_scores(of.bits, d_k, CHUNK // 16)
    own_keys, n_acc = make_own_keys(of, d_k), CHUNK // 4

    @device
    def score(keys, query, d, scores, lane):
        words = cuda.local.array(n_key, np.uint32)
        scales = cuda.local.array(n_scales, np.uint32)
        acc = cuda.local.array(n_acc, np.float32)
        own, own_scales = own_keys(keys, lane, I(0))
        load_key(own, own_scales, words, scales)
        pair = I(2 * (lane & 3))
        score_key(own, own_scales, words, scales, advance(query, 2 * lane), advance(d, pair), acc)
        for k in range(2):
            t = I(pair + k)
            if t < tasks:
                first = advance(scores, I(I(t // pitch * CHUNK + 2 * (lane >> 2)) * pitch + t % pitch))
                for tile in range(CHUNK // 16):
                    first[16 * tile * pitch] = acc[4 * tile + k]
                    first[(16 * tile + 1) * pitch] = acc[4 * tile + 2 + k]

    return score


def make_chunk_of_a_warp(
    of_keys: CacheType,
    of_values: CacheType,
    d_k: int,
    d_v: int,
    group: int,
    tasks: int,
    single: bool,
    cap: float,
    spans: bool,
) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions for a warp that processes a chunk: ``take_scores(keys, query, d, scores, lane)`` and, from
    there to weights and sums of all pairs, ``take_values(values, scores, limits, places, weights, sums, lane, n, task0,
    head0, n_head, partials, window, chunk)``.

    No warp waits for another.  Each warp has its own scores float32 [tasks, 64] and limits int32 [3, tasks]: the first
    position that a pair sees, the one after the last, and the partial where its sums go, -1 if it sees none.
    """
    columns = d_v // OWNED
    sets = min(tasks, 32 // columns) if 32 % columns == 0 else 1
    pitch = tasks // sets
    served = group if single and sets == 1 and group < tasks else pitch
    passes = -(-columns // 32)
    own_columns = min(columns, 32)
    n_bounds = 1 if single or group % pitch == 0 else pitch
    n_total, n_places = OWNED * served, 2 * tasks
    span = 4 if served > 4 else 8 if of_values.bits == 32 else 16
    n_weighed = group if single and group < tasks else tasks
    row_words, row_scales = d_v * of_values.bits // 32, d_v // BLOCK
    value_integers, d_pad = of_values.integer_words(d_v), padded(d_v)
    n_value, load_span, weighted_sum = make_weighted_sum(of_values, d_v, served, pitch, n_bounds, span)
    score = _make_scores(of_keys, d_k, tasks, pitch)
    row_of, head_of, _, _ = make_weigh(group, tasks, pitch, 32, single)
    first_visible, _, visible = sight(spans)
    capped, most_score = cap > 0.0, F(cap)

    @device
    def look(places, limits, lane, n, task0, head0, n_head, partials, window, chunk):
        """Write the limits of a lane's pair; returns the ranges of the chunk that any pair, and all pairs, see, and the
        lane's partial."""
        t = min(lane, I(n - 1))
        place = places[row_of(I(task0 + t))]
        first, last = visible(place, window, chunk)
        partial = I(head_of(I(task0 + t), n_head, head0) * partials + chunk - (first_visible(place, window) >> 6))
        if lane >= n or first >= last:
            partial = I(-1)
        if lane < tasks:
            limits[lane], limits[tasks + lane], limits[n_places + lane] = first, last, partial
        if single:
            return first, last, first, last, partial
        return I(-lanes_max(I(-first))), lanes_max(last), lanes_max(first), I(-lanes_max(I(-last))), partial

    @device
    def masked(scores, limits, t, first, last, lane):
        """A pair's place, and its scores of positions ``lane`` and ``lane`` + 32."""
        if not single:
            first, last = limits[t], limits[tasks + t]
        own = advance(scores, I(I(t // pitch * CHUNK + lane) * pitch + t % pitch))
        s, u = own[0], own[32 * pitch]
        if capped:
            s, u = softcap(s, most_score), softcap(u, most_score)
        s = F(-np.inf) if lane < first or lane >= last else s
        u = F(-np.inf) if lane + 32 < first or lane + 32 >= last else u
        return own, s, u

    @device
    def weigh(scores, limits, first, last, lane):
        """Turn scores into weights, in place; lane t gets the maximum and the sum of pair t.  The result of a pair that sees
        nothing is not used.  Two pairs are interleaved, since one is a long dependent chain."""
        top, mass = F(0.0), F(0.0)
        t = I(0)
        while t < n_weighed:
            own, s, u = masked(scores, limits, t, first, last, lane)
            other, v, w = own, s, u
            if tasks > 1:
                other, v, w = masked(scores, limits, I(t + 1), first, last, lane)
            m = warp_max(max(s, u))
            n = warp_max(max(v, w)) if tasks > 1 else m
            s, u, v, w = exp(s - m), exp(u - m), exp(v - n), exp(w - n)
            own[0], own[32 * pitch] = s, u
            if tasks > 1:
                other[0], other[32 * pitch] = v, w
            # The order of ``fold32``.
            x, y = s + u, v + w
            for k in range(5):
                x = x + lane_xor(x, I(16 >> k))
                y = y + lane_xor(y, I(16 >> k)) if tasks > 1 else x
            if lane == t:
                top, mass = m, x
            elif lane == t + 1:
                top, mass = n, y
            t = I(t + 2)
        return top, mass

    @device
    def own_values(values, column):
        scales = advance(halves(advance(values, value_integers)), I(column >> 3))
        return advance(values, I(column * row_words // columns)), scales

    @device
    def load_first(value, scale, middle, words, scales):
        load_span(advance(value, I(middle * row_words)), advance(scale, I(middle * row_scales)), words, scales)

    @device
    def take_scores(keys, query, d, scores, lane):
        # Other lanes have finished reading the chunk before.
        cuda.syncwarp()
        score(keys, query, d, scores, lane)

    @device
    def take_values(
        values, scores, limits, places, weights, sums, lane, n, task0, head0, n_head, partials, window, chunk
    ):
        words = cuda.local.array(n_value, np.uint32)
        scales = cuda.local.array(span, np.uint16)
        total = cuda.local.array(n_total, np.float32)
        t0, column = I(lane // own_columns * pitch), I(lane % own_columns)
        shift = I(4 * (column & 1))
        firsts, lasts = advance(limits, t0), advance(limits, I(tasks + t0))
        seen = look(places, limits, lane, n, task0, head0, n_head, partials, window, chunk)
        begin, end, inner_begin, inner_end, partial = seen
        middle = I((inner_begin + STEP - 1) & ~(STEP - 1))
        spans_end = I(middle + max(I(inner_end - middle), I(0)) // span * span)
        owner, full = t0 < tasks, middle < spans_end
        value, value_scales = own_values(values, column)
        if owner and full and column < columns:
            load_first(value, value_scales, middle, words, scales)
        cuda.syncwarp()
        top, mass = weigh(scores, limits, begin, end, lane)
        if partial >= 0:
            weights[2 * partial], weights[2 * partial + 1] = top, mass
        cuda.syncwarp()
        p = advance(scores, I(t0 * CHUNK))
        left = I(passes)
        while left > 0:
            if owner and column < columns:
                weighted_sum(
                    value, value_scales, shift, p, begin, end, middle, spans_end, firsts, lasts, words, scales, total
                )
                for h in range(served):
                    at, k = limits[n_places + t0 + h], OWNED * h
                    if at >= 0:
                        to = np.int64(at) * d_pad + OWNED * column
                        store4(sums, to, total[k], total[k + 1], total[k + 2], total[k + 3])
            column, left = I(column + 32), I(left - 1)
            if passes > 1:
                value, value_scales = own_values(values, column)
                if owner and full and column < columns:
                    load_first(value, value_scales, middle, words, scales)

    return take_scores, take_values
