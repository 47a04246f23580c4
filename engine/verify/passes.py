"""The division of a comparison's tokens into passes."""

from collections.abc import Iterator, Sequence

import numpy as np

from engine.cuda.rows import NARROW_ROWS


def sizes(n: int) -> list[int]:
    """Row counts of passes that read n tokens: 16, 1, 15, 2 and so on through all counts from 1 to 16, repeated as needed."""
    counts = [k for pair in zip(range(16, 8, -1), range(1, 9), strict=True) for k in pair]
    found: list[int] = []
    while sum(found) < n:
        found.append(min(counts[len(found) % 16], n - sum(found)))
    return found


def wide_sizes(most: int, n: int) -> list[int]:
    """Row counts of passes of at most ``most`` rows that read n tokens: a long one, one with just enough rows for
    wide kernels, and the rest; empty if no pass can have as many rows."""
    if min(most, n) <= NARROW_ROWS:
        return []
    first = min(most, max(NARROW_ROWS + 1, 3 * n // 5))
    second = min(NARROW_ROWS + 1, most, n - first)
    return [count for count in (first, second, *in_steps_of(most, n - first - second)) if count]


def in_steps_of(most: int, n: int) -> list[int]:
    """Row counts of the fewest passes that read n tokens."""
    return [min(most, n - first) for first in range(0, n, most)]


def passes(ids: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens and positions of passes with these row counts, from position 0 on: (int32 [rows], int32 [rows]) each."""
    first = 0
    for count in counts:
        yield np.array(ids[first : first + count], np.int32), np.arange(first, first + count, dtype=np.int32)
        first += count
