"""Words that the host and a device set for each other while a pass of the device runs.

A word is 0 when a pass begins.  Either side sets it to ``GIVEN``; the host sets it to ``ABANDONED`` after an error, and the
device to ``EXPIRED`` when it has waited for too long.
"""

from numba import njit, types

from engine.compile.jobs import CPUJob
from engine.cpu.runtime.atomics import store, swap_if

GIVEN, ABANDONED, EXPIRED = 1, 2, 3
"""The values of a word that is set."""


@njit(cache=True)
def put(words, i, value):
    """Set words[i], int64.  Everything that this thread has written is visible to whoever reads the value."""
    store(words, i, value)


@njit(cache=True, error_model="numpy")
def give(x, rows, words, i, first, last):
    """Copy x, float32 [m, width], to rows [n, width], n >= m, whose further rows become copies of the last one of x, and set
    words[i], int64, to ``GIVEN`` unless it is set."""
    for t in range(rows.shape[0]):
        a, b = x[min(t, x.shape[0] - 1)], rows[t]
        for j in range(b.size):
            b[j] = a[j]
    swap_if(words, i, 0, GIVEN)


def flag_jobs() -> list[CPUJob]:
    """The compile jobs of the functions that Python calls."""
    words, word = types.Array(types.int64, 1, "C"), types.int64
    return [CPUJob(__name__, "put", (words, word, word))]
