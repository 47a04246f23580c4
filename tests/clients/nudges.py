"""Fields that are added to the requests of clients so that a small model gets on with its task.

Such a model calls functions again and again, and does not find the end of a text.  After ``MOST_RESULTS`` results of
functions a ``logit_bias`` keeps it from beginning another call, so that it answers.  For clients that set no limit, texts end
early, and an answer has one call.
"""

from collections.abc import Mapping
from typing import Any

from tests.clients.recorder import Exchange

MOST_RESULTS = 2
"""After how many results of functions in one turn the model is made to answer."""

CALLS = ("<", "\n<", " <", "</", "<t")
"""The beginnings of a call."""

NAMES = ("w", "we", "wea", "weather")
"""The beginnings of the name of the function ``weather``."""

CLOSING = ('"', '"}', '"]', "]", "]}", "}", "}]", "}]}")
"""What ends texts, lists and objects in JSON."""

ANSWER = "StructuredOutput"
"""The tool with which Claude Code takes an answer that has a schema."""

MORE, END, NEVER = 10, 9, -100
"""What makes a token of a text more probable, one that ends an answer, and what rules a token out."""


def results(body: Mapping[str, Any]) -> int:
    """The number of results of functions since the user has said something, in the words of each interface."""
    messages = body.get("messages") or body.get("input")
    n = 0
    for item in messages if isinstance(messages, list) else []:
        content = item.get("content")
        kinds = [block.get("type") for block in content] if isinstance(content, list) else []
        found = kinds.count("tool_result") + (item.get("role") == "tool" or item.get("type") == "function_call_output")
        n = 0 if item.get("role") == "user" and not found else n + found
    return n


def nudge(exchange: Exchange, end: int | None) -> dict[str, Any]:
    """The fields that are added to a request, or replace its own; end: the token that ends an answer, None if texts need not
    be short."""
    body, n_results = exchange.body, results(exchange.body)
    bias: list[list[Any]] = []
    if n_results >= MOST_RESULTS:
        choice = body.get("tool_choice")
        forced = choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any")
        bias += [[text, NEVER] for text in (NAMES if forced else CALLS)]
    if end is None:
        return {"logit_bias": bias} if bias else {}
    bias.append([end, END])
    if exchange.route != "messages":
        bias += [[text, MORE] for text in CLOSING]
        return {"parallel_tool_calls": False, "logit_bias": bias}
    own = _choice(body, n_results)
    if own["type"] == "any":
        bias += [[text, MORE] for text in CLOSING]
    return {"tool_choice": own, "logit_bias": [] if own["type"] == "tool" else bias}


def _choice(body: Mapping[str, Any], n_results: int) -> dict[str, Any]:
    """What Claude Code's request should call: any tool at first; then the one that takes the answer, if there is one."""
    choice: dict[str, Any] = {"type": "auto", "disable_parallel_tool_use": True}
    names = [tool["name"] for tool in body.get("tools") or ()]
    if n_results >= MOST_RESULTS and ANSWER in names:
        return choice | {"type": "tool", "name": ANSWER}
    return choice | {"type": "any"} if names and not n_results else choice
