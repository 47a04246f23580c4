"""Conversations that a chat template refuses, in an order of roles that it takes.

Many templates want one system message at the beginning, and messages of the user and the assistant by turns.  Clients send
others: two messages of the user in a row, a system message in the middle, an answer without text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, TypeVar

from engine.errors import TemplateError
from engine.text.template.budget import BudgetError

T = TypeVar("T")

Message = dict[str, Any]
"""A message as a chat template expects it."""


def rendered(render: Callable[[Sequence[Message]], T], messages: Sequence[Message]) -> T:
    """What ``render`` makes of a conversation as it is given, or of the first of its other forms that the template takes.

    Raises the TemplateError of the conversation as it is given if the template takes none, and BudgetError at once: another
    form would take as long.
    """
    tried: list[Sequence[Message]] = []
    refused: TemplateError | None = None
    for form in chain([messages], filter(None, forms(messages))):
        if form not in tried:
            tried.append(form)
            try:
                return render(form)
            except BudgetError:
                raise
            except TemplateError as error:
                refused = refused or error
    assert refused is not None
    raise refused


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other forms of a conversation, each of which changes more than the one before."""
    placed = _system_first(messages)
    yield placed
    joined = _joined(placed)
    yield joined
    yield _after_results(joined)
    spoken = _joined([_as_user(each) for each in joined])
    yield spoken
    yield _after_results(spoken)


def _as_user(message: Message) -> Message:
    return message | {"role": "user"} if message["role"] == "system" else message


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """System messages at the beginning as one, and later ones as messages of the user where they are."""
    first = list(takewhile(lambda each: each["role"] == "system", messages))
    text = "\n\n".join(each["content"] for each in first)
    own: list[Message] = [{"role": "system", "content": text}] if first else []
    return own + [_as_user(each) for each in messages[len(first) :]]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, results of tools excepted, and without answers that say nothing."""
    own: list[Message] = []
    for each in messages:
        if each["role"] == "assistant" and not each["content"] and not each.get("tool_calls"):
            continue
        if own and own[-1]["role"] == each["role"] != "tool":
            own[-1] = _both(own[-1], each)
        else:
            own.append(each)
    return own


def _both(message: Mapping[str, Any], more: Mapping[str, Any]) -> Message:
    """Two messages as one: texts with a blank line between them, and all calls."""
    both = {**more, **message}
    for name in ("content", "reasoning_content"):
        if name in both:
            both[name] = "\n\n".join(each[name] for each in (message, more) if each.get(name))
    if "tool_calls" in both:
        both["tool_calls"] = [*message.get("tool_calls", ()), *more.get("tool_calls", ())]
    return both


def _after_results(messages: Sequence[Message]) -> list[Message]:
    """With what the user says next to the result of a tool as part of this result: some templates want an answer first."""
    own: list[Message] = []
    for each in messages:
        if each["role"] == "user" and own and own[-1]["role"] == "tool":
            own[-1] = own[-1] | {"content": _both(own[-1], each)["content"]}
        else:
            own.append(each)
    return own
