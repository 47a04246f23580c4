"""The prompt of a conversation and the grammar of its answer: what chat and Responses read in the same way."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.grammar.grammar import Grammar
from engine.llm import LLM
from engine.serving.aside import aside
from engine.serving.conversation import prompt_of, read_values
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.structured import read_form
from engine.serving.tool_choice import calls_grammar
from engine.tools.choice import ToolChoice, beside_calls
from engine.tools.prompt import Prompt
from engine.tools.turns import Message


async def read_prompt(
    fields: Fields,
    llm: LLM,
    limits: Limits,
    messages: Sequence[Message],
    choice: ToolChoice,
    *,
    effort: str | None,
    form: tuple[Fields, str],
    continue_final: bool = False,
) -> tuple[Prompt, Grammar | None]:
    """The prompt of a conversation, and the grammar of its answer, None if it may be any text.

    messages: the conversation; choice: the functions that may or must be called; effort: how much the model should think,
    "none": not at all; form: the object, and its field, that describe the form of the answer; continue_final: the last
    message is the beginning of the answer.
    """
    values = read_values(fields, effort)
    grammar = await read_form(fields, llm, limits, form)
    if grammar is not None:
        values.setdefault("enable_thinking", False)  # the answer follows the grammar from its first character
    grammar, text = beside_calls(grammar, choice, continue_final)
    given: dict[str, Any] = {"tools": choice.tools, "names": choice.names, "ruled": grammar is not None}
    given["at_least"] = llm.check_least
    make = partial(prompt_of, llm, messages, values=values, continue_final=continue_final, **given)
    prompt = await aside(fields.size, make)
    return prompt, await calls_grammar(choice, llm, prompt, limits, text) if grammar is None else grammar
