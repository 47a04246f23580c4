"""The arguments of a call whose values come one after another, as JSON."""

import json
from collections.abc import Callable


class Members:
    """Writes the members of an object. A string is written while it arrives, other values when they are complete.

    write: takes a piece of JSON and what would close the object after it.
    """

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._key = ""
        self._parts: list[str] = []
        self._json_of: Callable[[str], str] | None = None
        write("{", "}")

    def begin(self, key: str, json_of: Callable[[str], str] | None = None) -> None:
        """A member begins. json_of: makes JSON of the text of its value; None: it is a string."""
        self._key += json.dumps(key, ensure_ascii=False) + ": "
        self._json_of = json_of
        if json_of is None:
            self._write(self._key + '"', '"}')

    def add(self, text: str) -> None:
        """``text`` is part of the value."""
        if self._json_of is not None:
            self._parts.append(text)
        elif text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1], '"}')

    def end(self) -> None:
        """The value is complete."""
        if self._json_of is None:
            self._write('"', "}")
        else:
            self._write(self._key + self._json_of("".join(self._parts)), "}")
            self._parts.clear()
        self._key = ", "

    def close(self) -> None:
        """No member follows."""
        self._write("}", "")
