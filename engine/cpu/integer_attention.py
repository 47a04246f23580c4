"""Attention over integer keys and values (cache types i8 and i12): every sum of products is a sum of integers.

A sum of integers that stays below 2**24 is exact in any order and on any unit: int32 and float32 lanes, and the tensor cores
of every GPU.  So nothing but a few floats per score and per chunk has an order to specify.

Formula: score_j = sum over blocks of (dq_b * dk_jb) * I_jb, I the integer dot product of a block of the query and of the key;
    queries have been multiplied by log2(e), so a factor of two in weight is a difference of 1 in score; with a cap c,
    score_j = softcap(score_j, c log2(e)), before hiding;
    per chunk M = max_j score_j, p_j = 2**(score_j - M), l = sum_j p_j over the visible positions, m = M ln 2;
    w_j = p_j * dv_jb for each block b of values, 0 where hidden; E with 2**(E - 1) <= max_j w_j < 2**E;
    P_j = min(2047, round(w_j * 2**(11 - E))), o = 2**(E - 11) * sum_j P_j v_j; all P_j and o are 0 if no w_j reaches 2**-100.
    The exponent is that of p * d and not of d alone: the largest weight, say of a sink, may belong to tiny values.
Shapes: integers of queries int16 [rows, n_head, d_k], scales float32 [rows, n_head, blocks]; keys, values as words uint32
    [n_head_kv, pages, words] (``engine/cache/types.py``); positions, sequences int32 [rows]; table int32 [slots, chunks]:
    chunk c of the sequence in slot s is in page table[s, c]; sinks float32 [n_head], or [0] for none; out float32 [rows,
    n_head, d_v], which has yet to be rotated back (``engine/cpu/integer_cache.py``).
Who owns what: an item is a row and a head, in the order of ``engine/cpu/attention.py``; a call owns items [first, last).
Reduction order: score = fma(dq_b * dk_b, float32(I_b), score) in rising b, from 0; l = halving tree of p_0 .. p_63; integer
    sums are exact: |I| <= 128 * 1023 * 127 and |sum P v| <= 64 * 2047 * 127 are below 2**24.  i12 has two such sums, of h and
    of l, and float32(16 H + L) rounds once, as fma(16, H, L) does.
    Chunks join in two levels, as in ``engine/cpu/attention.py``.
Bytes moved: (d_k + d_v) * bits / 8 per visible position, once from memory per call and run of items that share it, and once
    per four items from a cache of the CPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from engine.cache.types import BLOCK, CHUNK, GROUP
from engine.compile.family import family
from engine.cpu.attention import (
    begin,
    bound,
    end_of_run,
    finish,
    first_visible,
    join,
    join_groups,
    last_visible,
    note,
    row_and_head,
    rows_that_see,
)
from engine.cpu.fold import fold
from engine.cpu.integer_cache import LOG2_E
from engine.cpu.integer_products import floats_of_halves, make_scores, make_values, prefetch
from engine.cpu.lanes import ROWS, hide, row
from engine.gguf.quants import TINY
from engine.numerics import bits_float, exp2, float_bits, fma, round_product, unless_overflow

f32 = np.float32
i16 = np.int16
i32 = np.int32
i64 = np.int64

WEIGHT = 2047
"""The largest integer of a weight: 64 * 2047 * 127 < 2**24."""


LN_2 = f32(0.6931471805599453)

# --- one chunk -------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def weigh(p, first, last):
    """Turn scores p [64] into 2**(p - maximum) in place, 0 outside the lanes [first, last); returns ln 2 * maximum."""
    m = hide(p, first, last)
    for j in range(CHUNK):
        p[j] = exp2(p[j] - m)
    return fma(m, LN_2, f32(-0.0))


@njit(cache=True, error_model="numpy")
def integer_weights(p, d, w, integers):
    """The integers P int16 [64] of the products of weights p and scales d, float32 [64]; returns 2**(E - 11), or 0 if all are
    0, or NaN if a product is not finite.  w float32 [64] is scratch."""
    bits = i32(0)
    for j in range(CHUNK):
        # The weights of hidden lanes are 0; their scales may be anything.  Where a weight is NaN, so is the sum of weights.
        w[j] = p[j] * d[j] if p[j] > f32(0.0) else f32(0.0)
        bits = max(bits, float_bits(w[j]))
    if bits_float(bits) < TINY:
        integers[:] = i16(0)
        return f32(0.0)
    exponent = i32(bits >> i32(23))
    up = bits_float(i32(i32(264) - exponent) << i32(23))
    for j in range(CHUNK):
        integers[j] = i16(min(i32(WEIGHT), round_product(w[j], up)))
    return unless_overflow(bits_float(bits), bits_float(i32(exponent - i32(10)) << i32(23)))


def of_chunk(bits: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions for one chunk of integers of this size:

    ``scores(queries, dq, at, rows, keys, word, ahead, dk, p)``: write the scores of 1 or 4 ``rows`` of queries int16 [n, d_k]
    and dq float32 [n, blocks] from ``at`` to p [4, 64]; the chunk begins at keys[word]; dk float32 [blocks, 64];
    ``weighted(p, n, values, word, ahead, dv, w, weights, factors, o)``: write the weighted values of n rows to o
    float32 [4, d_v]; w float32 [64], weights int16 [4, 64] and factors float32 [4] are scratch.
    """
    one_score, four_scores = (make_scores(bits, rows) for rows in (1, ROWS))
    one_small, four_small, one_value, four_values = (
        make_values(bits, rows, least) for least in (BLOCK, 2 * BLOCK) for rows in (1, ROWS)
    )

    @njit(error_model="numpy")
    def scores(queries, dq, at, rows, keys, word, ahead, dk, p):
        d, blocks = i64(queries.shape[1]), i64(dq.shape[1])
        if rows == 1:
            one_score(queries, dq, at, keys, word, ahead, dk, d, blocks, p)
        else:
            four_scores(queries, dq, at, keys, word, ahead, dk, d, blocks, p)

    @njit(error_model="numpy")
    def weighted(p, n, values, word, ahead, dv, w, weights, factors, o):
        blocks, d = dv.shape[0], i64(o.shape[1])
        for b in range(blocks):
            for r in range(n):
                factors[r] = integer_weights(row(p, r), row(dv, b), w, row(weights, r))
            block = d // blocks
            if block == BLOCK and n == 1:
                one_small(weights, factors, values, word, ahead, d, i64(b), block, o)
            elif block == BLOCK:
                four_small(weights, factors, values, word, ahead, d, i64(b), block, o)
            elif n == 1:
                one_value(weights, factors, values, word, ahead, d, i64(b), block, o)
            else:
                four_values(weights, factors, values, word, ahead, d, i64(b), block, o)

    return scores, weighted


