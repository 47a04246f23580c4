"""What is written on a terminal: sizes, line breaks, characters that cannot control it, and a line that is redrawn."""

import os
import textwrap
from functools import partial
from typing import TextIO

# Carriage returns are removed, tabs and newlines stay; ESC and the like would let a model's text control the terminal.
_CONTROLS = {c: "\ufffd" for c in (*range(0x20), *range(0x7F, 0xA0)) if c not in (0x09, 0x0A)} | {0x0D: None}


def printable(text: str) -> str:
    """Text from a model or a file without the control characters that could change or fake what a terminal shows."""
    return text.translate(_CONTROLS)


class StatusLine:
    """One line of a terminal that is redrawn.

    If the answer goes to the same terminal (``shared``), the line is the bottom row, excluded from the scrolling region
    (DECSTBM), so that text streams above it undisturbed; else it is the current line.
    """

    def __init__(self, stream: TextIO, *, shared: bool) -> None:
        self.stream = stream
        self.shared = shared
        self.rows = 0

    def draw(self, text: str) -> None:
        """Replaces the text; a terminal of fewer than five rows has no row to spare, and shows nothing."""
        size = terminal_size(self.stream)
        text = f"\x1b[2m{text[: size.columns - 1]}\x1b[0m"
        if not self.shared:
            self.stream.write(f"\r\x1b[2K{text}")
            self.rows = size.lines
        elif size.lines >= 5:
            if size.lines != self.rows:
                # Index and cursor-up make sure that the cursor is above the bottom row, in the same column.
                self.stream.write(f"\x1bD\x1b[A\x1b7\x1b[1;{size.lines - 1}r\x1b8")
                self.rows = size.lines
            self.stream.write(f"\x1b7\x1b[{self.rows};1H\x1b[2K{text}\x1b8")
        self.stream.flush()

    def close(self) -> None:
        """Clears the line and makes the whole screen scroll again."""
        if self.rows:
            self.stream.write(f"\x1b7\x1b[r\x1b[{self.rows};1H\x1b[2K\x1b8" if self.shared else "\r\x1b[2K")
            self.stream.flush()
            self.rows = 0


def terminal_size(stream: TextIO) -> os.terminal_size:
    """The size of a terminal; 80 by 24 if it does not know its own, as some that programs open do not."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return os.terminal_size((80, 24))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def wrapped(text: str, columns: int) -> str:
    """Text with line breaks between words; a line that continues another one is indented by two spaces."""
    lines = text.splitlines() or [""]
    fill = partial(textwrap.wrap, width=columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(fill(line, replace_whitespace=False)) if len(line) > columns else line for line in lines)


def ends_at_edge(text: str, stream: TextIO) -> bool:
    """Whether the last line of a text ends in the last column of the terminal."""
    from rich.cells import cell_len

    columns, column = terminal_size(stream).columns, 0
    for character in printable(text.rpartition("\n")[2]):
        width = cell_len(character)
        column = width if column + width > columns else column + width
    return column == columns
