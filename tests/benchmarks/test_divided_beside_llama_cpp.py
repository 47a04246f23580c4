"""``benchmarks/divided_beside_llama_cpp.py``, with a stand-in for llama-bench."""

import os
import stat
import sys
from pathlib import Path

import pytest

from benchmarks import divided_beside_llama_cpp
from tests.conftest import REPOSITORY

RIVAL = """#!/bin/sh
echo "$@" >> {log}
echo '{{"n_prompt": 8, "n_gen": 0, "samples_ns": [2000000000, 4000000000]}}'
echo '{{"n_prompt": 0, "n_gen": 2, "samples_ns": [1000000000, 1000000000]}}'
"""


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rival, log = tmp_path / "llama-bench", tmp_path / "log"
    rival.write_text(RIVAL.format(log=log))
    rival.chmod(rival.stat().st_mode | stat.S_IXUSR)
    model = REPOSITORY / "engine/data/pycoder-draft-Q4_K_M.gguf"
    given = [str(model), "--bench", str(rival), "--ours=-t 1 -dev cpu", "--theirs=-ngl 19"]
    divided_beside_llama_cpp.main([*given, "-p", "8", "-n", "2", "-r", "2"])
    assert log.read_text().splitlines() == [f"-m {model} -fa 1 -ngl 19 -p 8 -n 2 -r 2 -o jsonl"] * 2
    *_, prompt, answer = capsys.readouterr().out.splitlines()
    words = [[word.strip() for word in line.strip("|").split("|")] for line in (prompt, answer)]
    assert [(line[0], line[2]) for line in words] == [("pp8", "3.0"), ("tg2", "2.0")]
    for line in words:
        own, other, ratio = map(float, line[1:])
        assert own > 0 and abs(own / other - ratio) < 0.01 * ratio + 0.01


def test_a_failure_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^/no/such/llama-bench cannot be run: No such file or directory; name"):
        divided_beside_llama_cpp.main([str(tmp_path / "none.gguf"), "--bench", "/no/such/llama-bench"])
    with pytest.raises(SystemExit, match=r"-m bitmirror failed:\n(.|\n)*none\.gguf"):
        divided_beside_llama_cpp.rates([sys.executable, "-m", "bitmirror", "bench", "-m", str(tmp_path / "none.gguf")])
