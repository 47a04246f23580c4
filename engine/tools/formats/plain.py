"""Models whose format is not known: everything is text."""

from engine.tools.formats.events import Content, Event
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import characters


class Plain(FormatParser):
    """``TEXT``

    There are no tags: what the model writes is the answer, whatever it looks like.
    """

    def feed(self, piece: str, special: bool = False) -> list[Event]:
        """Returns the piece, which is certain."""
        return [Content(characters(piece))] if piece else []

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns nothing: no text waits."""
        return []


def plain() -> Plain:
    """A parser of the continuation of a text, in which everything is text."""
    return Plain((), single=lambda tag: False)
