"""Thinning: after a prompt, layers without a window keep only the chunks of it that its last tokens attend to (SnapKV, Li et
al. 2024, arXiv 2404.14469; whole chunks, one choice for all layers and heads, as in SharpInference).

The mass of a chunk is the square of its part of the softmax, summed over the last ``OBSERVED`` rows of the prompt, all heads,
and all layers without a window::

    mass[c] = sum over rows, layers, heads of round(2^17 p[c]^2),    p[c] = l[c] exp(m[c] - M) / L

with the maximum m[c] and the sum l[c] of the chunk's weights, M the largest of all m, and L the sum of all l[c] exp(m[c] - M)
(``engine/cpu/observe.py``).  The terms are integers, so the sum does not depend on the order of rows, layers and heads, nor
on how a prompt is cut into passes or a model into devices.  SnapKV and SharpInference add p itself.  Squares give more weight
to the few heads that look at one place, which find a fact in a long text, than to the many that look everywhere
(docs/kv-budget.md has the measurement).  An int32 holds the sum of a row for up to 16 383 heads in all layers.

The first chunk stays, because many heads attend to the first tokens whatever the text is (Xiao et al. 2023, "attention
sinks"), and so do the chunks of the observed rows.  Of the others, those with the largest masses stay, the earlier one of two
equal masses.

The chunks that stay are numbered anew without gaps.  Attention of a thinned sequence sees *places* instead of positions: the
place of position p is p minus the number of dropped positions.  Keys have been rotated by their positions before, and later
tokens are still rotated by theirs.  So no kernel of attention knows that positions are missing.
"""

import numpy as np

from engine.cache.types import CHUNK

OBSERVED = CHUNK
"""The number of last rows of a prompt whose attention decides which chunks stay."""

MASS_BITS = 17
"""The mass of a chunk that has the whole softmax of a head is 2^MASS_BITS."""


def thins(n_prompt: int, budget: int) -> bool:
    """Whether a prompt of ``n_prompt`` tokens has more chunks than a budget of positions; budget 0: no limit."""
    return 0 < budget // CHUNK < -(-n_prompt // CHUNK)


def first_observed(n_prompt: int) -> int:
    """The index of the first token of a prompt whose attention is observed."""
    return max(0, n_prompt - OBSERVED)


def kept_chunks(masses: np.ndarray, n_prompt: int, budget: int) -> list[int]:
    """The chunks of a prompt that stay, in ascending order.

    masses: int64 [chunks], summed over the observed rows, of at least all chunks before the first observed row.
    budget: the number of positions that may stay, at least ``LEAST_KV_BUDGET``.  Only whole chunks are counted.
    """
    recent = first_observed(n_prompt) // CHUNK
    certain = [0, *range(max(1, recent), -(-n_prompt // CHUNK))]
    room = max(0, budget // CHUNK - len(certain))
    # A stable sort of negated masses: of equal masses, the earlier chunk comes first.
    best = 1 + np.argsort(-masses[1:recent], kind="stable")[:room]
    return sorted([*certain, *map(int, best)])