# --- all chunks ------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def read_scales(words, end, out):
    """The scales of a chunk, the float16 before words[end], as float32 [blocks, 64]."""
    floats_of_halves(words, i64(end - out.size // 2), i64(out.size), out)


# Chunks of up to so many words are multiplied in less time than memory takes to answer as many requests, and a CPU drops the
# requests beyond those that it can have in flight.
_FEW_WORDS = 2048


@njit(cache=True, error_model="numpy")
def prefetch_third(words, place, size, part):
    """Prefetch a third of a later chunk of ``size`` words from words[place] on, or nothing if size is 0.  These runs of
    requests are made between the steps of a chunk."""
    prefetch(words, i64(place + size * part // 3), i64(size // 3))


@family
def attend(bits: int, group: int = GROUP, cap: float = 0.0) -> Callable[..., None]:
    """The kernel ``attend(integers, scales, keys, values, positions, sequences, table, window, sinks, parts, out, first,
    last)`` for integers of this size in bits and groups of this number of chunks; ``cap``: of scores, 0 for none.

    integers int16 [rows, n_head, d_k] and scales float32 [rows, n_head, blocks] are the quantized queries; window 0 means all
    earlier positions, and if it is larger than ``SPANS``, positions are spans.  parts float32 [rows, n_head, chunks, 2]:
    where the maximum and the sum of the weights of each chunk are written, or empty.
    """
    scores, weighted = of_chunk(bits)
    capped, most_score = cap > 0.0, f32(cap * LOG2_E)

    @njit(error_model="numpy")
    def attend(integers, scales, keys, values, positions, sequences, table, window, sinks, parts, out, first, last):
        rows, n_head, d_k = integers.shape
        heads, n_pages, k_words = keys.shape
        of_head, v_words, d_v = n_head // heads, values.shape[2], out.shape[2]
        k_blocks = scales.shape[2]
        v_blocks = (v_words - CHUNK * d_v * bits // 32) // (CHUNK // 2)
        flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
        most = min(last - first, of_head * rows)
        # Four queries are read at once, even where fewer are left.
        queries, dq = np.zeros((most + ROWS, d_k), np.int16), np.zeros((most + ROWS, k_blocks), np.float32)
        dk, dv = np.empty((k_blocks, CHUNK), np.float32), np.empty((v_blocks, CHUNK), np.float32)
        p, o = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, d_v), np.float32)
        w, weights = np.empty(CHUNK, np.float32), np.zeros((ROWS, CHUNK), np.int16)
        tops, factors = np.empty(ROWS, np.float32), np.zeros(ROWS, np.float32)
        sums, inner = np.empty((most, 4), np.float32), np.zeros((most, d_v), np.float32)
        lanes, at_positions = np.empty((ROWS, 2), np.int64), np.empty(most, np.int64)
        while first < last:
            stop, n_items = min(last, end_of_run(first, sequences, of_head)), 0
            t, h = row_and_head(first, rows, of_head)
            first_page, slot = h // of_head * n_pages, sequences[t]
            low, high = first_visible(positions[t], window), i64(last_visible(positions[t], window))
            for item in range(first, stop):
                t, h = row_and_head(item, rows, of_head)
                low = min(low, first_visible(positions[t], window))
                high = max(high, i64(last_visible(positions[t], window)))
                # Element by element: the error of an assignment of rows of other lengths would be half of what is compiled.
                for i in range(d_k):
                    queries[n_items, i] = integers[t, h, i]
                for b in range(k_blocks):
                    dq[n_items, b] = scales[t, h, b]
                at_positions[n_items] = positions[t]
                n_items += 1
            begin(sums, out, of_head, first, stop)
            end = high // CHUNK + 1
            for c in range(low // CHUNK, end):
                page = first_page + table[slot, c]
                key, value = page * k_words, page * v_words
                # Chunks of few words ask for the one after the next, others for the next one: 0 words ahead is none.
                ahead = first_page + table[slot, min(c + 1, end - 1)] - page
                later = first_page + table[slot, min(c + 2, end - 1)]
                read_scales(flat_keys, key + k_words, dk)
                read_scales(flat_values, value + v_words, dv)
                at = 0
                while at < n_items:
                    n = rows_that_see(c, at_positions, at, n_items, window, lanes)
                    if n == 0:
                        at += 1
                        continue
                    together = i64(1 if n == 1 else ROWS)
                    k_size = i64(k_words if at == 0 and k_words <= _FEW_WORDS and c + 2 < end else 0)
                    v_size = i64(v_words if at == 0 and v_words <= _FEW_WORDS and c + 2 < end else 0)
                    k_ahead = i64(ahead * k_words if at == 0 and k_words > _FEW_WORDS else 0)
                    v_ahead = i64(ahead * v_words if at == 0 and v_words > _FEW_WORDS else 0)
                    later_key, later_value = i64(later * k_words), i64(later * v_words)
                    prefetch_third(flat_values, later_value, v_size, i64(2))
                    prefetch_third(flat_keys, later_key, k_size, i64(0))
                    scores(queries, dq, i64(at), together, flat_keys, i64(key), k_ahead, dk, p)
                    if capped:
                        bound(p, n, most_score)
                    prefetch_third(flat_keys, later_key, k_size, i64(1))
                    for r in range(n):
                        tops[r] = weigh(row(p, r), lanes[r, 0], lanes[r, 1])
                    prefetch_third(flat_keys, later_key, k_size, i64(2))
                    weighted(p, n, flat_values, i64(value), v_ahead, dv, w, weights, factors, o)
                    prefetch_third(flat_values, later_value, v_size, i64(0))
                    for r in range(n):
                        total, own = fold(row(p, r), CHUNK), row(sums, at + r)
                        note(parts, first + at + r, rows, of_head, c, tops[r], total)
                        own[2], own[3] = join(own[2], own[3], tops[r], total, row(o, r), row(inner, at + r))
                    prefetch_third(flat_values, later_value, v_size, i64(1))
                    at += n
                if (c + 1) % group == 0 or c + 1 == end:
                    join_groups(sums, inner, out, of_head, first, stop)
            finish(sums, sinks, out, of_head, first, stop)
            first = stop

    return attend
