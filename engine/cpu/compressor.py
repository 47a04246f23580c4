"""Compressed rows: each is made of the tokens of a block, and perhaps of the block before it (DeepSeek-V4, 2026).

Formula: token p has values a_p and scores b_p; block r consists of the positions [r R, (r + 1) R), R the ratio.  Row r,
element
    j: x_j = sum_p softmax_p(b_pj + ape[p mod R]_j) a_pj over the tokens of the block.  With an overlap, a and b are twice as
    wide, and the tokens of block r - 1 take part with their first halves, those of block r with their second halves; there is
    nothing before block 0.  An infinite score is NaN.  Then row = rms_norm(x), its last n_rot elements rotated by position
    r R.
Shapes: values, scores float32 [rows, overlap * d] of the pass; positions, sequences int32 [rows]; ape float32 [R, overlap *
    d]; norm float32 [d]; pending float32 [sequences, length, 2, overlap * d], a and b of position p of a sequence in its row
    p % length; stored float32 or uint16 (float16) [pages, 64, d], or transposed, [pages, d, 64]: row r of a sequence is lane
    r % 64 of page table[sequence, r // 64], table int32 [sequences, chunks].
Who owns what: an item is a row of the pass; ``compress`` computes the block that it completes.  The tokens of a block are the
    rows before it as far as they are in its run, rows of one sequence at consecutive positions, and else in the ring.  The
    last row of a pass may be repeated to pad it: copies do nothing in ``compress``, and in ``keep`` what the row does.
Reduction order: tokens in rising position; m = the largest score, e_p = exp(score - m), L = e_p added one after another from
    0, x = fma(e_p, a_p, x) from 0, then x / L.  Everything depends on the tokens of the blocks only: not on the division of
    the text into passes.
Bytes moved: 8 overlap d per token that a row is made of.
"""

import numpy as np
from numba import njit

from engine.cache.types import CHUNK
from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms
from engine.cpu.rope import rotate_pairs
from engine.numerics import exp, finite, fma, stored_half

f32 = np.float32


@njit(cache=True, error_model="numpy")
def weigh_token(values, scores, ape, most, total, x, begins):
    """One of two passes over the tokens of a row.  ``begins``: raise most [d] to the scores; else add the token's weights to
    total [d] and its weighted values to x [d]."""
    if begins:
        for j in range(x.size):
            most[j] = max(most[j], finite(scores[j] + ape[j]))
    else:
        for j in range(x.size):
            e = exp(finite(scores[j] + ape[j]) - most[j])
            total[j] = total[j] + e
            x[j] = fma(e, values[j], x[j])


@njit(cache=True)
def completed(positions, sequences, ratio, t):
    """The block that row t of a pass completes; -1 if it completes none, or is a copy of the row before it."""
    position = positions[t]
    if (position + 1) % ratio != 0:
        return -1
    if t > 0 and positions[t - 1] == position and sequences[t - 1] == sequences[t]:
        return -1
    return position // ratio


@njit(cache=True, error_model="numpy")
def compress(
    values,
    scores,
    ape,
    norm,
    eps,
    positions,
    sequences,
    angles,
    pending,
    transposed,
    table,
    stored,
    first,
    last,
):
    """Store the rows of the blocks that the rows [first, last) of the pass complete."""
    ratio, d = ape.shape[0], norm.size
    overlap, length = values.shape[1] // d, pending.shape[1]
    chains = np.empty(NORM_CHAINS, np.float32)
    most, total, x = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    for t in range(first, last):
        r = completed(positions, sequences, ratio, t)
        if r < 0:
            continue
        end, sequence = (r + 1) * ratio, sequences[t]
        begin = max(0, end - overlap * ratio)
        # Row u, at position ``start``, is the first of the run that the block may need.
        u, start = t, end - 1
        while u > 0 and start > begin and sequences[u - 1] == sequence and positions[u - 1] == start - 1:
            u, start = u - 1, start - 1
        most[:] = f32(-np.inf)
        total[:] = f32(0.0)
        x[:] = f32(0.0)
        for step in range(2):
            for p in range(begin, end):
                # The second half of what the last block has, the first half of what the one before it has.
                at = (overlap - 1) * d if p >= r * ratio else 0
                own = ape[p % ratio, at : at + d]
                if p >= start:
                    a, b = values[u + p - start, at : at + d], scores[u + p - start, at : at + d]
                else:
                    old = pending[sequence, p % length]
                    a, b = old[0, at : at + d], old[1, at : at + d]
                weigh_token(a, b, own, most, total, x, step == 0)
        for j in range(d):
            x[j] = x[j] / total[j]
        factor = inverse_rms(x, eps, chains)
        for j in range(d):
            x[j] = x[j] * factor * norm[j]
        rotate_pairs(x, angles[r * ratio, 0], angles[r * ratio, 1], False)
        page, lane = stored[table[sequence, r // CHUNK]].reshape(-1), r % CHUNK
        place, stride = (lane, CHUNK) if transposed else (lane * d, 1)
        for j in range(d):
            if stored.itemsize == 2:
                page[place + j * stride] = stored_half(x[j])
            else:
                page[place + j * stride] = finite(x[j])


@njit(cache=True)
def keep(values, scores, positions, sequences, pending, first, last):
    """Store values and scores of the rows [first, last), as far as the ring holds them, when all rows have been made."""
    rows, length = values.shape[0], pending.shape[1]
    for t in range(first, last):
        # The row of the same run that has the same place in the ring.
        later, position = t + length, positions[t]
        if later < rows and sequences[later] == sequences[t] and positions[later] == position + length:
            continue
        own = pending[sequences[t], position % length]
        own[0, :] = values[t]
        own[1, :] = scores[t]
