"""Runs: consecutive rows of a pass that belong to one sequence and have consecutive positions.

Copies of a row may follow it.  They have its sequence and its position, and belong to its run.
"""

import numpy as np
from numba import njit


@njit(forceinline=True, error_model="numpy")
def follows(positions, sequences, t, n):
    """Whether row t is n positions after the row before it, in the same sequence."""
    return t > 0 and sequences[t] == sequences[t - 1] and positions[t] == positions[t - 1] + n


@njit(forceinline=True, error_model="numpy")
def overwritten(positions, sequences, t, length):
    """Whether the run of row t stores a later row in its place of a ring."""
    later = t + length
    return later < positions.size and sequences[later] == sequences[t] and positions[later] == positions[t] + length


@njit(forceinline=True, error_model="numpy")
def find_runs(positions, sequences):
    """The row of which each row is a copy, itself if it is none, and the number of rows of its run before that: two arrays
    int32 [rows]."""
    rows = positions.size
    own, since = np.empty(rows, np.int32), np.empty(rows, np.int32)
    for t in range(rows):
        copied = follows(positions, sequences, t, 0)
        own[t] = own[t - 1] if copied else t
        since[t] = since[t - 1] if copied else since[t - 1] + 1 if follows(positions, sequences, t, 1) else 0
    return own, since
