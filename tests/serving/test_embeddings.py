"""Embeddings and rerankers over HTTP, as the clients of OpenAI and Ollama see them."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("ollama")
import ollama
import openai
from starlette.testclient import TestClient

from engine.errors import named_by_flags
from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.served import Spec
from tests.models.test_embeddings import BUNDLED, TEMPLATE, rerank_file
from tests.oracle.encoders import CASES

pytestmark = pytest.mark.together("embeddings")

TEXTS = ["def add(a, b):", "import os", "x"]


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server with an embedder, a reranker and a model that is neither."""
    path = tmp_path_factory.mktemp("rerank") / "reranker.gguf"
    rerank_file(BUNDLED, path, (300, 301), **{"tokenizer.chat_template.rerank": TEMPLATE})
    bert = CASES["bert"].write_gguf(path.with_name("bert.gguf"))
    specs = [
        Spec("embedder", lambda: engine.load(device="cpu", n_ctx=128, pooling="mean"), path=str(BUNDLED)),
        Spec("reranker", lambda: engine.load(path, device="cpu", n_ctx=128), path=str(path)),
        Spec("coder", lambda: engine.load(device="cpu", n_ctx=128)),
        Spec("encoder", lambda: engine.load(bert, device="cpu"), path=str(bert)),
    ]
    with TestClient(app(specs, limits=Limits(prompts=40)), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    with engine.load(device="cpu", n_ctx=128, pooling="mean") as llm:
        return llm.embed(TEXTS)


# --- OpenAI --------------------------------------------------------------------------------------------------------


@pytest.mark.first
def test_the_client_of_openai_gets_vectors(web: Any, vectors: np.ndarray) -> None:
    client: Any = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=web)
    # The client asks for base64 by itself.
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    assert np.array_equal(np.array([each.embedding for each in answer.data], np.float32), vectors)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "embedder"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16, encoding_format="float")
    expected = vectors[0, :16] / np.linalg.norm(vectors[0, :16])
    assert np.allclose(short.data[0].embedding, expected, rtol=1e-6)


@pytest.mark.parametrize("route", ["/v1/embeddings", "/embeddings"])
def test_inputs_of_every_kind(web: Any, vectors: np.ndarray, route: str) -> None:
    with engine.load(device="cpu", n_ctx=16) as llm:
        ids = [llm.tokenize(text) for text in TEXTS]
    for given in (TEXTS[0], [TEXTS[0]], ids[0], [ids[0]]):
        data = web.post(route, json={"model": "embedder", "input": given}).json()["data"]
        assert len(data) == 1 and np.array_equal(np.float32(data[0]["embedding"]), vectors[0])
    mixed = web.post(route, json={"model": "embedder", "input": [TEXTS[0], ids[1]], "encoding_format": "base64"}).json()
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in mixed["data"]]
    assert np.array_equal(found, vectors[:2])
    assert mixed["usage"] == {"prompt_tokens": len(ids[0] + ids[1]), "total_tokens": len(ids[0] + ids[1])}


