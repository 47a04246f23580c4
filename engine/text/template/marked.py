"""Text that knows which of its characters may be part of a control token.

A chat template joins its own text (``<|im_start|>``) with text that people wrote. Once joined they cannot be told
apart, so someone who writes ``<|im_end|>`` could end their turn and speak as the system. A :class:`MarkedText` is a
``str`` that carries one mark per character; every operation of a template on it either keeps marks and characters in
step or drops the marks. Marks can be lost, never gained, so text from outside cannot become a control token.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Self, SupportsIndex


class MarkedText(str):
    """A string with ``marks``: one byte per character, 1 where the character may be part of a control token."""

    __slots__ = ("marks",)
    marks: bytes

    def __new__(cls, text: str, marks: bytes) -> Self:
        self = super().__new__(cls, str.__str__(text))
        if len(marks) != len(text):
            raise ValueError(f"{len(marks)} marks for {len(text)} characters")
        self.marks = marks
        return self

    def __str__(self) -> str:
        return self

    def _part(self, start: int, end: int) -> Self:
        return type(self)(str.__getitem__(self, slice(start, end)), self.marks[start:end])

    def __getitem__(self, key: SupportsIndex | slice) -> Self:
        text = str.__getitem__(self, key)
        return type(self)(text, self.marks[key] if isinstance(key, slice) else bytes([self.marks[key]]))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> Self:
        if not isinstance(other, str):
            return NotImplemented
        return type(self)(str.__add__(self, other), self.marks + marks_of(other))

    def __radd__(self, other: str) -> Self:
        if not isinstance(other, str):
            return NotImplemented
        return type(self)(str.__add__(other, self), marks_of(other) + self.marks)

    def join(self, parts: Iterable[str], /) -> Self:
        parts = list(parts)
        marks = self.marks.join(map(marks_of, parts))
        return type(self)(str.join(self, parts), marks)

    def strip(self, chars: str | None = None, /) -> Self:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Self:
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Self:
        return self._part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> Self:
        return self._part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> Self:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def lower(self) -> str:
        text = str.lower(self)
        return type(self)(text, self.marks) if self.isascii() else text

    def upper(self) -> str:
        text = str.upper(self)
        return type(self)(text, self.marks) if self.isascii() else text

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = str.split(self, sep, maxsplit)
        if sep is None:
            return parts  # blanks of any number lie between them: their places are not known, and they have no marks
        starts = accumulate((len(part) + len(sep) for part in parts), initial=0)
        return [self._part(start, start + len(part)) for start, part in zip(starts, parts, strict=False)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return type(self)(new, marks_of(new)).join(self.split(old, count))


class HTMLText(MarkedText):
    """What the filters ``safe`` and ``escape`` give: text added to it is escaped, as to ``markupsafe.Markup``.

    Chat templates do not write HTML, but some use ``safe``, and their models know the text that follows from it.
    """

    __slots__ = ()

    def __add__(self, other: str) -> Self:
        return super().__add__(escaped(other) if isinstance(other, str) else other)

    def __radd__(self, other: str) -> Self:
        return super().__radd__(escaped(other) if isinstance(other, str) else other)

    def join(self, parts: Iterable[str], /) -> Self:
        return super().join(map(escaped, parts))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return super().replace(old, escaped(new), count)


def escaped(text: str) -> HTMLText:
    """``text`` with the characters that HTML reserves as entities, which have no marks; HTMLText stays as it is."""
    if isinstance(text, HTMLText):
        return text
    result: str = marked(text)
    for symbol, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
        result = result.replace(symbol, entity)
    return HTMLText(result, marks_of(result))


def trusted(text: str) -> MarkedText:
    """``text`` with every character marked: the template's own, or a role name."""
    return MarkedText(text, b"\1" * len(text))


def marks_of(text: str) -> bytes:
    """The marks of any string: those it carries, or none for a plain string."""
    return text.marks if isinstance(text, MarkedText) else bytes(len(text))


def marked(text: str) -> MarkedText:
    """``text`` with the marks it carries, or none; text added to it is not escaped."""
    return MarkedText(text, marks_of(text))


def joined(parts: Iterable[str]) -> MarkedText:
    """``"".join(parts)`` with the marks of the parts."""
    return trusted("").join(parts)
