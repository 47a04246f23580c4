"""A chat on a pseudo-terminal: keys, pastes, what is typed during an answer, and the history between runs."""

import os
import re
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_run import Terminal, posix

PROMPT = "\x1b[0m>"
"""The prompt, as prompt_toolkit writes it."""


def talk(*words: str, **environment: Any) -> Terminal:
    """A chat with the fake model, at its first prompt."""
    terminal = Terminal(["-m", "pycoder", *words], FAKE_TEMPLATE="1", **environment)
    terminal.wait_for("/help lists")
    terminal.wait_for(PROMPT)
    return terminal


def press(terminal: Terminal, keys: str) -> None:
    """Types at once: what is not read yet waits."""
    os.write(terminal.fd, keys.encode())


@posix
def test_two_chats(tmp_path: Path) -> None:
    """Pastes, typing during an answer, Ctrl-C, and, in the second chat, the history, a message that fails and a question."""
    state = {"XDG_STATE_HOME": str(tmp_path), "FAKE_TEXT": "0123456789" * 50}
    terminal = talk("-c", "4000", FAKE_DELAY="0.01", **state)
    press(terminal, "\x1b[200~first line\nsecond line\x1b[201~ and more\r")
    terminal.wait_for("0123")
    before = terminal.seen[: terminal.seen.index("0123")]
    assert before.rindex("\x1b[?2004h") > before.rindex("\x1b[?2004l")  # pastes are marked
    press(terminal, "\x1b[200~next\nlines\x1b[201~\rrest")
    terminal.wait_for("34567")
    press(terminal, "\x03")
    terminal.wait_for("interrupted]")
    answered = terminal.seen[: terminal.seen.index("interrupted]")]
    assert "next" not in answered and "rest" not in answered
    terminal.wait_for("lines")  # it ended with Enter, so it was sent
    terminal.wait_for("0123")
    press(terminal, "\x03")
    terminal.wait_for("interrupted]")
    terminal.wait_for("rest")  # it waits to be sent
    press(terminal, "\x03one\x1b\rtwo\\\rthree\r")
    terminal.wait_for("0123")
    press(terminal, "\x03")
    terminal.wait_for("interrupted]")
    terminal.wait_for(PROMPT)
    press(terminal, "\x03")
    terminal.wait_for("press Ctrl-C again")
    terminal.wait_for(PROMPT)
    press(terminal, "\x03")
    status, text = terminal.finish()
    assert status == 130
    assert "Traceback" not in text

    history = tmp_path / "bitmirror" / "history"
    kept = re.sub(r"\n# .*\n", "\n", history.read_text())
    assert kept == "\n+first line\n+second line and more\n\n+next\n+lines\n\n+one\n+two\n+three\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700

    state["FAKE_TEXT"] = "0123456789"
    terminal = talk("-c", "100", **state)
    terminal.type("\x12first")  # once the history is there
    terminal.wait_for("second line and more")
    press(terminal, "\r\r")
    terminal.wait_for("context ")
    terminal.wait_for(PROMPT)
    press(terminal, "y" * 70 + "\r")
    terminal.wait_for("error: the prompt has")
    terminal.wait_for("y" * 70)
    press(terminal, "\x7f" * 67 + "\r")
    terminal.wait_for("context ")
    terminal.wait_for(PROMPT)
    press(terminal, "this does not fit\r")
    terminal.wait_for("drop the 2 oldest messages after the first exchange and continue?")
    terminal.wait_for("type yes or no")
    press(terminal, "y\ryes\r")
    terminal.wait_for("2 messages were dropped")
    terminal.wait_for("context ")
    terminal.wait_for(PROMPT)
    press(terminal, "/se")
    terminal.wait_for("show all settings or one")  # the menu
    press(terminal, "\x03\x04")
    assert terminal.finish()[0] == 0


@posix
def test_a_terminal_is_quiet_and_then_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty
    import termios

    from engine.cli.keyboard import quiet

    outer, inner = pty.openpty()
    with os.fdopen(inner) as stdin, os.fdopen(outer, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(inner)

        def fail() -> None:
            with quiet():
                flags = termios.tcgetattr(inner)[3]
                assert not flags & (termios.ECHO | termios.ICANON)
                assert flags & termios.ISIG
                with quiet():
                    keys.write(b"no line")
                assert termios.tcgetattr(inner)[3] == flags
                assert os.read(inner, 100) == b"no line"
                termios.tcsetattr(inner, termios.TCSANOW, before)  # as a shell does after Ctrl-Z
                os.kill(os.getpid(), signal.SIGCONT)
                assert termios.tcgetattr(inner)[3] == flags
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert termios.tcgetattr(inner) == before


@pytest.mark.thorough
@posix
def test_the_terminal_is_given_back_after_an_error() -> None:
    import termios

    terminal = Terminal(["-m", "pycoder", "--cnv", "-p", "x"], FAKE_TEMPLATE="1", FAKE_ERROR="ZeroDivisionError")
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for("this is a bug")
    assert termios.tcgetattr(terminal.fd) == before
    assert terminal.finish()[0] == 1
