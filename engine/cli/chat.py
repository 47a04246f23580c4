"""A chat: messages and commands, one after another, until the user leaves."""

import sys
from collections.abc import Callable
from pathlib import Path

from engine.cli import commands
from engine.cli.lines import Lines, Reader
from engine.cli.opened import Opened
from engine.cli.report import Report
from engine.cli.session import Session
from engine.errors import EngineError

INTERRUPTED = 130


def chat(
    opened: Opened,
    report: Report,
    open_model: Callable[[Path], Opened],
    *,
    system: str | None = None,
    first: str | None = None,
) -> int:
    """Runs a chat until /quit, the end of stdin, or Ctrl-C twice at the prompt, and returns the exit status.

    opened: the model that answers first. open_model: opens another one. system: the system prompt. first: the first
    message, never a command.

    An error caused by a message (too long, rejected by the template) is printed as one sentence, and the message is removed
    from the conversation; on a terminal it can then be edited.
    """
    reader = open_reader(report)
    session = Session(opened, report, reader, open_model, system)
    session.explain()
    if reader.interactive:
        report.line("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat")
    with reader.away():
        if first is not None:
            with reader.away():
                turn(session, first, first, None)
        return loop(session, reader)


def open_reader(report: Report) -> Reader:
    """The keyboard, or stdin line by line if it is not a terminal or there is no screen to write on."""
    if not (sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())):
        return Lines(report)
    from engine.cli.history import open_history
    from engine.cli.keyboard import Keyboard

    return Keyboard(report, open_history(report), commands.completions)


def loop(session: Session, reader: Reader) -> int:
    """Reads commands and messages until the chat ends; returns the exit status."""
    leaving = False
    while True:
        default, session.draft = session.draft, ""
        try:
            typed = reader.read(default)
        except KeyboardInterrupt:
            if leaving or not reader.interactive:
                session.report.line()
                return INTERRUPTED
            leaving = True
            session.report.line("press Ctrl-C again, press Ctrl-D, or enter /quit to end the chat")
            continue
        leaving = False
        if typed is None:
            return 0
        with reader.away():
            try:
                turn(session, typed, commands.message_of(typed), commands.parse(typed))
            except commands.Quit:
                return 0


def turn(session: Session, typed: str, message: str, command: tuple[str, str] | None) -> None:
    """Runs a command or sends a message. An error is printed as one sentence, and the message, as it was typed, becomes the
    draft."""
    answered = False
    try:
        if command is not None:
            commands.obey(session, *command)
        elif message.strip():
            session.send(message)
        answered = True
    except EngineError as error:
        session.report.line(f"error: {error}")
    except MemoryError:
        session.report.line(
            "error: not enough memory for this message: shorten it, or choose a smaller context with -c"
        )
    except KeyboardInterrupt:
        session.report.line("interrupted")
    if not answered and command is None:
        session.draft = typed
