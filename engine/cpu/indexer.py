"""The indexer: which positions (DeepSeek-V3.2) or compressed rows (V4) a token attends to.

Formula: score_r = sum_h (w_h c) relu(q_h . k_r) for the rows r < n = (p + 1) // ratio that position p can see; the top_k rows
    with the largest scores are chosen, the lower row where scores are equal; all of them where there are no more.  An
    infinite score becomes NaN.  Positions are rows with ratio 1.  ``ends``: the number of the last chosen position, min(p,
    top_k - 1), up to which a row attends if what it has chosen is taken for a sequence.
Shapes: q float32 [rows, n_head, d], rotated; w float32 [rows, n_head]; keys [pages, d, 64], float32 or float16, given as
    words uint32 [pages, words]; row r of a sequence is in page table[sequence, r // 64], table int32 [sequences, chunks];
    positions, sequences int32 [rows]; scores float32 [rows, 64 chunks]; chosen int32 [rows, top_k], numbers of rows of the
    sequence in rising order, -1 after the first min(n, top_k); the first is -1, too, if a score is not finite.
Who owns what: an item of ``score`` is a row and one of ``PARTS`` parts of its chunks, of the others a row.
Reduction order: q . k: one chain, fma from 0 in rising element; scores: fma(w_h * c, relu, score) from 0 in rising head.
    The choice compares integers that are ordered as the scores are, so any algorithm gives the same rows.
Bytes moved: d * element size per visible row, 4 n for the choice.
"""

from typing import Any

import numpy as np
from numba import njit

from engine.cache.types import CHUNK
from engine.compile.family import family
from engine.cpu.lanes import ROWS, add_weighted, clear
from engine.cpu.sample import order_key
from engine.numerics import finite, fma, rectified, stored_half

f32 = np.float32
i64 = np.int64

PARTS = 16
"""Parts of the chunks of a row, which several threads can compute: chunk c belongs to part c % 16."""

NAN_KEY = 0x7FFFFFFF
"""The key of NaN, above those of all numbers (``order_key``)."""

_DIGITS = 256


@njit(cache=True)
def append_keys(x, positions, sequences, table, keys, first, last):
    """Store the keys x float32 [rows, d] at their positions, for the rows [first, last); keys [pages, d, 64]."""
    d = x.shape[1]
    for t in range(first, last):
        page, lane = keys[table[sequences[t], positions[t] // CHUNK]], positions[t] % CHUNK
        for i in range(d):
            if keys.itemsize == 2:
                page[i, lane] = stored_half(x[t, i])
            else:
                page[i, lane] = finite(x[t, i])


@njit(cache=True)
def ends(positions, top_k, out, first, last):
    """out int32 [rows]: the number of the last chosen position of each row."""
    for t in range(first, last):
        out[t] = min(positions[t], top_k - 1)


@family
def score(half: bool) -> Any:
    """The kernel for keys in float16, or in float32."""
    add = add_weighted(half)

    @njit(error_model="numpy")
    def score(q, w, factor, keys, positions, sequences, table, ratio, top_k, scores, first, last):
        """Nothing is computed for rows that see no more than top_k rows."""
        n_head, d = q.shape[1], q.shape[2]
        # Four heads are multiplied at once, even where fewer are left.
        queries, dots = np.zeros((n_head + ROWS, d), np.float32), np.empty((ROWS, CHUNK), np.float32)
        lanes = i64(CHUNK)
        for item in range(first, last):
            t, part = item // PARTS, item % PARTS
            n = (positions[t] + 1) // ratio
            if n <= top_k:
                continue
            queries[:n_head] = q[t]
            for chunk in range(part, (n + CHUNK - 1) // CHUNK, PARTS):
                out = scores[t, chunk * CHUNK : (chunk + 1) * CHUNK]
                out[:] = f32(0.0)
                # In elements: a word has two of float16.
                key = i64(table[sequences[t], chunk]) * keys.shape[1] * (2 if half else 1)
                for h in range(0, n_head, ROWS):
                    clear(dots, dots.size)
                    add(queries, h * d, d, i64(ROWS), d, keys, key, lanes, lanes, dots, i64(0), lanes)
                    for k in range(min(ROWS, n_head - h)):
                        weight = w[t, h + k] * factor
                        for j in range(CHUNK):
                            out[j] = fma(weight, rectified(dots[k, j]), out[j])
                for j in range(CHUNK):
                    out[j] = finite(out[j])

    return score


@njit(cache=True, error_model="numpy")
def threshold(scores, n, k):
    """The k-th largest key (``order_key``) of scores [n], and how many of that key are among the k largest."""
    counts = np.empty(_DIGITS, np.int64)
    prefix, left = i64(0), i64(k)
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for r in range(n):
            key = i64(order_key(scores[r])) + i64(0x80000000)
            if key >> (shift + 8) == prefix:
                counts[(key >> shift) & (_DIGITS - 1)] += 1
        digit = _DIGITS - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = (prefix << 8) | digit
    return prefix - i64(0x80000000), left


@njit(cache=True, error_model="numpy")
def choose(scores, positions, ratio, chosen, first, last):
    """The chosen rows of the rows [first, last) of the pass; of one whose scores are not finite, the first is -1."""
    top_k = chosen.shape[1]
    for t in range(first, last):
        n = (positions[t] + 1) // ratio
        if n <= top_k:
            for r in range(top_k):
                chosen[t, r] = r if r < n else -1
            continue
        least, equal = threshold(scores[t], n, top_k)
        count, not_finite = 0, False
        for r in range(n):
            key = i64(order_key(scores[t, r]))
            if key > least or (key == least and equal > 0):
                chosen[t, count] = r
                count += 1
                not_finite |= key == NAN_KEY
                if key == least:
                    equal -= 1
        if not_finite:
            chosen[t, 0] = -1
