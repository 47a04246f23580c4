"""The command ``bitmirror`` and the package of that name, also where the current folder has an ``engine.py``."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import bitmirror
import engine
from bitmirror.__main__ import main, program
from bitmirror.tools import TOOLS
from engine.compile.worker import START
from tests.conftest import REPOSITORY

Capture = pytest.CaptureFixture[str]


def test_the_package_has_the_interface_of_the_engine() -> None:
    assert bitmirror.load is engine.load
    assert dir(bitmirror) == sorted(engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bitmirror.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_tools_are_listed(words: list[str], capsys: Capture) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {tool} " in out for tool in TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_help(tool: str, capsys: Capture) -> None:
    try:
        status = main([tool, "--help"])
    except SystemExit as end:  # argparse
        status = int(end.code or 0)
    assert status == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["rnu", "-p", "x"], "did you mean `bitmirror run`?"),
        (["-p", "x"], "as in `bitmirror run -p ...`"),
        (["Why is the sky blue?"], "write bitmirror run 'Why is the sky blue?'"),
    ],
)
def test_a_word_that_is_no_tool(words: list[str], advice: str, capsys: Capture) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bitmirror ")


# -- a folder with its own engine.py


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files named like the package's."""
    (tmp_path / "engine.py").write_text("raise SystemExit('the wrong engine')\n")
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The folder comes first on sys.path, then the checkout: PYTHONPATH, not an installed package, provides bitmirror.
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_runs_beside_another_engine(folder: Path) -> None:
    done = python(folder, "-m", "bitmirror", "run", "--temp", "0", "-n", "6", "-p", "def is_even(n):\\n    return n %")
    assert (done.returncode, done.stdout) == (0, " 2 == 0"), done.stderr


def test_the_package_is_imported_beside_another_engine(folder: Path) -> None:
    done = python(folder, "-c", "import bitmirror, engine; print(engine.__file__, bitmirror.load.__module__)")
    assert done.stdout.split() == [str(REPOSITORY / "engine" / "__init__.py"), "engine.loading"], done.stderr


def test_kernels_are_compiled_beside_another_engine(folder: Path) -> None:
    """A process that compiles reads the folders of its parent, of which the first is the current one."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {START}"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        input=pickle.dumps([str(folder), str(REPOSITORY), *sys.path]),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert b"wrong engine" not in done.stderr
    assert done.returncode == 0


def test_another_engine_that_is_already_imported(folder: Path) -> None:
    (folder / "engine.py").write_text("")
    done = python(folder, "-c", "import engine, bitmirror")
    assert "another module named 'engine' is in use" in done.stderr.splitlines()[-1]


def test_an_interrupt_while_a_tool_is_imported(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitmirror.__main__.import_module", interrupted)
    monkeypatch.setattr("sys.argv", ["bitmirror", "run"])
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    with pytest.raises(SystemExit) as end:
        program()
    assert end.value.code == 130 and capsys.readouterr() == ("", "")
