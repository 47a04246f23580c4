"""Calls of functions in an answer, and the answer without them."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.text.shown import Shown
from engine.text.tokenizer import Tokenizer
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from engine.tools.formats.parser import Parser


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that an answer asks for.

    Attributes
    ----------
    id : str
        Identifies the call. The message with its result names it as ``tool_call_id``.
    name : str
        The function.
    arguments : dict
        The arguments by their names.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls`` in a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}


def identity(prompt_ids: Sequence[int], seed: int) -> str:
    """A digest that the ids of the calls of one answer contain: the same for the same prompt and seed, another in the next
    turn."""
    prompt = np.array(prompt_ids, "<i4")
    return hashlib.blake2b(prompt.tobytes(), digest_size=8, key=seed.to_bytes(8, "little")).hexdigest()


@dataclass
class Divided:
    """An answer: its text without thoughts and calls, its thoughts, and its calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def divided(
    ids: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str], parser: Parser, *, cut: bool, identity: str
) -> Divided:
    """The parts of an answer.

    ids: its tokens; stop: the texts that end it; cut: whether it was cut off, as by a limit of tokens; identity: what the ids
    of calls begin with.
    """
    decoder = Shown(tokenizer, stop, control=True)
    pieces = [piece for id in ids for piece in decoder.feed(id)] + decoder.flush()
    events = [
        event
        for text, special in pieces
        if not special or text in parser.tags or not _is_control(tokenizer, text)
        for event in parser.feed(text, special)
    ]
    found = Divided()
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    # Text after a call begins on a new line if there was text before it.
    contents, thoughts = [""], [""]
    for event in [*events, *parser.finish(cut=cut)]:
        match event:
            case Content(text):
                contents[-1] += text
            case Reasoning(text):
                thoughts[-1] += text
            case CallBegin(index, name):
                names[index], arguments[index] = name, []
                contents.append("")
                thoughts.append("")
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index):
                with suppress(ValueError, RecursionError):  # numbers of thousands of digits, or thousands of brackets
                    values = json.loads("".join(arguments[index]))
                    found.calls.append(ToolCall(f"call_{identity}{index:06x}", names[index], values))
    found.content, found.reasoning = ("\n".join(filter(None, texts)) for texts in (contents, thoughts))
    return found


def _is_control(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a special token is no text."""
    id = tokenizer.token_id(text)
    return id is not None and not tokenizer.token_bytes(id)
