"""What an answer says, as Ollama divides it: text, thoughts, and whole calls of functions."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.serving.answer import Answer
from engine.tools.formats.arguments import object_of
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning


class Said(NamedTuple):
    """A part of an answer: its text, what the model thinks, and the calls that end in it."""

    content: str = ""
    thinking: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()

    def beside(self) -> dict[str, Any]:
        """The fields of a message besides its text; only those that say something."""
        found: dict[str, Any] = {"thinking": self.thinking} if self.thinking else {}
        return found | ({"tool_calls": list(self.calls)} if self.calls else {})


class Listening:
    """Divides an answer.  A call is said when it is complete, since its arguments are an object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._name = ""
        self._arguments: list[str] = []

    def feed(self, events: Iterable[Event]) -> Said:
        """What the next events say."""
        contents: list[str] = []
        thoughts: list[str] = []
        calls: list[Mapping[str, Any]] = []
        for event in events:
            if isinstance(event, Content):
                contents.append(event.text)
            elif isinstance(event, Reasoning):
                thoughts.append(event.text)
            elif isinstance(event, CallBegin):
                self._name, self._arguments = event.name, []
            elif isinstance(event, CallArguments):
                self._arguments.append(event.text)
            elif isinstance(event, CallEnd):
                calls.append(self._call(event.index))
        return Said("".join(contents), "".join(thoughts), tuple(calls))

    def _call(self, index: int) -> Mapping[str, Any]:
        arguments = object_of("".join(self._arguments) or "{}")
        function = {"index": index, "name": self._name, "arguments": arguments}
        return {"id": self._answer.call_id(index), "function": function}
