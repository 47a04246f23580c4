"""Which functions an answer may or must call, and the grammar that holds it to them."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.grammar.messages import CRASH, SLOW
from engine.grammar.tokens import tokens_of
from engine.text.tokenizer import Tokenizer
from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.schemas import pruned
from engine.tools.calls.select import calls_source
from engine.tools.prompt import Prompt, control_token

Tool = Mapping[str, Any]

SEARCH_SECONDS = 5.0
"""The time in which it is found out which of several functions cannot be enforced."""


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
        The field or argument that says what to call, as errors name it.
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

    @property
    def functions(self) -> list[Function]:
        """The functions that may be called, as grammars need them."""
        given = [tool["function"] for tool in self.callable]
        return [Function(each["name"], pruned(each["parameters"]), each["name"] in self.strict) for each in given]


def beside_calls(form: Grammar | None, choice: ToolChoice, begun: bool) -> tuple[Grammar | None, str]:
    """How an answer that has a ``form`` may be calls instead: the grammar that holds the whole answer, or None and the
    expression of the text, for :func:`calls_grammar`; begun: the beginning of the answer is given.

    A forced call is never ruled out here, so that :func:`calls_grammar` refuses what cannot be forced.
    """
    if form is None or choice.forced:
        return None, ""
    return (None, form.expression) if choice.names and not begun else (form, "")


def calls_grammar(choice: ToolChoice, tokenizer: Tokenizer, prompt: Prompt, text: str = "") -> Grammar | None:
    """The grammar that holds an answer to a choice; None if it may be any text.  It is tried in another process, which takes
    a while.

    text: the expression of the text that the answer is if it has no calls; by default it is any text.

    Raises UsageError if a schema cannot be followed, or if an answer that has begun has no place for calls.
    """
    if not choice.ruled and not text:
        return None
    if prompt.headed:
        problem = (
            "cannot be enforced in an answer of this model that has begun: leave out its beginning, or do not force"
        )
        raise UsageError(f"{choice.param} {problem} calls, make functions strict or forbid parallel calls.")
    functions = choice.functions

    def made(functions: Sequence[Function]) -> Grammar:
        tokens = tokens_of(tokenizer)
        source = calls_source(
            prompt.format,
            functions,
            token=lambda tag: control_token(tokenizer, tag),
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

    together = "the functions cannot be enforced together"
    try:
        return made(functions)
    except Unenforceable:
        pass
    except UsageError as error:
        if any(costly in str(error) for costly in (SLOW, CRASH)):  # to try each would take as long again
            raise UsageError(f"{together}: {error}") from None
    # Which one is it?  A function that is not strict then takes any object.
    deadline = time.monotonic() + SEARCH_SECONDS
    for i, function in enumerate(functions):
        if time.monotonic() > deadline:
            raise UsageError(f"{together}: {SLOW}.")
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
        raise UsageError(f"{together}: {error}") from None


def _refused(function: Function, error: Exception) -> UsageError:
    if isinstance(error, Unenforceable):
        remedy = "change it, or leave strict out" if function.strict else "change it"
        return UsageError(f"the function {function.name[:64]!r} {error}: {remedy}.")
    return UsageError(f"the function {function.name[:64]!r} cannot be enforced: {error}")
