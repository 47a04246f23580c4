"""XTC ("exclude top choices"): at some positions, of the probable tokens only the least probable one stays.

Source: p-e-w 2024 (text-generation-webui, PR 6335); llama.cpp (PR 9742).

Formula: at a share ``probability`` of the positions, of the tokens t with p(t) >= threshold all but the least probable are
    removed; p = softmax of the candidates' logits, at temperature 1.  Of equally probable ones the lowest ids are removed.
Shapes: a list of candidates as in ``engine/cpu/sample.py``: values float32 [n], ids int32 [n].
Who owns what: one call, one thread, one list.
Reduction order: the total of the weights is a ``tree_sum`` in the order of the list.
Bytes moved: 8 n read three times, 4 n written and read for the weights, 8 n written.

Which positions is a function of seed and position, like the noise of the draw, but of another seed: a token must not be
excluded because of the noise that would have drawn it.
"""

import numpy as np
from numba import njit

from engine.cpu.sample import argmax, softmax_weights, tree_sum
from engine.numerics import uniform

f32 = np.float32
i64 = np.int64
u64 = np.uint64

XTC_SEED = u64(0xA0761D6478BD642F)
"""XORed with the seed, it gives the seed of the number that decides about a position."""

_ZERO = f32(0.0)


@njit(cache=True, error_model="numpy")
def strikes(seed, position, probability):
    """Whether tokens are excluded at ``position``; probability float32."""
    return uniform(u64(seed) ^ XTC_SEED, position, 0) < probability


@njit(cache=True, error_model="numpy")
def exclude(values, ids, n, threshold, weights, partial, out_values, out_ids):
    """Write the list without the excluded entries, in its order, and return its length; weights float32 [n], partial
    float32 [ceil(n / 256)].  An entry without probability is never the one that stays."""
    softmax_weights(values, n, values[argmax(values, n)], weights)
    total = tree_sum(weights, n, partial)
    least = i64(-1)
    for i in range(n):
        if weights[i] / total >= threshold and weights[i] > _ZERO:
            lower = least < 0 or values[i] < values[least]
            if lower or (values[i] == values[least] and ids[i] > ids[least]):
                least = i64(i)
    kept = i64(0)
    for i in range(n):
        if i == least or not (weights[i] / total >= threshold and weights[i] > _ZERO):
            out_values[kept] = values[i]
            out_ids[kept] = ids[i]
            kept += 1
    return kept
