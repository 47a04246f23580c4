"""What a parser finds in an answer: text, thoughts, and calls of functions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers, without the tags around it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the function ``name`` begins. Calls are numbered 0, 1, 2… in one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call ``index``: those of one call joined are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call ``index`` is complete: its arguments can be read. It is missing if the answer was cut off within them."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """``events`` with neighbouring pieces of the same text joined."""
    found: list[Event] = []
    texts: list[str] = []

    def join() -> None:
        if len(texts) > 1:
            last = found[-1]
            assert isinstance(last, (Content, Reasoning, CallArguments))
            found[-1] = replace(last, text="".join(texts))
        texts.clear()

    for event in events:
        if isinstance(event, (Content, Reasoning, CallArguments)):
            if not (texts and type(found[-1]) is type(event)):
                join()
                found.append(event)
            texts.append(event.text)
        else:
            join()
            found.append(event)
    join()
    return found
