"""The programs in ``examples`` run from any folder, and print what the book says."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(n_ctx=256)


LAW = ("law.py", "law_integer_cache.py", "law_mixture.py", "law_delta_net.py", "law_drafts.py")
"""Programs that ``tests/test_law.py`` and ``tests/test_law_parts.py`` test."""

SHORT = ("batch.py", "stream_chat.py", "classify.py", "parse.py", "call_tools.py")
"""Programs of fewer than 15 lines, blank ones not counted."""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in another folder, and returns what it prints."""

    def output(name: str, *words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        captured = capsys.readouterr()
        assert captured.err == ""
        assert not [*tmp_path.iterdir()]
        return captured.out

    return output


def test_every_example_is_tested_and_described() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"tour.py", "evaluate.py", "stream_asyncio.py", *LAW, *SHORT}
    book = (REPOSITORY / "docs" / "examples.md").read_text(encoding="utf-8")
    for name in names:
        assert f"`examples/{name}`" in book
        assert f"python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8")


def test_the_tour(llm: engine.LLM, run: Run) -> None:
    source = (EXAMPLES / "tour.py").read_text(encoding="utf-8")
    assert source.count("\n# %% ") > 10
    out = run("tour.py")
    expected = llm.complete("def add(a, b):\n    return", max_tokens=24, temperature=0, stop="\n")
    rows = llm.logits(llm.tokenize("def add(a, b):"))
    assert f"{expected!r} stop" in out
    assert f"{rows.shape} {{{llm.detokenize([rows[-1].argmax()])!r}: {round(float(rows[-1].max()), 2)}" in out
    assert "False" not in out
    assert re.search(r"^True (\d+) of \d+ drafts were right$", out, re.M)
    assert out.splitlines()[-1].endswith("closed>")


def test_the_evaluation(llm: engine.LLM, run: Run) -> None:
    questions = runpy.run_path(str(EXAMPLES / "evaluate.py"))["QUESTIONS"]
    assert len(questions) == len({opening for opening, _ in questions}) == 50
    head, *rows, blank, score = run("evaluate.py").splitlines()
    assert (len(rows), blank) == (50, "")
    passed = sum(row.startswith("pass ") for row in rows)
    assert score == f"{passed} of 50 passed ({passed / 50:.0%})"
    assert 0 < passed < 50
    for i in (0, 14, 49):
        opening, expected = questions[i]
        text = llm.complete(opening, max_tokens=8, temperature=0, heal=True).text
        assert rows[i].startswith("pass" if text.startswith(expected) else "fail") and rows[i].endswith(repr(text))
    # The book shows some of these lines.
    book = (REPOSITORY / "docs" / "examples.md").read_text(encoding="utf-8")
    found = re.search(r"^```text\n(.*?)^```", book, re.M | re.S)
    assert found
    assert set(found[1].splitlines()) <= {head, *rows, blank, score}


@pytest.mark.thorough
def test_the_evaluation_of_another_model(run: Run) -> None:
    assert run("evaluate.py", "-m", "pycoder-draft") != run("evaluate.py")


def test_streams_in_asyncio(llm: engine.LLM, run: Run) -> None:
    *lines, free, same = run("stream_asyncio.py").splitlines()
    assert free == "the event loop was free: True"
    assert same == "both texts are those of one answer at a time: True"
    pieces = {name: "".join(eval(line[2:]) for line in lines if line[0] == name) for name in "AB"}
    for name, prompt in {
        "A": "def add(a, b):\n    ",
        "B": "class Stack:\n    def push(self, item):\n        ",
    }.items():
        assert pieces[name] == llm.complete(prompt, max_tokens=16, seed=7).text


def test_a_batch(llm: engine.LLM, run: Run) -> None:
    for line in run("batch.py").splitlines():
        prompt, text, reason = re.fullmatch(r"('.*?') ('.*') (\w+)", line).groups()  # type: ignore[union-attr]
        expected = llm.complete(eval(prompt), max_tokens=12, temperature=0, stop="\n")
        assert (eval(text), reason) == (expected.text, expected.finish_reason)


def test_a_streamed_chat(llm: engine.LLM, run: Run) -> None:
    messages = [{"role": "user", "content": "# add two numbers"}]
    expected = llm.chat(messages, chat_template="chatml", max_tokens=24, seed=1)
    assert run("stream_chat.py") == f"{expected.text}\n{len(expected.ids)} tokens, {expected.finish_reason}\n"


def test_a_classification(run: Run) -> None:
    assert [line.split()[-1] for line in run("classify.py").splitlines()] == ["ImportError", "KeyError", "ImportError"]


def test_a_parsed_answer(run: Run) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("llguidance", reason="a schema needs the extra serve")
    assert re.fullmatch(r"True name='.{0,20}' age=\d+\n", run("parse.py"))


def test_a_call(run: Run) -> None:
    pytest.importorskip("llguidance", reason="a forced call needs the extra serve")
    found = re.fullmatch(r"(\[.*?\]) (\w+) ('.*'|\".*\")\n", run("call_tools.py"))
    assert found and found[2] == "tool_calls"
    ((name, arguments),) = eval(found[1])
    assert name == "weather" and arguments["city"] in ("Berlin", "Paris")


@pytest.mark.thorough
def test_short_programs_are_short_and_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("pydantic")
    for name in SHORT:
        lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert sum(map(bool, lines)) < 15
        shutil.copy(EXAMPLES / name, tmp_path)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", "cache", *SHORT]
    environment = os.environ | {"MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
