"""The small files beside ``examples/law.py`` against the engine: every bit of the logits."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import engine
from engine.cpu.products.experts import route
from engine.gguf.file import read_gguf
from engine.synthetic.model import make_model
from engine.synthetic.shapes import N_VOCAB_TINY, Shape
from tests.conftest import REPOSITORY
from tests.tiers import few


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples import each other as programs do."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.dtype == theirs.dtype == np.float32 and ours.tobytes() == theirs.tobytes()


def check(path: Path, model: Any, ids: list[int], cache_type: str | None = "f16") -> None:
    """The logits after each token are the engine's."""
    with engine.load(path, n_ctx=128, cache_type=cache_type) as llm:
        expected = llm.logits(ids)
    assert np.isfinite(expected).all() and len({row.tobytes() for row in expected}) == len(ids)
    for position, token in enumerate(ids):
        assert same(model.step(token), expected[position]), f"position {position}"


@pytest.mark.parametrize("quant", few(["Q8_0", "F32", "Q6_K"], 1))
def test_a_mixture(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-qwen3moe", quant)
    law = example("law_mixture")
    model = law.Mixture(read_gguf(path))
    chosen: set[int] = set()
    inner = law.route

    def noted(logits: np.ndarray, n_used: int) -> Any:
        experts, weights = inner(logits, n_used)
        chosen.update(experts.tolist())
        return experts, weights

    monkeypatch.setattr(law, "route", noted)
    check(path, model, [*range(40, 52)])
    assert len(chosen) > 3


def test_the_choice_of_experts() -> None:
    """With logits that are equal, too."""
    law, rng = example("law_mixture"), np.random.default_rng(1)
    logits = rng.integers(-3, 4, (50, 9)).astype(np.float32) / 2
    ids, weights = np.empty((50, 4), np.int32), np.empty((50, 4), np.float32)
    route(logits, 9, ids, weights, 0, 50)
    for t in range(50):
        chosen, own = law.route(logits[t], 4)
        assert chosen.tolist() == ids[t].tolist() and same(own, weights[t])


@pytest.mark.parametrize("n", few([18, 50], 1))
def test_delta_nets(n: int, tmp_path: Path) -> None:
    """Beyond the end of a segment, and of three."""
    path = make_model(tmp_path / "m.gguf", "tiny-qwen35", "Q8_0")
    check(path, example("law_delta_net").Hybrid(read_gguf(path)), np.random.default_rng(n).integers(0, 256, n).tolist())


@pytest.mark.parametrize(
    ("shape", "quant", "bits"),
    few([("qwen3", "Q8_0", 8), ("llama", "F32", 12), ("llama", "Q6_K", 8), ("qwen3", "F32", 12)], 1),
)
def test_the_default_cache(shape: str, quant: str, bits: int, tmp_path: Path) -> None:
    """Beyond the end of a chunk."""
    path, ids = (
        make_model(tmp_path / "m.gguf", f"tiny-{shape}", quant),
        np.random.default_rng(bits).integers(0, 256, 70),
    )
    check(path, example("law_integer_cache").IntegerCache(read_gguf(path), bits), ids.tolist(), None)


def test_groups_of_the_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer, keys and values do not depend on attention, so it is only computed at some positions.  Heads of 96 are
    three blocks of 32."""
    shape = Shape("llama", 1, 192, 2, 1, 96, 64, N_VOCAB_TINY, 1088, 1e4, 1e-5)
    path, law = make_model(tmp_path / "m.gguf", shape, "Q8_0"), example("law_integer_cache")
    ids = np.random.default_rng(5).integers(0, 256, 1030).tolist()
    with engine.load(path, n_ctx=1088) as llm:
        assert llm.cache_types == ("i8", "i8")
        expected = llm.logits(ids)
    model, attention = law.IntegerCache(read_gguf(path)), law.attention
    for position, token in enumerate(ids):
        compared = position in (510, 511, 512, 513, 580, 1023, 1024, 1029)
        monkeypatch.setattr(
            law, "attention", attention if compared else lambda q, *_: np.zeros((len(q), 96), np.float32)
        )
        logits = model.step(token)
        assert not compared or same(logits, expected[position]), f"position {position}"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts(temperature: float, tmp_path: Path) -> None:
    """The text is the engine's, with drafts and without; drafts that are right save passes."""
    path, law, prompt = make_model(tmp_path / "m.gguf", "tiny-qwen3", "Q8_0"), example("law_drafts"), [7, 8, 9, 7, 8]
    with engine.load(path, n_ctx=64, cache_type="f16") as llm:
        free: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "ignore_eos": True}
        expected = llm.complete(prompt, max_tokens=12, temperature=temperature, **free).ids
        logits = llm.logits([*prompt, *expected])[-1]

    def fresh() -> Any:
        return law.Model(read_gguf(path))

    for n_drafts in (0, 4):
        ids, passes = law.answer(fresh(), prompt, 12, n_drafts, temperature, 5)
        assert ids == expected and (passes == 12 if n_drafts == 0 else passes <= 12)
    for right in (0, 2, 4):
        model = fresh()
        for token in prompt[:-1]:
            model.step(token)
        drafts = [*expected[:right], *(token ^ 1 for token in expected[right:4])]
        assert law.verify(model, prompt[-1], drafts, temperature, 5) == expected[: right + 1]
        for token in expected[right:]:
            last = model.step(token)
        assert same(last, logits)


def test_lookups() -> None:
    lookup = example("law_drafts").lookup
    assert lookup([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert lookup([1, 2, 9, 1, 2, 8, 1, 2], 3) == [8, 1, 2]
    assert lookup([1, 2, 3], 4) == []
    assert lookup([5], 4) == []


@pytest.mark.parametrize(("name", "shape"), [("law_mixture", "tiny-qwen3moe"), ("law_delta_net", "tiny-qwen35")])
def test_programs(
    name: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, law = make_model(tmp_path / "m.gguf", shape, "Q8_0"), example(name)
    monkeypatch.setattr(sys, "argv", [name, str(path)])
    law.main()
    with engine.load(path, n_ctx=64, cache_type="f16") as llm:
        expected = llm.complete([0], max_tokens=8, temperature=0, ignore_eos=True).ids
    assert capsys.readouterr().out.split() == ["0", *map(str, expected)]
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=f"bitmirror synthetic --shape {shape}:Q8_0"):
        law.main()


def test_the_program_with_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    example("law_drafts").main()
    plain, drafted = capsys.readouterr().out.splitlines()
    with engine.load(n_ctx=64) as llm:
        text = llm.complete("def add(a, b):", max_tokens=24, temperature=0, ignore_eos=True).text
    assert plain == f"{text!r}: 24 passes with up to 0 drafts"
    found = drafted.removeprefix(f"{text!r}: ").split()
    assert int(found[0]) < 24
