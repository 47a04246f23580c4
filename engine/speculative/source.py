"""What sources of drafts that are models have in common."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM


class Source:
    """A model that drafts by passes of its own: ``llm``, or what belongs to it."""

    llm: "LLM"
    behind = 0
    """Tokens that must come before the certain one."""
    anchor: Any = None
    """Where the position of the certain token is kept, for sources that want to know it: int32 [2], it and the one before."""

    @property
    def ops(self) -> Any:
        """The backend that computes them."""
        return self.llm.model.ops

    def reserve(self, length: int) -> None:
        """Have the angles of positions [0, length) ready."""
        self.llm.model.reserve(length)
