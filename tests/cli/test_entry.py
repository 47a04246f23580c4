"""How all commands begin and end: help, exit statuses, readers that leave, signals."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import bench, parity, run
from engine.cli import compile as compiling
from engine.cli import entry, models, synthetic
from engine.cli.parser import Parser
from engine.errors import UsageError
from tests.conftest import REPOSITORY

TOOLS = {
    "run": run.parser,
    "bench": bench.parser,
    "parity": parity.parser,
    "models": models.parser,
    "synthetic": synthetic.parser,
    "compile": compiling.parser,
}

posix = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")


@pytest.mark.parametrize("tool", TOOLS)
def test_help_has_one_style(tool: str) -> None:
    parser = TOOLS[tool]()
    text = parser.format_help()
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: bitmirror {tool}")
    assert all(line.startswith("       ") and "bitmirror" in line for line in lines[1:3])
    assert lines[3] == ""
    assert max(map(len, lines)) <= 100
    assert "Exit status: 0 " in text
    # Every flag is in a group with a title, explained, and shown with its default.
    assert "options:" not in text and "positional arguments:" not in text
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction)
        for name in action.option_strings:
            assert re.search(rf"^  .*(?<![\w-]){name}\b", text, re.M)
        if action.option_strings and isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
            assert f"(default {action.default})" in re.sub(r"\s+", " ", text)
    renamed = TOOLS[tool]("bitmirror other").format_help()  # type: ignore[call-arg]
    assert renamed.startswith("usage: bitmirror other")


def test_help_is_quick() -> None:
    code = (
        "import sys, contextlib, io, importlib\n"
        "for name in 'bench', 'parity', 'cli.models', 'cli.synthetic', 'cli.compile':\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        assert importlib.import_module(f'engine.{name}').main(['--help']) == 0\n"
        "    assert out.getvalue().startswith('usage: bitmirror ')\n"
        "assert not {'numba', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_a_start_does_not_import_scipy(tmp_path: Path) -> None:
    """Numba would import its linear algebra, which takes half a second."""
    package = tmp_path / "scipy" / "linalg"
    package.mkdir(parents=True)
    (tmp_path / "scipy" / "__init__.py").write_text("__version__ = '1.16.0'")
    (package / "__init__.py").write_text("raise SystemExit('SciPy was imported')")
    command = [sys.executable, "-m", "bitmirror", "run", "--device", "cpu", "-p", "x", "-n", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)


def end(work: Callable[[], int], *words: str) -> int:
    """The exit status of a command that does ``work``."""

    def parser() -> Parser:
        top = Parser("program")
        top.add_argument("-v", "--verbose", action="store_true")
        return top

    return entry.main(parser, lambda args: work(), words, memory="take less")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UsageError("it is wrong"), 2, "error: it is wrong\n"),
        (MemoryError(), 2, "error: not enough memory: take less\n"),
        (ImportError("No module named 'x'"), 2, "error: a package is missing (No module named 'x'): install"),
        (FileNotFoundError(2, "No such file", "name"), 2, "error: name: No such file\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
        (ValueError("x"), 1, "error: this is a bug (ValueError: x); please run it again with --verbose"),
    ],
)
def test_an_error_is_one_sentence(
    error: BaseException, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert end(fail) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(says) and err.count("\n") == int(says != "")
    assert end(fail, "--verbose") == status
    assert ("Traceback" in capsys.readouterr().err) == (says != "")
    assert end(lambda: 7) == 7


def test_control_characters_in_an_error_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UsageError("\x1b[2Jname")

    assert end(fail) == 2
    assert capsys.readouterr().err == r"error: \x1b[2Jname" + "\n"


def leave(*words: str, lines: int = 0, errors: bool = False) -> tuple[int, str]:
    """Status and stderr of a command whose reader leaves after so many lines; with ``errors``, stderr goes the same way."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    err = ""
    if process.stderr is not None:
        err = process.stderr.read()
        process.stderr.close()
    return process.wait(timeout=300), err


@posix
@pytest.mark.parametrize(
    "words",
    [
        ("engine.run", "--help"),
        ("engine.cli.models",),
        ("engine.cli.synthetic", "--list"),
        ("engine.bench", "--help"),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_ends_a_command_silently(words: tuple[str, ...]) -> None:
    assert leave("-m", *words) == (141, "")


@posix
def test_a_reader_of_results_that_leaves() -> None:
    """The result after the one that was read ends the command, and what was open is closed."""
    code = (
        "import sys\n"
        "from engine import bench\n"
        "def lines(results):\n"
        "    try:\n"
        "        yield from map(str, range(10 ** 9))\n"
        "    finally:\n"
        "        print('closed', file=sys.stderr)\n"
        "bench._OUTPUTS['md'] = lines\n"
        "bench.entry.program(bench.main)\n"
    )
    assert leave("-c", code, lines=1) == (141, "closed\n")


@posix
@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(streams: str) -> None:
    command = f"'{sys.executable}' -m engine.run {streams}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no prompt") or "2>&-" in streams


@posix
def test_a_reader_of_errors_that_leaves() -> None:
    assert leave("-m", "engine.run", "--nope", errors=True)[0] == 141


@posix
def test_a_request_to_end_removes_unfinished_files(tmp_path: Path) -> None:
    words = ["engine.cli.synthetic", "--shape", "qwen3-0.6b:Q8_0", "-o", str(tmp_path / "m.gguf")]
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not any(file.stat().st_size > 1_000_000 for file in tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert (process.wait(timeout=300), process.stderr.read()) == (143, "")
    process.stderr.close()
    assert list(tmp_path.iterdir()) == []
