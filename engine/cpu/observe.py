"""How much of the softmax of each row belongs to each chunk: what decides which chunks of a prompt stay
(``engine/cache/thinning.py``).

Formula: mass[64 s + p % 64, c] += sum over heads of round(2^17 (l_c exp(m_c - M) / L)^2), M = max_c m_c, L = sum_c of
    l_c exp(m_c - M), with the maximum m_c and the sum l_c of the weights of chunk c (``engine/cpu/attention.py``); a sink s
    takes part in M, and adds exp(s - M) to L last;
    ``places``: place_t = position_t - dropped[sequence of t].
Shapes: parts float32 [rows, n_head, chunks, 2] (m, l); places, positions, sequences (slots) int32 [rows]; dropped int32
    [slots]; sinks float32 [n_head], or [0] for none; masses int32 [slots * 64, all chunks].  Places and positions differ by
    whole chunks, so p % 64 is the same for both.
Who owns what: an item is a row.
Reduction order: chunk c belongs to chain c % 32: L_j = fma(l_c, exp(m_c - M), L_j) in rising c; then the halving tree of
    the 32 chains, ((L_0 + L_16), ...), then 8, 4, 2, 1.  Masses are integers.
Bytes moved: 16 per row, head and chunk, and 8 per row and chunk.
"""

import numpy as np
from numba import njit

from engine.cache.thinning import MASS_BITS, OBSERVED
from engine.cache.types import CHUNK
from engine.cpu.fold import fold
from engine.numerics import exp, fma, round_product

f32 = np.float32

CHAINS = 32
"""The chains of the sum over chunks."""

ONE = f32(1 << MASS_BITS)
"""The mass of a chunk that has the whole softmax of a head."""


@njit(cache=True)
def places(positions, sequences, dropped, out, first, last):
    """The rows [first, last) of out int32 [rows]."""
    for t in range(first, last):
        out[t] = positions[t] - dropped[sequences[t]]


@njit(cache=True, error_model="numpy")
def observe(parts, places, sequences, sinks, masses, first, last):
    """Add the masses of the rows [first, last)."""
    chains = np.empty(CHAINS, np.float32)
    for t in range(first, last):
        to, n = masses[sequences[t] * OBSERVED + places[t] % OBSERVED], places[t] // CHUNK + 1
        for h in range(parts.shape[1]):
            part, top = parts[t, h], f32(-np.inf)
            for c in range(n):
                top = max(top, part[c, 0])
            if sinks.size > 0:
                top = max(top, sinks[h])
            chains[:] = f32(0.0)
            for c in range(n):
                chains[c % CHAINS] = fma(part[c, 1], exp(part[c, 0] - top), chains[c % CHAINS])
            total = fold(chains, CHAINS)
            if sinks.size > 0:
                total = total + exp(sinks[h] - top)
            for c in range(n):
                p = part[c, 1] * exp(part[c, 0] - top) / total
                to[c] += round_product(p, p * ONE)
