"""The arguments of a call, an object in JSON or in Gemma's dialect of it, turned into valid JSON while they arrive."""

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from engine.tools.formats.reader import SYMBOLS
from engine.tools.formats.tools import MAX_DIGITS, NUMBER

MAX_DEPTH = 50
"""Objects and arrays in one another; deeper ones are broken. Templates, which read them again, allow 64."""

_BLANKS = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(rf'[^"\\\x00-\x1f{SYMBOLS}]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_BARE_KEY = re.compile(rf'[^:,{{}}\[\]"\n{SYMBOLS}]+')
_BARE_VALUE = re.compile(rf'[^,{{}}\[\]"\n{SYMBOLS}]+')
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"{": "}", "[": "]"}


def object_of(text: str) -> dict[str, Any]:
    """The object that the complete arguments of a call stand for, such that it can be written as JSON again: half a character
    becomes "?", and a number beyond the range of a float the greatest one."""
    value = json.loads(text, parse_float=_finite)
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def whole_members(text: str) -> dict[str, Any]:
    """The members that are complete in the arguments of a call that was cut off."""
    decoder = json.JSONDecoder(parse_float=_finite)
    found: dict[str, Any] = {}
    at = text.find("{") + 1
    try:
        while at:
            key, at = decoder.raw_decode(text, _skipped(text, at))
            value, at = decoder.raw_decode(text, _skipped(text, at))
            found[key] = value
    except ValueError:
        pass
    return object_of(json.dumps(found))


def _skipped(text: str, at: int) -> int:
    """Where the next key or value begins."""
    while at < len(text) and text[at] in " \t\r\n,:":
        at += 1
    return at


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


class Arguments:
    """Reads one object, character by character, and says what can be delivered and what would close it.

    A comma, a key and a colon are held until their value begins, and a number until it is complete: what has been delivered
    can always be closed without adding a value.

    Three faults are mended, since models make them and the meaning is plain: a newline or another control character in a
    string is escaped, a backslash that begins no escape stands for itself, and a comma before a closing bracket is dropped.

    quote: for Gemma, the symbol that begins and ends a string, in which nothing is escaped. Keys may then be bare, and so may
    values: a bare value that is no number, ``true``, ``false`` or ``null`` is a string.

    Attributes
    ----------
    done : bool
        Whether the object is complete.
    broken : bool
        Whether a character cannot follow; it has not been read.
    """

    def __init__(self, spelled: Callable[[str], str], quote: str = "") -> None:
        self.done = False
        self.broken = False
        self._spelled = spelled
        self._quote = quote
        self._expects = "object"
        self._open: list[str] = []
        self._reading = self._between
        self._key = False  # of a string: whether it is a key
        self._escape = ""
        self._word: list[str] = []
        self._held: list[str] = []
        self._out: list[str] = []
        self._delivered = 0

    def feed(self, text: str, at: int) -> tuple[int, int, str]:
        """Reads ``text`` from ``at`` up to its end, the end of the object, or what breaks it.

        Returns where reading stopped, where the text ends whose JSON is delivered, and this JSON.
        """
        self._out, self._delivered = [], at
        while at < len(text) and not self.done and not self.broken:
            at = self._reading(text, at)
        return at, self._delivered, "".join(self._out)

    def end(self) -> str:
        """The text ends here: JSON that waited for more."""
        self._out = []
        if self._word and not self._key:
            self._end_word(0)
        return "".join(self._out)

    @property
    def closing(self) -> str:
        """What closes the object after what was delivered."""
        inside = self._reading in (self._string, self._escaped, self._quoted) and not self._key
        return '"' * inside + "".join(_CLOSES[each] for each in reversed(self._open))

    # --- what is delivered -------------------------------------------------------------------------------------

    def _deliver(self, json_text: str, at: int) -> None:
        self._out += [*self._held, json_text]
        self._held.clear()
        self._delivered = at

    def _put(self, json_text: str, at: int) -> None:
        """Delivers a piece of a string or blanks, unless they wait for a value."""
        if self._held:
            self._held.append(json_text)
        else:
            self._deliver(json_text, at)

    # --- the ways of reading: each reads something from text[at:] and returns where it stopped -----------------

    def _between(self, text: str, at: int) -> int:
        """Brackets, commas and colons, and the beginning of anything else."""
        if blanks := _BLANKS.match(text, at):
            self._put(blanks[0], blanks.end())
            return blanks.end()
        found, expects = text[at], self._expects
        value = expects in ("value", "first item", "item")
        key = expects in ("first key", "key")
        if found in ('"', self._quote) and (value or key):
            self._key = key
            self._reading = self._string if found == '"' else self._quoted
            if key:
                self._held.append('"')
            else:
                self._deliver('"', at + 1)
        elif (found == "{" and (value or expects == "object")) or (found == "[" and value):
            if len(self._open) == MAX_DEPTH:
                self.broken = True
                return at
            self._open.append(found)
            self._expects = "first key" if found == "{" else "first item"
            self._deliver(found, at + 1)
        elif found in ("}", "]") and self._can_close(found):
            self._open.pop()
            self._held.clear()
            self._expects = "next"
            self._deliver(found, at + 1)
            self.done = not self._open
        elif found == "," and expects == "next":
            self._held.append(",")
            self._expects = "key" if self._open[-1] == "{" else "item"
        elif found == ":" and expects == "colon":
            self._held.append(":")
            self._expects = "value"
        elif (value or (key and self._quote)) and self._pattern(key).match(text, at):
            self._key = key
            self._reading = self._in_word
            return at
        else:
            self.broken = True
            return at
        return at + 1

    def _can_close(self, bracket: str) -> bool:
        if not self._open or _CLOSES[self._open[-1]] != bracket:
            return False
        return self._expects in (("next", "first key", "key") if bracket == "}" else ("next", "first item", "item"))

    def _string(self, text: str, at: int) -> int:
        """A string of JSON."""
        if plain := _PLAIN.match(text, at):
            self._put(plain[0], plain.end())
            return plain.end()
        if text[at] == '"':
            return self._end_string(at + 1)
        if text[at] == "\\":
            self._escape = "\\"
            self._reading = self._escaped
        else:
            self._put(_escaped(self._spelled(text[at])), at + 1)
        return at + 1

    def _escaped(self, text: str, at: int) -> int:
        """The rest of what a backslash begins."""
        found, self._escape = text[at], self._escape + text[at]
        unicode = self._escape[1] == "u" and (len(self._escape) == 2 or found in "0123456789abcdefABCDEF")
        if unicode and len(self._escape) < 6:
            return at + 1
        self._reading = self._string
        if unicode or self._escape[1:] in tuple('"\\/bfnrt'):
            self._put(self._escape, at + 1)
            return at + 1
        self._put("\\" + self._escape[:-1], at)
        return at

    def _quoted(self, text: str, at: int) -> int:
        """A string between Gemma's quotes."""
        end = text.find(self._quote, at)
        if end == at:
            return self._end_string(at + 1)
        end = len(text) if end < 0 else end
        self._put(_escaped(self._spelled(text[at:end])), end)
        return end

    def _end_string(self, at: int) -> int:
        self._put('"', at)
        self._expects = "colon" if self._key else "next"
        self._reading = self._between
        return at

    def _in_word(self, text: str, at: int) -> int:
        """The rest of a number, a literal, or a bare key or value."""
        if more := self._pattern(self._key).match(text, at):
            self._word.append(more[0])
            return more.end()
        return self._end_word(at)

    def _end_word(self, at: int) -> int:
        word = "".join(self._word).rstrip()
        self._word = []
        self._reading = self._between
        if self._key:
            self._held.append(json.dumps(word, ensure_ascii=False))
            self._expects = "colon"
            return at
        literal = _LITERALS.get(word) or (_PYTHON_LITERALS.get(word) if self._quote else None)
        if literal or (len(word) <= MAX_DIGITS and NUMBER.fullmatch(word)):
            self._deliver(literal or word, at)
        elif self._quote:
            self._deliver(json.dumps(word, ensure_ascii=False), at)
        else:
            self.broken = True
        self._expects = "next"
        return at

    def _pattern(self, key: bool) -> re.Pattern[str]:
        """What a word consists of."""
        return _WORD if not self._quote else _BARE_KEY if key else _BARE_VALUE


def _escaped(text: str) -> str:
    """``text`` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
