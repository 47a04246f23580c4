"""A weight matrix as operations take it: packed rows and their format."""

from dataclasses import dataclass, replace

import numpy as np

from engine.gguf.quants import Format


@dataclass(frozen=True)
class Weight:
    """Packed rows of one tensor.

    ``data``: uint8 [n, row bytes], usually a view of the mapped file; ``columns``: weights per row.  If ``pitch`` is not 0,
    the matrix consists of only ``count`` rows of every ``pitch``, from row ``first`` on.  ``stack``: the number of matrices
    that the rows consist of, those of a mixture's experts.
    """

    name: str
    format: Format
    columns: int
    data: np.ndarray
    first: int = 0
    count: int = 0
    pitch: int = 0
    stack: int = 1

    @property
    def rows(self) -> int:
        """The number of output values."""
        n = int(self.data.shape[0])
        return n // self.pitch * self.count if self.pitch else n

    def part(self, first: int, last: int) -> np.ndarray:
        """Rows [first, last), contiguous: uint8 [last - first, row bytes]."""
        if not self.pitch:
            return self.data[first:last]
        i = np.arange(first, min(last, self.rows))
        return self.data[i // self.count * self.pitch + self.first + i % self.count]

    def runs(self, first: int, count: int, pitch: int) -> "Weight":
        """One matrix for every ``pitch`` rows, of ``count`` of them from row ``first`` on; stacked."""
        return replace(self, first=first, count=count, pitch=pitch, stack=self.rows // pitch)

    def halves(self, pitch: int) -> "tuple[Weight, Weight]":
        """Two matrices: the first and the second half of every ``pitch`` rows."""
        n = pitch // 2
        return replace(self, count=n, pitch=pitch), replace(self, first=n, count=n, pitch=pitch)

    def slice(self, first: int, last: int) -> "Weight":
        """The matrix of rows [first, last) of a matrix that has all rows of its tensor."""
        return replace(self, data=self.data[first:last])

    def reordered(self, order: np.ndarray) -> "Weight":
        """The matrix with row ``order[i]`` as its row i; order: integers [rows]."""
        data = self.data[order]
        data.flags.writeable = False  # like mapped rows, so that the same compiled kernels serve both
        return replace(self, data=data)
