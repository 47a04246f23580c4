"""Which functions a model may call, and which it must call: ``tools``, ``tool_choice`` and their like."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.grammar.messages import CRASH, SLOW
from engine.grammar.tokens import tokens_of
from engine.llm import LLM
from engine.serving.aside import compiling
from engine.serving.conversation import Prompt, control_token, read_tools
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.schemas import pruned
from engine.tools.calls.select import calls_source

Tool = Mapping[str, Any]

SEARCH_SECONDS = 5.0
"""The time in which it is found out which of the functions of a request cannot be enforced."""


class ToolChoice(NamedTuple):
    """The functions of a request.

    Attributes
    ----------
    tools : sequence of mapping
        Those that the prompt describes, in OpenAI's form.
    names : collection of str
        Those that may be called.
    forced : bool
        Whether the answer consists of calls.
    named : bool
        Whether the request names the one function to call.
    several : bool
        Whether an answer may have more than one call.
    strict : collection of str
        Those whose calls must follow their schema.
    param : str
        The field that says what to call, as errors name it.
    """

    tools: Sequence[Tool]
    names: Collection[str]
    forced: bool = False
    named: bool = False
    several: bool = True
    strict: Collection[str] = ()
    param: str = "tool_choice"

    @property
    def callable(self) -> list[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if tool["function"]["name"] in self.names]

    @property
    def ruled(self) -> bool:
        """Whether a grammar must hold the answer to the choice."""
        return bool(self.names) and (self.forced or not self.several or any(n in self.strict for n in self.names))


def chosen(
    fields: Fields, tools: Sequence[Tool], names: Sequence[str], strict: Collection[str], *, param: str, **choice: bool
) -> ToolChoice:
    """A choice of ``names`` among ``tools``.  Raises Refusal if one of them is no tool, or a call is forced without tools."""
    offered = [tool["function"]["name"] for tool in tools]
    if choice.get("forced") and not offered:
        raise fields.refuse(param, "forces a call, and there are no functions to call: give tools")
    for name in names:
        if name not in offered:
            raise fields.refuse(param, f"names the function {name[:64]!r}, which is not one of the tools")
    return ToolChoice(tools, names, strict=strict, param=fields.name(param), **choice)


def read_tool_choice(fields: Fields, limits: Limits) -> ToolChoice:
    """The functions of an OpenAI request, and what ``tool_choice`` and ``parallel_tool_calls`` say about them."""
    tools = read_tools(fields, limits)
    strict = []
    for tool in fields.objects("tools", limits.tools, "--tools"):
        function = tool.object("function") or tool
        if tool.get("type") == "function" and function.flag("strict", False):
            strict.append(function.required_text("name"))
    several = fields.flag("parallel_tool_calls", True)
    every = [tool["function"]["name"] for tool in tools]
    given = fields.get("tool_choice")
    names, forced, named = every, False, False
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise fields.refuse("tool_choice", f"must be none, auto, required or an object, not {given[:40]!r}")
        if given == "none":
            return ToolChoice([], [])
        forced = given == "required"
    elif given is not None:
        choice = Fields(given, "tool_choice")
        kind = choice.choice("type", ("function", "allowed_tools"))
        if kind is None:
            raise choice.refuse("type", "is missing: give function or allowed_tools")
        if kind == "function":
            names, forced, named = [(choice.object("function") or choice).required_text("name")], True, True
        else:
            allowed = choice.object("allowed_tools") or choice
            forced = allowed.choice("mode", ("auto", "required"), "auto") == "required"
            names = []
            for tool in allowed.objects("tools", limits.tools, "--tools"):
                names.append((tool.object("function") or tool).required_text("name"))
            if not names:
                raise allowed.refuse("tools", "is empty: name at least one function")
    several = several and not named
    return chosen(fields, tools, names, strict, param="tool_choice", forced=forced, named=named, several=several)


def beside_calls(form: Grammar | None, choice: ToolChoice, llm: LLM, begun: bool) -> tuple[Grammar | None, str]:
    """How an answer that has a ``form`` may be calls instead: the grammar that holds the whole answer, or None and the
    expression of the text, for :func:`calls_grammar`; begun: the client has written the beginning of the answer.

    A forced call is never ruled out here, so that :func:`calls_grammar` refuses what cannot be forced.
    """
    if form is None or choice.forced:
        return None, ""
    # A grammar of several rules is not a part of another one, so it holds the whole answer.
    free = choice.names and not begun and llm.chat_template is not None
    return (None, form.expression) if free and form.expression else (form, "")


async def calls_grammar(choice: ToolChoice, llm: LLM, prompt: Prompt, limits: Limits, text: str = "") -> Grammar | None:
    """The grammar that holds an answer to the choice of a request; None if it may be any text.

    text: the expression of the text that the answer is if it has no calls; by default it is any text.

    Raises Refusal if a schema cannot be followed, or the client has begun an answer that has no place for calls.
    """
    if not choice.ruled and not text:
        return None
    if prompt.headed:
        problem = (
            "cannot be enforced in an answer of this model that has begun: leave out its beginning, or do not force"
        )
        raise Refusal(
            f"{choice.param} {problem} calls, make functions strict or forbid parallel calls.", param=choice.param
        )
    # A grammar is tried in another process, which takes a while.
    return await compiling(lambda: _grammar(choice, llm, prompt, limits, text))


def _grammar(choice: ToolChoice, llm: LLM, prompt: Prompt, limits: Limits, text: str) -> Grammar:
    given = [tool["function"] for tool in choice.callable]
    functions = [Function(each["name"], pruned(each["parameters"]), each["name"] in choice.strict) for each in given]
    size = sum(len(json.dumps(function.given)) for function in functions)
    if size > limits.schema_bytes:
        problem = f"tools have schemas of {size} bytes, and this server accepts {limits.schema_bytes} (--schema-bytes)"
        raise Refusal(f"{problem} if it has to enforce them.", param="tools")

    def made(functions: Sequence[Function]) -> Grammar:
        tokens = tokens_of(llm.tokenizer)
        source = calls_source(
            prompt.format,
            functions,
            token=lambda tag: control_token(llm, tag),
            ends=tokens.ends,
            special=tokens.special,
            forced=choice.forced,
            several=choice.several,
            thought=prompt.thought,
            text=text,
        )
        grammar = Grammar.lark(source)
        tokens.check(grammar)
        return grammar

    together = "the functions of this request cannot be enforced together"
    try:
        return made(functions)
    except Unenforceable:
        pass
    except UsageError as error:
        if any(costly in str(error) for costly in (SLOW, CRASH)):  # to try each would take as long again
            raise Refusal(f"{together}: {error}", param="tools") from None
    # Which one is it?  A function that is not strict then takes any object.
    deadline = time.monotonic() + SEARCH_SECONDS
    for i, function in enumerate(functions):
        if time.monotonic() > deadline:
            raise Refusal(f"{together}: {SLOW}.", param="tools")
        for tried in (function, replace(function, given={"type": "object"})):
            try:
                made([tried])
            except (UsageError, Unenforceable) as error:
                if function.strict or tried is not function:
                    raise _refused(function, error) from None
            else:
                functions[i] = tried
                break
    try:
        return made(functions)
    except (UsageError, Unenforceable) as error:
        raise Refusal(f"{together}: {error}", param="tools") from None


def _refused(function: Function, error: Exception) -> Refusal:
    if isinstance(error, Unenforceable):
        remedy = "change it, or leave strict out" if function.strict else "change it"
        return Refusal(f"the function {function.name[:64]!r} {error}: {remedy}.", param="tools")
    return Refusal(f"the function {function.name[:64]!r} cannot be enforced: {error}", param="tools")
