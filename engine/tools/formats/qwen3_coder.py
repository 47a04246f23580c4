"""Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3 Nano and Step 3.5: parameters between tags, their values as plain text."""

import re
from collections.abc import Collection
from functools import partial

from engine.tools.formats.members import Members
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import SYMBOLS, Broken, Reader, Steps
from engine.tools.formats.tools import json_of

_TEXT = re.compile(rf"[^{SYMBOLS}]+")
_NAME = re.compile(rf"[^<>\s{SYMBOLS}]+")

# What to look for: outside of brackets, within them, in a string, and after a backslash.
_OUTSIDE, _WITHIN, _STRING, _ESCAPED = map(re.compile, (r"\S", r'["{}\[\]]', r'["\\]', r"(?s:.)"))


class Qwen3Coder(FormatParser):
    """Thoughts, text, and calls::

        <think>
        THOUGHT
        </think>

        TEXT
        <tool_call>
        <function=NAME>
        <parameter=KEY>
        VALUE
        </parameter>
        </function>
        </tool_call>

    A newline before and one after a value belong to the tags. Values are typed by the schema of the function
    (:func:`engine.tools.formats.tools.json_of`); those that can only be strings are passed on as they arrive.

    Nothing in a value is escaped. Its end is therefore the first ``</parameter>`` that another parameter, the end of the call
    or the end of the answer follows, and tags of a call within the value are counted: a call that has begun in it must end
    in it, unless the value is an array or an object of JSON, which is complete without. Models forget tags: ``<tool_call>``
    may be missing; ``</parameter>`` may be missing at the end of a call, and before a line that is the tag of another
    parameter of the function.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = ("<tool_call>", "<function=")
    CLOSES = ("</tool_call>",)
    TAGS = ("</function>", "<parameter=", "</parameter>")

    def call(self, symbol: str) -> Steps[None]:
        tag = self.input.symbol
        if symbol == tag("<tool_call>"):
            yield from self.input.blanks()
            yield from self.input.accept(tag("<function="))
        name = yield from self._name()
        if not self.tools.has(name):
            raise Broken
        yield from self.input.blanks()
        if (yield from self.input.peek()) not in (tag("<parameter="), tag("</function>")):
            raise Broken
        self.begin(name)
        members = Members(self.arguments)
        missing = set(self.tools.parameters(name))
        key = ""
        while True:
            if not key:
                yield from self.input.blanks()
                following = yield from self.input.accept(tag("<parameter=") + tag("</function>") + tag("</tool_call>"))
                if following != tag("<parameter="):
                    break
                key = yield from self._name()
            missing.discard(key)
            types = self.tools.types(name, key)
            members.begin(key, None if types <= {"string"} else partial(json_of, types=types))
            ended, key = yield from _Value(self.input, members).read(missing)
            members.end()
            if ended:
                break
        members.close()
        yield from self.end()

    def _name(self) -> Steps[str]:
        """Reads a name and the end of its tag."""
        name = yield from self.input.run(_NAME)
        yield from self.input.accept(">")
        return name


class _Value:
    """A value, which is read into ``members``."""

    def __init__(self, reader: Reader, members: Members) -> None:
        self._input = reader
        self._members = members
        self._begun = False
        self._newline = ""  # the newline that ends what was read: it belongs to a tag if one follows
        self._line_begins = False
        self._brackets = _Brackets()

    def read(self, keys: Collection[str]) -> Steps[tuple[bool, str]]:
        """Reads the value and the tag after it; a parameter of ``keys`` may follow without one.

        Returns whether the call has ended, and the key of the next parameter if its tag has been read.
        """
        tag, calls = self._input.symbol, 0
        while found := (yield from self._input.peek()):
            if text := self._input.match(_TEXT):
                self._add(text)
                continue
            seen = self._input.take(1)
            if self._brackets.closed:
                calls = 0
            if found == tag("<function="):
                calls += 1
            elif found == tag("<parameter="):
                key = yield from self._input.run(_NAME)
                seen += key
                if key in keys and self._line_begins and not calls and (yield from self._input.peek()) == ">":
                    seen += self._input.take(1)
                    if (yield from self._input.peek()) == "\n":
                        return False, key
            elif found == tag("</function>"):
                seen += yield from self._input.blanks()
                if not calls and (yield from self._input.peek()) in ("", tag("</tool_call>")):
                    return True, ""
                calls = max(0, calls - 1)
            elif found == tag("</parameter>"):
                seen += yield from self._input.blanks()
                following = yield from self._input.peek()
                if not calls and following in ("", tag("<parameter="), tag("</function>"), tag("</tool_call>")):
                    return False, ""
                # A call within the value may have begun without an end: at the end of the answer, the tags count anyway.
                while following in (tag("</function>"), tag("</tool_call>")):
                    seen += self._input.take(1) + (yield from self._input.blanks())
                    following = yield from self._input.peek()
                if following in ("", tag("<tool_call>")):
                    return True, ""
                calls = max(0, calls - seen.count(tag("</function>")))
            self._add(seen)
        return True, ""

    def _add(self, text: str) -> None:
        text = self._input.spelled(text)
        self._brackets.add(text)
        self._line_begins = text.endswith("\n")
        text = self._newline + text if self._begun else text.removeprefix("\n")
        self._begun = True
        self._newline = "\n" if text.endswith("\n") else ""
        self._members.add(text.removesuffix("\n"))


class _Brackets:
    """The brackets of a value that arrives in pieces.

    closed: whether the value is an array or an object of JSON, and complete, as far as brackets and quotes show.
    """

    def __init__(self) -> None:
        self.closed = False
        self._open = 0
        self._wanted: re.Pattern[str] | None = _OUTSIDE  # None: the value is something else

    def add(self, text: str) -> None:
        at = 0
        while self._wanted and (found := self._wanted.search(text, at)):
            mark, at = found[0], found.end()
            if self._wanted is _ESCAPED:
                self._wanted = _STRING
            elif self._wanted is _STRING:
                self._wanted = _WITHIN if mark == '"' else _ESCAPED
            elif mark == '"' and self._open:
                self._wanted = _STRING
            elif mark in "{[" and not self.closed:
                self._open += 1
                self._wanted = _WITHIN
            elif mark in "}]" and self._open:
                self._open -= 1
                self.closed = not self._open
                self._wanted = _WITHIN if self._open else _OUTSIDE
            else:
                self.closed, self._wanted = False, None
