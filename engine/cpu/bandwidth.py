"""A plain read of memory: the upper bound on the speed of generating a token.

Formula: total = sum of all words mod 2^64.
Shapes: data uint64 [n]; a uint64 out.
Who owns what: an item is one of the ``parts.size`` runs of ceil(n / parts.size) words.
Reduction order: any, since integers do not round.
Bytes moved: 8 n.
"""

import math
import os
import time
from functools import cache

import numpy as np
from numba import njit

from engine.cpu.runtime.program import TILE_NS, Program
from engine.cpu.runtime.team import team

RUN = 1 << 16
"""Words that a thread reads at a time."""


@njit(cache=True)
def sum_of(data):
    """The sum of data uint64 [n]: with integers the compiler may add in any order, as wide as the machine can."""
    total = np.uint64(0)
    for i in range(data.size):
        total += data[i]
    return total


@njit(cache=True)
def read_sums(data, parts, first, last):
    """parts [c] = the sum of the c-th run of data uint64 [n], for the runs [first, last); parts uint64."""
    step = (data.size + parts.size - 1) // parts.size
    for c in range(first, last):
        parts[c] = sum_of(data[c * step : (c + 1) * step])


def memory_bandwidth(n_threads: int, n_bytes: int = 1 << 30, passes: int = 5) -> float:
    """Bytes per second that ``n_threads`` threads read from memory: the best of ``passes`` passes over ``n_bytes``.

    ``n_bytes`` must be much larger than the caches for the figure to be that of memory.
    """
    data = np.full(max(n_bytes // 8, 1), 1, np.uint64)
    # Runs are short, so that no thread waits long for the last one.
    parts = np.zeros(-(-data.size // RUN), np.uint64)
    program = Program()
    program.add(read_sums, (data, parts), parts.size, TILE_NS)
    program.finish()
    best = math.inf
    for _ in range(passes):
        start = time.perf_counter()
        team().run(program, n_threads)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


@cache
def machine_bandwidth(n_threads: int) -> float:
    """``memory_bandwidth`` over 1 GiB, or over an eighth of the memory if that is less; measured once per process."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        installed = 4 << 30
    return memory_bandwidth(n_threads, min(1 << 30, installed // 8))
