"""Calls whose parameters stand between tags, with values as plain text up to the closing tag."""

import re
from collections.abc import Callable
from functools import partial

from engine.tools.formats.members import Members
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import SYMBOLS, Broken, Steps
from engine.tools.formats.tools import json_of

Kind = Callable[[str], str] | None
"""What makes JSON of the text of a value; None: the value is a string."""

_TEXT = re.compile(rf"[^{SYMBOLS}]+")


class TaggedValues(FormatParser):
    """A format whose calls have parameters ``<KEY>VALUE</KEY>``, with any tags.

    Values are typed by the schema of the function (:func:`engine.tools.formats.tools.json_of`), unless a format says
    otherwise; those that can only be strings are passed on as they arrive. The first closing tag ends a value.
    """

    PARAMETER: str
    """The tag before a key."""
    VALUE_END: str
    """The tag after a value."""
    CALL_END: str
    """The tag after the last parameter."""

    def key(self) -> Steps[str]:
        """Reads a key, and what stands between it and its value; raises Broken if it is none."""
        raise NotImplementedError

    def parameter(self, name: str) -> Steps[tuple[str, Kind]]:
        """Reads what stands before a value of a call of ``name``: its key, and what the value is; raises Broken."""
        key = yield from self.key()
        types = self.tools.types(name, key)
        return key, None if types <= {"string"} else partial(json_of, types=types)

    def spelled(self, text: str) -> str:
        """A part of a value as it was meant; tags in it are symbols."""
        return self.input.spelled(text)

    def parameters(self, name: str) -> Steps[None]:
        """Reads the parameters of a call of ``name``, and its end; raises Broken if there is no such function."""
        begin, end = self.input.symbol(self.PARAMETER), self.input.symbol(self.CALL_END)
        if not self.tools.has(name):
            raise Broken
        yield from self.input.blanks()
        if (yield from self.input.peek()) not in (begin, end):
            raise Broken
        self.begin(name)
        members = Members(self.arguments)
        while (yield from self.input.accept(begin + end)) == begin:
            members.begin(*(yield from self.parameter(name)))
            yield from self._value(members)
            members.end()
            yield from self.input.blanks()
        members.close()
        yield from self.end()

    def _value(self, members: Members) -> Steps[None]:
        """Reads a value and its closing tag, which is missing if the answer ends here."""
        while found := (yield from self.input.peek()):
            text = self.input.match(_TEXT) or self.input.take(1)
            if found == self.input.symbol(self.VALUE_END):
                break
            members.add(self.spelled(text))
