"""The text of an answer as it arrives, with each tag as one character.

A tag that is a token of the vocabulary arrives as one piece, and only this piece is the tag: the same text in ordinary tokens
is text. A tag that is no token is recognized in the text, over any pieces. Both become *symbols*, single characters that no
text contains (lone surrogates), so that a parser has to look at one character only to know where it is.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reading that pauses at each ``yield`` until there is more text, and returns a ``T``."""

SYMBOLS = "\ud800-\udfff"
"""The symbols, for use inside a character class of a regular expression."""

_FIRST = 0xD800
_SYMBOL = re.compile(f"[{SYMBOLS}]")
_BLANKS = re.compile(r"[ \t\r\n]+")


def characters(piece: str) -> str:
    """``piece`` without lone surrogates, which are no characters: no tokenizer decodes to one."""
    return piece if piece.isascii() else _SYMBOL.sub("\ufffd", piece)


class Broken(Exception):
    """What was read is no call in the format of the model."""


class Reader:
    """Text to read, one piece after another.

    Attributes
    ----------
    text : str
        The text that is here, tags replaced by symbols.
    at : int
        How much of ``text`` has been read.
    ended : bool
        Whether no more text follows.
    """

    def __init__(self, tags: Sequence[str], single: Callable[[str], bool]) -> None:
        """``tags``: all tags, and the tokens that some contain; ``single``: whether a text is one token."""
        self.text = ""
        self.at = 0
        self.ended = False
        self._read: list[str] = []
        self._symbols = {tag: chr(_FIRST + i) for i, tag in enumerate(tags)}
        self._texts = {ord(symbol): tag for tag, symbol in self._symbols.items()}
        self._tokens = {tag: symbol for tag, symbol in self._symbols.items() if single(tag)}
        # The tags to recognize in the text. Those with a token in them have its symbol; what is a part of others is no tag.
        self._spelled: dict[str, str] = {}
        for tag, symbol in self._symbols.items():
            if tag not in self._tokens and sum(tag in other for other in tags) == 1:
                for token, inner in self._tokens.items():
                    tag = tag.replace(token, inner)
                self._spelled[tag] = symbol
        longest = sorted(self._spelled, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None
        self._starts = {tag[:n] for tag in longest for n in range(1, len(tag))}
        self._longest = max(map(len, self._starts), default=0)
        self._waiting = ""

    def symbol(self, tag: str) -> str:
        """The symbol of a tag."""
        return self._symbols[tag]

    def spelled(self, text: str) -> str:
        """``text`` with its symbols as the tags that they stand for."""
        return text if text.isascii() or not _SYMBOL.search(text) else text.translate(self._texts)

    # --- what arrives ------------------------------------------------------------------------------------------

    def add(self, piece: str, special: bool) -> None:
        """Takes the next piece; ``special``: it is one token that the vocabulary marks as control or user-defined."""
        symbol = self._tokens.get(piece) if special else None
        self._append(symbol or characters(piece))

    def end(self) -> None:
        """No more pieces follow."""
        self.ended = True
        self.text = self.text[self.at :] + self._waiting
        self.at = 0
        self._waiting = ""

    def forget(self, anything: bool) -> None:
        """Leaves out the beginning of a tag that waits for the rest: one with a token in it, or ``anything`` that waits."""
        if anything or _SYMBOL.search(self._waiting):
            self._waiting = ""

    def _append(self, text: str) -> None:
        if self._pattern is not None:
            text = self._waiting + text
            parts, at = [], 0
            for match in self._pattern.finditer(text):
                parts += [text[at : match.start()], self._spelled[match[0]]]
                at = match.end()
            keep = self._beginning(text, at)
            self._waiting = text[len(text) - keep :]
            text = "".join((*parts, text[at : len(text) - keep]))
        self.text = self.text[self.at :] + text
        self.at = 0

    def _beginning(self, text: str, at: int) -> int:
        """The length of the end of ``text[at:]`` that may become a tag."""
        for n in range(min(self._longest, len(text) - at), 0, -1):
            if text[-n:] in self._starts:
                return n
        return 0

    # --- reading -----------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """What has been read is used: :meth:`passed` begins here."""
        self._read.clear()

    def passed(self) -> str:
        """What has been read since the last mark, as it arrived; sets a mark."""
        text = self.spelled("".join(self._read))
        self._read.clear()
        return text

    @property
    def pending(self) -> str:
        """What has been read since the last mark, tags replaced by symbols."""
        return "".join(self._read)

    def take(self, n: int) -> str:
        """Reads ``n`` characters that are here."""
        text = self.text[self.at : self.at + n]
        self.at += n
        self._read.append(text)
        return text

    def match(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches ``pattern`` here; "" if nothing does."""
        found = pattern.match(self.text, self.at)
        return self.take(len(found[0])) if found else ""

    def peek(self) -> Steps[str]:
        """The next character, which is not read; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, characters: str) -> Steps[str]:
        """Reads one of ``characters``; raises Broken if something else follows."""
        found = yield from self.peek()
        if not found or found not in characters:
            raise Broken
        return self.take(1)

    def literal(self, text: str) -> Steps[None]:
        """Reads ``text``; raises Broken if something else follows."""
        for character in text:
            yield from self.accept(character)

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as long as ``pattern``, a class of characters with ``+``, matches."""
        parts = []
        while (yield from self.peek()) and (part := self.match(pattern)):
            parts.append(part)
        return "".join(parts)

    def blanks(self) -> Steps[str]:
        """Reads blanks and newlines."""
        return (yield from self.run(_BLANKS))