def test_texts_that_are_too_long_are_cut_if_the_client_asks(web: Any) -> None:
    body = {"model": "embedder", "input": ["x", "x = 1\n" * 99]}
    refused = web.post("/v1/embeddings", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert "text 1 has" in error["message"] and "context 128" in error["message"]
    cut = web.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 1 + 128
    assert web.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": 9}).json()["usage"]["total_tokens"] == 10


def test_a_server_names_its_flag(web: Any) -> None:
    with named_by_flags():  # as in the command
        refused = web.post("/v1/embeddings", json={"model": "coder", "input": "a"})
    assert refused.json()["error"]["message"].endswith("open it with --pooling mean or --pooling last.")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "input is missing"),
        ({"input": ""}, 400, "text 0 has no tokens"),
        ({"input": []}, 400, "input must be a text or a list of texts"),
        ({"input": 3}, 400, "input must be a text or a list of texts, of token ids or of lists of token ids, not 3"),
        ({"input": ["a", 3]}, 400, "input[1] must be a text or a list of token ids, not 3"),
        ({"input": ["a", []]}, 400, "input[1] must be a text or a list of token ids, not an empty list"),
        ({"input": [1, 99999]}, 400, "input must be token ids, 0 to 8191, not 99999"),
        ({"input": [[1], [True]]}, 400, "input[1] must be token ids, 0 to 8191, not True"),
        ({"input": ["a"] * 41}, 400, "input has 41 entries and this server accepts 40 (--prompts)"),
        ({"input": "a", "dimensions": 513}, 400, "dimensions must be a whole number, 1 to 512, not 513"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format must be float or base64"),
        ({"input": "a", "normalize": False}, 400, "normalize must be true"),
        ({"input": "a", "embd_normalize": -1}, 400, "embd_normalize must be 2"),
        ({"input": "a", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens must be"),
        ({"model": "coder", "input": "a"}, 501, "is not made for embeddings"),
        ({"model": "reranker", "input": "a"}, 501, "is a reranker"),
        ({"model": "none", "input": "a"}, 404, "there is no model 'none'"),
    ],
)
def test_a_refusal_is_one_sentence(web: Any, body: Any, status: int, words: str) -> None:
    answer = web.post("/v1/embeddings", json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status
    assert words in message and message.endswith(".")


def test_requests_at_the_same_time_get_the_bits_that_they_get_alone(web: Any, vectors: np.ndarray) -> None:
    def ask(i: int) -> Any:
        if i % 5 == 4:
            return web.post(
                "/v1/completions", json={"model": "embedder", "prompt": "def f(", "max_tokens": 4}
            ).status_code
        return web.post("/v1/embeddings", json={"model": "embedder", "input": TEXTS[i % 3]}).json()["data"][0][
            "embedding"
        ]

    with ThreadPoolExecutor(12) as pool:
        for i, found in enumerate(pool.map(ask, range(40))):
            assert found == 200 if i % 5 == 4 else np.array_equal(np.float32(found), vectors[i % 3])


def test_texts_of_many_requests_ride_together_and_those_that_nobody_awaits_are_not_read() -> None:
    """The embedder alone, with a model that notes what it reads."""
    import asyncio

    from engine.errors import ModelError
    from engine.serving.embedder import Embedder
    from engine.serving.errors import Refusal

    class Noting:
        path = Path("model.gguf")

        def __init__(self) -> None:
            self.passes: list[list[list[int]]] = []
            self.may = threading.Event()

        def pooled(self, texts: list[list[int]]) -> np.ndarray:
            self.passes.append(texts)
            assert self.may.wait(10)
            if [13] in texts:
                raise ModelError("the vector is not finite.")
            return np.array(texts, np.float32)

    async def main(llm: Any) -> None:
        embedder = Embedder(llm, 4)
        first = asyncio.ensure_future(embedder.pooled([[1]]))
        while not llm.passes:
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(embedder.pooled([[i], [i + 1]])) for i in (2, 4, 12)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="4 requests wait"):
            await embedder.pooled([[9]])
        others[1].cancel()
        await asyncio.sleep(0)
        llm.may.set()
        assert (await first).tolist() == [[1]] and (await others[0]).tolist() == [[2], [3]]
        with pytest.raises(ModelError, match="not finite"):
            await others[2]
        # After the error, each text is read alone.
        assert llm.passes == [[[1]], [[2], [3], [12], [13]], [[2]], [[3]], [[12]], [[13]]]
        llm.may.clear()
        late = asyncio.ensure_future(embedder.pooled([[20]]))
        while len(llm.passes) < 7:
            await asyncio.sleep(0.001)
        later = asyncio.ensure_future(embedder.pooled([[21]]))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(asyncio.to_thread(embedder.close))
        with pytest.raises(Refusal, match=r"model.gguf is being closed"):
            await later
        llm.may.set()
        assert (await late).tolist() == [[20]]
        await closing

    asyncio.run(main(Noting()))


# --- Ollama --------------------------------------------------------------------------------------------------------


def test_the_client_of_ollama_gets_vectors(web: Any, vectors: np.ndarray) -> None:
    client: Any = ollama.Client("http://localhost")
    client._client = web
    answer: Any = client.embed("embedder", TEXTS, keep_alive="5m", options={"num_ctx": 64})
    assert np.array_equal(np.float32(answer.embeddings), vectors)
    assert answer.model == "embedder" and answer.total_duration >= answer.load_duration >= 0
    assert answer.prompt_eval_count > 3
    assert np.array_equal(np.float32(client.embed("embedder", TEXTS[0]).embeddings), vectors[:1])
    assert len(client.embed("embedder", "x = 1\n" * 99, dimensions=8).embeddings[0]) == 8
    assert client.embed("embedder", "").embeddings == []
    refused = web.post("/api/embed", json={"model": "embedder", "input": "x = 1\n" * 99, "truncate": False})
    assert refused.status_code == 400 and refused.json()["error"].startswith("text 0 has")
    old = np.array(client.embeddings("embedder", TEXTS[0]).embedding)
    assert np.allclose(old / np.linalg.norm(old), vectors[0], rtol=1e-5) and np.linalg.norm(old) > 1.1
    assert web.post("/api/embeddings", json={"model": "embedder"}).json()["embedding"] == []
    for route, body in (("embed", {"input": "x"}), ("embeddings", {"prompt": "x"})):
        refused = web.post(f"/api/{route}", json=body | {"model": "coder"})
        assert refused.status_code == 501 and "is not made for embeddings" in refused.json()["error"]


def test_models_say_what_they_are_for(web: Any) -> None:
    found = {
        name: web.post("/api/show", json={"model": name}).json()["capabilities"] for name in ("encoder", "reranker")
    }
    assert found == {"encoder": ["embedding"], "reranker": ["embedding"]}
    web.post("/api/embed", json={"model": "embedder", "input": "x"})  # opens it
    assert web.post("/api/show", json={"model": "embedder"}).json()["capabilities"] == ["completion", "embedding"]


def test_an_encoder_gives_vectors_and_no_text(web: Any) -> None:
    data = web.post("/v1/embeddings", json={"model": "encoder", "input": [[5, 6, 7], [8]]}).json()["data"]
    assert [len(each["embedding"]) for each in data] == [96, 96]
    for route, prompt in (("/v1/completions", "prompt"), ("/completion", "prompt"), ("/api/generate", "prompt")):
        refused = web.post(route, json={"model": "encoder", prompt: "a"})
        assert refused.status_code == 400 and "turns texts into vectors and generates no text" in refused.text


# --- rerankers -----------------------------------------------------------------------------------------------------


def test_documents_come_in_the_order_of_their_scores(web: Any, tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template.rerank": TEMPLATE}
    with engine.load(rerank_file(BUNDLED, tmp_path / "a.gguf", (300, 301), **keys), device="cpu", n_ctx=128) as llm:
        scores = llm.rank("add", TEXTS)
    best = np.argsort(-scores).tolist()
    body: Any = {"model": "reranker", "query": "add", "documents": [{"text": TEXTS[0]}, *TEXTS[1:]]}
    for route in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"):
        answer = web.post(route, json=body).json()
        assert [each["index"] for each in answer["results"]] == best
        assert [np.float32(each["relevance_score"]) for each in answer["results"]] == scores[best].tolist()
    assert answer["object"] == "list" and answer["model"] == "reranker" and answer["usage"]["prompt_tokens"] > 12
    some = web.post("/v1/rerank", json=body | {"top_n": 2, "return_documents": True}).json()["results"]
    assert [each["document"]["text"] for each in some] == [TEXTS[i] for i in best[:2]]
    # Hugging Face's TEI.
    listed = web.post("/rerank", json={"model": "reranker", "query": "add", "texts": TEXTS, "return_text": True}).json()
    assert [(each["index"], each["text"]) for each in listed] == [(i, TEXTS[i]) for i in best]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"documents": ["a"]}, 400, "query is missing"),
        ({"query": "a"}, 400, "documents is missing"),
        ({"query": "a", "documents": []}, 400, "documents is empty"),
        ({"query": "a", "documents": ["a", 3]}, 400, "documents[1] must be a text, or an object with a text, not 3"),
        ({"query": "a", "documents": ["x = 1\n" * 99]}, 400, "document 0 with its query has"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n must be"),
        ({"query": "a", "documents": ["a"] * 41}, 400, "documents has 41 entries"),
        ({"query": "a", "texts": ["a"], "raw_scores": True}, 400, "raw_scores is not supported"),
        ({"model": "coder", "query": "a", "documents": ["a"]}, 501, "is no reranker"),
    ],
)
def test_a_refusal_of_a_reranker_is_one_sentence(web: Any, body: Any, status: int, words: str) -> None:
    answer = web.post("/v1/rerank", json={"model": "reranker"} | body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status
    assert words in message and message.endswith(".")


def test_documents_are_cut_if_the_client_asks(web: Any) -> None:
    body: Any = {"model": "reranker", "query": "a", "documents": ["x = 1\n" * 99]}
    assert web.post("/v1/rerank", json=body | {"truncate_prompt_tokens": -1}).json()["usage"]["total_tokens"] <= 128
    texts = {"model": "reranker", "query": "a", "texts": body["documents"], "truncate": True}
    assert len(web.post("/rerank", json=texts).json()) == 1
