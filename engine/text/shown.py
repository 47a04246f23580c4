"""The text of an answer that may be shown: whole characters, up to a stop text."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.tokenizer import Tokenizer, TokenType


class Piece(NamedTuple):
    """A piece of text.  ``special``: it is one token that the vocabulary marks as a control or user-defined token."""

    text: str
    special: bool = False


class Shown:
    """Turns the tokens of an answer into text as they arrive.

    What may become a stop text is held back until it is certain.  The text ends before the first stop text: ``stopped`` says
    which one it was, "" as long as there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], *, control: bool = False, begins_with: str = ""
    ) -> None:
        """control: control tokens appear as the vocabulary spells them; begins_with: a text that the first token begins with
        and that is not shown."""
        self.stopped = ""
        self._tokenizer = tokenizer
        self._control = control
        self._begins_with = begins_with
        self._stops = [text for text in stops if text]
        self._decoder = tokenizer.stream(special=control)
        self._held: list[Piece] = []

    def feed(self, token: int) -> list[Piece]:
        """The pieces that are certain once ``token`` has arrived."""
        kind = self._tokenizer.token_type(token)
        special = kind is TokenType.USER_DEFINED or (self._control and kind is TokenType.CONTROL)
        if special:
            self._hold(self._decoder.flush())
        self._hold(self._decoder.feed(token).removeprefix(self._begins_with), special)
        self._begins_with = ""
        return self._certain()

    def flush(self) -> list[Piece]:
        """The rest, at the end."""
        self._hold(self._decoder.flush())
        pieces = self._certain()
        if not self.stopped:
            pieces += self._held
        self._held = []
        return pieces

    def _hold(self, text: str, special: bool = False) -> None:
        if text:
            self._held.append(Piece(text, special))

    def _certain(self) -> list[Piece]:
        """Remove and return what can be shown."""
        if not self._stops:
            held, self._held = self._held, []
            return held
        safe, self.stopped = find_stop("".join(piece.text for piece in self._held), self._stops)
        shown: list[Piece] = []
        rest: list[Piece] = []
        for text, special in self._held:
            # A special token is shown as a whole or, if a stop text begins within it, as text.
            n = len(text) if len(text) <= safe else safe if self.stopped or not special else 0
            if n:
                shown.append(Piece(text[:n], special and n == len(text)))
            if n < len(text):
                rest.append(Piece(text[n:], special and n == 0))
            safe = safe - n if n == len(text) else 0
        self._held = [] if self.stopped else rest
        return shown


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """The length of the part of ``text`` that can be shown, and the stop text that begins there, "" if there is none: then an
    end that may become a stop text cannot be shown."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return min(found, key=lambda each: each[0])
    safe = len(text)
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                safe = min(safe, len(text) - n)
                break
    return safe, ""
