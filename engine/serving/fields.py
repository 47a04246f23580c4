"""The fields of a body: each is read with its type and range, and an error names it."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import Any, TypeVar, overload

from engine.checks import described
from engine.serving.errors import Refusal

T = TypeVar("T")

MOST_IGNORED = 16
"""The most fields of an object that nothing has read and that are named."""


class Fields:
    """A JSON object of a request.

    ``path`` is where the object is in the body ("" for the body itself), ``values`` what it holds, ``size`` the bytes of the
    body, for the object that is the whole body.  A field that is null counts as missing: clients send null for what they do
    not set.
    """

    def __init__(self, values: object, path: str = "", size: int = 0) -> None:
        if not isinstance(values, dict):
            raise Refusal(f"{path or 'the body'} must be an object, not {described(values)}.", param=path or None)
        self.values: dict[str, Any] = values
        self.path = path
        self.size = size
        self._read: set[str] = set()
        self._parts: list[Fields] = []

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def name(self, name: str) -> str:
        """Where a field is in the body, as errors name it."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, problem: str, code: str | None = None) -> Refusal:
        """The refusal of a field: ``raise fields.refuse("n", "must be ...")``."""
        where = self.name(name)
        return Refusal(f"{where} {problem}.", param=where, code=code)

    def get(self, name: str) -> Any:
        """The value of a field, None if it is missing."""
        value = self.values.get(name)
        if value is not None:
            self._read.add(name)
        return value

    def ignored(self) -> list[str]:
        """Some of the fields that nothing has read, and of those of the objects among the others, as errors name them."""
        unread = (name for name, value in self.values.items() if name not in self._read and value is not None)
        own = nsmallest(MOST_IGNORED, unread)
        return [self.name(name) for name in own] + [name for part in self._parts for name in part.ignored()]

    def ignore(self, *names: str) -> None:
        """Read fields that mean nothing here, whatever they hold."""
        self._read.update(names)

    @overload
    def text(self, name: str, default: str) -> str: ...
    @overload
    def text(self, name: str, default: None = None) -> str | None: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        return self._typed(name, str, "a text", default)

    def required(self, name: str) -> Any:
        """A field that must be given."""
        value = self.get(name)
        if value is None:
            raise self.refuse(name, "is missing", "missing_required_parameter")
        return value

    def required_text(self, name: str) -> str:
        """A text that must be given."""
        self.required(name)
        return self.text(name, "")

    @overload
    def flag(self, name: str, default: bool) -> bool: ...
    @overload
    def flag(self, name: str, default: None = None) -> bool | None: ...
    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """True or false."""
        return self._typed(name, bool, "true or false", default)

    @overload
    def whole(self, name: str, default: int, least: int = ..., most: int | None = ..., limit: str = ...) -> int: ...
    @overload
    def whole(
        self, name: str, default: None = None, least: int = ..., most: int | None = ..., limit: str = ...
    ) -> int | None: ...
    def whole(
        self, name: str, default: int | None = None, least: int = 0, most: int | None = None, limit: str = ""
    ) -> int | None:
        """A whole number from ``least`` to ``most``; ``limit``: the flag of the server that raises this, if one does."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            allowed = f"{least} or more" if most is None else f"{least} to {most}"
            raised = f" ({limit} raises the limit of this server)" if limit and most is not None else ""
            raise self.refuse(name, f"must be a whole number, {allowed}, not {described(value)}{raised}")
        return value

    @overload
    def number(self, name: str, default: float, least: float = ..., most: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None = None, least: float = ..., most: float = ...) -> float | None: ...
    def number(
        self, name: str, default: float | None = None, least: float = -math.inf, most: float = math.inf
    ) -> float | None:
        """A number from ``least`` to ``most``."""
        value = self.get(name)
        if value is None:
            return default
        wrong = isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most
        if wrong or not -sys.float_info.max <= value <= sys.float_info.max:
            allowed = (
                ""
                if math.isinf(least)
                else f" of at least {least:g}"
                if math.isinf(most)
                else f", {least:g} to {most:g}"
            )
            raise self.refuse(name, f"must be a number{allowed}, not {described(value)}")
        return float(value)

    def choice(self, name: str, words: Sequence[str], default: str | None = None) -> str | None:
        """One of a few words."""
        value = self.text(name)
        if value is None:
            return default
        if value not in words:
            raise self.refuse(name, f"must be {', '.join(words[:-1])} or {words[-1]}, not {described(value)}")
        return value

    def items(self, name: str, most: int, limit: str) -> list[Any]:
        """A list of at most ``most`` entries, empty if it is missing; ``limit``: the flag of the server that raises this."""
        values = self._typed(name, list, "a list", [])
        if len(values) > most:
            raise self.refuse(name, f"has {len(values)} entries and this server accepts {most} ({limit})")
        return values

    def texts(self, name: str, most: int, limit: str) -> list[str]:
        """A text or a list of texts, as a list."""
        value = self.get(name)
        if isinstance(value, str):
            return [value]
        values = self.items(name, most, limit)
        for i, each in enumerate(values):
            if not isinstance(each, str):
                raise self.refuse(f"{name}[{i}]", f"must be a text, not {described(each)}")
        return values

    def object(self, name: str) -> "Fields | None":
        """An object."""
        value = self.get(name)
        if value is None:
            return None
        part = Fields(value, self.name(name))
        self._parts.append(part)
        return part

    def objects(self, name: str, most: int, limit: str) -> Iterator["Fields"]:
        """A list of objects."""
        for i, value in enumerate(self.items(name, most, limit)):
            yield Fields(value, f"{self.name(name)}[{i}]")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object with any fields; empty if it is missing."""
        return self._typed(name, dict, "an object", {})

    def _typed(self, name: str, kind: type[T], words: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.refuse(name, f"must be {words}, not {described(value)}")
        return value


def is_token_id(value: object, n_vocab: int) -> bool:
    """Whether a value of a body is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n_vocab
