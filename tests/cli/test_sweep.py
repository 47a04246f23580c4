"""A sweep over depths (never its speeds): every token is read once, answers are those of the model, mistakes are refused."""

import argparse
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from benchmarks import plot_depth
from benchmarks.measured import measurements
from engine import bench
from engine.cli import sweep as module
from engine.cli.sweep import Sweep, depths
from engine.cpu.backend import Backend
from engine.errors import UsageError
from engine.hub.resolve import resolve
from engine.synthetic.model import make_model

# --- ranges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2048-65536", [2048, 4096, 8192, 16384, 32768, 65536]),
        ("2048-20000", [2048, 4096, 8192, 16384, 20000]),
        ("0-2048+512", [0, 512, 1024, 1536, 2048]),
        ("100-350+100", [100, 200, 300, 350]),
        ("2048-65536*4", [2048, 8192, 32768, 65536]),
        ("4-20*1.5", [4, 6, 9, 14, 20]),
        ("1-4*1.01", [1, 2, 3, 4]),
        ("512-512", [512]),
        ("0-0+1", [0]),
    ],
)
def test_depths_of_a_range(text: str, expected: list[int]) -> None:
    assert depths(text) == expected


@given(first=st.integers(1, 5000), more=st.integers(0, 5000), grow=st.sampled_from(["", "+7", "*2", "*1.3", "+100000"]))
def test_depths_rise_from_the_first_to_the_last(first: int, more: int, grow: str) -> None:
    found = depths(f"{first}-{first + more}{grow}")
    assert found[0] == first and found[-1] == first + more
    assert all(a < b for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2048", "must be a range of depths such as 2048-65536, "),
        ("a-b", "must be a range of depths"),
        ("-5-10", "must be a range of depths"),
        ("1-2-3", "must be a range of depths"),
        ("1-2,4", "must be a range of depths"),
        ("4096-2048", "must begin at its lower end: 2048-4096, not 4096-2048"),
        ("0-4096", "cannot grow from depth 0 by a factor: begin at 1 or more, or add a step: 0-4096+512"),
        ("1-4096+0", "must have a step of 1 or more"),
        ("1-4096+0.5", "must have a whole number of tokens after the +, not 0.5"),
        ("1-4096*1", "must have a factor above 1"),
        ("1-99999999999", "must end at 1073741824 or before"),
    ],
)
def test_a_range_that_is_none(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        depths(text)
    assert says in str(error.value)


# --- what is run -----------------------------------------------------------------------------------------------


def text_for(llm: engine.LLM, sweep: Sweep) -> np.ndarray:
    return np.random.default_rng(7).integers(0, llm.config.n_vocab, sweep.n_tokens, dtype=np.int32)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The tokens that were read, as (first, count), and the answers."""
    found: dict[str, list[Any]] = {"read": [], "answers": []}
    read_prompt, answer = module.read_prompt, module._answer

    def reading(llm: engine.LLM, tokens: np.ndarray) -> None:
        found["read"].append((llm.sequence.length, tokens.size))
        read_prompt(llm, tokens)

    def answering(llm: engine.LLM, known: list[int], n: int, params: Any) -> Any:
        assert llm.sequence.length == len(known) - 1
        result = answer(llm, known, n, params)
        found["answers"].append((known, params.enabled, result[0]))
        return result

    monkeypatch.setattr(module, "read_prompt", reading)
    monkeypatch.setattr(module, "_answer", answering)
    monkeypatch.setattr("engine.cli.runs.read_prompt", lambda *_: pytest.fail("what was read is read again"))
    return found


@pytest.fixture(scope="module", params=["pycoder-moe-mtp", "tiny-gemma3", "pycoder with pycoder-draft"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    """A model with recurrent layers and one that drafts, one with sliding windows, and one with a draft model."""
    name, _, draft = request.param.partition(" with ")
    path = make_model(tmp_path_factory.mktemp("sweep") / "m.gguf", name, "Q4_0") if "tiny" in name else resolve(name)
    with engine.load(path, device="cpu", n_ctx=512, batch_size=96, draft_model=draft or None) as loaded:
        yield loaded


def test_every_token_is_read_once(llm: engine.LLM, recorded: dict[str, list[Any]]) -> None:
    sweep = Sweep(depths("20-320"), n_prompt=64, n_gen=12, warmup=False)
    text = text_for(llm, sweep)
    found = list(sweep.run(llm, text))
    drafts = llm.draft.name if llm.draft is not None else ""
    names = [(0, 12, ""), *([(0, 12, drafts)] if drafts else [])]
    expected = []
    for depth, n_prompt in zip((20, 40, 80, 160, 320), (20, 40, 64, 64, 64), strict=True):
        expected += [(*name, depth) for name in [*names, (n_prompt, 0, "")]]
    assert [(m.n_prompt, m.n_gen, m.drafts, m.n_depth) for m in found] == expected
    assert all(len(m.samples_ns) == 1 and m.samples_ns[0] > 0 for m in found)
    at = 0
    for first, count in recorded["read"]:
        assert first == at
        at += count
    assert at == 320 + 64
    # Drafts change no token, and neither does the way to the depth.
    for known, _, answer in recorded["answers"]:
        assert known == text[: len(known)].tolist()
        fresh = llm.complete(known, max_tokens=12, temperature=0, ignore_eos=True)
        assert fresh.ids == answer


def test_tests_are_repeated_and_drafts_prescribed(llm: engine.LLM, recorded: dict[str, list[Any]]) -> None:
    for acceptance in (0.0, 1.0):
        sweep = Sweep([0, 100], n_prompt=32, n_gen=16, repetitions=2, acceptance=acceptance)
        recorded["read"].clear()
        found = list(sweep.run(llm, text_for(llm, sweep)))
        assert all(len(m.samples_ns) == 2 for m in found)
        # To depth 0, three prompts there, one to warm up; on to depth 100, two prompts there.
        assert [(a, n) for a, n in recorded["read"] if n] == [(0, 32)] * 3 + [(32, 68)] + [(100, 32)] * 2
        if llm.draft is not None:
            assert [m.acceptance for m in found if m.drafts] == [acceptance] * 2
            llm.draft.script = None


def test_a_window_that_cannot_forget_an_answer(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-gemma3", "Q4_0")
    with engine.load(path, device="cpu", n_ctx=512, batch_size=16) as llm:
        most = llm.cache.rewind
        for sweep in (Sweep([100], 16, most), Sweep([100], most + 1, 8, repetitions=2)):
            with pytest.raises(
                UsageError, match=rf"the sliding windows of this model can forget {most}: lower -n and -p"
            ):
                next(sweep.run(llm, text_for(llm, sweep)))
        sweep = Sweep([100], most + 1, 8)
        assert len(list(sweep.run(llm, text_for(llm, sweep)))) == 2


# --- the command -----------------------------------------------------------------------------------------------

MODEL = ["-m", "pycoder-moe-mtp", "--device", "cpu", "-t", "1"]


def test_a_sweep_prints_csv_that_can_be_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Backend, "bandwidth", lambda ops: 1e9)
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):\n    return a + b\n\n\n" * 12, encoding="utf-8")
    argv = [*MODEL, "--sweep", "16-64", "-p", "16", "-n", "8", "-f", str(file)]
    assert bench.main(argv) == 0
    text = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(text)))
    tests = [test + f" @ d{depth}" for depth in (16, 32, 64) for test in ("tg8", "tg8+mtp", "pp16")]
    assert [row["test"] for row in rows] == tests
    assert [row["drafts"] for row in rows] == ["", "mtp", ""] * 3
    assert all(float(row["avg_ts"]) > 0 and 0 <= float(row["acceptance"]) <= 1 for row in rows)
    counted = [float(row["bytes_per_token"]) > 0 for row in rows]
    assert counted == [True, False, False] * 3
    output = tmp_path / "sweep.csv"
    output.write_text(text, encoding="utf-8")
    name = "pycoder-moe-mtp-Q4_K_M"
    facts = plot_depth.facts(measurements([str(output)]))
    assert [line[0] for line in facts["n_gen"]] == [name, f"{name}, drafts of its own layer"]
    assert [[depth for depth, _ in line[1]] for line in facts["n_gen"]] == [[16, 32, 64]] * 2
    assert facts["n_prompt"] == [
        [name, [[int(r["n_depth"]), float(r["avg_ts"])] for r in rows if r["n_prompt"] != "0"]]
    ]
    # Another format has the same tests; without its layer the model makes no drafts.
    assert bench.main([*argv, "-o", "jsonl", "--no-mtp"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["test"] for line in lines] == [test for test in tests if "mtp" not in test]


def test_an_interrupted_sweep_keeps_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Backend, "bandwidth", lambda ops: 1e9)
    answer = module._answer

    def interrupted(llm: engine.LLM, known: list[int], n: int, params: Any) -> Any:
        if len(known) > 32:
            raise KeyboardInterrupt
        return answer(llm, known, n, params)

    monkeypatch.setattr(module, "_answer", interrupted)
    assert bench.main([*MODEL, "--sweep", "16-64", "-p", "8", "-n", "4"]) == 130
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["tg4 @ d16", "tg4+mtp @ d16", "pp8 @ d16"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--sweep", "9"], "--sweep must be a range of depths such as 2048-65536"),
        (["--sweep", "64-8192"], "is 1024 tokens and the sweep needs 8704: end --sweep at 512 or before"),
        (["--sweep", "1000-1024"], "is 1024 tokens and the sweep needs 1536: lower --sweep, -p or -n"),
        (["--sweep", "1-64", "-d", "0"], "--sweep and -d both give depths"),
        (["--sweep", "1-64", "-p", "1,2"], "give one number with -p"),
        (["--sweep", "1-64", "-p", "0", "-n", "0"], "nothing to measure"),
        (["--sweep", "1-64", "--acceptance", "1.5"], "--acceptance must be 0 to 1, not 1.5"),
        (["--sweep", "1-64", "-p", "1", "--acceptance", "1", "--no-mtp"], "give a draft model with -md"),
        (["--sweep", "1-64", "-f", "/nowhere/text"], "/nowhere/text cannot be read: No such file"),
        (["--sweep", "1-64", "-f", "{short}"], "too few tokens, 1 of the 576 that the sweep needs: give a longer text"),
        (["--sweep", "1-64", "-f", "{binary}"], "is not UTF-8"),
        (["-md", "pycoder-draft"], "-md is for a sweep: add --sweep 2048-65536"),
        (["-f", "x"], "-f is for a sweep"),
        (["--acceptance", "1"], "--acceptance is for a sweep"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"short": b"x", "binary": b"\xff\xfe\x00"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert bench.main([*MODEL, *(word.format(**{name: tmp_path / name for name in files}) for word in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("compiling ")] == err.splitlines()[-1:]
    assert says in err
