"""How devices that share every layer bring divided columns together within a pass."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.shares import Cut


class Gathering(Protocol):
    """The exchanges of a pass that several backends of one kind, the owners, record together
    (:meth:`engine.ops.executor.Executor.together`).

    parts: the columns of each owner, in its memory; results have one value for each owner, in its memory.  A result that is
    not an array may be used once, in a product that all owners record before other exchanges.
    """

    def begin(self, rows: int) -> None:
        """Another pass of so many rows is recorded from now on."""

    def end(self) -> None:
        """All exchanges of the pass have been recorded."""

    def takes(self, rows: int, cut: Cut) -> bool:
        """Whether columns of so many rows, divided in this way, can be brought together in the pass that is recorded."""

    def arrays(self, parts: Sequence[Any], cut: Cut) -> list[Any]:
        """All columns, as arrays."""

    def inputs(self, parts: Sequence[Any], cut: Cut) -> list[Any]:
        """All columns, as inputs of products."""

    def normalized(self, parts: Sequence[Any], cut: Cut, weights: Sequence[Any], eps: float) -> list[Any]:
        """rms_norm of all columns, as inputs of products; weights: those of each owner."""
