"""EmbeddingGemma, against vectors that ``transformers`` and sentence-transformers computed in float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine.cpu.attention import first_visible, last_visible
from engine.errors import GGUFError, ModelError
from engine.ops.spans import MOST_CUT, SPANS, spans
from tests.families import Packed, edited
from tests.oracle.gemma_embedding import fingerprint, golden, texts, write_gguf
from tests.oracle.shared import N_VOCAB

BOUND = 1e-5
"""Largest error of an element, in standard deviations of the vector."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gemma") / "a.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[engine.LLM]:
    with engine.load(path, device="cpu", cache_type="f32") as llm:
        yield llm


def check(vectors: np.ndarray, name: str) -> None:
    """Compare vectors with the golden values of a name."""
    for vector, values in zip(vectors, golden()["texts"], strict=True):
        expected = np.array(values[name])
        assert np.abs(vector - expected).max() <= BOUND * expected.std()


def test_golden_values_belong_to_the_model() -> None:
    assert golden()["fingerprint"] == fingerprint()


def test_vectors_are_those_of_sentence_transformers(llm: engine.LLM) -> None:
    assert llm.config.pooling == "mean" and not llm.config.causal
    check(llm.embed(texts()), "vector")


def test_without_dense_layers_the_mean_is_that_of_transformers(tmp_path: Path) -> None:
    with engine.load(write_gguf(tmp_path / "a.gguf", projected=False), device="cpu", cache_type="f32") as llm:
        check(llm.embed(texts(), normalize=False), "mean")
        assert any("lacks the matrices dense_2 and dense_3" in warning for warning in llm.warnings)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_text_has_the_same_bits_in_any_company(llm: engine.LLM, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=150)
    several = data.draw(st.lists(ids, min_size=1, max_size=12))
    vectors = llm.embed(several)
    for i in data.draw(st.sets(st.integers(0, len(several) - 1), max_size=3)):
        assert np.array_equal(llm.embed([several[i]])[0], vectors[i])


def test_the_size_of_passes_changes_no_bit(path: Path) -> None:
    """Keys and values are quantized, as by default for larger models."""
    several = [*texts(), *([i] * i for i in range(1, 40))]
    found = []
    every: list[dict[str, Any]] = [{"batch_size": 512}, {"batch_size": 1024, "n_threads": 1}, {"parallel": 3}]
    for options in every:
        with engine.load(path, device="cpu", cache_type="i8", **options) as llm:
            found.append(llm.embed(several))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    exact = np.array(golden()["texts"][2]["vector"])
    assert 0.99 < found[0][2] @ exact < 1.0001


@pytest.mark.parametrize(
    ("keys", "lacking", "words"),
    [
        (
            {"gemma-embedding.attention.sliding_window": 1},
            "",
            "is 1, and 2 to 8191 is supported",
        ),
        ({}, "dense_2.weight", "dense_2.weight"),
        ({}, "dense_3.weight", "dense_3.weight"),
    ],
)
def test_damaged_files(path: Path, tmp_path: Path, keys: dict[str, object], lacking: str, words: str) -> None:
    def change(tensors: Packed) -> Packed:
        found = {name: tensor for name, tensor in tensors.items() if name != lacking}
        if not keys and lacking == "dense_2.weight":
            data, kind = found["dense_3.weight"]
            found["dense_3.weight"] = data[0], kind
        return found

    with pytest.raises((ModelError, GGUFError), match=words):
        engine.load(edited(path, tmp_path / "a.gguf", keys, change), device="cpu")


@given(st.integers(1, 3000), st.integers(1, MOST_CUT))
def test_spans_are_what_rows_see(n: int, reach: int) -> None:
    found, window = spans(n, reach), 2 * reach + 1 + SPANS
    assert found.dtype == np.int32 and (np.diff(found) > 0).all()
    for p in {0, n // 3, max(0, n - reach - 1), n - 1}:
        seen = [first_visible.py_func(int(found[p]), window), last_visible.py_func(int(found[p]), window)]
        assert seen == [max(0, p - reach), min(n - 1, p + reach)]
