"""Structured output: from ``response_format`` to the grammar that an answer follows."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.grammar.tokens import tokens_of
from engine.llm import LLM
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits

KINDS = ("text", "json_object", "json_schema", "regex", "grammar")
"""The types of ``response_format``: OpenAI's, and a regular expression or a grammar of llguidance (Lark)."""

_TRIALS = ThreadPoolExecutor(1, "grammar")
"""Where grammars are tried, one after another.  Those that take long delay other grammars, and nothing else."""


async def read_grammar(fields: Fields, llm: LLM, limits: Limits, field: str) -> Grammar | None:
    """The grammar of an answer, which ``field`` describes; None if the answer may be any text.  Raises Refusal if it is
    invalid, too large, or needs too much work."""
    given = fields.object(field)
    if given is None:
        return None
    kind = given.choice("type", KINDS)
    if kind is None:
        raise given.refuse("type", f"is missing: give one of {', '.join(KINDS)}")
    if kind == "text":
        return None
    make: Callable[[Any], Grammar]
    value: Any
    if kind in ("json_object", "json_schema"):
        where, name, make = given.object("json_schema") or given, "schema", Grammar.json_schema
        where.ignore("name", "strict", "description")
        if kind == "json_schema" and name not in where:
            raise where.refuse(name, "is missing: give a JSON schema")
        value = {"type": "object"} if name not in where else where.get(name)
    else:
        where, name, make = (given, "pattern", Grammar.regex) if kind == "regex" else (given, "grammar", Grammar.lark)
        value = where.required_text(name)
    return await grammar_of(where, name, make, value, llm, limits)


async def grammar_of(
    where: Fields, name: str, make: Callable[[Any], Grammar], value: Any, llm: LLM, limits: Limits
) -> Grammar:
    """The grammar that ``make`` makes of ``value``, which the field ``name`` stands for.  Raises Refusal if it is invalid,
    too large, or needs too much work."""

    def made() -> Grammar:
        size = len((value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "surrogatepass"))
        if size > limits.schema_bytes:
            raise where.refuse(name, f"has {size} bytes and this server accepts {limits.schema_bytes} (--schema-bytes)")
        grammar = make(value)
        tokens_of(llm.tokenizer).check(grammar)
        return grammar

    try:
        # It is tried in another process, which takes a while.
        return await asyncio.get_running_loop().run_in_executor(_TRIALS, made)
    except UsageError as error:
        raise Refusal(f"{where.name(name)}: {error}", param=where.name(name)) from None
