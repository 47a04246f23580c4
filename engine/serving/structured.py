"""Structured output: from ``response_format`` to the grammar that an answer follows."""

import asyncio
import json
from collections.abc import Callable, Iterator
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

MOST_CHOICES = 1024
"""The most texts of which an answer may be one."""

_TRIALS = ThreadPoolExecutor(1, "grammar")
"""Where grammars are tried, one after another.  Those that take long delay other grammars, and nothing else."""


async def read_form(fields: Fields, llm: LLM, limits: Limits, form: tuple[Fields, str] | None = None) -> Grammar | None:
    """The grammar of an answer; None if it may be any text.

    fields: the body, which may describe the form in vLLM's or llama-server's words; form: the object, and its field, that
    describe it in the words of the interface.
    """
    found = list(_described(fields))
    grammar = None if form is None else await read_grammar(form[0], llm, limits, form[1])
    names = [*([form[0].name(form[1])] if form and grammar else []), *(where.name(name) for where, name, *_ in found)]
    if len(names) > 1:
        raise Refusal(f"{names[0]} and {names[1]} both describe the answer: leave one of them out.", param=names[1])
    for where, name, make, value in found:
        grammar = await grammar_of(where, name, make, value, llm, limits)
    return grammar


def _described(fields: Fields) -> Iterator[tuple[Fields, str, Callable[[Any], Grammar], Any]]:
    """The fields that describe an answer in vLLM's and llama-server's words: each with what makes a grammar of its value."""
    given = fields.object("structured_outputs") or Fields({}, "structured_outputs")
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if given.get(name):
            raise given.refuse(name, "is not supported by this server: leave it out")
    if given.flag("json_object", False):
        yield given, "json_object", Grammar.json_schema, {"type": "object"}
    given.ignore("disable_any_whitespace", "disable_fallback")
    names = {
        **{name: (fields, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")},
        "schema": (fields, "json_schema"),
        "gbnf": (fields, "grammar"),
    }
    own = {name: (given, name) for name in ("json", "regex", "choice", "grammar")}
    for kind, (where, name) in (*names.items(), *own.items()):
        value = where.get(name)
        if value is None or value == "":
            continue
        if kind in ("json", "schema"):
            yield where, name, Grammar.json_schema, value
        elif kind == "choice":
            choices = where.items(name, MOST_CHOICES, f"at most {MOST_CHOICES}")
            if not choices or not all(isinstance(choice, str) and choice for choice in choices):
                raise where.refuse(name, "must be a list of texts that are not empty")
            yield where, name, _choice, choices
        else:
            yield where, name, Grammar.regex if kind == "regex" else _language, where.text(name)


def _choice(choices: list[str]) -> Grammar:
    return Grammar.lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _language(text: str) -> Grammar:
    """The grammar that a text in GBNF or in Lark describes: only GBNF has ``::=``."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)


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
