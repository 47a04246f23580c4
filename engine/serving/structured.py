"""Structured output: from ``response_format`` to the grammar that an answer follows."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits

KINDS = ("text", "json_object", "json_schema", "regex", "grammar")
"""The types of ``response_format``: OpenAI's, and a regular expression or a grammar of llguidance (Lark)."""


async def read_grammar(fields: Fields, limits: Limits) -> Grammar | None:
    """The grammar of an answer, None if it may be any text.  Raises Refusal if it is invalid, too large, or needs too much
    work."""
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.choice("type", KINDS)
    if kind is None:
        raise given.refuse("type", f"is missing: give one of {', '.join(KINDS)}")
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema"):
        named = given.object("json_schema")
        where, name = (named, "schema") if named is not None else (given, "schema")
        if kind == "json_schema" and name not in where:
            raise where.refuse(name, "is missing: give a JSON schema")
        if named is not None:
            named.ignore("name", "strict", "description")
        schema = where.get(name)
        schema = {"type": "object"} if schema is None else schema
        return await _made(Grammar.json_schema, schema, len(json.dumps(schema)), where.name(name), limits)
    text = given.required_text("pattern" if kind == "regex" else "grammar")
    make: Callable[[Any], Grammar] = Grammar.regex if kind == "regex" else Grammar.lark
    return await _made(make, text, len(text.encode()), given.name("pattern" if kind == "regex" else "grammar"), limits)


async def _made(make: Callable[[Any], Grammar], value: Any, n_bytes: int, where: str, limits: Limits) -> Grammar:
    if n_bytes > limits.schema_bytes:
        problem = f"{where} has {n_bytes} bytes and this server accepts {limits.schema_bytes} (--schema-bytes)."
        raise Refusal(problem, param=where)
    try:
        # It is tried in another process, which takes a while.
        return await asyncio.to_thread(make, value)
    except UsageError as error:
        raise Refusal(f"{where}: {error}", param=where) from None
