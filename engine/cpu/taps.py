"""What a network that reads several layers of another model needs beside its own layers (EAGLE-3, Li et al. 2025).

Formula: ``rows_before``: out_t = the row of the ring of t's sequence for position p_t - 1, zeros where p_t is 0;
    ``place_columns``: out[t, begin + i] = x[t, i];
    ``spread_logits``: out[t, v] = logits[t, index[v]], or ``UNKNOWN`` where index[v] < 0.
Shapes: rings float32 [slots, length, n]; positions, sequences (slots) int32 [rows]; x float32 [rows, n], out [rows, columns];
    logits float32 [rows, n_draft], index int32 [n_vocab], out [rows, n_vocab].
Who owns what: an item is a row.
Reduction order: none.
Bytes moved: 8 n per row; 8 n_vocab per row for logits, and the index.
"""

import numpy as np
from numba import njit

f32 = np.float32

UNKNOWN = f32(-1e30)
"""The logit of a token that the network cannot draft: a finite number, since logits that are not finite are an error."""


@njit(cache=True)
def rows_before(rings, positions, sequences, out, first, last):
    """The rows [first, last) of out."""
    for t in range(first, last):
        row = rings[sequences[t], (positions[t] - 1) % rings.shape[1]]
        for i in range(out.shape[1]):
            out[t, i] = row[i] if positions[t] > 0 else f32(0.0)


@njit(cache=True)
def place_columns(x, begin, out, first, last):
    """Columns [begin, begin + n) of the rows [first, last) of out."""
    for t in range(first, last):
        for i in range(x.shape[1]):
            out[t, begin + i] = x[t, i]


@njit(cache=True)
def spread_logits(logits, index, out, first, last):
    """The rows [first, last) of out."""
    for t in range(first, last):
        for v in range(index.size):
            out[t, v] = logits[t, index[v]] if index[v] >= 0 else UNKNOWN
