"""Arrays and matrices of several owners: whole in the memory of each, or divided among them."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from numpy.typing import DTypeLike

from engine.shares import Cut


class Whole:
    """An array of which every owner has a copy.

    copies: the array of each owner; is_loaded: whether they are parameters of a file, which keep their values.
    """

    def __init__(self, copies: Sequence[Any], is_loaded: bool = False) -> None:
        self.copies = list(copies)
        self.is_loaded = is_loaded

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each copy."""
        shape: tuple[int, ...] = self.copies[0].shape
        return shape

    @property
    def dtype(self) -> DTypeLike:
        """The element type of each copy."""
        return cast(DTypeLike, self.copies[0].dtype)

    @property
    def size(self) -> int:
        """The number of elements of each copy."""
        return int(self.copies[0].size)

    def reshape(self, *shape: int) -> "Whole":
        """The array in this shape, without a copy."""
        return Whole([copy.reshape(*shape) for copy in self.copies])

    def __getitem__(self, rows: slice) -> "Whole":
        return Whole([copy[rows] for copy in self.copies])

    def whole(self) -> "Whole":
        """The array itself."""
        return self


class Divided:
    """An array [rows, n] whose columns are divided.

    cut: the columns of each owner; parts: the array [rows, columns] of each owner.
    """

    def __init__(self, cut: Cut, parts: Sequence[Any], gather: Callable[["Divided"], Whole]) -> None:
        """gather: brings all columns together at every owner."""
        self.cut = cut
        self.parts = list(parts)
        self._gather = gather
        self._whole: Whole | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array with all columns."""
        return self.parts[0].shape[0], self.cut.size

    @property
    def size(self) -> int:
        """The number of elements of the array with all columns."""
        return int(self.parts[0].shape[0]) * self.cut.size

    def reshape(self, *shape: int) -> Whole:
        """The array with all columns in this shape."""
        return self.whole().reshape(*shape)

    def __getitem__(self, rows: slice) -> "Divided":
        return Divided(self.cut, [part[rows] for part in self.parts], self._gather)

    @property
    def is_gathered(self) -> bool:
        """Whether all columns have been exchanged."""
        return self._whole is not None

    def whole(self) -> Whole:
        """The array with all columns, which are exchanged once."""
        if self._whole is None:
            self._whole = self._gather(self)
        return self._whole


class SharedMatrix:
    """A matrix [rows, columns] whose rows are divided, or of which every owner has a copy.

    cut: the rows of each owner; None: all; parts: the matrix of each owner.
    """

    def __init__(self, name: str, rows: int, columns: int, cut: Cut | None, parts: Sequence[Any]) -> None:
        self.name = name
        self.rows = rows
        self.columns = columns
        self.cut = cut
        self.parts = list(parts)
