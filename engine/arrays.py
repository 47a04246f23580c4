"""What models see of a device's memory: handles of arrays, values and matrices, and the rows of a pass.

A model never looks inside of them.  It knows their shapes, takes rows of an array, and hands them from one operation to the
next (``engine/ops.py``).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast


class Value(Protocol):
    """What an operation gives; a device may compute it only where it is used.

    It may be used once.  ``Operations.plain`` makes an array of it, which may be used as often as needed.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and what each has."""


class Array(Value, Protocol):
    """An array in a device's memory."""

    @property
    def size(self) -> int:
        """Number of elements."""

    def reshape(self, first: int, /, *rest: int) -> "Array":
        """The same elements under another shape."""

    def __getitem__(self, rows: slice, /) -> "Array":
        """A contiguous slice of the first axis, without a copy."""


class Matrix(Protocol):
    """A weight matrix [rows, columns] in memory that the operations read, in any format."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def rows(self) -> int:
        """Number of output values."""

    @property
    def columns(self) -> int:
        """Number of weights in a row."""


A = TypeVar("A", bound=Array)
"""A backend's arrays."""

V = TypeVar("V", bound=Value)
"""A backend's values; its arrays are among them."""

M = TypeVar("M", bound=Matrix)
"""A backend's matrices."""

A_co = TypeVar("A_co", bound=Array, covariant=True)
M_co = TypeVar("M_co", bound=Matrix, covariant=True)


@dataclass(frozen=True)
class Pass(Generic[A_co]):
    """The rows that a forward pass reads.

    tokens: int32 [rows].
    positions: int32 [rows], where in its sequence each token is stored.
    sequences: int32 [rows], the sequence that each row belongs to; None: all rows belong to one sequence, number 0.
    per_layer: float32 [n_layer, rows, n_per_layer], what each layer is told of the tokens, once ``Model.begin`` has computed
        it; None for models that have no such thing.
    """

    tokens: A_co
    positions: A_co
    sequences: A_co | None = None
    per_layer: A_co | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.positions.size

    def part(self, rows: slice) -> "Pass[A_co]":
        """Some of the rows, without ``per_layer``."""
        # A slice has its array's own type, which the protocol cannot say of NumPy's arrays.
        tokens, positions = cast(A_co, self.tokens[rows]), cast(A_co, self.positions[rows])
        sequences = None if self.sequences is None else cast(A_co, self.sequences[rows])
        return Pass(tokens, positions, sequences)
