"""Line breaks between words while an answer is written to a terminal."""

import re
from collections.abc import Callable

from rich.cells import cell_len

LIST = re.compile(r"[-*+]$|\d+[.)]$")
"""The first word of an item of a list."""


WIDE = r"\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
"""Characters of scripts that write no spaces: a line may be broken after each."""

CLOSING = "\u3001\u3002\uff0c\uff0e\uff01\uff1f\uff1a\uff1b\uff09\u300d\u300f\u3011"
"""Punctuation of these scripts that begins no line."""

PARTS = re.compile(rf"(?<=\s)(?=\S)|(?<=\n)|(?<=[{WIDE}])(?=[^\s{CLOSING}])")
"""The places between words; white space belongs to the word before it."""


class Words:
    """Breaks the lines of a text between words, as its pieces arrive.  A word is held back until it is complete or wider than
    the terminal, so nothing that was written is ever changed, and the terminal may be resized.

    Lines of code (in fences, or indented by four spaces) and of tables stay as they are, and so does a word that is wider
    than the terminal.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """columns: the width of the terminal, asked for at every word."""
        self._columns = columns
        self._held = ""
        self._line = 0  # cells of the line so far
        self._begins = True  # no word of the line has been written
        self._fence = ""
        self._kept = False
        self._inside = False  # the beginning of the next word has been written

    @property
    def fills_line(self) -> bool:
        """Whether what was written ends in the last column of the terminal."""
        return self._line > 0 and self._line % self._columns() == 0

    def feed(self, piece: str) -> str:
        """What to write for the next piece of the text."""
        *parts, self._held = PARTS.split(self._held + piece)
        written = "".join(map(self._part, parts))
        # A fence is decided by the whole word, and after a wide character the next one tells where the word ends.
        waits = self._held[:1] in "`~" or self._held[-1:].isspace() or re.match(f"[{WIDE}]", self._held[-1])
        if not waits and cell_len(self._held) >= self._columns():
            written, self._held = written + self._part(self._held), ""
            self._inside = True
        return written

    def end(self) -> str:
        """What to write at the end of the text."""
        part, self._held = self._held, ""
        return self._part(part)

    def _part(self, part: str) -> str:
        """A word with the white space after it, or white space at the beginning of a line."""
        word = part.rstrip()
        inside, self._inside = self._inside, False
        if self._begins and word:
            self._begin(word)
        # The white space after a word may stand beyond the end of a line, where it is left out.
        broken = ""
        width = cell_len(word)
        if (
            not self._kept
            and word
            and self._line
            and self._line + width > self._columns() - 1
            and not self._begins
            and not inside
        ):
            broken, self._line = "\n", 0
        if word:
            self._begins = False
        self._line += cell_len(part.rstrip("\n"))
        if part.endswith("\n"):
            self._line, self._begins, self._kept = 0, True, False
        return broken + part

    def _begin(self, word: str) -> None:
        """Decide how the line of this first word is written."""
        mark = re.match(r"(`{3,}|~{3,})", word)
        code = self._line >= 4 and not LIST.match(word)
        self._kept = bool(self._fence) or mark is not None or code or word.startswith("|")
        if self._fence:
            self._fence = "" if word.startswith(self._fence) else self._fence
        elif mark:
            self._fence = mark[1]
