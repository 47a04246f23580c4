"""Encoders, against vectors and scores that ``transformers`` computed in float64."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine.errors import ContextError, GGUFError, ModelError, UsageError
from tests.families import Packed, Tensors, edited, quantized, rewritten
from tests.oracle.encoders import CASES, golden
from tests.oracle.shared import N_VOCAB

BERT, RANK = CASES["bert"], CASES["bert-rank"]

BOUND = 1e-5
"""Largest error of an element, in standard deviations of the vector."""


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    path = BERT.write_gguf(tmp_path_factory.mktemp("bert") / "bert.gguf")
    with engine.load(path, device="cpu", cache_type="f32") as llm:
        yield llm


def test_golden_values_belong_to_the_models() -> None:
    assert {name: values["fingerprint"] for name, values in golden().items()} == {
        name: case.fingerprint() for name, case in CASES.items()
    }


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "mean"), ("bert", "cls"), ("nomic-bert", "mean"), ("xlm-r", "cls")]
)
def test_vectors_are_those_of_transformers(name: str, pooling: str, tmp_path: Path) -> None:
    path = CASES[name].write_gguf(tmp_path / "a.gguf")
    with engine.load(path, device="cpu", cache_type="f32", pooling=pooling) as llm:
        vectors = llm.embed(CASES[name].prompts(), normalize=False)
    for vector, values in zip(vectors, golden()[name]["texts"], strict=True):
        expected = np.array(values[pooling])
        assert np.abs(vector - expected).max() <= BOUND * expected.std()


@pytest.mark.parametrize("name", ["bert-rank", "xlm-r-rank"])
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with engine.load(case.write_gguf(tmp_path / "a.gguf"), device="cpu", cache_type="f32") as llm:
        scores = llm.scores(llm.pooled(case.prompts()))
        expected = np.array([values["scores"][0] for values in golden()[name]["texts"]])
        assert np.abs(scores - expected).max() <= BOUND * max(1, np.abs(expected).max())
        assert llm.rank("a", ["b", "c"]).shape == (2,)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_text_has_the_same_bits_in_any_company(bert: engine.LLM, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=200)
    texts = data.draw(st.lists(ids, min_size=1, max_size=40))
    vectors = bert.embed(texts)
    for i in data.draw(st.sets(st.integers(0, len(texts) - 1), max_size=3)):
        assert np.array_equal(bert.embed([texts[i]])[0], vectors[i])


def test_threads_and_the_size_of_passes_change_no_bit(bert: engine.LLM) -> None:
    texts = [*BERT.prompts(), *([i] * i for i in range(1, 60))]
    vectors = bert.embed(texts)
    for options in ((512, 1), (1024, 2), (400, 1)):
        n_ctx = 256 if options[0] == 400 else 0  # a pass of 256 rows
        kept = texts if not n_ctx else [text for text in texts if len(text) <= n_ctx]
        sizes = {"batch_size": options[0], "n_threads": options[1], "n_ctx": n_ctx}
        with engine.load(bert.path, device="cpu", cache_type="f32", **sizes) as llm:  # type: ignore[arg-type]
            expected = [vector for text, vector in zip(texts, vectors, strict=True) if text in kept]
            assert np.array_equal(llm.embed(kept), expected)


def test_a_quantized_encoder_is_close(bert: engine.LLM, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        # Tools that quantize files leave these as they are.
        kept = {name: tensors.pop(name) for name in ("position_embd.weight", "token_types.weight")}
        return quantized(tensors, "Q8_0") | kept

    path = rewritten(bert.path, tmp_path / "a.gguf", change)
    with engine.load(path, device="cpu") as llm:
        close = (llm.embed(BERT.prompts()) * bert.embed(BERT.prompts())).sum(axis=1)
        assert 0.99 < close.min() < close.max() < 1.0001


def test_an_encoder_generates_no_text(bert: engine.LLM) -> None:
    for ask in (lambda: bert.complete("a"), lambda: bert.logits([1]), lambda: bert.prefill([1]), lambda: bert.step(1)):
        with pytest.raises(UsageError, match="turns texts into vectors and generates no text: ask it for embeddings"):
            ask()


def test_texts_that_do_not_fit(bert: engine.LLM) -> None:
    with pytest.raises(ContextError, match="longer than the 512 positions that this model has embeddings for"):
        engine.load(bert.path, device="cpu", n_ctx=600)
    with pytest.raises(ContextError, match="a pass must read a whole text, and holds 64 tokens, not 128"):
        engine.load(bert.path, device="cpu", n_ctx=128, batch_size=100)
    with engine.load(bert.path, device="cpu", batch_size=100) as llm:
        assert llm.n_ctx == 64
    with pytest.raises(ContextError, match="text 0 has 513 tokens and the context 512"):
        bert.embed([[1] * 513])


@pytest.mark.parametrize(
    ("keys", "lacking", "words"),
    [
        ({"bert.attention.causal": True}, "", "attention.causal"),
        ({}, "token_embd_norm.weight", "token_embd_norm.weight"),
        ({}, "blk.1.attn_output_norm.bias", ""),
        ({}, "position_embd.weight", "position_embd.weight"),
        ({"bert.attention.layer_norm_epsilon": None}, "", "attention.layer_norm_epsilon"),
    ],
)
def test_damaged_files(bert: engine.LLM, tmp_path: Path, keys: dict[str, object], lacking: str, words: str) -> None:
    def change(tensors: Packed) -> Packed:
        return {name: tensor for name, tensor in tensors.items() if name != lacking}

    path = edited(bert.path, tmp_path / "a.gguf", keys, change)
    if not words:  # a norm may have no bias
        with engine.load(path, device="cpu") as llm:
            assert llm.embed([[1, 2]]).shape == (1, 96)
        return
    with pytest.raises((ModelError, GGUFError), match=words):
        engine.load(path, device="cpu")
