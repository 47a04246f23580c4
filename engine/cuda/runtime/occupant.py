"""Who has used the memory of decode passes last."""

from typing import Protocol


class Occupant(Protocol):
    """Whoever has started a decode pass and may still need what it left in the memory that all decode passes share: its rows
    (tokens, positions and slots) and its results."""

    def leave(self, rows: bool) -> None:
        """Start what reads the results of the pass, because another pass is about to overwrite them; rows: whether that
        overwrites the rows too."""
