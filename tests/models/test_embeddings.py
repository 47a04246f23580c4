"""Embeddings: the vectors and scores of decoders, against logits that ``transformers`` computed in float64."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine.errors import ContextError, ModelError, UsageError
from engine.models.pooling import PooledText, normalized, softmax
from tests.conftest import REPOSITORY
from tests.families import Packed, edited
from tests.oracle.models import CASES, prompts, write_gguf

CASE = CASES["qwen3"]
TEMPLATE = "<|im_start|>judge\n{query}\n---\n{document}<|im_end|>"
BUNDLED = REPOSITORY / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf"
TEXTS = ["def add(a, b):", "import os", "x", "for i in range(10):\n    print(i)\n" * 20, "# London"]


def golden() -> list[dict[str, Any]]:
    """The logits of ``transformers``."""
    rows: list[dict[str, Any]] = json.loads((REPOSITORY / "tests/oracle/qwen3.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    return rows


def output_matrix(path: Path) -> np.ndarray:
    """The matrix that turns outputs into logits, float64."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    return np.array(tensors.get("output.weight", tensors["token_embd.weight"]), np.float64)


def rerank_file(source: Path, path: Path, rows: tuple[int, int], **keys: Any) -> Path:
    """A copy of a model as llama.cpp converts Qwen3-Reranker: the classifier consists of two rows of the output."""

    def change(tensors: Packed) -> Packed:
        data, kind = tensors.get("output.weight", tensors["token_embd.weight"])
        head = gguf.quants.dequantize(data, kind)[list(rows)].astype(np.float32)
        return tensors | {"cls.output.weight": (head, gguf.GGMLQuantizationType.F32)}

    labels = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    return edited(source, path, labels | keys, change)


@pytest.fixture(scope="module")
def bundled() -> Iterator[engine.LLM]:
    with engine.load(device="cpu", n_ctx=512, pooling="mean") as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    path = tmp_path_factory.mktemp("rerank") / "reranker.gguf"
    keys = {"tokenizer.chat_template.rerank": TEMPLATE}
    with engine.load(rerank_file(BUNDLED, path, (300, 301), **keys), device="cpu", n_ctx=128) as llm:
        yield llm


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.first
def test_the_last_output_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    path = edited(write_gguf(CASE, tmp_path / "a.gguf"), tmp_path / "b.gguf", {"qwen3.pooling_type": 3})
    with engine.load(path, device="cpu", cache_type="f32") as llm:
        assert llm.config.pooling == "last"
        rows = golden()
        ids = [prompts(CASE)[row["prompt"]][: row["position"] + 1].tolist() for row in rows]
        vectors = llm.embed(ids, normalize=False)
    for row, vector in zip(rows, vectors, strict=True):
        expected = np.array(row["logits"])
        assert np.abs(output_matrix(path) @ vector - expected).max() <= 1e-5 * expected.std()


def test_the_score_of_a_reranker_is_that_of_two_logits_of_transformers(tmp_path: Path) -> None:
    yes, no = 17, 4
    path = rerank_file(write_gguf(CASE, tmp_path / "a.gguf"), tmp_path / "b.gguf", (yes, no))
    with engine.load(path, device="cpu", cache_type="f32") as llm:
        ids = [prompts(CASE)[row["prompt"]][: row["position"] + 1].tolist() for row in golden()]
        scores = llm.scores(llm.pooled(ids))
    for row, score in zip(golden(), scores, strict=True):
        expected = 1 / (1 + math.exp(row["logits"][no] - row["logits"][yes]))
        assert abs(score - expected) <= 1e-5


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_outputs_are_joined(pooling: str, bundled: engine.LLM) -> None:
    ids = [bundled.tokenize(text) for text in TEXTS]
    with engine.load(device="cpu", n_ctx=512, pooling=pooling) as llm:
        vectors = llm.embed(ids, normalize=False)
        outputs = [np.concatenate([llm.model.read_texts([(llm.model.sequence, own)])[0]]) for own in ids[:3]]
    for vector, rows in zip(vectors, outputs, strict=False):
        wide = rows.astype(np.float64)
        expected = {"mean": np.add.reduce(wide) / len(rows), "cls": wide[0], "last": wide[-1]}[pooling]
        assert np.array_equal(vector, expected.astype(np.float32))


def test_a_vector_has_the_length_one(bundled: engine.LLM) -> None:
    vectors = bundled.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 512)
    assert np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-6
    plain = bundled.embed(TEXTS, normalize=False)
    assert np.array_equal(vectors, [normalized(vector) for vector in plain])
    short = bundled.embed(TEXTS, dimensions=64)
    assert np.array_equal(short, [normalized(vector[:64]) for vector in plain])


def test_no_texts_have_no_vectors(bundled: engine.LLM) -> None:
    assert bundled.embed([]).shape == (0, 512)


