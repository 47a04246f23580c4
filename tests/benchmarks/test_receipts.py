"""The script that measures what receipts cost."""

import re
import sys

import pytest

from benchmarks import receipts
from engine.hub.resolve import resolve


def test_a_comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --users 1,2 -n 6 --replayed 12 -r 1"
    monkeypatch.setattr(sys, "argv", ["receipts", str(resolve("pycoder-draft")), *words.split()])
    receipts.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu: pycoder-draft")
    assert [line.split("|")[1].strip() for line in lines[3:5]] == ["1", "2"]
    sentence = (
        r"12 tokens: made in \S+ s, replayed in \S+ s at first and \S+ s again, \S+ times as fast; \S+ s of this for"
    )
    assert len(lines) == 7 and all(re.match(sentence, line) for line in lines[5:])
