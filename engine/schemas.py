"""The schema of an answer: JSON that becomes a value, or an object of a class such as pydantic's."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from engine.checks import described
from engine.errors import UsageError
from engine.grammar.grammar import Grammar


class SchemaModel(Protocol):
    """A class that describes its objects by a JSON schema, such as a subclass of ``pydantic.BaseModel``."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema."""


Schema = Mapping[str, Any] | SchemaModel
"""What an answer in JSON follows: a JSON schema, or a class with ``model_json_schema``."""


def grammar_of(schema: object) -> Grammar:
    """The grammar of the answers that follow a schema.  Raises UsageError."""
    describe = getattr(schema, "model_json_schema", None)
    if callable(describe):
        return Grammar.json_schema(_closed(describe()))
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"schema must be a JSON schema as a dict, or a class with model_json_schema(), not {described(schema)}."
        )
    return Grammar.json_schema(schema)


def _closed(schema: Any) -> Any:
    """The schema of a class without properties that the class does not name, unless it says that it takes any."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    own = {name: _closed(each) for name, each in schema.items()}
    if own.get("type") == "object" and isinstance(own.get("properties"), Mapping):
        own.setdefault("additionalProperties", False)
    return own


def parsed(schema: Schema, text: str) -> Any:
    """What a text that follows a schema means: an object of the class if it is one that reads JSON, else a value of Python.
    Raises ValueError if the text does not follow it."""
    read = getattr(schema, "model_validate_json", None)
    return read(text) if callable(read) else json.loads(text)
