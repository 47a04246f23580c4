"""The comparison with llama.cpp on the CPU: what is asked of which process, and what the table says. Nothing is timed."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import cpu_beside_llama_cpp as compared
from benchmarks import cpu_player
from benchmarks.cpu_beside_llama_cpp import FLASH, OURS, RIVAL, Row, main, parser, spinning, table
from engine.hub.resolve import resolve

FAKE = """
import json, sys
task = json.loads(sys.argv[1])
flash = task.get("flash_attn")
print(json.dumps("ready"), flush=True)
count = 0
for line in sys.stdin:
    count += 1
    speed = {"ours": 30, "llama.cpp": 20 if flash else 10}[task["engine"]] * task["n_threads"] + count
    facts = {"bytes_per_token": 1e8, "bandwidth": 1e10} if task["engine"] == "ours" else {"version": "1.2.3"}
    n = {"prompt": task["n_prompt"], "answer": task["n_answer"]}.get(line.strip())
    print(json.dumps({"tokens": n, "seconds": n / speed} if n else facts), flush=True)
"""
"""A player whose measurements are known beforehand: each is faster than the one before by a token per second."""

RATES = {OURS: [20.0, 40.0, 30.0], RIVAL + FLASH: [10.0, 20.0, 60.0], RIVAL: [1.0, 15.0, 16.0]}
ROW = Row("some", "tg64", 2, 1, RATES, 1e8, 6e9)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "player.py"
    path.write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(compared, "PLAYER", path)
    monkeypatch.setattr(compared, "PAUSE", 0.0)
    return path


def test_arguments() -> None:
    args = parser().parse_args(["a", "b", "--shape", "x:Q4_0", "-t", "1,16", "--busy", "0,1,2", "-r", "7"])
    assert (args.models, args.shape, args.threads) == (["a", "b"], ["x:Q4_0"], [1, 16])
    assert (args.busy, args.rounds, args.n_prompt, args.n_gen) == ([0, 1, 2], 7, 256, 64)
    assert args.rival_python == [(RIVAL, sys.executable)]
    args = parser().parse_args(["a", "--rival-python", "native=/x/python", "wheel=~/python"])
    assert args.rival_python == [("llama.cpp, native", "/x/python"), ("llama.cpp, wheel", f"{Path.home()}/python")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a model"),
        (["m", "-t", "0"], "1 or more"),
        (["m", "--busy", "-1"], "0 or more"),
        (["m", "-r", "0"], "1 or more"),
        (["m", "-t", "two"], "whole numbers"),
        (["m", "--rival-python", "a", "b"], "name the builds"),
    ],
)
def test_bad_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_a_row() -> None:
    # The better of both medians counts: 20 with flash attention, 15 without.
    cells = dict(zip(ROW.header(), ROW.cells(), strict=True))
    assert (cells["ours"], cells["llama.cpp"], cells["ratio"], cells["from-to"]) == (
        "30.0",
        "20.0",
        "1.50",
        "0.50-2.00",
    )
    assert (cells["GB/s"], cells["of memory"]) == ("3.0", "50%")
    prompt = Row("some", "pp256", 2, 1, ROW.rates)
    assert prompt.cells()[-2:] == ["", ""]


def test_a_row_with_two_builds() -> None:
    rates = {OURS: [20.0, 40.0, 30.0]}
    rates |= {"a": [10.0, 20.0, 10.0], "a" + FLASH: [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "b" + FLASH: [5.0, 5.0, 5.0]}
    row = Row("some", "tg64", 2, 0, rates)
    assert row.header()[5:11] == ["a", "ratio", "from-to", "b", "ratio", "from-to"]
    assert row.cells()[4:11] == ["30.0", "10.0", "3.00", "2.00-3.00", "5.0", "6.00", "4.00-8.00"]
    assert row.theirs == 10.0


def test_a_table() -> None:
    lines = list(table([ROW]))
    assert len(lines) == 3 and {line.count("|") for line in lines} == {len(ROW.header()) + 1}


@pytest.mark.usefixtures("fake")
def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert (
        main(["pycoder", "-t", "1,2", "--busy", "0,1", "-r", "3", "-p", "100", "-n", "50", "--json", str(target)]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:10]]
    assert [row[1:4] for row in rows] == [
        [test, threads, busy] for busy in "01" for test in ("pp100", "tg50") for threads in "12"
    ]
    # Ours was asked for facts first, so its prompts of the first load are measurements 2, 4 and 6.
    assert rows[0][4:7] == ["34.0", "24.0", "1.42"]
    assert rows[3][8:] == ["6.5", "65%"]
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["llama.cpp"] == {RIVAL: {"version": "1.2.3"}}
    assert len(written["rows"]) == 8 and written["rows"][0]["rates"][OURS] == pytest.approx([32, 34, 36])
    assert "tg50, 1 busy: 2 threads are " in lines[-1] and len(lines) == 11 + 4


def test_an_engine_that_ends(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.write_text("raise SystemExit(3)", encoding="utf-8")
    assert main(["pycoder", "-t", "1"]) == 2
    assert "ours with 1 threads has ended with exit status 3" in capsys.readouterr().err


def test_processes_that_spin_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen

    def record(*args: Any, **more: Any) -> Any:
        started.append(start(*args, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", record)

    def interrupted() -> None:
        with spinning(2):
            assert [process.poll() for process in started] == [None, None]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_a_process_that_spins_ends_with_its_parent() -> None:
    # Its parent is this process, not the one that it is told.
    assert subprocess.run([sys.executable, "-c", compared.SPIN, str(os.getpid() + 1)], timeout=60).returncode == 0


def test_our_player() -> None:
    player = cpu_player.Ours(str(resolve("pycoder")), 1, 16, 4)
    assert player.llm.n_ctx == 256
    assert player.prompt()["tokens"] == 16 and player.llm.n_cached == 16
    assert player.answer()["tokens"] == 4
    # The last token of the answer is not read.
    assert player.llm.n_cached == cpu_player.BEGINNING + 4
    player.llm.model.ops.bandwidth = lambda: 1e9  # type: ignore[method-assign]
    facts = player.facts()
    assert facts["bytes_per_token"] > player.llm.n_bytes_read and facts["bandwidth"] == 1e9


class FakeLlamaCpp:
    """Its model continues a token with the next number."""

    llama_token = ctypes.c_int32

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.logits = (ctypes.c_float * 1000)()
        self.options: dict[str, Any] = {}

    def Llama(self, path: str, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(ctx=None, n_vocab=lambda: 1000)

    def llama_get_memory(self, ctx: None) -> None:
        pass

    def llama_memory_clear(self, memory: None, data: bool) -> None:
        self.read.clear()

    def llama_batch_get_one(self, tokens: Any, n: int) -> list[int]:
        return list(tokens[:n])

    def llama_decode(self, ctx: None, batch: list[int]) -> int:
        self.read.append(batch)
        self.logits[:] = [0.0] * 1000
        self.logits[(batch[-1] + 1) % 1000] = 1.0
        return 0

    def llama_get_logits_ith(self, ctx: None, i: int) -> Any:
        assert i == -1
        return self.logits


def test_the_player_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", api)  # type: ignore[arg-type]
    player = cpu_player.LlamaCpp("x.gguf", 2, 300, 4, flash_attn=True)
    assert (api.options["n_ctx"], api.options["n_threads"], api.options["n_threads_batch"]) == (512, 2, 2)
    assert api.options["flash_attn"] and not api.options["verbose"]
    assert player.prompt()["tokens"] == 300
    assert api.read == [cpu_player.prompt_ids(1000, 300)]
    assert player.answer()["tokens"] == 4
    first = api.read[0][-1]
    assert api.read == [player.beginning, *([(first + n) % 1000] for n in range(1, 5))]
    monkeypatch.setattr(cpu_player, "LIMIT", 0.0)
    assert player.answer()["tokens"] == 1


def test_prompts_are_those_of_both_engines() -> None:
    ids = cpu_player.prompt_ids(100, 5000)
    assert ids == cpu_player.prompt_ids(100, 5000) and set(ids) == set(range(5, 95))
    assert np.array(ids).dtype.kind == "i"
