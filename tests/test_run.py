"""The command line: what goes to stdout, what the exit status is, and that every mistake is reported in one sentence."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import DeviceError
from engine.hub.catalog import CATALOG, model_file
from engine.memory import Memory
from engine.models import traffic as bandwidth
from engine.run import main
from engine.speculative.params import SpeculationParams
from engine.version import ARITHMETIC
from tests import fake_llm
from tests.conftest import REPOSITORY, model_path

# -- one answer, by the fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fake_llm.FakeLLM]]:
    """Replaces ``engine.load``; returns the models that were loaded."""
    for name in [name for name in os.environ if name.startswith("FAKE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(vars(engine), "load", fake_llm.load)
    fake_llm.loaded.clear()
    yield fake_llm.loaded
    fake_llm.loaded.clear()


@pytest.fixture
def chatty(fake: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch) -> list[fake_llm.FakeLLM]:
    """The fake with a chat template and a longer context."""
    monkeypatch.setenv("FAKE_TEMPLATE", "1")
    monkeypatch.setattr(fake_llm, "N_CTX", 400)
    return fake


def stdin(monkeypatch: pytest.MonkeyPatch, data: str | bytes, *, terminal: bool = False) -> None:
    raw = io.BytesIO(data if isinstance(data, bytes) else data.encode())
    text = io.TextIOWrapper(raw, encoding="utf-8")
    text.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", text)


Capture = pytest.CaptureFixture[str]


def test_stdout_holds_the_answer_and_stderr_the_report(fake: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    assert main(["-p", "one\\ntwo"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "ONE\nTWO"
    for word in ("load", "compile", "prompt", "7 tokens", "first token", "memory", "ended by", "seed"):
        assert word in captured.err
    assert "\x1b" not in captured.err  # not a terminal: plain lines, and no control characters from the file
    assert fake[0].compiled
    assert fake[0].path == model_file(CATALOG["pycoder"])


def test_what_is_odd_about_a_file_is_a_note(
    fake: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(fake_llm, "sampling_defaults", lambda file: ({}, ["an id is odd.", "another one too."]))
    assert main(["-p", "x"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert lines == ["note: an id is odd.", "note: another one too."]


def test_memory_by_what_it_is_for(
    fake: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["-p", "x"]) == 0
    assert re.search(r"^memory      [0-9.]+ [MG]B at most$", capsys.readouterr().err, re.M)
    assert main(["-p", "x", "--verbose"]) == 0
    line = "memory: weights 0.0 MB, cache 1.0 MB (0.0 MB in use), buffers 2.0 MB"
    assert line in capsys.readouterr().err.splitlines()
    memory = Memory(500, 10**6, 0, 10**6, 0, 3 * 10**6, 0, 2**31)
    monkeypatch.setattr(fake_llm, "MEMORY", memory)
    assert str(memory).endswith(", cache 2.0 MB (1.0 MB in use), snapshots 3.0 MB (up to 2.15 GB), buffers 0.0 MB")
    assert main(["-p", "x"]) == 0
    found = re.search(r"^memory      .* at most, (.*)$", capsys.readouterr().err, re.M)
    assert found is not None and found[1] == "3.0 MB of them for snapshots (up to 2.15 GB)"


def test_a_name_in_a_file_cannot_control_the_terminal(
    fake: list[fake_llm.FakeLLM], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "model.gguf"
    file.symlink_to(model_file(CATALOG["pycoder"]))
    assert main(["-p", "x", "-m", str(file), "-md", str(file)]) == 0
    error = capsys.readouterr().err
    assert "\nfake \ufffd[31mmodel  fake" in f"\n{error}"
    assert "drafts by fake \ufffd[31mmodel, " in error
    assert "\x1b" not in error


def test_flags_reach_the_model(fake: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    words = "-p x -n 3 -c 32 -t 3 --cache-type f32 -ctk q8_0 --cache-type-v q4_0 --temp 0.5 --top-k 7 --top-p 0.5 "
    words += "--min-p 0.25 --typical 0.75 -s 9 "
    words += "--repeat-penalty 1.5 --repeat-last-n 32 --presence-penalty 0.5 --frequency-penalty 0.25 --ignore-eos "
    words += (
        "--dry-multiplier 0.75 --dry-base 1.5 --dry-allowed-length 3 --dry-penalty-last-n 99 --xtc-probability 0.5 "
    )
    words += "--dry-sequence-breaker \\n --xtc-threshold 0.25 "
    words += (
        "--logprobs 2 --stop a\\n -r b -l 5+1 -l 5+1 -l 6-inf --no-warmup --device cpu -b 96 -ngl 5 -ncmoe 2 -ot a=cpu "
        "--kv-budget 512"
    )
    assert main(words.split()) == 0
    capsys.readouterr()
    (llm,) = fake
    types = {"cache_type": "f32", "cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    sizes = {"n_ctx": 32, "n_threads": 3, "batch_size": 96, "kv_budget": 512}
    places = {"n_gpu_layers": 5, "n_cpu_moe": 2, "override_tensor": "a=cpu"}
    assert llm.options == fake_llm.NO_DRAFT | {"device": "cpu"} | sizes | types | places
    assert not llm.compiled
    (asked,) = llm.asked
    del asked["on_prefill"]
    assert asked == {
        "prompt": "x", "max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75,
        "repeat_penalty": 1.5, "repeat_last_n": 32, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 9,
        "dry_multiplier": 0.75, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 99,
        "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5, "xtc_threshold": 0.25,
        "logit_bias": {5: 2.0, 6: -float("inf")}, "stop": ["a\n", "b"], "ignore_eos": True, "logprobs": 2,
        "heal": True, "speculation": SpeculationParams(),
    }  # fmt: skip


SPECULATION = "--draft-lookup --draft-max 9 --draft-min 2 --draft-p-min 0.25 --spec-accept p-min --spec-p-min 0.5"


def test_flags_of_speculation_reach_the_model(fake: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    words = ["-p", "x", "-dev", "cpu", *SPECULATION.split(), "--spec-sequential-verify"]
    assert main([*words, "-md", "pycoder", "-devd", "cuda"]) == 0
    assert (
        "drafts by pycoder, 0.0 M parameters, 0.0 MB, cache 1.0 MB in f16, cuda:0 Abacus X1\n"
        in capsys.readouterr().err
    )
    assert main([*words, "-md", "pycoder"]) == 0
    assert "drafts by pycoder, 0.0 M parameters, 0.0 MB, cache 1.0 MB in f16\n" in capsys.readouterr().err
    assert main([*words, "-md", "pycoder", "--no-spec"]) == 0
    err = capsys.readouterr().err
    assert "draft" not in err and "verification" not in err
    draft = model_file(CATALOG["pycoder"])
    assert [(llm.options["draft_model"], llm.options["device_draft"]) for llm in fake] == [
        (draft, "cuda"), (draft, None), (None, None),
    ]  # fmt: skip
    asked = [llm.asked[0]["speculation"] for llm in fake]
    expected = SpeculationParams(
        lookup=True, draft_max=9, draft_min=2, draft_p_min=0.25, accept="p-min", accept_p_min=0.5, sequential=True
    )
    assert asked == [expected, expected, replace(expected, enabled=False)]


@pytest.mark.usefixtures("fake")
def test_what_drafts_did(capsys: Capture) -> None:
    assert main(["-p", "abc", "--draft-lookup", "-md", "pycoder"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "drafts      8 of 12 kept (67%; by place 100% 100% 0%), 4 of 6 by lookup, 4 of 6 by the draft model" in lines
    (passes,) = [line for line in lines if line.startswith("passes")]
    assert passes.startswith("passes      3.00 tokens per verification (4), 4 plain at 8.0 tokens/s: ")
    assert main(["-p", "abc", "--json", "--draft-lookup"]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"] == {
        "drafted": 6,
        "accepted": 4,
        "accepted_by_place": [1.0, 1.0, 0.0],
        "sources": {"lookup": {"drafted": 6, "accepted": 4}},
        "verifications": 2,
        "mean_accepted_length": 3.0,
        "plain_tokens": 4,
        "plain_per_second": 8.0,
    }
    for words in ([], ["--draft-lookup", "--no-spec"]):
        assert main(["-p", "abc", "--json", *words]) == 0
        captured = capsys.readouterr()
        assert "speculation" not in json.loads(captured.out)
        assert "drafts" not in captured.err


def test_where_it_runs(fake: list[fake_llm.FakeLLM], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a CPU says threads, that of a GPU its name, its memory and what it reads; both say GB/s."""
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda llm, timings: 1e10)
    for device in ("cpu", "none", "auto"):
        assert main(["-p", "abc", "-dev", device]) == 0
        err = capsys.readouterr().err
        assert "cache 1.0 MB in f16, 2 threads\n" in err
        assert "tokens/s  10.0 GB/s\n" in err  # measuring a CPU would take long
        assert "GPU" not in err
    assert main(["-p", "abc", "-dev", "cpu", "-v"]) == 0
    assert "tokens/s  10.0 GB/s (50% of the 20.0 GB/s that a plain read reaches)\n" in capsys.readouterr().err
    assert main(["-p", "abc", "-dev", "cuda", "-t", "3"]) == 0
    err = capsys.readouterr().err
    assert "cache 1.0 MB in f16, cuda:0 Abacus X1\n" in err
    assert "GPU memory 2.5 MB (weights 0.5 MB, cache 1.0 MB, rest 1.0 MB), 7.00 GB free; it reads at 4000 GB/s\n" in err
    assert "tokens/s  10.0 GB/s (0% of the 4000 GB/s that a plain read reaches)\n" in err
    assert re.search(r"^memory      .* at most, 2\.5 MB on the GPU$", err, re.M)
    assert "thread" not in err
    assert [llm.options["device"] for llm in fake] == ["cpu", "none", "auto", "cpu", "cuda"]


