"""How a format is read while the text arrives: what all formats share.

A format is a subclass of :class:`FormatParser`, which reads as if the whole text were there, with generators that pause
where it is not. What turns out to be no call is said as text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from engine.tools.formats.arguments import Arguments
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, merged
from engine.tools.formats.reader import Broken, Reader, Steps
from engine.tools.formats.tools import Tools


class Parser(Protocol):
    """Divides an answer into text, thoughts and calls while it arrives.

    However the text is cut into pieces, the events are the same once neighbours are merged
    (:func:`engine.tools.formats.events.merged`).
    """

    @property
    def tags(self) -> tuple[str, ...]:
        """The control tokens that :meth:`feed` wants to have; others are no text and should be left out."""

    def feed(self, piece: str, special: bool = False) -> list[Event]:
        """Takes the next piece of the answer and returns what is certain now.

        Parameters
        ----------
        piece : str
            Text. It need not end where a token ends.
        special : bool
            Whether ``piece`` is exactly one token that the vocabulary marks as control or user-defined.

        Returns
        -------
        list of Event
            What was found.
        """

    def finish(self, cut: bool = False) -> list[Event]:
        """Ends the answer and returns the rest.

        Parameters
        ----------
        cut : bool
            Whether the answer was cut off, as by a limit of tokens. A call whose arguments are not complete then has no
            :class:`engine.tools.formats.events.CallEnd`, and the beginning of a call is left out. Otherwise a call that has
            begun is closed. Other text that waited is text.

        Returns
        -------
        list of Event
            What was found.
        """


class FormatParser:
    """The parser of one format.

    Text that is no call in the format stays text, byte for byte. A call begins when its name is certain, a function of the
    request, and followed by arguments. A call that breaks off later, or that breaks the rules, ends where its arguments can
    be closed; what follows this place is text. Newlines next to a tag that counts belong to the tag.

    Calls are found in thoughts too. A thought goes on after them.
    """

    THOUGHT: ClassVar[tuple[str, str] | None] = None
    """The tags before and after a thought."""
    OPENS: ClassVar[tuple[str, ...]] = ()
    """The tags with which a call may begin."""
    CLOSES: ClassVar[tuple[str, ...]] = ()
    """The tags after a call. More of them than belong there are dropped."""
    HEADER: ClassVar[tuple[str, ...]] = ()
    """What stands before a text, in pieces: each is a tag or contains none."""
    TAGS: ClassVar[tuple[str, ...]] = ()
    """The other tags, and tokens that tags contain."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        single: Callable[[str], bool],
        reasoning_open: bool = False,
        calls: bool = True,
        reasoning: bool = True,
    ) -> None:
        """Parameters
        ----------
        tools : sequence of mapping, optional
            The functions of the request, in OpenAI's form. Only they can be called; None: every name can.
        single : callable
            Whether a text is one token, control or user-defined, of the vocabulary. Such a tag counts only as this token.
        reasoning_open : bool
            Whether the prompt ends in an open thought.
        calls, reasoning : bool
            Whether to look for calls, and for thoughts; if not, their tags are text.
        """
        self.tools = Tools(tools)
        self.input = Reader(self.tags, single)
        self.looks_for_calls = calls
        self.looks_for_reasoning = reasoning
        self._thought = tuple(map(self.input.symbol, self.THOUGHT)) if self.THOUGHT and reasoning else ("", "")
        self._opens = "".join(map(self.input.symbol, self.OPENS)) if calls else ""
        self._closes = "".join(map(self.input.symbol, self.CLOSES))
        tags = "".join((*self._thought, self._opens))
        self._plain = re.compile(f"[^{tags}]+" if tags else "(?s:.+)")
        self.thinking = bool(self._thought[0]) and reasoning_open
        self._events: list[Event] = []
        self._newlines: list[str] = []  # at the end of the text: they belong to a tag if one follows
        self._after_tag = self.thinking
        self._answered = False  # whether there was text outside of thoughts
        self._index = 0
        self._closing: str | None = None  # what closes the arguments of the call that has begun
        self._reading = self._answer()

    @property
    def tags(self) -> tuple[str, ...]:
        """See :attr:`Parser.tags`."""
        return (*self.TAGS, *(self.THOUGHT or ()), *self.OPENS, *self.CLOSES)

    def feed(self, piece: str, special: bool = False) -> list[Event]:
        """See :meth:`Parser.feed`."""
        self.input.add(piece, special)
        return self._read_on()

    def finish(self, cut: bool = False) -> list[Event]:
        """See :meth:`Parser.finish`."""
        if cut and self._closing is not None:
            # Arguments that nobody has completed must not look as if they were.
            return [CallEnd(self._index)] if not self._closing else []
        # What waits directly after a call is the beginning of another one.
        if cut and (self.is_opening(self.input.pending) or (self._index and self._after_tag)):
            return []
        if cut:
            self.input.forget(anything=self._after_tag)
        self.input.end()
        return self._read_on()

    def _read_on(self) -> list[Event]:
        next(self._reading, None)
        events, self._events = self._events, []
        return merged(events)

    # --- the answer --------------------------------------------------------------------------------------------

    def _answer(self) -> Steps[None]:
        """Reads everything."""
        yield from self.beginning()
        while symbol := (yield from self._text()):
            self.input.take(1)
            if symbol in self._opens:
                yield from self.attempt(self.call(symbol))
            elif symbol == self._thought[0]:
                yield from self.attempt(self._open_thought())
            else:
                yield from self.attempt(self._close_thought())
        self._flush()

    def beginning(self) -> Steps[None]:
        """Reads what only the beginning of an answer can be."""
        yield from ()

    def call(self, symbol: str) -> Steps[None]:
        """Reads one call after the tag ``symbol``, which has been read; raises Broken if it is none."""
        raise NotImplementedError

    def thought(self) -> Steps[None]:
        """Reads what belongs to the tag before a thought; raises Broken if it is something else."""
        # In a text about thoughts the tag is a part of the text.
        if self._answered:
            raise Broken
        yield from ()

    def is_opening(self, pending: str) -> bool:
        """Whether ``pending``, what was read and not used when the answer was cut off, begins a call."""
        return bool(pending) and pending[0] in self._opens

    # --- what formats call -------------------------------------------------------------------------------------

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Reads ``steps``; if they are Broken, closes the call that has begun, and says as text what was not used."""
        try:
            yield from steps
        except Broken:
            rest = self.input.passed()
            begun = self._closing is not None
            if begun:
                self._end()
            self.say(rest)
            if begun and not rest.strip():
                yield from self._drop_closes()

    def say(self, text: str) -> None:
        """``text`` is part of the answer, or of the thought that is open."""
        if self._after_tag:
            text = text.lstrip("\n")
        if not text:
            return
        self._after_tag = False
        body = text.rstrip("\n")
        if body:
            self._flush(body)
        if len(body) < len(text):
            self._newlines.append(text[len(body) :])

    def begin(self, name: str) -> None:
        """A call of ``name`` begins; :meth:`arguments` must follow."""
        self._events.append(CallBegin(self._index, name))

    def arguments(self, text: str, closing: str) -> None:
        """``text`` belongs to the arguments of the call; ``closing`` would close them. What was read until now is used."""
        self._events.append(CallArguments(self._index, text))
        self._closing = closing
        self.input.mark()

    def json_arguments(self, name: str) -> Steps[None]:
        """Reads an object in JSON, with which a call of ``name`` begins; raises Broken if there is none."""
        if (yield from self.input.peek()) != "{":
            raise Broken
        self.begin(name)
        yield from self.object(Arguments(self.input.spelled))

    def object(self, arguments: Arguments, keep: list[str] | None = None) -> Steps[None]:
        """Reads an object up to its end: the arguments of the call that has begun, unless its pieces are to be kept.

        Raises Broken if the object has no end.
        """
        while not arguments.done:
            ended = not (yield from self.input.peek())
            stopped, delivered, text = arguments.feed(self.input.text, self.input.at)
            self.input.take(delivered - self.input.at)
            text += arguments.end() if ended else ""
            if keep is not None:
                keep.append(text)
            elif text:
                self.arguments(text, arguments.closing)
            self.input.take(stopped - self.input.at)
            if ended or arguments.broken:
                raise Broken

    def end(self) -> Steps[None]:
        """The call is complete, and what was read until now belongs to it; reads the tags after it."""
        self._end()
        yield from self._drop_closes()

    # --- within ------------------------------------------------------------------------------------------------

    def _text(self) -> Steps[str]:
        """Says text up to the next tag that may count, which is not read; returns its symbol, "" at the end."""
        while found := (yield from self.input.peek()):
            if not self.input.match(self._plain):
                break
            self.say(self.input.passed())
        self.say(self.input.passed())
        return found

    def _flush(self, text: str = "") -> None:
        """Says ``text`` after the newlines that waited."""
        text = "".join((*self._newlines, text))
        self._newlines.clear()
        if text:
            self._events.append(Reasoning(text) if self.thinking else Content(text))
            self._answered = self._answered or not (self.thinking or text.isspace())

    def _tag(self) -> None:
        """A tag counts: the newlines around it belong to it."""
        self.input.mark()
        self._newlines.clear()
        self._after_tag = True

    def _end(self) -> None:
        if self._closing:
            self.arguments(self._closing, "")
        self._events.append(CallEnd(self._index))
        self._index += 1
        self._closing = None
        self._tag()

    def _drop_closes(self) -> Steps[None]:
        yield from self.input.blanks()
        while (found := (yield from self.input.peek())) and found in self._closes:
            self.input.take(1)
            self.input.mark()
            yield from self.input.blanks()

    def _open_thought(self) -> Steps[None]:
        if self.thinking and not self._after_tag:
            raise Broken  # in the middle of a thought the tag is part of it
        yield from self.thought()
        self._tag()
        self.thinking = True

    def _close_thought(self) -> Steps[None]:
        if not self.thinking:
            raise Broken
        self._tag()
        self.thinking = False
        yield from ()