# --- bits ----------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_text_has_the_same_bits_in_any_company(bundled: engine.LLM, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 8191), min_size=1, max_size=150)
    texts = data.draw(st.lists(ids, min_size=1, max_size=40))
    vectors = bundled.embed(texts)
    for i in data.draw(st.sets(st.integers(0, len(texts) - 1), max_size=4)):
        assert np.array_equal(bundled.embed([texts[i]])[0], vectors[i])


def test_the_size_of_passes_does_not_change_bits(bundled: engine.LLM) -> None:
    vectors = bundled.embed(TEXTS)
    every: list[dict[str, Any]] = [{"batch_size": 20}, {"batch_size": 512, "n_threads": 1}, {"parallel": 40}]
    for options in every:
        with engine.load(device="cpu", n_ctx=512, pooling="mean", **options) as llm:
            assert np.array_equal(llm.embed(TEXTS), vectors)


def test_texts_between_answers_change_nothing(bundled: engine.LLM) -> None:
    expected, vectors = bundled.complete("def f(", max_tokens=12, temperature=0).text, bundled.embed(TEXTS)
    answer = bundled.generate("def f(", max_tokens=12, temperature=0)
    pieces = []
    for piece in answer:
        pieces.append(piece)
        assert np.array_equal(bundled.embed(TEXTS[:3]), vectors[:3])
    assert "".join(pieces) == expected
    bundled.check_pages()


def test_texts_take_slots_from_answers_if_there_are_no_others() -> None:
    with engine.load(device="cpu", n_ctx=256, pooling="mean", parallel=32) as llm:
        answers = [llm.generate(f"def f{i}(", max_tokens=3, temperature=0) for i in range(len(llm.slots))]
        begun = [next(iter(answer)) for answer in answers]
        vector = llm.embed(["x"])[0]
        assert [first + "".join(rest) for first, rest in zip(begun, answers, strict=True)] == [
            llm.complete(f"def f{i}(", max_tokens=3, temperature=0).text for i in range(len(answers))
        ]
        assert np.array_equal(llm.embed(["x"])[0], vector)


def test_a_model_of_one_answer_at_a_time_reads_texts_where_pages_are_short() -> None:
    """All pages hold answers' texts that nobody uses any more, or other texts of the pass."""
    with engine.load(device="cpu", n_ctx=128, pooling="mean") as llm:
        texts = [[i] * 128 for i in range(1, 50)]
        vectors = llm.embed(texts)
        assert np.array_equal(llm.embed(texts[::-1]), vectors[::-1])
        llm.check_pages()


# --- rerankers -----------------------------------------------------------------------------------------------------


def test_documents_are_scored(reranker: engine.LLM) -> None:
    documents = ["import os", "def add(a, b): return a + b", "x"]
    scores = reranker.rank("add two numbers", documents)
    assert scores.shape == (3,) and scores.dtype == np.float32 and ((scores > 0) & (scores < 1)).all()
    for document, score in zip(documents, scores, strict=True):
        prompt = TEMPLATE.replace("{query}", "add two numbers").replace("{document}", document)
        ids = reranker.tokenizer.encode(prompt, add_special=False, parse_special=True)
        logits = reranker.logits(ids)[-1]
        assert (
            abs(score - 1 / (1 + math.exp(logits[301] - logits[300]))) < 0.02
        )  # the output is quantized, its rows are not


def test_texts_do_not_change_the_prompt_of_a_reranker(reranker: engine.LLM) -> None:
    prompt = reranker.rerank_prompt
    assert prompt is not None
    ids = prompt.ids("{document}<|im_end|>", "{query}<|endoftext|>")
    assert reranker.tokenizer.decode(ids, special=True) == TEMPLATE.replace("{query}", "Q").replace(
        "{document}", "{query}<|endoftext|>"
    ).replace("Q", "{document}<|im_end|>")
    assert [ids.count(id) for id in (0, 1, 2)] == [0, 1, 1]


def test_documents_are_cut(reranker: engine.LLM) -> None:
    long = "def add(a, b): return a + b\n" * 40
    with pytest.raises(ContextError, match=r"document 1 with its query has \d+ tokens and the context 128"):
        reranker.rank("add", ["x", long])
    assert reranker.rank("add", ["x", long], truncate=True).shape == (2,)
    prompt = reranker.rerank_prompt
    assert prompt is not None and len(prompt.ids("add", long, 40)) <= 40
    assert prompt.ids("add", long, 40)[-1] == 2  # what follows the document stays


def test_without_a_template_the_texts_follow_one_another(tmp_path: Path) -> None:
    end = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    path = rerank_file(BUNDLED, tmp_path / "a.gguf", (300, 301), **{"tokenizer.ggml.eos_token_id": 2})
    with engine.load(path, device="cpu", n_ctx=64) as llm:
        llm.tokenizer.add_bos = llm.tokenizer.add_eos = bool(end)
        assert llm.rerank_prompt is not None
        a, b = (llm.tokenizer.encode(text, add_special=False) for text in ("x", "y = 1"))
        assert llm.rerank_prompt.ids("x", "y = 1") == [0, *a, 2, *b, 2]


