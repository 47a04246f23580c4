"""The prompt of ``bitmirror run``: words, a file, and what is piped."""

import argparse
import os
import select
import sys

from engine.cli.texts import read_text, unescape, valid
from engine.errors import UsageError

NO_PROMPT = "there is no prompt: write one in quotes, give one with -p or -f, or write it to stdin"

PATIENCE = 3.0
"""Seconds to wait for the first text of a pipe.  Programs that start this one may leave a pipe open that never gets any."""


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text of PROMPT, -p or -f, after what is piped; None if there is none, and a conversation may begin.

    Piped text comes first, and a blank line separates the two.  In a conversation stdin has its messages.  Raises UsageError.
    """
    if args.prompt == "":
        raise UsageError(NO_PROMPT)
    given = None
    if args.prompt is not None and args.prompt != "-":
        given = unescape(args.prompt) if args.escape else valid(args.prompt)
    elif args.file is not None and args.file != "-":
        given = read_text(args.file, "prompt")
    terminal, whole = sys.stdin.isatty(), "-" in (args.prompt, args.file)
    if given is not None:
        before = _whole(terminal, "text") if whole else "" if terminal or args.cnv else piped()
        return f"{before}\n\n{given}" if before.strip() else given or _none()
    if not whole and (args.cnv or (terminal and not args.single_turn)):
        return None
    if terminal and args.single_turn and not whole:
        print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().removesuffix("\n") or _none()
    if not terminal and not _ready():
        print("note: waiting for the prompt on stdin, since none is given with -p or -f", file=sys.stderr, flush=True)
    return _whole(terminal, "prompt") or _none()


def piped() -> str:
    """The text of stdin, which is no terminal: "" if it is empty or closed, or, after a note, if it is an open pipe that has
    given nothing after :data:`PATIENCE`.  Raises UsageError if it is not UTF-8."""
    try:
        os.read(sys.stdin.fileno(), 0)
    except (OSError, ValueError):
        return ""  # closed, or only for writing, as with nohup
    if _ready():
        return read_text("-", "text")
    print(
        f"note: stdin is open and gave no text for {PATIENCE:g} s, so only the prompt is used (-f - waits for the end of "
        "stdin; < /dev/null is an empty one)",
        file=sys.stderr,
        flush=True,
    )
    return ""


def _whole(terminal: bool, what: str) -> str:
    if terminal:
        print(f"enter the {what}, and end it with Ctrl-D on a line of its own:", file=sys.stderr)
    return read_text("-", what)


def _ready() -> bool:
    """Whether stdin has text, or has ended, within :data:`PATIENCE`."""
    try:
        return bool(select.select([sys.stdin.fileno()], [], [], PATIENCE)[0])
    except (OSError, ValueError):
        return True  # it cannot be asked, as a pipe on Windows


def _none() -> str:
    raise UsageError(NO_PROMPT)
