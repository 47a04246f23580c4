"""Sampling parameters that a file recommends: their names, types and ranges, and that arguments replace them."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import pytest

import engine
from engine.decode.generation import request_of
from engine.gguf.file import read_gguf
from engine.sampling.defaults import sampling_defaults
from engine.sampling.params import SamplerParams
from tests import recommended
from tests.conftest import shared_path


def found(folder: Path, **values: Any) -> tuple[dict[str, Any], list[str]]:
    return sampling_defaults(read_gguf(recommended.header(folder / "x.gguf", values)))


def test_the_keys_that_gguf_py_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3")
    writer.add_sampling_sequence("penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature")
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.8)
    writer.add_sampling_min_p(0.01)
    writer.add_sampling_xtc_probability(0.5)
    writer.add_sampling_xtc_threshold(0.2)
    writer.add_sampling_temp(0.7)
    writer.add_sampling_penalty_last_n(-1)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_mirostat(0)
    writer.add_sampling_mirostat_tau(5.0)
    writer.add_sampling_mirostat_eta(0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values, warnings = sampling_defaults(read_gguf(tmp_path / "x.gguf"))
    # The decimal numbers themselves, not their float32 neighbours.
    assert values == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repeat_penalty": 1.05, "repeat_last_n": -1,
        "xtc_probability": 0.5, "xtc_threshold": 0.2,
    }  # fmt: skip
    assert warnings == []
    assert SamplerParams(**values).top_k == 20


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("temp", 0.0, "temperature", 0.0),
        ("temp", 1, "temperature", 1.0),  # an integer is a number, too
        ("top_k", 0, "top_k", 0),
        ("top_k", -1, "top_k", 0),  # llama.cpp: all tokens
        ("top_p", 1.0, "top_p", 1.0),
    ],
)
def test_values(tmp_path: Path, name: str, value: Any, field: str, expected: Any) -> None:
    assert found(tmp_path, **{name: value}) == ({field: expected}, [])


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("top_k", "20", "is of type str instead of a whole number"),
        ("top_k", 20.0, "is of type f32 instead of a whole number"),
        ("top_k", True, "is of type bool instead of a whole number"),
        ("top_k", [20], "is of type i32[] instead of a whole number"),
        ("temp", "hot", "is of type str instead of a number"),
        ("temp", [0.5], "is of type f32[] instead of a number"),
        ("temp", ["a"], "is of type str[] instead of a number"),
        ("temp", math.nan, "must be a finite number, not nan"),
        ("temp", -math.inf, "must be a finite number, not -inf"),
        ("temp", -0.5, "must be 0 or more, not -0.5"),
        ("top_p", -0.1, "must be 0 or more (1 switches it off), not -0.1"),
        ("min_p", 1.5, "must be at most 1 (0 switches it off), not 1.5"),
        ("penalty_repeat", 0.0, "must be at least 1e-06 (1 switches it off), not 0.0"),
        ("penalty_last_n", -2, "must be -1 (all), 0 (none) or more, not -2"),
        ("xtc_probability", 2.0, "must be 0 (off) to 1, not 2.0"),
        ("mirostat", 2, "asks for a sampler that is not supported"),
        ("mirostat", [0], "asks for a sampler that is not supported"),
        ("sequence", "top_k;temperature", "asks for another order of samplers than penalties;dry;top_k;"),
        ("sequence", ["top_k"], "asks for another order of samplers than penalties;dry;top_k;"),
    ],
)
def test_what_is_ignored_with_a_warning(tmp_path: Path, name: str, value: Any, problem: str) -> None:
    values, warnings = found(tmp_path, **{name: value, "penalty_repeat" if name == "temp" else "temp": 1.5})
    assert list(values.values()) == [1.5], "the other keys count"
    (warning,) = warnings
    assert warning.startswith(f"general.sampling.{name} {problem}")
    assert warning.endswith(": the key is ignored") and "\n" not in warning


# --- answers in Python -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    values = {"temp": 0.25, "top_k": 3, "xtc_probability": 0.5, "penalty_last_n": 9, "mirostat": 1}
    path = recommended.model(tmp_path_factory.mktemp("model") / "x.gguf", values)
    with engine.load(path, device="cpu", n_ctx=64) as opened:
        yield opened


def test_a_model_says_what_its_file_recommends(llm: engine.LLM) -> None:
    assert dict(llm.sampling) == {"temperature": 0.25, "top_k": 3, "xtc_probability": 0.5, "repeat_last_n": 9}
    with pytest.raises(TypeError):
        llm.sampling["top_k"] = 4  # type: ignore[index]
    (warning,) = llm.warnings
    assert "general.sampling.mirostat" in warning


def test_arguments_replace_what_the_file_recommends(llm: engine.LLM) -> None:
    def params(**options: Any) -> dict[str, Any]:
        return asdict(request_of(llm.generate([1], seed=1, **options)).sampler.params)

    file = asdict(SamplerParams(temperature=0.25, top_k=3, xtc_probability=0.5, repeat_last_n=9, seed=1))
    bias = {"logit_bias": dict.fromkeys(llm.tokenizer.suppressed_ids, -math.inf)}
    assert params() == file | bias
    assert params(temperature=None, top_k=None) == file | bias
    # The default of the engine, given explicitly, is not what a file may replace.
    given = {"temperature": 0.8, "top_k": 40, "top_p": 0.5, "xtc_probability": 0.0, "repeat_last_n": 64}
    assert params(**given) == file | bias | given
    with pytest.raises(engine.UsageError, match="presence_penalty"):
        params(presence_penalty=None)


@pytest.mark.thorough
def test_a_file_that_asks_for_greedy_answers() -> None:
    with engine.load(shared_path("cases", "general-sampling.gguf"), device="cpu", n_ctx=64) as llm:
        assert dict(llm.sampling) == {"temperature": 0.0, "top_k": 1}
        greedy = llm.complete([5, 6, 7], max_tokens=8, temperature=0).ids
        assert llm.complete([5, 6, 7], max_tokens=8, seed=1).ids == greedy
        drawn = [llm.complete([5, 6, 7], max_tokens=8, temperature=5, top_k=0, seed=seed).ids for seed in range(4)]
        assert any(ids != greedy for ids in drawn)
