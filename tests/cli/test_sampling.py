"""Sampling parameters on the command line: flags before the file of the model, and the file before the defaults."""

import io
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.cli.flags import generation_options, parser
from engine.cli.sampling import NUMBERS, given, origins, with_file
from engine.run import main
from engine.sampling.params import SamplerParams
from tests import fake_llm, recommended

Capture = pytest.CaptureFixture[str]

FILE = {"temp": 0.0, "top_k": 3, "top_p": 0.9}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A file whose recommendations a fake of a model reads."""
    monkeypatch.setitem(vars(engine), "load", fake_llm.load)
    fake_llm.loaded.clear()
    return str(recommended.model(tmp_path / "x.gguf", FILE))


def test_every_number_has_an_origin() -> None:
    others = {"logit_bias", "dry_breakers", "logits_processors", "seed"}
    assert set(NUMBERS) == {field.name for field in fields(SamplerParams)} - others


@pytest.mark.parametrize("name", NUMBERS)
def test_a_flag_is_before_the_file(name: str) -> None:
    file = {name: 7}
    plain, flag = parser().parse_args([]), "--" + name.replace("_", "-")
    default = generation_options(plain)[name]
    assert with_file(generation_options(plain), given(plain), file)[name] == 7
    assert origins(given(plain), file)[name] == "file"
    # Also if its value is the default.
    args = parser().parse_args([flag, str(default)])
    assert with_file(generation_options(args), given(args), file)[name] == default
    assert origins(given(args), file)[name] == "flag"
    assert {origin for other, origin in origins(given(args), file).items() if other != name} == {"default"}


def asked(words: list[str]) -> dict[str, Any]:
    assert main(words) == 0
    request = fake_llm.loaded[-1].asked[-1]
    return {name: request[name] for name in ("temperature", "top_k", "top_p", "min_p")}


def test_what_run_uses(model: str, capsys: Capture) -> None:
    file = {"temperature": 0.0, "top_k": 3, "top_p": 0.9, "min_p": 0.05}
    assert asked(["-m", model, "-p", "ab"]) == file
    err = capsys.readouterr().err
    assert re.search(r"^ended by .*\(greedy\)$", err, re.M)
    assert "sampling as the file recommends: temperature 0.0, top_k 3, top_p 0.9\n" in err
    assert asked(["-m", model, "-p", "ab", "--top-k", "40", "--min-p", "0.5", "-v"]) == file | {
        "top_k": 40,
        "min_p": 0.5,
    }
    err = capsys.readouterr().err
    assert "temperature 0.0 (file), top_k 40 (flag), top_p 0.9 (file), min_p 0.5 (flag), typical_p 1.0 (default)" in err
    asked(["-m", model, "-p", "ab", "--json", "--temp", "0.8"])
    sampling = json.loads(capsys.readouterr().out)["sampling"]
    assert sampling["temperature"] == {"value": 0.8, "from": "flag"}
    assert sampling["top_p"] == {"value": 0.9, "from": "file"}
    assert sampling["xtc_probability"] == {"value": 0.0, "from": "default"}
    assert sampling.keys() == set(NUMBERS)


def test_a_chat_shows_and_changes_it(model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    lines = "/set top_k\n/set temperature\n/set top_p 0.5\nhello\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert asked(["-m", model, "--cnv", "--temp", "0.3"]) == {
        "temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.05,
    }  # fmt: skip
    assert {"top_k  3", "temperature  0.3"} <= set(capsys.readouterr().err.splitlines())


def test_a_key_that_is_ignored_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setitem(vars(engine), "load", fake_llm.load)
    path = recommended.model(tmp_path / "x.gguf", {"top_k": "many"})
    assert asked(["-m", str(path), "-p", "ab"])["top_k"] == 40
    err = capsys.readouterr().err
    assert "note: general.sampling.top_k is of type str instead of a whole number: the key is ignored\n" in err
