"""Which functions a request offers, and which must be called: ``tools``, ``tool_choice`` and their like."""

import json
from collections.abc import Collection, Sequence

from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.llm import LLM
from engine.serving.aside import compiling
from engine.serving.conversation import read_tools
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.tools import choice as enforced
from engine.tools.choice import Tool, ToolChoice
from engine.tools.prompt import Prompt


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


async def calls_grammar(choice: ToolChoice, llm: LLM, prompt: Prompt, limits: Limits, text: str = "") -> Grammar | None:
    """The grammar that holds an answer to the choice of a request; None if it may be any text.

    text: the expression of the text that the answer is if it has no calls; by default it is any text.

    Raises Refusal if a schema cannot be followed, or the client has begun an answer that has no place for calls.
    """
    if not choice.ruled and not text:
        return None

    def made() -> Grammar | None:
        size = sum(len(json.dumps(function.given)) for function in choice.functions)
        if size > limits.schema_bytes and not prompt.headed:
            problem = (
                f"tools have schemas of {size} bytes, and this server accepts {limits.schema_bytes} (--schema-bytes)"
            )
            raise Refusal(f"{problem} if it has to enforce them.", param="tools")
        try:
            return enforced.calls_grammar(choice, llm.tokenizer, prompt, text)
        except UsageError as error:
            raise Refusal(str(error), param=choice.param if prompt.headed else "tools") from None

    return await compiling(made)
