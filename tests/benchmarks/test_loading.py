"""The benchmark of loading runs, with the code of each checkout."""

from pathlib import Path

import pytest

from benchmarks import loading
from engine.hub.resolve import resolve
from tests.conftest import REPOSITORY


def test_a_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of one folder under two names."""
    other = tmp_path / "other"
    other.symlink_to(REPOSITORY)
    words = [str(resolve("pycoder-draft")), "--device", "cpu", "--runs", "1", "--code", str(REPOSITORY), str(other)]
    loading.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert "read by one thread in" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[3:]]
    assert [row[:2] for row in rows] == [
        [str(folder), name] for folder in (REPOSITORY, other) for name in ("load", "first token", "end")
    ]
    assert all(0 < float(row[2]) <= float(row[3]) <= float(row[4]) < 600 for row in rows)


def test_the_digest(capsys: pytest.CaptureFixture[str]) -> None:
    loading.main([str(resolve("pycoder-draft")), "--digest", "--runs", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["sha256", "blake2b"]
    assert lines[5].startswith("| 1 |")
