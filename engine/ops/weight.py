"""A weight matrix: packed rows and their format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.gguf.quants import Format
from engine.shares import HeadRows


@dataclass(frozen=True)
class Weight:
    """The packed rows of one tensor, or a selection of them.

    name: the name of the tensor.
    format: the format of the rows.
    columns: the number of weights per row.
    data: uint8 [n, row bytes], usually a view of the mapped file.
    first, count, pitch: of every ``pitch`` rows, the matrix contains the ``count`` rows from row ``first`` on.  If ``pitch``
        is 0, it contains all rows.
    stack: the number of matrices whose rows are stacked, for example those of the experts of a mixture.
    heads: how the rows belong to heads, by which several devices may share them; None: they do not.
    """

    name: str
    format: Format
    columns: int
    data: np.ndarray
    first: int = 0
    count: int = 0
    pitch: int = 0
    stack: int = 1
    heads: HeadRows | None = None

    @property
    def rows(self) -> int:
        """The number of rows of the matrix, which is the number of output values."""
        n = int(self.data.shape[0])
        return n // self.pitch * self.count if self.pitch else n

    def part(self, first: int, last: int) -> np.ndarray:
        """The packed rows [first, last), contiguous: uint8 [last - first, row bytes]."""
        if not self.pitch:
            return self.data[first:last]
        i = np.arange(first, min(last, self.rows))
        return self.data[i // self.count * self.pitch + self.first + i % self.count]

    def stretches(self, first: int, last: int) -> list[np.ndarray]:
        """Rows [first, last) as few contiguous arrays, uint8 [n, row bytes] each, without copying them."""
        if not self.pitch:
            return [self.data[first:last]]
        found, last = [], min(last, self.rows)
        while first < last:
            i, j = divmod(first, self.count)
            end = min(last, (i + 1) * self.count)
            at = i * self.pitch + self.first + j
            found.append(self.data[at : at + end - first])
            first = end
        return found

    def runs(self, first: int, count: int, pitch: int) -> "Weight":
        """Stacked matrices, one for every ``pitch`` rows, each with the ``count`` rows from row ``first`` on."""
        return replace(self, first=first, count=count, pitch=pitch, stack=self.rows // pitch)

    def halves(self, pitch: int) -> "tuple[Weight, Weight]":
        """Two matrices: the first halves and the second halves of every ``pitch`` rows."""
        n = pitch // 2
        return replace(self, count=n, pitch=pitch), replace(self, first=n, count=n, pitch=pitch)

    def slice(self, first: int, last: int) -> "Weight":
        """The matrix of rows [first, last).  This matrix must contain all rows of its tensor."""
        return replace(self, data=self.data[first:last])

    def reordered(self, order: np.ndarray) -> "Weight":
        """A copy with the rows in another order: row i of the copy is row ``order[i]``.  order: integers [rows]."""
        data = self.data[order]
        data.flags.writeable = False  # like mapped rows, so that the same compiled kernels accept both
        return replace(self, data=data)

    def of(self, runs: Sequence[tuple[int, int]]) -> "Weight":
        """The matrix of the rows in some runs [first, last) in rising order."""
        (first, last), count = runs[0], len(runs)
        if count == 1 and not self.pitch:
            return replace(self.slice(first, last), heads=None)
        # Equal runs at equal distances, as heads of queries, keys and values have them, need no copy.
        pitch = self.rows // count
        if runs == tuple((first + i * pitch, last + i * pitch) for i in range(count)) and self._is_in_records:
            return replace(self, first=first, count=last - first, pitch=pitch, heads=None)
        return replace(self.reordered(np.concatenate([np.arange(*run) for run in runs])), heads=None)

    def of_each(self, first: int, last: int) -> "Weight":
        """The matrices of the rows [first, last) of each of the stacked matrices."""
        if self.pitch:
            return replace(self, first=self.first + first, count=last - first)
        return replace(self, first=first, count=last - first, pitch=self.rows // self.stack)

    @property
    def _is_in_records(self) -> bool:
        """Whether backends copy the rows, so that they need not be contiguous."""
        return self.format.quantized and not self.pitch
