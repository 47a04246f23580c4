"""One answer in a terminal or a pipe: written piece by piece, and ended by Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from engine.cli.report import Report
from engine.cli.terminal import printable

if TYPE_CHECKING:
    from engine.decode.generation import Generation
    from engine.llm import LLM


@dataclass(frozen=True)
class Outcome:
    """A finished generation, whether Ctrl-C ended it, and why tokens were read again, if they were."""

    generation: "Generation"
    interrupted: bool
    reread: str | None = None

    @property
    def reason(self) -> str:
        """``stop`` (end of text, or a stop string), ``length`` (limit or context), or ``interrupted``."""
        return "interrupted" if self.interrupted else str(self.generation.finish_reason)


def answer(
    llm: "LLM",
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    report: Report,
    *,
    show: bool = True,
    echo: str = "",
    prose: bool = False,
) -> Outcome:
    """Generates one answer and, with ``show``, writes it to stdout piece by piece; raises EngineError.

    ``options`` are the keyword arguments of ``LLM.generate``. ``echo`` is shown first on a terminal, which breaks lines
    between words if the answer is ``prose``. The first Ctrl-C ends
    the answer after the current token, so that the cache stays consistent; the second ends it immediately.
    """
    terminal = sys.stdout.isatty()
    words = None
    if terminal and show and prose:
        from engine.cli.words import Words  # here: rich takes a moment to import

        words = Words(report.columns)
    with ctrl_c() as pressed:

        def on_prefill(done: int, total: int) -> None:
            report.progress("prompt", done, total)
            if pressed.is_set():
                raise KeyboardInterrupt

        generation = llm.generate(prompt, on_prefill=on_prefill, **options)
        try:
            first = True
            for piece in generation:
                if first and show:
                    report.echo(echo)
                first = False
                if show and piece:
                    piece = printable(piece) if terminal else piece
                    sys.stdout.write(words.feed(piece) if words is not None else piece)
                    sys.stdout.flush()
                report.live(generation, None if words is None else words.fills_line)
                if pressed.is_set():
                    break
        except KeyboardInterrupt:
            pressed.set()
        finally:
            generation.close()
            if words is not None:
                report.close()
                sys.stdout.write(words.end())
                sys.stdout.flush()
            report.answered(generation.text, shown=show)
    return Outcome(generation, pressed.is_set() and generation.finish_reason is None, llm.reread)


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event; the second is a KeyboardInterrupt as usual."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    # A shell makes a background job ignore the signal; a thread must not change handlers at all.
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
