"""A function of a request, as grammars of calls need it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[^\s<>{}\"'\\/=]+")


class Unenforceable(Exception):
    """A schema, or a part of it, that the format of a model cannot be held to; the text completes "the function NAME"."""


@dataclass(frozen=True)
class Function:
    """A function that a model may call.

    Attributes
    ----------
    name : str
        Its name.
    given : mapping
        The JSON schema of its arguments; empty: it has none.
    strict : bool
        Whether the arguments must follow every keyword of the schema. If not, they follow those that are supported.
    """

    name: str
    given: Mapping[str, Any]
    strict: bool = False

    def check(self) -> None:
        """Raise Unenforceable if the name, or the kind of the schema, suits no call."""
        if not _NAME.fullmatch(self.name):
            raise Unenforceable("has a name with blanks, quotes or brackets, which no grammar of calls permits")
        if self.given.get("type", "object") != "object":
            raise Unenforceable('has parameters that are no object: give a schema with "type": "object"')

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object.  Parameters that it does not name are not permitted, unless it
        names none or describes them."""
        schema: dict[str, Any] = {"type": "object", **self.given}
        if not self.given:
            schema["properties"] = {}
        if "properties" in schema and not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}:
            schema.setdefault("additionalProperties", False)
        return schema
