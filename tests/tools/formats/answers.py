"""Reads an answer in every way in which it can arrive, and says what was found."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, merged
from engine.tools.formats.select import parser

TOKENS: dict[str, tuple[str, ...]] = {
    "plain": ("<think>", "<tool_call>"),
    "think": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'),
    "llama3": ("<|python_tag|>",),
    "deepseek4": ("<think>", "</think>", "｜DSML｜"),
    "gpt_oss": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "generic": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "granite": ("<think>", "</think>", "<|tool_call|>"),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "glm": (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "minimax": ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    "deepseek3": (
        *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "kimi": (
        *("<think>", "</think>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
    "hunyuan": ("<think>", "</think>", "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
}
"""The tags that are tokens in the vocabularies of the models."""

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "text": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "nothing": {"type": "null"},
    "tags": {"type": "array"},
    "options": {"type": "object"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]

Pieces = list[tuple[str, bool]]


@dataclass
class Answer:
    """What is in an answer; ``calls`` are names and values of arguments, ``raw`` the texts of the arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)


def pieces(text: str, tokens: Collection[str]) -> Pieces:
    """``text`` in its tokens and what lies between them."""
    if not tokens:
        return [(text, False)]
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return [(part, part in tokens) for part in parts if part]


def characters(arriving: Pieces) -> Pieces:
    """``arriving`` with its text in single characters."""
    return [(part, special) for text, special in arriving for part in ([text] if special else text)]


def events_of(name: str, arriving: Pieces, tokens: Collection[str], **options: Any) -> list[Event]:
    """The merged events of an answer that arrives in these pieces."""
    reader = parser(name, **{"tools": TOOLS} | options, single=set(tokens).__contains__)
    events = [event for piece, special in arriving for event in reader.feed(piece, special)]
    return merged([*events, *reader.finish()])


def collected(events: Iterable[Event]) -> Answer:
    """What ``events`` say. Their order is checked, and that arguments are an object."""
    answer, arguments = Answer(), None
    for event in events:
        if isinstance(event, Content):
            answer.content += event.text
        elif isinstance(event, Reasoning):
            answer.reasoning += event.text
        elif isinstance(event, CallBegin):
            assert arguments is None and event.index == len(answer.calls)
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            assert arguments is not None and event.index == len(answer.calls)
            arguments += event.text
        else:
            assert isinstance(event, CallEnd) and arguments is not None and event.index == len(answer.calls)
            answer.raw.append(arguments)
            answer.calls.append((name, json.loads(arguments)))
            assert isinstance(answer.calls[-1][1], dict)
            arguments = None
        assert arguments is None or isinstance(event, (CallBegin, CallArguments))
    assert arguments is None, "a call has no end"
    return answer


def read(name: str, text: str, tokens: Sequence[Collection[str]] = (), **options: Any) -> Answer:
    """What is found in ``text``, whole and in single characters, whether the tags are tokens or not."""
    ways: list[list[Event]] = []
    for single in tokens or (TOKENS[name], ()):
        whole = pieces(text, single)
        ways += [events_of(name, each, single, **options) for each in (whole, characters(whole))]
    assert all(way == ways[0] for way in ways), ways
    return collected(ways[0])
