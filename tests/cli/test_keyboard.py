"""Keys, without a terminal: what a message is, and what Ctrl-C, completion and questions do."""

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.output import DummyOutput

from engine.cli import history, saved
from engine.cli.commands import COMMANDS, completions
from engine.cli.history import open_history, shorten
from engine.cli.keyboard import CommandCompleter, Keyboard
from engine.cli.report import Report


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def keyboard(keys: PipeInput) -> Keyboard:
    report = Report(stream=io.StringIO())
    return Keyboard(report, InMemoryHistory(["earlier", "later"]), completions, keys, DummyOutput())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ('"""\rone\rtwo\r"""\r', "one\ntwo"),
        ('"""one"""\r', "one"),
        ('x = """one"""\r', 'x = """one"""'),
        ("\x1b[200~one\r\ntwo\n\nthree\x1b[201~\r", "one\ntwo\n\nthree"),
        ("half\x03whole\r", "whole"),
        ("a\udcffb\r", "a?b"),
    ],
)
def test_messages(typed: str, message: str, keyboard: Keyboard, keys: PipeInput) -> None:
    keys.send_bytes(typed.encode("utf-8", "surrogateescape"))
    assert keyboard.read() == message


@pytest.mark.parametrize(
    ("first", "typed", "message"),
    [
        ("/cl", "\t", "/clear"),
        ("", "\x1b[A", "later"),
        ("", "\x1b[A\x1b[A", "earlier"),
        ("", "\x12earl\r", "earlier"),
    ],
)
def test_keys_that_look_something_up(first: str, typed: str, message: str, keyboard: Keyboard, keys: PipeInput) -> None:
    """Completions and the history are loaded while the prompt waits, so a key comes when what it needs is there."""
    buffer = keyboard._session.default_buffer

    def ready() -> bool:
        return buffer.complete_state is not None if first else len(buffer._working_lines) == 3

    def press() -> None:
        for condition, text in ((ready, typed), (lambda: buffer.text == message, "\r")):
            end = time.monotonic() + 30
            while not condition() and time.monotonic() < end:
                time.sleep(0.005)
            keys.send_text(text)

    keys.send_text(first)
    thread = threading.Thread(target=press)
    thread.start()
    assert keyboard.read() == message
    thread.join()


def test_leaving(keyboard: Keyboard, keys: PipeInput) -> None:
    keys.send_text("\x04")
    assert keyboard.read() is None
    keys.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        keyboard.read()


def test_a_draft_is_edited_unless_something_was_typed_meanwhile(keyboard: Keyboard, keys: PipeInput) -> None:
    assert keyboard._typed() == []
    keys.send_text("next\rrest")
    assert keyboard.read("draft") == "next"
    keys.send_text("\r")
    assert keyboard.read() == "rest"


@pytest.mark.parametrize(
    ("typed", "answer", "kept"),
    [
        ("yes\r", True, ""),
        ("YES \r", True, ""),
        ("y\ryes\r", True, ""),
        ("y\rn\r", False, ""),
        ("no\r", False, ""),
        ("\r", False, ""),
        ("\x03", False, ""),
        ("\x04", False, ""),
        ("yes, and a message\r", False, "yes, and a message"),
        ("one\rtwo", False, "onetwo"),
    ],
)
def test_questions(
    typed: str, answer: bool, kept: str, keyboard: Keyboard, keys: PipeInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keyboard._typed

    def asked() -> list[KeyPress]:
        waiting = before()
        monkeypatch.setattr(keyboard, "_typed", before)
        keys.send_text(typed)
        return waiting

    keys.send_text("yes\r")  # too early
    monkeypatch.setattr(keyboard, "_typed", asked)
    assert keyboard.confirm("more?") is answer
    monkeypatch.undo()
    assert keyboard.read() == "yes"
    keys.send_text("\r")
    assert keyboard.read() == kept


def test_completion(tmp_path: Path) -> None:
    complete = CommandCompleter(completions)

    def words(text: str) -> list[str]:
        return [each.text for each in complete.get_completions(Document(text), CompleteEvent())]

    assert words("/") == [*COMMANDS]
    assert words("/se") == ["set"]
    assert words("/set top") == ["top_k", "top_p"]
    assert words("/set sys") == ["system"]
    assert words("hello /se") == words("//") == words("") == words("/clear ") == []
    (tmp_path / "talk.json").touch()
    assert words(f"/load {tmp_path}/ta") == ["lk.json"]


def test_the_history_is_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(history, "user_state_dir", lambda name, **_: str(tmp_path / name))
    kept = tmp_path / "bitmirror" / "history"
    kept.parent.mkdir()
    kept.touch(0o644)
    open_history(Report(stream=stream)).append_string("one\ntwo")
    open_history(Report(stream=stream)).append_string("three \udcff")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert [*open_history(Report(stream=stream)).load_history_strings()] == ["three ?", "one\ntwo"]
    assert stream.getvalue() == ""
    # Its older half goes if it is long.
    monkeypatch.setattr(history, "MOST_BYTES", 300)
    for i in range(20):
        open_history(Report(stream=stream)).append_string(f"message {i}\n# of {i}")
    strings = [*open_history(Report(stream=stream)).load_history_strings()]
    assert 1 < len(strings) < 12
    assert strings == [f"message {i}\n# of {i}" for i in range(19, 19 - len(strings), -1)]
    assert kept.stat().st_mode & 0o777 == 0o600
    assert [*kept.parent.iterdir()] == [kept]
    shorten(kept)


@pytest.mark.skipif(os.name != "posix", reason="files have no modes on this system")
def test_what_is_kept_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history with the folders that are made for it, and saved conversations, which may replace public ones."""
    monkeypatch.setattr(history, "user_state_dir", lambda name, **_: str(tmp_path / "local" / "state" / name))
    talk, old = tmp_path / "talk.json", tmp_path / "old.json"
    old.touch(0o644)
    before = os.umask(0)
    try:
        open_history(Report(stream=io.StringIO())).append_string("one")
        saved.write(talk, [], {}, replace=False)
        saved.write(old, [], {}, replace=True)
    finally:
        os.umask(before)
    made = [*(tmp_path / "local").rglob("*"), tmp_path / "local"]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    files = [path for path in [*made, talk, old] if path.is_file()]
    assert len(files) == 3 and {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_history_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitmirror").touch()
    for folder in (str(tmp_path / "bitmirror"), "~/relative"):
        stream = io.StringIO()
        monkeypatch.setattr(history, "user_state_dir", lambda name, folder=folder, **_: folder)
        kept = open_history(Report(stream=stream))
        kept.append_string("x")
        assert kept.get_strings() == ["x"]
        assert stream.getvalue().count("\n") == 1
        assert "kept only for this session" in stream.getvalue()
