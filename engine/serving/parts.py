"""The parts of an answer: texts, thoughts and calls, one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from engine.tools.formats.events import CallArguments, CallBegin, Content, Event, Reasoning

Message = dict[str, Any]
"""An event of a stream; "type" is its name."""


class Kind(Enum):
    """What a part is."""

    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()


@dataclass
class Part:
    """A part of an answer.

    kind: what it is; index: its number among the parts of the answer; call: for a call, its number among the calls, and name:
    the function that it calls; pieces: the pieces of its text so far, for a call those of its arguments.
    """

    kind: Kind
    index: int
    call: int = 0
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)


class Parts(ABC):
    """Divides what a parser finds into parts, and writes them as events of a stream.

    One part is open at a time, and parts are numbered 0, 1, 2…: clients append a part to a list when it begins, and find it
    by its number.
    """

    def __init__(self) -> None:
        self._open: Part | None = None
        self._n_parts = 0

    def feed(self, events: Iterable[Event]) -> list[Message]:
        """What to send for the next events."""
        messages: list[Message] = []
        for event in events:
            if isinstance(event, Content):
                messages += self._text(Kind.TEXT, event.text)
            elif isinstance(event, Reasoning):
                messages += self._text(Kind.THOUGHT, event.text)
            elif isinstance(event, CallBegin):
                messages += self._begin(Part(Kind.CALL, self._n_parts, event.index, event.name))
            elif isinstance(event, CallArguments):
                if event.text:
                    messages += self._text(Kind.CALL, event.text)
            else:
                messages += self.end()
        return messages

    def end(self) -> list[Message]:
        """What ends the part that is open, if one is."""
        part, self._open = self._open, None
        return self.ended(part) if part is not None else []

    def _text(self, kind: Kind, text: str) -> list[Message]:
        messages: list[Message] = []
        if self._open is None or self._open.kind is not kind:
            messages = self._begin(Part(kind, self._n_parts))
        assert self._open is not None
        self._open.pieces.append(text)
        return [*messages, *self.added(self._open, text)]

    def _begin(self, part: Part) -> list[Message]:
        messages = self.end()
        self._open, self._n_parts = part, self._n_parts + 1
        return [*messages, *self.begun(part)]

    @abstractmethod
    def begun(self, part: Part) -> list[Message]:
        """What to send when a part begins."""

    @abstractmethod
    def added(self, part: Part, text: str) -> list[Message]:
        """What to send when ``text``, which is the last piece of the part now, is added to it."""

    @abstractmethod
    def ended(self, part: Part) -> list[Message]:
        """What to send when a part is complete."""
