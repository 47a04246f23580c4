"""Where the prompt comes from, with a stdin of every kind: a pipe, a file, empty, closed, or one that never says anything."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import engine
from bitmirror.__main__ import main as bitmirror
from engine.cli import prompt as prompts
from engine.run import main
from tests import fake_llm

Capture = pytest.CaptureFixture[str]
posix = pytest.mark.skipif(os.name == "nt", reason="descriptors of POSIX")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fake_llm.FakeLLM]]:
    monkeypatch.setitem(vars(engine), "load", fake_llm.load)
    monkeypatch.setattr(fake_llm, "N_CTX", 400)
    fake_llm.loaded.clear()
    yield fake_llm.loaded
    fake_llm.loaded.clear()


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a descriptor the stdin of this process."""

    def use(fd: int, mode: str = "r") -> None:
        monkeypatch.setattr(sys, "stdin", os.fdopen(fd, mode, encoding="utf-8", closefd=False))

    return use


def piped(text: bytes) -> int:
    """The end of a pipe that has this text, and then ends."""
    out, into = os.pipe()
    os.write(into, text)
    os.close(into)
    return out


def prompt(capsys: Capture, *words: str) -> str:
    """What a run with these flags read as the prompt."""
    assert main([*words, "--json", "-n", "1"]) == 0
    return str(json.loads(capsys.readouterr().out)["prompt"])


def test_piped_text_comes_before_the_prompt(
    stdin: Callable[..., None], tmp_path: Path, capsys: Capture, fake: list[fake_llm.FakeLLM]
) -> None:
    file = tmp_path / "question"
    file.write_text("What is it?\n")
    for words in (["-p", "What is it?"], ["What is it?"], ["-f", str(file)], ["-f", "-", "-p", "What is it?"]):
        stdin(piped("één\\n\n\n".encode()))
        # One line break at the end belongs to the file, and its backslashes are no escapes.
        assert prompt(capsys, *words) == "één\\n\n\n\nWhat is it?"
    (tmp_path / "source").write_text("x = 1\n")
    with (tmp_path / "source").open() as source:
        stdin(source.fileno())
        assert prompt(capsys, "-p", "y = ") == "x = 1\n\ny = "
    # Without a prompt, it is the prompt.
    stdin(piped(b"only this\n"))
    assert prompt(capsys) == "only this"
    # In a conversation, it is what the user says next.
    stdin(piped(b"second\n"))
    assert main(["--cnv", "-p", "first"]) == 0
    assert [each["prompt"] for each in fake[-1].asked] == ["first", "second"]


@posix
@pytest.mark.parametrize("kind", ["null", "empty", "blank", "closed", "write only", "terminal"])
def test_a_stdin_without_text_changes_nothing(kind: str, stdin: Callable[..., None], capsys: Capture) -> None:
    import pty

    if kind in ("null", "write only"):
        stdin_fd = os.open(os.devnull, os.O_RDONLY if kind == "null" else os.O_WRONLY)  # nohup opens it for writing
    elif kind == "terminal":
        _, stdin_fd = pty.openpty()
    else:
        stdin_fd = piped(b"\n" if kind == "blank" else b"")
    stdin(stdin_fd, "w" if kind == "write only" else "r")
    if kind == "closed":
        os.close(stdin_fd)
    assert main(["-p", "hello", "--json", "-n", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["prompt"] == "hello"
    assert "stdin" not in captured.err


@posix
def test_an_open_pipe_that_never_says_anything(
    stdin: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    out, into = os.pipe()
    stdin(out)
    assert main(["-p", "hello", "--json", "-n", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["prompt"] == "hello"
    assert "note: stdin is open and gave no text for 0.05 s" in captured.err and "-f -" in captured.err
    # Where stdin has to have the prompt, it is waited for, and a note says so.
    for words in ([], ["-f", "-", "-p", "after it"]):
        out, into = os.pipe()
        stdin(out)

        def write(into: int = into) -> None:
            os.write(into, b"late\n")
            os.close(into)

        writer = threading.Timer(0.3, write)
        writer.start()
        assert main([*words, "--json", "-n", "1"]) == 0
        writer.join()
        captured = capsys.readouterr()
        assert json.loads(captured.out)["prompt"] == ("late\n\nafter it" if words else "late")
        assert ("waiting for the prompt on stdin" in captured.err) is not bool(words)


def test_what_is_piped_must_be_text(stdin: Callable[..., None], capsys: Capture) -> None:
    stdin(piped(b"abc\xff"))
    assert main(["-p", "hello"]) == 2
    assert "error: the text in - is not UTF-8 text (byte 3" in capsys.readouterr().err


# -- a model where a prompt should be


@pytest.mark.parametrize("name", ["smollm2-135m", "pycoder", "./some model.gguf", "A.GGUF", "hf:owner/repo:Q4_K_M"])
def test_the_name_of_a_model_is_no_prompt(name: str, capsys: Capture, fake: list[fake_llm.FakeLLM]) -> None:
    for words in (
        ["run", name],
        ["run", "-n", "3", name],
        ["chat", name],
        ["run", name, "Why?"],
        ["chat", name, "Why?"],
        ["serve", name],
        ["bench", name],
        ["bench", "-p", "5", name, "x"],
        ["compile", name],
    ):
        assert bitmirror(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and f"did you mean -m {name}?" in line
    assert bitmirror([name]) == 2
    assert f"write bitmirror run -m {name}" in capsys.readouterr().err
    assert not fake


def test_a_prompt_that_only_looks_like_a_model(capsys: Capture) -> None:
    for words in (["-p", "pycoder"], ["-m", "pycoder", "pycoder"], ["smollm"], ["hf: what is it?"], ["a.gguf\nb"]):
        assert prompt(capsys, *words) in (words[-1], "pycoder")
    assert bitmirror(["run", "-m", "pycoder", "pycoder", "a.gguf"]) == 2
    assert "unexpected argument 'a.gguf': write the prompt in quotes" in capsys.readouterr().err
    assert bitmirror(["parity", "a.gguf", "b.gguf"]) == 2
    assert "unexpected argument 'b.gguf': there is one MODEL" in capsys.readouterr().err


def test_a_model_is_no_file_with_a_prompt(tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"GGUF" + bytes(100))
    for flag, what in (("-f", "prompt"), ("-sysf", "system prompt")):
        assert main([flag, str(model), "--no-escape"]) == 2
        assert f"is a model, not the {what}: give a model with -m" in capsys.readouterr().err
