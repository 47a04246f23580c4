"""``bitmirror embed``: whole command lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cli import embed, shared
from engine.models.config import JOINED

FLAGS = ("--device", "cpu", "-c", "128", "--pooling", "mean")


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    """The exit status of a command line, and what it prints."""
    status = embed.main([*FLAGS, *words])
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    with engine.load(device="cpu", n_ctx=128, pooling="mean") as llm:
        return llm.embed(["a cat", "-x"])


def test_words_become_lines_of_json(capsys: Any, vectors: np.ndarray) -> None:
    status, out, _ = run(capsys, "a cat", "--dimensions", "0", "--", "-x")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [line["index"] for line in lines] == [0, 1]
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), vectors)


def test_lines_become_an_array(capsys: Any, tmp_path: Path, vectors: np.ndarray) -> None:
    (tmp_path / "texts").write_text("a cat\n-x\n", encoding="utf-8")
    status, out, _ = run(capsys, "-f", str(tmp_path / "texts"), "-o", str(tmp_path / "out.npy"))
    assert status == 0 and out == ""
    assert np.array_equal(np.load(tmp_path / "out.npy"), vectors)


def test_texts_are_cut_if_a_flag_says_so(capsys: Any) -> None:
    assert run(capsys, "x = 1 " * 99, "--dimensions", "4", "--truncate")[0] == 0
    status, _, problem = run(capsys, "x = 1 " * 99)
    assert status == 2 and "let it be cut (--truncate), or choose a larger context (-c)" in problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "there is no text: write some in quotes"),
        (["a", "-f", "b"], "texts are given as words and with -f: use only one of them"),
        (["-f", "missing"], "the texts cannot be read from missing"),
        (["a", "-o", "nowhere/a.npy"], "nowhere is no folder: name another file with -o"),
        (["a", "--dimensions", "513"], "dimensions must be 1 to 512, or 0 for all, not 513"),
        (["a", "--pooling", "max"], "mean, cls or last"),
    ],
)
def test_an_error_is_one_sentence(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, error = run(capsys, *words)
    assert status == 2 and out == "" and problem in error and error.count("error:") == 1


def test_an_empty_line_is_named(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a\n \nb", encoding="utf-8")
    assert "line 2 of" in run(capsys, "-f", str(tmp_path / "texts"))[2]
    (tmp_path / "texts").write_text("", encoding="utf-8")
    assert "has no lines" in run(capsys, "-f", str(tmp_path / "texts"))[2]


def test_a_model_without_a_pooling_says_what_to_do(capsys: Any) -> None:
    assert embed.main(["--device", "cpu", "-c", "64", "a"]) == 2
    assert "open it with --pooling mean or --pooling last" in capsys.readouterr().err


def test_the_words_of_the_flag_are_those_of_the_engine() -> None:
    assert shared.JOINED == JOINED
