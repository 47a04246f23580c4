"""``bitmirror completion``: what shells complete with its scripts."""

import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from bitmirror.__main__ import main
from bitmirror.completion import SHELLS, script
from bitmirror.tools import TOOLS
from engine.hub.catalog import CATALOG

CASES = [
    ("bitmirror ", set(TOOLS)),
    ("bitmirror par", {"parity"}),
    ("bitmirror models ", {"list", "fetch", "verify", "remove"}),
    ("bitmirror models fetch ", set(CATALOG)),
    ("bitmirror serve --par", {"--parallel"}),
    ("bitmirror run --temp 0 --cache-type q", {"q8_0", "q4_0"}),
    ("bitmirror chat -m pycoder-", {"pycoder-draft", "pycoder-eagle3", "pycoder-moe-mtp"}),
    ("bitmirror run -m own", {"own.gguf"}),
    ("bitmirror compile -o fol", {"folder"}),
]
"""The beginning of a line in a folder that has ``own.gguf`` and ``folder``, and the words that complete its end."""

BASH = """
source "$1"
function=$(complete -p bitmirror | grep -o -e "-F [^ ]*" | cut -c 4-)
read -ra COMP_WORDS <<< "$2"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$function bitmirror "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, a file and a folder."""
    path = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (path / f"script.{shell}").write_text(script(shell), encoding="utf-8")
    (path / "own.gguf").touch()
    (path / "folder").mkdir()
    return path


def need(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def output(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(("line", "words"), CASES)
def test_bash(line: str, words: set[str], folder: Path) -> None:
    need("bash")
    assert set(output(folder, "bash", "-c", BASH, "bash", "script.bash", line)) == words


@pytest.mark.parametrize(("line", "words"), CASES)
def test_fish(line: str, words: set[str], folder: Path) -> None:
    need("fish")
    lines = output(folder, "fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'")
    assert {each.partition("\t")[0].rstrip("/") for each in lines} == words


def test_zsh(folder: Path) -> None:
    """zsh completes in a terminal only."""
    import pty

    need("zsh")
    terminal, inner = pty.openpty()
    command = ["zsh", "-f", "-i"]
    setting = os.environ | {"TERM": "dumb", "COLUMNS": "300"}
    shell = subprocess.Popen(command, cwd=folder, env=setting, stdin=inner, stdout=inner, stderr=inner, process_group=0)
    os.close(inner)

    def wait(text: str) -> None:
        found, end = b"", time.monotonic() + 30
        while text.encode() not in found:
            assert time.monotonic() < end, found.decode()
            if select.select([terminal], [], [], 0.1)[0]:
                found += os.read(terminal, 1 << 16)

    try:
        setup = 'autoload -Uz compinit; compinit -u -D; eval "$(cat script.zsh)"; echo re""ady'
        os.write(terminal, f"stty columns 300; {setup}\n".encode())
        wait("ready")
        for line, words in CASES:
            if len(words) == 1:
                os.write(terminal, f"{line}\t".encode())
                wait(f"{line[: line.rindex(' ')]} {next(iter(words))}")
                os.write(terminal, b"\x15")  # clear the line
    finally:
        os.close(terminal)
        shell.kill()
        shell.wait()


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash") + "\n"