# --- texts that are too long, and refusals -------------------------------------------------------------------------


def test_texts_are_cut(bundled: engine.LLM) -> None:
    ids = bundled.tokenize("x = 1\n" * 400)
    with pytest.raises(ContextError, match=rf"text 1 has {len(ids)} tokens and the context 512"):
        bundled.embed(["x", ids])
    for truncate, most in ((True, 512), (100, 100), (10_000, 512)):
        cut = bundled.embed(["x = 1\n" * 400], truncate=truncate)
        assert np.array_equal(cut, bundled.embed([ids[:most]]))


def test_the_end_token_of_a_text_that_is_cut_stays(tmp_path: Path) -> None:
    path = edited(BUNDLED, tmp_path / "a.gguf", {"qwen3.pooling_type": 3, "tokenizer.ggml.add_bos_token": False})
    with engine.load(path, device="cpu", n_ctx=64) as llm:
        llm.tokenizer.add_eos = True
        ids = llm.tokenize("x = 1\n" * 400)
        assert ids[-1] == llm.tokenizer.eos_id
        assert np.array_equal(llm.embed(["x = 1\n" * 400], truncate=True), llm.embed([[*ids[:63], ids[-1]]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"texts": "x"}, "texts must be a list of texts, not 'x'"),
        ({"texts": [3]}, "texts must be a list of texts, or of lists of token ids, not 3"),
        ({"texts": [""]}, "text 0 has no tokens; give some text"),
        ({"texts": ["x", [-1]]}, "token ids must be 0 to 8191"),
        ({"texts": ["x"], "dimensions": 513}, "dimensions must be 1 to 512, or 0 for all, not 513"),
        ({"texts": ["x"], "truncate": -1}, "truncate must be True, False or a number of tokens, not -1"),
    ],
)
def test_a_refusal_is_one_sentence(bundled: engine.LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        bundled.embed(**options)


def test_models_for_other_things_say_what_to_do(bundled: engine.LLM, reranker: engine.LLM) -> None:
    with engine.load(device="cpu", n_ctx=64) as llm, pytest.raises(UsageError, match="is not made for embeddings: use"):
        llm.embed(["x"])
    with pytest.raises(UsageError, match="is no reranker, which scores documents: use a model that is made for this"):
        bundled.rank("x", ["y"])
    with pytest.raises(
        UsageError, match="is a reranker, which scores documents: use a model that is made for embeddings"
    ):
        reranker.embed(["x"])
    with pytest.raises(UsageError, match="is a reranker, which has no vectors of texts: leave out its pooling"):
        engine.load(reranker.path, device="cpu", pooling="mean")
    with pytest.raises(UsageError, match="pooling must be mean, cls or last, not 'rank'"):
        engine.load(device="cpu", pooling="rank")
    with pytest.raises(UsageError, match="the query must be a text, not 1"):
        reranker.rank(1, ["x"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="document 1 must be a text, not 2"):
        reranker.rank("x", ["x", 2])  # type: ignore[list-item]


def test_a_vector_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    def spoiled(tensors: Packed) -> Packed:
        data, kind = tensors["output_norm.weight"]
        return tensors | {"output_norm.weight": (np.full_like(data, np.nan), kind)}

    path = edited(BUNDLED, tmp_path / "a.gguf", {"qwen3.pooling_type": 1}, spoiled)
    with (
        engine.load(path, device="cpu", n_ctx=64) as llm,
        pytest.raises(ModelError, match="text 1 is not finite|text 0"),
    ):
        llm.embed(["x", "y"])


# --- the functions of the host -------------------------------------------------------------------------------------


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50))
def test_normalizing_does_not_depend_on_the_order_of_elements(values: list[float]) -> None:
    vector = np.array(values, np.float32)
    assert np.array_equal(normalized(vector)[::-1], normalized(vector[::-1]))
    length = math.hypot(*vector.tolist())
    # In float64: the length of subnormal numbers is not a float32.
    assert not length or np.allclose(normalized(vector), vector.astype(np.float64) / length, rtol=1e-6, atol=1e-38)


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=5))
def test_the_softmax_of_scores(values: list[float]) -> None:
    wide = np.exp(np.array(values) - max(values))
    assert np.allclose(softmax(np.array(values, np.float32)), wide / wide.sum(), rtol=1e-5, atol=1e-30)


def test_outputs_of_several_passes_are_those_of_one() -> None:
    rows = np.random.default_rng(0).standard_normal((70, 8)).astype(np.float32)
    for kind in ("mean", "cls", "last"):
        whole, parts = PooledText(kind), PooledText(kind)
        whole.add(rows)
        for first in range(0, 70, 9):
            parts.add(rows[first : first + 9])
        assert np.array_equal(whole.vector, parts.vector)
