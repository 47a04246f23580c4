"""Calls that are one JSON object with the name of the function and its arguments."""

import json
import re
from collections.abc import Iterable
from itertools import count

from engine.tools.formats.arguments import Arguments
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import SYMBOLS, Broken, Steps

_PLAIN = re.compile(rf'[^"\\\x00-\x1f{SYMBOLS}]+')
_ARGUMENTS = ("arguments", "parameters")


class JsonCalls(FormatParser):
    """A format whose calls are ``{"name": "NAME", "arguments": {…}}``.

    The members may stand in any order, ``parameters`` may stand for ``arguments``, and ``"type": "function"`` and an ``id``
    may be among them; the id is dropped. Arguments that come before the name wait for it.
    """

    def json_call(self, arguments_needed: bool) -> Steps[None]:
        """Reads one call; raises Broken if it is none, or has no arguments although they are needed."""
        name, begun = "", False
        early: list[str] | None = None
        yield from self.input.blanks()
        yield from self.input.accept("{")
        following = ","
        while following == ",":
            key = yield from self.key()
            if key == "name" and not name:
                name = yield from self._string()
                if not self.tools.has(name):
                    raise Broken
                if early is not None:
                    begun = True
                    self._whole(name, "".join(early))
            elif key in _ARGUMENTS and not begun and early is None:
                if (yield from self.input.peek()) != "{":
                    raise Broken
                if name:
                    begun = True
                    self.begin(name)
                else:
                    early = []
                yield from self.object(Arguments(self.input.spelled), early)
            elif key == "id":
                yield from self._string()
            elif key != "type" or (yield from self._string()) != "function":
                raise Broken
            yield from self.input.blanks()
            following = yield from self.input.accept(",}")
        if not begun:
            if not name or arguments_needed:
                raise Broken
            self._whole(name, "{}")
        yield from self.end()

    def json_calls(self) -> Steps[None]:
        """Reads one call, or a list of them; raises Broken if it is none."""
        yield from self.input.blanks()
        if (yield from self.input.peek()) != "[":
            yield from self.json_call(arguments_needed=False)
            return
        yield from self.items(self.json_call(arguments_needed=False) for _ in count())

    def items(self, calls: Iterable[Steps[None]]) -> Steps[None]:
        """Reads a list, each item by the next of ``calls``, which end with :meth:`end`; raises Broken if it is none."""
        yield from self.input.accept("[")
        for call in calls:
            yield from call
            if (yield from self.input.accept(",]")) == "]":
                break
        self.input.mark()
        yield from self._drop_closes()

    def _whole(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.arguments(arguments, "")

    def key(self) -> Steps[str]:
        """Reads a key and the colon after it, and the blanks around them."""
        yield from self.input.blanks()
        key = yield from self._string()
        yield from self.input.blanks()
        yield from self.input.accept(":")
        yield from self.input.blanks()
        return key

    def _string(self) -> Steps[str]:
        """Reads a JSON string and returns what it denotes."""
        parts = [(yield from self.input.accept('"'))]
        while len(parts) == 1 or parts[-1] != '"':
            parts.append((yield from self.input.run(_PLAIN)))
            parts.append((yield from self.input.accept('"\\')))
            if parts[-1] == "\\":
                parts[-1] += yield from self.input.accept('"\\/bfnrtu')
        try:
            return json.loads("".join(parts))
        except ValueError:
            raise Broken from None
