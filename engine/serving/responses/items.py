"""The items of an answer: its parts as Responses writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer, Delta
from engine.serving.parts import Kind, Message, Part, Parts
from engine.serving.responses.sealed import sealed

Logprob = Mapping[str, Any]
"""A token with its log-probability and its bytes, as it is sent."""

NAMES = {
    Kind.TEXT: ("msg", "output_text"),
    Kind.THOUGHT: ("rs", "reasoning_text"),
    Kind.CALL: ("fc", "function_call_arguments"),
}
"""What the ids of items begin with, and the names of their texts in events."""


class Items(Parts):
    """Writes an answer as items."""

    def __init__(
        self,
        answer: Answer,
        id: str,
        output: list[dict[str, Any]],
        described: Callable[[Sequence[TokenLogprob]], list[Logprob]],
        seal: bool,
    ) -> None:
        """id: is part of the ids of all items; output: to which items are added when they are complete; described:
        log-probabilities as they are sent; seal: whether thoughts are sent as ``encrypted_content``, too."""
        super().__init__()
        self._answer = answer
        self._id = id
        self._output = output
        self._described = described
        self._seal = seal
        self._status = "completed"
        #: Of the tokens whose text has not come yet, and of the text that is open.
        self._waiting: list[Logprob] = []
        self._logprobs: list[Logprob] = []

    def delta(self, delta: Delta) -> list[Message]:
        """What to send for the next delta of the answer."""
        if delta.finish_reason == "length":
            self._status = "incomplete"
        self._waiting += self._described(delta.logprobs)
        messages = self.feed(delta.events)
        if delta.finish_reason:
            messages += self.end()
            if delta.finish_reason == "stop" and all(item["type"] == "reasoning" for item in self._output):
                # Clients look for a message, even if it is empty.
                messages += self._begin(Part(Kind.TEXT, self._n_parts)) + self.end()
        return messages

    def begun(self, part: Part) -> list[Message]:
        """The beginning of an item, and of its content."""
        self._logprobs = []
        added = {"output_index": part.index, "item": self._item(part, "in_progress", [])}
        messages: list[Message] = [{"type": "response.output_item.added", **added}]
        if part.kind is not Kind.CALL:
            messages.append({"type": "response.content_part.added", **self._place(part), "part": self._content(part)})
        return messages

    def added(self, part: Part, text: str) -> list[Message]:
        """An addition to the content of an item."""
        message = {"type": f"response.{NAMES[part.kind][1]}.delta", **self._place(part), "delta": text}
        if part.kind is Kind.TEXT:
            message["logprobs"] = self._tokens(text)
            self._logprobs += message["logprobs"]
        self._waiting.clear()
        return [message]

    def ended(self, part: Part) -> list[Message]:
        """The end of an item, and of its content."""
        kind, place = NAMES[part.kind][1], self._place(part)
        done: Message = {"type": f"response.{kind}.done", **place}
        content: list[Any] = []
        if part.kind is Kind.CALL:
            done |= {"name": part.name, "arguments": part.text}
        else:
            done |= {"text": part.text} | ({"logprobs": self._logprobs} if part.kind is Kind.TEXT else {})
            content = [self._content(part)]
        item = self._item(part, self._status, content)
        self._output.append(item)
        messages = [done]
        if content:
            messages.append({"type": "response.content_part.done", **place, "part": content[0]})
        return [*messages, {"type": "response.output_item.done", "output_index": part.index, "item": item}]

    def _place(self, part: Part) -> dict[str, Any]:
        """Where a text is."""
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind is Kind.CALL else place | {"content_index": 0}

    def _item_id(self, part: Part) -> str:
        return f"{NAMES[part.kind][0]}_{self._id}{part.index:04x}"

    def _item(self, part: Part, status: str, content: list[Any]) -> dict[str, Any]:
        id = self._item_id(part)
        if part.kind is Kind.CALL:
            call = {"call_id": self._answer.call_id(part.call), "name": part.name, "arguments": part.text}
            return {"id": id, "type": "function_call", "status": status, **call}
        if part.kind is Kind.THOUGHT:
            item = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
            return item | ({"encrypted_content": sealed(part.text)} if self._seal and content else {})
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind is Kind.THOUGHT:
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(self._logprobs)}

    def _tokens(self, text: str) -> list[Logprob]:
        """The tokens that ``text`` comes from: of those that wait, the last ones that have as many bytes.  Before them are
        those of a tag."""
        left, first = len(text.encode("utf-8", "replace")), len(self._waiting)
        while left > 0 and first > 0:
            first -= 1
            left -= len(self._waiting[first]["bytes"])
        return self._waiting[first:]
