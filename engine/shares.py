"""Which part of an axis each of several devices owns that share the layers of a model.

The rows of a matrix are the elements of the axis: those of a matrix whose results belong to heads are divided by heads, those
of others into nearly equal runs.  Nothing here depends on a device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

STEP = 32
"""Runs of rows without heads begin at multiples of this, so that few of the blocks of rows that kernels compute are cut."""


def share(total: int, owner: int, n_owners: int) -> tuple[int, int]:
    """The elements [first, last) out of ``total`` that an owner has; no two owners differ by more than one."""
    return total * owner // n_owners, total * (owner + 1) // n_owners


class OwnedRun(NamedTuple):
    """A run of an axis with one owner: its first element, the owner, the first of its elements there, and their number."""

    first: int
    owner: int
    at: int
    size: int


@dataclass(frozen=True)
class Cut:
    """How an axis is divided: for each owner, its elements as runs [first, last) in rising order.  Every element has one
    owner, and every owner has an element."""

    runs: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def size(self) -> int:
        """The number of elements of the axis."""
        return sum(self.counts)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of elements of each owner."""
        return tuple(sum(last - first for first, last in runs) for runs in self.runs)

    @cached_property
    def pieces(self) -> tuple[OwnedRun, ...]:
        """The runs of all owners in the order of the axis."""
        found = []
        for owner, runs in enumerate(self.runs):
            at = 0
            for first, last in runs:
                found.append(OwnedRun(first, owner, at, last - first))
                at += last - first
        return tuple(sorted(found))

    @cached_property
    def period(self) -> int | None:
        """The number p, if every owner has the elements i with first <= i % p < last, where its first run is (first, last);
        None if there is none."""
        n = len(self.runs[0])
        p, rest = divmod(self.size, n)
        wanted = tuple(tuple((k * p + first, k * p + last) for k in range(n)) for (first, last), *_ in self.runs)
        return p if not rest and wanted == self.runs and max(runs[0][1] for runs in self.runs) == p else None

    def times(self, n: int) -> "Cut":
        """The axis in which n elements stand for each one of this axis."""
        return Cut(tuple(tuple((n * first, n * last) for first, last in runs) for runs in self.runs))


@dataclass(frozen=True)
class HeadRows:
    """How the rows of a matrix belong to heads.

    n_groups: the number of groups of heads that stay together, such as the heads of keys and values.
    segments: the numbers of rows of consecutive parts of the matrix, each of which has an equal share for every group.
    """

    n_groups: int
    segments: tuple[int, ...]

    def cut(self, n_owners: int) -> Cut:
        """The rows of each owner, who has the same groups in all segments."""
        found = []
        for owner in range(n_owners):
            first, last = share(self.n_groups, owner, n_owners)
            runs, begin = [], 0
            for size in self.segments:
                rows = size // self.n_groups
                runs.append((begin + rows * first, begin + rows * last))
                begin += size
            found.append(_merged(runs))
        return Cut(tuple(found))


UNDIVIDED = HeadRows(1, ())
"""That of a matrix that every owner has as a whole."""


def even_cut(size: int, n_owners: int) -> Cut | None:
    """An axis without heads in nearly equal runs; None if it is too short to be divided."""
    steps = -(-size // STEP)
    if steps < n_owners:
        return None
    shares = (share(steps, owner, n_owners) for owner in range(n_owners))
    return Cut(tuple(((STEP * first, min(size, STEP * last)),) for first, last in shares))


def _merged(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs in rising order without borders between adjacent ones."""
    found = runs[:1]
    for first, last in runs[1:]:
        if first == found[-1][1]:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)
