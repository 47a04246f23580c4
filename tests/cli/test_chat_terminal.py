"""A chat on a pseudo-terminal: keys, pastes, what is typed during an answer, and the history between runs."""

import stat
import time
from pathlib import Path

from tests.test_run import Terminal, posix

PROMPT = "\x1b[0m>"
"""The prompt, as prompt_toolkit writes it."""


def talk(*words: str, **environment: str) -> Terminal:
    """A chat with the fake model, at its first prompt."""
    terminal = Terminal([*words], FAKE_TEMPLATE="1", **environment)
    terminal.wait_for("/help lists")
    terminal.wait_for(PROMPT)
    return terminal


@posix
def test_ctrl_c_and_ctrl_d() -> None:
    terminal = talk(FAKE_DELAY="0.02", FAKE_TEXT="abcdefghij" * 20)
    terminal.type("hello\r")
    terminal.wait_for("abc")
    terminal.type("\x03")
    terminal.wait_for("interrupted]")
    terminal.wait_for(PROMPT)
    terminal.type("half a line\x03/help\r")  # the line is cleared, so it does not come before the command
    terminal.wait_for("Ctrl-C ends an answer")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /quit ends the chat")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    status, text = terminal.finish()
    assert status == 130
    assert "Traceback" not in text
    terminal = talk()
    terminal.type("\x04")
    assert terminal.finish()[0] == 0


@posix
def test_a_paste_is_one_message_and_history_lasts(tmp_path: Path) -> None:
    terminal = talk("-c", "400", XDG_STATE_HOME=str(tmp_path))
    terminal.type("\x1b[200~first line\nsecond line\x1b[201~ and more\r")
    terminal.wait_for("FIRST LINE\r\nSECOND LINE AND MORE")
    terminal.wait_for(PROMPT)
    terminal.type("one\x1b\rtwo\\\rthree\r")
    terminal.wait_for("ONE\r\nTWO\r\nTHREE")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.finish()[0] == 0
    history = tmp_path / "bitmirror" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700

    terminal = talk("-c", "400", XDG_STATE_HOME=str(tmp_path))
    terminal.type("\x12first\r\r")  # Ctrl-R finds the first message
    terminal.wait_for("FIRST LINE\r\nSECOND LINE AND MORE")
    terminal.wait_for(PROMPT)
    terminal.type("/quit\r")
    assert terminal.finish()[0] == 0


@posix
def test_what_is_typed_during_an_answer_waits() -> None:
    answer = "the answer goes on and on, "
    terminal = talk("-c", "400", FAKE_DELAY="0.02", FAKE_TEXT=answer * 4)
    terminal.type("hello\r")
    terminal.wait_for("the answer")
    terminal.type("\x1b[200~next\nlines\x1b[201~\rrest")
    terminal.wait_for("context ")  # the report of the first answer
    written = terminal.seen
    assert "next" not in written and "rest" not in written
    terminal.wait_for("next")
    terminal.wait_for("lines")
    terminal.wait_for("the answer")  # the line that ended with Enter was sent ...
    terminal.wait_for("context ")
    terminal.wait_for("rest")  # ... and the other waits to be
    terminal.type("\x03\x04")
    assert terminal.finish()[0] == 0


@posix
def test_the_terminal_is_given_back_after_an_error() -> None:
    import termios

    terminal = Terminal(["--cnv", "-p", "x"], FAKE_TEMPLATE="1", FAKE_ERROR="ZeroDivisionError")
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for("this is a bug")
    assert termios.tcgetattr(terminal.fd) == before
    assert terminal.finish()[0] == 1


@posix
def test_a_message_that_failed_is_edited() -> None:
    terminal = talk("-c", "60")
    terminal.type("x" * 30 + "\r")
    terminal.wait_for("note: the answer has filled the context")
    terminal.wait_for(PROMPT)
    terminal.type("/clear\r")
    terminal.wait_for("a new conversation")
    terminal.wait_for(PROMPT)
    terminal.type("y" * 70 + "\r")
    terminal.wait_for("error: the prompt has")
    terminal.wait_for("y" * 70)
    terminal.type("\x7f" * 67 + "\r")
    terminal.wait_for("YYY")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.finish()[0] == 0


@posix
def test_keys_typed_before_a_question_do_not_answer_it() -> None:
    terminal = talk("-c", "100", FAKE_DELAY="0.02", FAKE_TEXT="0123456789")
    for message in ("first", "second"):
        terminal.type(message + "\r")
        terminal.wait_for("context ")
        terminal.wait_for(PROMPT)
    terminal.type("third, which does not fit any more\r")
    terminal.wait_for("drop the 2 oldest messages after the first exchange, and go on? [y/n]")
    time.sleep(0.1)
    terminal.type("?y")
    terminal.wait_for("2 messages were dropped")
    terminal.wait_for("0123")
    terminal.type("yes")  # waits for the prompt, and a question that comes first is not answered by it
    terminal.wait_for("context ")
    terminal.wait_for("yes")
    terminal.type("\x03\x04")
    assert terminal.finish()[0] == 0
