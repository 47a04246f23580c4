"""The blocks of an answer: texts, thoughts and calls, one after the other."""

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

from engine.serving.formats.arguments import object_of
from engine.serving.formats.events import CallArguments, CallBegin, Content, Event, Reasoning

Message = dict[str, Any]
"""An event of a stream; "type" is its name."""


class Blocks:
    """Writes what a parser finds as events of a stream.

    One block is open at a time, and blocks are numbered 0, 1, 2…: clients append a block to a list when it begins, and find
    it by its number.
    """

    def __init__(self, call_prefix: str) -> None:
        """call_prefix: what the ids of calls begin with."""
        self._call_prefix = call_prefix
        self._index = -1
        self._open = ""
        self._thought: list[str] = []

    def feed(self, events: Iterable[Event]) -> list[Message]:
        """What to send for the next events."""
        messages: list[Message] = []
        for event in events:
            if isinstance(event, Content):
                messages += self._text("text", event.text)
            elif isinstance(event, Reasoning):
                self._thought.append(event.text)
                messages += self._text("thinking", event.text)
            elif isinstance(event, CallBegin):
                id = f"{self._call_prefix}{event.index:06x}"
                messages += self._begin({"type": "tool_use", "id": id, "name": event.name, "input": {}})
            elif isinstance(event, CallArguments):
                if event.text:
                    messages.append(self._delta({"type": "input_json_delta", "partial_json": event.text}))
            else:
                messages += self.end()
        return messages

    def end(self) -> list[Message]:
        """What ends the block that is open, if one is."""
        if not self._open:
            return []
        messages = []
        if self._open == "thinking":
            messages.append(self._delta({"type": "signature_delta", "signature": _signature("".join(self._thought))}))
            self._thought.clear()
        self._open = ""
        return [*messages, {"type": "content_block_stop", "index": self._index}]

    def _text(self, kind: str, text: str) -> list[Message]:
        messages: list[Message] = []
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            messages = self._begin({"type": kind, kind: "", **more})
        return [*messages, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: dict[str, Any]) -> list[Message]:
        messages = self.end()
        self._index += 1
        self._open = block["type"]
        return [*messages, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, str]) -> Message:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


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
        blocks[index]["input"] = object_of("".join(texts))
    return blocks
