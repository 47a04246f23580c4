"""``bitmirror trace``: text for terminals of any width, and JSON."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from engine.cli import trace
from engine.sampling.token_logprob import TokenLogprob
from engine.trace.text import lines_of
from engine.trace.trace import Trace, TracedLayer, TracedStream

FLAGS = ["--device", "cpu", "-c", "256"]


def test_the_layers_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert trace.main(["def add(a, b):\\n    return", "--top", "3", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("token ") and "' return'" in lines[0]
    assert sum(line.startswith("layer ") for line in lines) > 1
    says = [line for line in lines if line.startswith("  says")]
    assert "' a'" in says[-1] and says[-1].count("%") == 3
    assert all(cell_len(line) <= 100 for line in lines)


def test_json_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    words = ["a = 1", "--token", "0", "--top", "2", "--drafts", "0", *FLAGS]
    assert trace.main([*words, "--json", str(path)]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["object"], found["position"], len(found["tokens"])) == ("trace", 0, 1)
    assert found["drafts"] is None and found["device"] == "cpu"
    assert trace.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "no" / "a.json")
    for words in ([], ["a", "--token", "7"], ["a", "--chat"], ["a", "--json", nowhere], ["a", "--top", "0"]):
        assert trace.main([*words, *FLAGS]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lens = tuple(TokenLogprob(i, text, -0.5) for i, text in enumerate(("\u732b", "\x1b[2J", "word", "\n\n", "")))
    stream = TracedStream(1234.5, lens)
    layer = TracedLayer(0, "attention", "experts", stream, {"mixer": 0.001, "network": float("inf")}, None, ((3, 0.5),))
    texts = dict(enumerate(("\u732b", "a")))
    found = Trace([0, 1], None, stream, (layer, layer), None, texts)  # type: ignore[arg-type]
    lines = lines_of(found, columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert "experts" in "\n".join(lines)
