"""What sources of drafts that are models have in common."""

from typing import TYPE_CHECKING

from engine.arrays import Array
from engine.ops import Ops

if TYPE_CHECKING:
    from engine.llm import LLM


class Source:
    """A model that drafts by passes of its own: ``llm``, or what belongs to it."""

    llm: "LLM"
    behind = 0
    """Tokens that must come before the certain one."""

    @property
    def ops(self) -> Ops:
        """The backend that computes them."""
        return self.llm.model.ops

    @property
    def n_ctx(self) -> int:
        """Positions of the context."""
        return self.llm.n_ctx

    @property
    def anchor(self) -> Array | None:
        """Where the position of the certain token and the one before lie, int32 [2]; None for sources that do not ask."""
        return None

    def reserve(self, length: int) -> None:
        """Have the angles of positions [0, length) ready."""
        self.llm.model.reserve(length)