@pytest.mark.parametrize("error", [DeviceError("too little memory."), MemoryError()])
@pytest.mark.usefixtures("fake")
def test_an_answer_does_not_need_the_bandwidth(
    error: Exception, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> float:
        raise error

    monkeypatch.setattr(fake_llm, "bandwidth", fail)
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda llm, timings: 1e12)
    assert main(["-p", "abc", "-dev", "cuda"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "ABC"
    assert "7.00 GB free\n" in captured.err
    assert "tokens/s  1000 GB/s\n" in captured.err


def test_json_is_one_object(fake: list[fake_llm.FakeLLM], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["-p", "åb", "--json", "--logprobs", "2", "-s", "7", "-n", "1"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    timings = result.pop("timings")
    assert result.pop("sampling")["top_k"] == {"value": 40, "from": "default"}
    assert result == {
        "model": str(model_file(CATALOG["pycoder"])),
        "prompt": "åb",
        "prompt_ids": [0xE5, 0x62],
        "ids": [0xC5],
        "text": "Å",
        "finish_reason": "length",
        "seed": 7,
        "arithmetic": ARITHMETIC,
        "logprobs": [
            {
                "id": 0xC5,
                "text": "Å",
                "logprob": -0.5,
                "top": [{"id": 0xC5, "text": "Å", "logprob": -0.5}, {"id": 0, "text": "\0", "logprob": None}],
            }
        ],
    }
    assert timings["device"] == "cpu"
    assert timings["device_memory_bytes"] is None
    assert timings["predicted_bytes_per_second"] is None  # there is one token, which came from the prompt's pass
    assert timings["prompt_n"] == 2
    assert timings["prompt_ms"] == 125
    assert timings["prompt_per_second"] == 16
    assert timings["predicted_n"] == 1
    assert "Infinity" not in captured.out
    assert main(["-p", "åbc", "--json", "-dev", "cuda"]) == 0
    timings = json.loads(capsys.readouterr().out)["timings"]
    assert (timings["device"], timings["device_memory_bytes"]) == ("cuda:0 Abacus X1", 2_500_000)
    assert timings["predicted_bytes_per_second"] > 0
    assert "ended by    length  (seed 7)" in captured.err


def test_a_bare_text_ends_by_itself(
    fake: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for words in (["-n", "40"], ["--stop", "x"], ["--ignore-eos"], ["-n", "-1"]):
        assert main(["-p", "a", *words]) == 0
        asked = fake[-1].asked[0]
        assert asked["max_tokens"] == (40 if words[-1] == "40" else -1)
        assert asked["stop"] == (["x"] if words[-1] == "x" else [])
    assert main(["-p", "a"]) == 0
    assert (fake[-1].asked[0]["max_tokens"], fake[-1].asked[0]["stop"]) == (256, ["\n\n\n"])
    monkeypatch.setattr(fake_llm, "N_CTX", 400)
    monkeypatch.setenv("FAKE_TEXT", "b" * 500)
    capsys.readouterr()
    assert main(["-p", "a", "-s", "3"]) == 0
    assert (
        "length  (256 tokens, the default for a bare text: -n sets another number; seed 3)" in capsys.readouterr().err
    )
    assert main(["-p", "a", "-n", "-1", "--temp", "0"]) == 0
    assert "length  (the context is full: -c sets its size; greedy)" in capsys.readouterr().err
    # With a template, the model ends its answer.
    monkeypatch.setenv("FAKE_TEMPLATE", "1")
    assert main(["-p", "a"]) == 0
    assert (fake[-1].asked[0]["max_tokens"], fake[-1].asked[0]["stop"]) == (-1, [])


def test_two_blank_lines_end_a_bare_text(capsys: Capture) -> None:
    words = ["-p", "class Config:\\n    def __init__(self, name, value):", "--temp", "0"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == (
        "\n        self.name = name\n        self.value = value\n\n    def __repr__(self):\n"
        '        return f"<{self.name} {self.value}>"'
    )
    assert "two blank lines, the default for a bare text" in captured.err


def test_a_random_seed_is_named(fake: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    seeds = set()
    for words in ([], ["--seed", "4294967295"], ["-s", "-1"]):
        assert main(["-p", "x", "--json", *words]) == 0
        seeds.add(json.loads(capsys.readouterr().out)["seed"])
    assert len(seeds) == 3
    assert seeds == {llm.asked[0]["seed"] for llm in fake}
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_logprobs_without_json_are_lines_of_the_report(fake: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    assert main(["-p", "ab", "--logprobs", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "AB"
    assert "-0.5000  'A'              'A' -0.5000" in captured.err


def test_a_prompt_from_a_file_or_stdin(
    fake: list[fake_llm.FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("é\\n\n\n".encode())
    for words in (["-f", str(file)], ["-p", "-"], ["-f", "-"]):
        stdin(monkeypatch, file.read_bytes())
        assert main(words) == 0
        capsys.readouterr()
        assert fake[-1].asked[0]["prompt"] == "é\\n\n"  # no escapes in a file, and one line break is dropped
    # Without a prompt, what is piped is the prompt.
    for words in ([], ["--no-cnv"], ["--single-turn"]):
        stdin(monkeypatch, file.read_bytes())
        assert main(words) == 0
        capsys.readouterr()
        assert fake[-1].asked[0]["prompt"] == "é\\n\n"
    # A positional prompt is the same as -p; it may begin with a dash after two dashes.
    for words in (["a\\tb", "-n", "3"], ["-n", "3", "a\\tb"], ["-n", "3", "--", "a\\tb"], ["-p", "a\\tb"]):
        assert main(words) == 0
        capsys.readouterr()
        assert fake[-1].asked[0]["prompt"] == "a\tb"
    assert main(["-p", "a\\nb", "--no-escape", "--stop", "\\n"]) == 0
    assert (fake[-1].asked[0]["prompt"], fake[-1].asked[0]["stop"]) == ("a\\nb", ["\\n"])


def one_sentence(captured: Any) -> str:
    """The error of a run that wrote nothing else; no traceback."""
    lines: list[str] = captured.err.splitlines()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert lines[-1].startswith("error: ")
    assert sum(line.startswith("error: ") for line in lines) == 1
    return lines[-1]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["-p", "x", "-f", "y"], "both"),
        (["-f", "/no/such/file"], "/no/such/file: No such file"),
        (["-p", "x", "-m", "no-such-model"], "smollm2-135m"),
        (["-p", "x", "--cnv", "--no-cnv"], "--no-cnv is not for a conversation"),
        (["-p", "x", "--cnv", "--json"], "--json is not for a conversation"),
        (["-p", "x", "--no-cnv", "--sys", "y"], "--sys"),
        (["-p", "x", "--sys", "y"], "--sys needs a chat template"),
        (["-p", "x", "-c", "-1"], "-c must be 0 or more, not -1"),
        (["-p", "x", "--device", "abacus"], "device 'abacus' is unknown"),
        (["-p", "x", "-dev", "cuda:one"], "device 'cuda:one' is unknown"),
        (["-p", "x", "-n", "-3"], "-n must be -2 or more, not -3"),
        (["-p", "x", "-b", "-1"], "-b must be 0 to 4096, not -1"),
        (["-p", "x", "--batch-size", "4097"], "--batch-size must be 0 to 4096, not 4097"),
        (["-p", "x", "--logprobs", "-3"], "--logprobs must be 0 or more, not -3"),
        (["-p", "x", "--top-p", "-1"], "--top-p must be 0 to 1, not -1"),
        (["-p", "x", "-devd", "cpu"], "give one with --draft-model"),
        (["-p", "x", "-md", "pycoder", "-devd", "abacus"], "device 'abacus' is unknown"),
        (["-p", "x", "-md", "no-such-model"], "smollm2-135m"),
        (["-p", "x", "--draft-max", "16"], "--draft-max must be 0 to 15, not 16"),
        (["-p", "x", "--draft-max", "-1"], "--draft-max must be 0 to 15, not -1"),
        (["-p", "x", "--draft-max", "3", "--draft-min", "4"], "draft_min must be between 0 and draft_max"),
        (["-p", "x", "--draft-p-min", "1.5"], "--draft-p-min must be 0 to 1, not 1.5"),
        (["-p", "x", "--spec-p-min", "-0.5"], "--spec-p-min must be 0 to 1, not -0.5"),
        (["-p", "x", "--repeat-penalty", "0"], "--repeat-penalty must be above 0"),
        (["-p", "x", "-s", "-5"], "-s must be -1 to 18446744073709551615, not -5"),
        (["-p", "x" * 64], "the prompt has 64 tokens"),
        (["-p", "\\xff"], "UTF-8"),
        (["-f", "~nobody-of-this-name/x"], "cannot be read"),
        (["-p", "x", "--cnv", "--logprobs", "2"], "--logprobs is for one answer"),
        (["-p", "x", "-n", "9" * 400], "-n must be a number of fewer digits"),
        (["-p", "x", "-ot", "ffn_up"], "must be REGEX=DEVICE"),
        # Before a draft model is looked for, which may be a download.
        (["-p", "x", "-ot", "ffn_up", "-md", "no-such-model"], "must be REGEX=DEVICE"),
        ([], "there is no prompt"),
        (["-p", "-"], "there is no prompt"),
        (["--single-turn"], "there is no prompt"),
        (["--no-cnv"], "there is no prompt"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    stdin(monkeypatch, "")
    assert main(words) == 2
    assert hint in one_sentence(capsys.readouterr())


@pytest.mark.usefixtures("fake")
def test_a_prompt_file_that_is_no_text(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"abc\xff")
    assert main(["-f", str(file)]) == 2
    assert "byte 3" in one_sentence(capsys.readouterr())
    assert main(["-f", str(tmp_path)]) == 2
    assert "cannot be read" in one_sentence(capsys.readouterr())


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("error", "status", "hint"),
    [
        ("ModelError", 2, "it failed"),
        ("MemoryError", 2, "not enough memory"),
        ("OSError", 2, "it failed"),
        ("ZeroDivisionError", 1, "--verbose"),
    ],
)
def test_errors_while_running(
    error: str, status: int, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAKE_ERROR", error)
    assert main(["-p", "x"]) == status
    assert hint in one_sentence(capsys.readouterr())
    assert main(["-p", "x", "--verbose"]) == status
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.splitlines()[-1].startswith("error: ")
    assert captured.out == ""


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(rf"bitmirror \S+, arithmetic {ARITHMETIC}\n", capsys.readouterr().out)


# -- templates and conversations


def test_a_template_asks_one_question(chatty: list[fake_llm.FakeLLM], capsys: Capture) -> None:
    assert main(["-p", "hi", "--sys", "be kind", "-n", "4"]) == 0
    assert capsys.readouterr().out == "SYST"
    assert chatty[0].asked[0]["prompt"] == "system: be kind\nuser: hi\nassistant: "
    assert main(["-p", "hi", "--no-cnv"]) == 0
    assert capsys.readouterr().out == "HI"
    assert chatty[1].asked[0]["prompt"] == "hi"


def test_a_conversation(
    chatty: list[fake_llm.FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_TEXT", "fine")
    lines = ["hello", "", "/nope", "/etc/passwd is a path", "two \\", "lines", '"""a', "block", '"""', "/help"]
    lines += ["/save talk.json", "/save talk.json", "/clear", "again", "/save other.json", "/quit", "never"]
    stdin(monkeypatch, "\n".join(lines))
    assert main(["--cnv", "--sys", "S"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "fine\n" * 5
    assert "no command /nope" in captured.err
    assert "/clear" in captured.err
    turns = ["hello", "/etc/passwd is a path", "two \nlines", "a\nblock"]
    messages = [{"role": "system", "content": "S"}]
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "fine"}]
    assert json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"] == messages
    asked = [each["prompt"] for each in chatty[0].asked]
    assert asked[0] == "system: S\nuser: hello\nassistant: "
    assert asked[1] == "system: S\nuser: hello\nassistant: fine\nuser: /etc/passwd is a path\nassistant: "
    assert asked[4] == "system: S\nuser: again\nassistant: "
    assert len(json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))["messages"]) == 3
    # Another conversation does not write over that file.
    stdin(monkeypatch, "hello\n/save talk.json\n")
    assert main(["--cnv"]) == 0
    assert "talk.json exists" in capsys.readouterr().err
    assert json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"] == messages


def test_a_single_turn(
    chatty: list[fake_llm.FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """On a terminal one message is asked for; the system prompt may come from a file."""
    system = tmp_path / "system"
    system.write_text("be kind\n")
    stdin(monkeypatch, "hello\nnever\n", terminal=True)
    assert main(["-st", "--cnv", "-n", "4", "-sysf", str(system)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "SYST"
    assert captured.err.startswith("> ")
    (asked,) = chatty[0].asked
    assert asked["prompt"] == "system: be kind\nuser: hello\nassistant: "


def test_a_conversation_after_a_prompt(
    chatty: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAKE_TEXT", "ok")
    stdin(monkeypatch, "next\n")
    assert main(["--cnv", "-p", "/quit"]) == 0
    assert capsys.readouterr().out == "ok\nok\n"
    assert chatty[0].asked[1]["prompt"] == "user: /quit\nassistant: ok\nuser: next\nassistant: "


def test_a_message_too_long_is_taken_back(
    chatty: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAKE_TEXT", "ok")
    stdin(monkeypatch, "a\n" + "x" * 500 + "\nb\n")
    assert main(["--cnv"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "ok\nok\n"
    assert "/clear starts a new conversation" in captured.err
    assert chatty[0].asked[-1]["prompt"] == "user: a\nassistant: ok\nuser: b\nassistant: "


# -- processes: signals, pipes, terminals

PATIENCE = 300
"""Seconds until a child that says nothing is taken for stuck; a busy machine may need most of them."""


def start(*words: str, real: bool = False, **environment: str) -> subprocess.Popen[str]:
    module = "engine.run" if real else "tests.fake_llm"
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if not k.startswith("FAKE_")} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def wait_until_loaded(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "context" not in process.stderr.readline():
        assert process.poll() is None


posix = pytest.mark.skipif(os.name == "nt", reason="signals and pseudo-terminals of POSIX")


@posix
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_ctrl_c_ends_the_answer_and_keeps_the_report(extra: tuple[str, ...], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = start("-p", "x" * 20, *extra, FAKE_DELAY="0.1", FAKE_TEXT="abc" * 99, FAKE_BEGUN=str(begun))
    assert process.stdout is not None
    wait_until_loaded(process)
    first = "" if extra else process.stdout.read(1)
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "ended by    interrupted" in err
    text = json.loads(out)["text"] if extra else first + out
    assert "abcabcabc".startswith(text[:9])
    assert len(text) < 44


@posix
def test_ctrl_c_while_loading_is_quiet() -> None:
    process = start("-p", "x", FAKE_DELAY="30")
    wait_until_loaded(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@posix
def test_a_reader_that_leaves_is_no_error() -> None:
    process = start("-p", "x", FAKE_DELAY="0.02", FAKE_TEXT="y" * 50)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert "error" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fake_llm", "-p", "x"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: No space left on device"


@posix
def test_the_locale_does_not_matter() -> None:
    process = start("-p", "é €", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out == "É €"


class Terminal:
    """A child on a pseudo-terminal of 80 columns and 24 rows, stdin, stdout and stderr, and all that it has written."""

    def __init__(self, words: list[str], *, real: bool = False, **environment: str) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.text = ""
        module = "engine.run" if real else "tests.fake_llm"
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(REPOSITORY)
            clean = {k: v for k, v in os.environ.items() if not k.startswith("FAKE_")}
            # Nobody answers requests for the cursor's position, and no file of the user is touched.
            clean |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": os.devnull}
            os.execve(
                sys.executable,
                [sys.executable, "-m", module, *words],
                clean | {"PYTHONUTF8": "1"} | environment,
            )
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Reads until ``text`` has been written after what an earlier call waited for."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} in {self.text!r}"
            assert self._read(end), f"ended without {text!r}: {self.text!r}"
        self.seen = self.text
        self.text = self.text[self.text.index(text) + len(text) :]

    def type(self, text: str) -> None:
        """Type once the child waits."""
        state = Path(f"/proc/{self.pid}/stat")
        end, still = time.monotonic() + PATIENCE, 0
        while still < 10 and time.monotonic() < end:
            time.sleep(0.02)
            waits = not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "S"
            still = still + 1 if waits else 0
        os.write(self.fd, text.encode())

    def finish(self, seconds: float = PATIENCE) -> tuple[int, str]:
        """The exit status, and what was written since the last ``wait_for``."""
        end = time.monotonic() + seconds
        while self._read(end):
            assert time.monotonic() < end, self.text
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.text

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self.fd], [], [], max(end - time.monotonic(), 0))
        try:
            data = os.read(self.fd, 65536) if ready else b""
        except OSError:  # how Linux says that the child has gone
            return False
        self.text += data.decode("utf-8", "replace")
        return bool(data) or not ready


@posix
def test_a_terminal_shows_prompt_bars_and_rate() -> None:
    terminal = Terminal(["-p", "count"], FAKE_DELAY="0.05", FAKE_TEXT="\x1b[2Jone two three")
    status, text = terminal.finish()
    assert status == 0
    assert "compiling (kept for the next run)" in text
    assert "reading the prompt" in text
    assert "\x1b[2mcount\x1b[0m" in text  # the text that the answer continues
    assert "tokens/s" in text[: text.index("ended by")]
    assert text.count("\x1b[1;23r") == 1  # the part that scrolls ...
    assert text.rindex("\x1b[r") > text.rindex("\x1b[1;23r")  # ... is the whole screen again
    assert "\x1b[2J" not in text
    answer = re.sub(r"\x1b7.*?\x1b8|\x1b\[\??[\d;]*[A-Za-z]|\x1bD", "", text)
    assert "count�[2Jone two three\r\n" in answer


# -- the engine itself


def run(*words: str, text: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    data = text.decode() if isinstance(text, bytes) else text
    return subprocess.run(
        [sys.executable, "-m", "engine.run", *words],
        cwd=REPOSITORY,
        input=data,
        stdin=subprocess.DEVNULL if data is None else None,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )


GREEDY = ("--temp", "0", "-n", "24")
FIBONACCI = "def fibonacci(n):"


def test_the_bundled_model_answers() -> None:
    done = run("-p", FIBONACCI, *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "error" not in done.stderr
    for word in ("load", "prompt", "tokens/s", "first token", "memory"):
        assert word in done.stderr
        assert word == "load" or word not in done.stdout
    llm = engine.load()
    expected = llm.complete(FIBONACCI, max_tokens=24, temperature=0.0, heal=True)
    assert done.stdout == expected.text
    assert (
        run("-p", FIBONACCI, *GREEDY, "--no-heal").stdout
        == llm.complete(FIBONACCI, max_tokens=24, temperature=0.0).text
    )
    # The same prompt through every input.
    assert run("-p", "-", *GREEDY, text=FIBONACCI + "\n").stdout == done.stdout
    assert run("-p", FIBONACCI, *GREEDY, "--no-warmup").stdout == done.stdout
    assert run("-m", "pycoder", "-p", FIBONACCI, *GREEDY, "-t", "1").stdout == done.stdout


def test_json_of_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text(FIBONACCI + "\n", encoding="utf-8")
    words = ("-f", str(file), "--json", "--logprobs", "3", "-n", "12", "-s", "5")
    first, second = run(*words), run(*words)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    llm = engine.load()
    assert result["prompt"] == FIBONACCI
    assert result["prompt_ids"] == llm.tokenize(FIBONACCI)[:-1]
    assert FIBONACCI + result["text"] == llm.detokenize(result["prompt_ids"] + result["ids"])
    assert result["finish_reason"] == "length"
    assert result["seed"] == 5
    assert len(result["ids"]) == len(result["logprobs"]) == result["timings"]["predicted_n"] == 12
    for id, entry in zip(result["ids"], result["logprobs"], strict=True):
        values = [likely["logprob"] for likely in entry["top"]]
        assert entry["id"] == id
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= values[0] <= 0
        assert entry["text"] == llm.tokenizer.token_bytes(id).decode(errors="replace")
    again = json.loads(second.stdout)
    del result["timings"], again["timings"]
    assert result == again  # the same seed, the same text


def test_stop_strings_do_not_reach_stdout() -> None:
    whole = run("-p", FIBONACCI, *GREEDY).stdout
    stop = whole[5:9]
    done = run("-p", FIBONACCI, *GREEDY, "--no-escape", f"--stop={stop}")
    assert done.stdout == whole[: whole.index(stop)]
    assert "ended by    stop" in done.stderr


def test_a_prompt_longer_than_the_context() -> None:
    done = run("-p", "x = 1\\n" * 200, "-c", "64")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert re.search(r"^error: .*64", done.stderr.splitlines()[-1])


def test_a_device_that_is_not_there() -> None:
    done = run("-p", "x", "--device", "abacus")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: .*abacus.*\n", done.stderr)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for data in (b"", b"no model", model_file(CATALOG["pycoder"]).read_bytes()[:100_000]):
        file.write_bytes(data)
        done = run("-m", str(file), "-p", "x")
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert str(file) in done.stderr


@posix
def test_ctrl_c_in_the_real_engine() -> None:
    process = start("-p", FIBONACCI, "--ignore-eos", "--temp", "0", real=True)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert first
    assert "Traceback" not in err
    assert "ended by    interrupted" in err


@pytest.mark.thorough
def test_a_chat_model_answers_through_its_template() -> None:
    model = str(model_path("smollm2-135m"))
    done = run("-m", model, "-p", "What is the capital of France?", "--temp", "0", "-n", "16", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    llm = engine.load(model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert llm.chat_template is not None
    assert result["prompt_ids"] == llm.chat_template.encode(messages)
    assert result["text"] == llm.complete(result["prompt_ids"], max_tokens=16, temperature=0.0).text
    bare = run(
        "-m", model, "-p", "The capital of France is", "--no-cnv", "--no-heal", "--temp", "0", "-n", "8", "--json"
    )
    assert json.loads(bare.stdout)["prompt_ids"] == llm.tokenize("The capital of France is")


@pytest.mark.thorough
@posix
def test_a_real_conversation_on_a_terminal() -> None:
    terminal = Terminal(["-m", str(model_path("smollm2-135m")), "-n", "8", "--temp", "0"], real=True)
    terminal.wait_for("\x1b[0m>")
    for _ in range(2):
        terminal.type("Say hello.\r")
        terminal.wait_for("context")
        terminal.wait_for("\x1b[0m>")
    terminal.type("/quit\r")
    assert terminal.finish()[0] == 0
