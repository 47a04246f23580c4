"""The blocks of an answer: its parts as Anthropic writes them."""

import base64
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from engine.serving.parts import Kind, Message, Part, Parts
from engine.tools.formats.arguments import object_of, whole_members

DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.THOUGHT: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
"""The type of what adds to a part, and the field that holds its text."""


class Blocks(Parts):
    """Writes what a parser finds as blocks."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        """call_id: the id of the call with an index."""
        super().__init__()
        self._call_id = call_id

    def begun(self, part: Part) -> list[Message]:
        """The beginning of a block."""
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind is Kind.THOUGHT:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif part.kind is Kind.CALL:
            block = {"type": "tool_use", "id": self._call_id(part.call), "name": part.name, "input": {}}
        return [{"type": "content_block_start", "index": part.index, "content_block": block}]

    def added(self, part: Part, text: str) -> list[Message]:
        """An addition to a block."""
        kind, name = DELTAS[part.kind]
        return [_delta(part, {"type": kind, name: text})]

    def ended(self, part: Part) -> list[Message]:
        """The end of a block."""
        messages: list[Message] = []
        if part.kind is Kind.THOUGHT:
            messages.append(_delta(part, {"type": "signature_delta", "signature": _signature(part.text)}))
        return [*messages, {"type": "content_block_stop", "index": part.index}]


def _delta(part: Part, delta: dict[str, str]) -> Message:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _signature(thought: str) -> str:
    """Clients require a signature of a thought.  Nothing here checks it."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def joined(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream amount to."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, list[str]] = {}
    for message in messages:
        index = message["index"]
        if message["type"] == "content_block_start":
            blocks.append(dict(message["content_block"]))
        elif message["type"] == "content_block_delta":
            (_, kind), (name, text) = message["delta"].items()
            if kind == "input_json_delta":
                inputs.setdefault(index, []).append(text)
            else:
                blocks[index][name] += text
    for index, texts in inputs.items():
        text = "".join(texts)
        try:
            blocks[index]["input"] = object_of(text)
        except ValueError:
            blocks[index]["input"] = whole_members(text)  # the answer was cut off within the call
    return blocks
