"""Names of files that contain line breaks and escapes: what a command writes has no line that only a name makes."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import bench, parity, run
from engine.hub.resolve import resolve

NAME = "a\nerror: forged \x1b[31m\u202e.gguf"
SHOWN = r"a\nerror: forged \x1b[31m\u202e"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(resolve("pycoder-draft"), tmp_path / NAME))


def lines(text: str) -> list[str]:
    """The lines of a text, in which each character is printable."""
    found = text.splitlines()
    assert all(line.isprintable() for line in found), text
    assert not any(line.startswith("error: forged") for line in found), text
    return found


@pytest.mark.parametrize("words", [["-m", "absent{}"], ["-md", "absent{}"], ["--{}"], ["a", "{}"], ["--seed", "{}"]])
def test_errors_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([word.format(NAME) for word in words]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert line.startswith("error: ")


def test_tables_and_reports(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["-m", str(path), "-p", "1", "-n", "1", "-r", "1", "--device", "cpu"]) == 0
    assert any(SHOWN in line for line in lines(capsys.readouterr().out))
    parity.main([str(path), "--device", "cuda:99"])
    lines("".join(capsys.readouterr()))


def test_the_log_of_a_server(path: Path) -> None:
    command = [sys.executable, "-m", "engine.serve", "-m", str(path), "--port", "0", "--device", "cpu", "-c", "64"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = ""
        while f"{SHOWN} is open" not in found:
            line = server.stderr.readline()
            assert line, found
            found += line
        server.send_signal(signal.SIGTERM)
        found += server.stderr.read()
    for line in lines(found):
        assert re.match(r"listening on |\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ ", line), line
