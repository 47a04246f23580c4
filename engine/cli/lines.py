"""Reading messages line by line, from a pipe or a file."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from engine.cli.report import Report

QUOTES = '"""'


class Reader(Protocol):
    """Where messages come from. ``interactive`` is True if a person can be asked."""

    interactive: bool

    def read(self, default: str = "") -> str | None:
        """One message, None at the end of the input. A person can edit ``default``. Raises KeyboardInterrupt if Ctrl-C ends
        the input."""

    def confirm(self, question: str) -> bool:
        """Whether a person answers yes; False if nobody can be asked."""

    def away(self) -> AbstractContextManager[None]:
        """A context in which nothing is read: what is typed meanwhile is not shown, and waits."""


class Lines:
    """Reads stdin by lines: a backslash at the end continues a message, and triple quotes enclose one of many lines."""

    interactive = False

    def __init__(self, report: Report) -> None:
        self.report = report

    def read(self, default: str = "") -> str | None:
        """One message; None at the end of stdin. There is nobody who could edit ``default``."""
        line = self._line("> ")
        if line is None:
            return None
        if line.startswith(QUOTES):
            return self._block(line)
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join([*lines, line or ""])

    def confirm(self, question: str) -> bool:
        """False: nobody can be asked."""
        return False

    @contextmanager
    def away(self) -> Iterator[None]:
        """Changes nothing."""
        yield

    def _block(self, text: str) -> str:
        while not text.rstrip().endswith(QUOTES) or len(text.rstrip()) < 2 * len(QUOTES):
            line = self._line(". ")
            if line is None:
                return text[len(QUOTES) :].strip("\n")
            text += "\n" + line
        return _inner(text)

    def _line(self, prompt: str) -> str | None:
        self.report.close()
        if sys.stdin.isatty():
            self.report.stream.write(prompt)  # stdout is the answer
            self.report.stream.flush()
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


def is_open(text: str) -> bool:
    """Whether a message begins with triple quotes that nothing closes yet."""
    return text.startswith(QUOTES) and text.count(QUOTES) == 1


def unquoted(text: str) -> str:
    """A message without the triple quotes around it, which may be on lines of their own; any other text as it is."""
    quoted = text.startswith(QUOTES) and text.rstrip().endswith(QUOTES) and text.count(QUOTES) == 2
    return _inner(text) if quoted else text


def _inner(text: str) -> str:
    return text.rstrip()[len(QUOTES) : -len(QUOTES)].strip("\n")
