"""The interfaces of llama-server and the counts for Prometheus, in process."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import engine
from engine.decode.request import Request
from engine.errors import DeviceError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.serving.answer import Ask
from engine.serving.app import app
from engine.serving.metrics import Metrics, pages_held
from engine.serving.models import Entry, Status
from engine.serving.served import Served, Spec
from engine.tools.formats import select
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

TEXTS = ["", "for i in range(3):\n    print(i)", "héllo 🙂 wörld", " two  blanks ", "<|endoftext|>"]


opened = partial(bundled, n_ctx=512)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    other = Spec("other", opened, aliases=["second"])
    with TestClient(app([Spec("bundled", opened, path="bundled.gguf"), other], local=False)) as client:
        yield client


@pytest.fixture
def entry(client: TestClient) -> Entry:
    found: Entry = client.app.state.models.entries["bundled"]  # type: ignore[attr-defined]
    return found


@pytest.fixture
def served(entry: Entry) -> Served:
    assert entry.served is not None
    return entry.served


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def failed(answer: Any, status: int, kind: str) -> str:
    """The message of an error, whose shape is checked."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    sizes = {"n_prompt_tokens", "n_ctx"} if kind == "exceed_context_size_error" else set()
    assert set(error) == {"code", "message", "type"} | sizes
    assert (error["code"], error["type"]) == (status, kind)
    return str(error["message"])


def counts(client: TestClient) -> dict[tuple[str, ...], float]:
    """The samples of ``/metrics``: (name, other labels than the model's) -> value."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    assert {s.labels.get("model_name") for s in samples if not s.name.startswith("process_")} == {"bundled"}
    return {(s.name, *(v for k, v in s.labels.items() if k != "model_name")): s.value for s in samples}


# --- health --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_health_while_draining(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.app.state, "draining", True)  # type: ignore[attr-defined]
    assert "shutting down" in failed(client.get("/health"), 503, "unavailable_error")
    assert client.get("/metrics").status_code == 200
    assert "shutting down" in failed(client.post("/tokenize", json={"content": "a"}), 503, "unavailable_error")


def test_health_while_loading(client: TestClient, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "served", None)
    assert client.get("/health").status_code == 200  # it is opened by the next request
    monkeypatch.setattr(entry, "status", Status.LOADING)
    assert failed(client.get("/health"), 503, "unavailable_error") == "Loading model"


def test_health_of_a_failed_device(client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.driver, "failed", DeviceError("the GPU was lost"))
    assert "bundled" in failed(client.get("/health"), 503, "unavailable_error")


def test_health_of_a_stalled_driver(client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.driver, "moved", time.monotonic() - 59)
    assert client.get("/health").status_code == 200
    monkeypatch.setattr(served.driver, "moved", time.monotonic() - 61)
    assert "60 seconds" in failed(client.get("/health"), 503, "unavailable_error")


def test_an_idle_driver_is_not_stalled(client: TestClient, served: Served) -> None:
    chat(client)
    deadline = time.monotonic() + 5
    while served.driver.moved != math.inf and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.driver.moved == math.inf


# --- what there is -------------------------------------------------------------------------------------------------


def test_props(client: TestClient, served: Served) -> None:
    found = client.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 512
    assert found["default_generation_settings"]["params"]["top_k"] == 40
    assert (found["total_slots"], found["model_alias"], found["model_path"]) == (4, "bundled", "bundled.gguf")
    assert served.llm.chat_template is not None
    assert found["chat_template"] == served.llm.chat_template.source
    assert found["eos_token"] == "<|endoftext|>"
    assert "no model" in failed(client.get("/props?model=none"), 404, "not_found_error")


def test_models(client: TestClient) -> None:
    found = client.get("/models").json()
    assert [(m["id"], m["status"]["value"]) for m in found["data"]] == [("bundled", "loaded"), ("other", "unloaded")]
    assert found["data"][1]["aliases"] == ["second"]


def test_slots(client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    free = client.get("/slots").json()
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in free] == [(i, 512, False) for i in range(4)]
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200
    owner = Request([1, 2, 3], Sampler(SamplerParams(top_k=7), served.llm.config.n_vocab), 9)
    for slot in served.llm.slots:
        monkeypatch.setattr(slot, "owner", owner)
    busy = client.get("/slots").json()[0]
    assert busy["is_processing"]
    assert busy["params"]["top_k"] == 7
    assert busy["next_token"] == [{"has_next_token": True, "n_remain": 9, "n_decoded": 0}]
    assert failed(client.get("/slots?fail_on_no_slot=1"), 503, "unavailable_error")


# --- text and tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_round_trip(client: TestClient, served: Served, text: str) -> None:
    ids = post(client, "/tokenize", content=text)["tokens"]
    assert ids == served.llm.tokenizer.encode(text, add_special=False)
    assert post(client, "/detokenize", tokens=ids) == {"content": text, "prompt": text}
    pieces = post(client, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    raw = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces]
    assert b"".join(raw) == text.encode()


def test_special_tokens_are_text_unless_asked_for(client: TestClient, served: Served) -> None:
    assert len(post(client, "/tokenize", content="<|endoftext|>")["tokens"]) > 1
    ids = post(client, "/tokenize", content="<|endoftext|>", parse_special=True)["tokens"]
    assert ids == [served.llm.tokenizer.eos_id]
    assert post(client, "/detokenize", tokens=ids)["content"] == "<|endoftext|>"


def test_tokenize_in_vllms_form(client: TestClient, served: Served) -> None:
    found = post(client, "/tokenize", prompt="a b c", model="bundled", add_special_tokens=False)
    ids = served.llm.tokenizer.encode("a b c", add_special=False)
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 512}
    assert post(client, "/tokenize", prompt="a b c")["tokens"] == served.llm.tokenizer.encode("a b c")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/tokenize", {}, "content is missing"),
        ("/tokenize", {"content": 3}, "content must be a text"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces must be true or false"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": "a"}, "tokens must be a list"),
        ("/detokenize", {"tokens": [1, 8192]}, "tokens[1] must be a token id, 0 to 8191"),
        ("/detokenize", {"tokens": [True]}, "tokens[0] must be a token id"),
        ("/apply-template", {}, "messages is empty"),
        ("/completion", {}, "prompt is missing"),
        ("/completion", {"prompt": []}, "prompt is empty"),
        ("/completion", {"prompt": ["a", "b"]}, "must be one prompt"),
        ("/completion", {"prompt": ["a", 8192]}, "prompt[1] must be a text or a token id"),
        ("/completion", {"prompt": "a", "n_probs": 21}, "n_probs must be a whole number, 0 to 20"),
        ("/completion", {"prompt": "a", "grammar": "root ::= 'a'"}, "grammar: the grammar cannot be used"),
    ],
)
def test_bad_bodies(client: TestClient, path: str, body: dict[str, Any], problem: str) -> None:
    assert problem in failed(client.post(path, json=body), 400, "invalid_request_error")


def test_tokenizer_info(client: TestClient, served: Served) -> None:
    found = client.get("/tokenizer_info").json()
    assert (found["eos_token"], found["eos_token_id"]) == ("<|endoftext|>", served.llm.tokenizer.eos_id)
    assert "im_start" in found["chat_template"]


def test_apply_template(client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked = "<|im_start|>user\nhi<|im_end|>\n"
    assert post(client, "/apply-template", messages=messages) == {"prompt": asked + "<|im_start|>assistant\n"}
    assert post(client, "/apply-template", messages=messages, add_generation_prompt=False) == {"prompt": asked}
    monkeypatch.setattr(served.llm, "chat_template", None)
    answer = client.post("/apply-template", json={"messages": messages})
    assert "no chat template" in failed(answer, 400, "invalid_request_error")


# --- completion ----------------------------------------------------------------------------------------------------


def test_fields_of_llama_server(client: TestClient, served: Served) -> None:
    ask: dict[str, Any] = {"prompt": {"prompt_string": "def add(a, b):"}, "n_predict": 12, "temperature": 0}
    plain = post(client, "/completion", **ask)
    assert plain["content"] == post(client, "/completion", **ask | {"prompt": "def add(a, b):"})["content"]
    assert plain["generation_settings"]["logit_bias"] == [] and plain["has_new_line"] == ("\n" in plain["content"])
    banned = post(client, "/completion", **ask, ignore_eos=True, logit_bias=[[5, -1.5], [7, False]])
    ends = [{"token": id, "bias": None} for id in sorted(served.llm.tokenizer.eog_ids)]
    expected = [{"token": 5, "bias": -1.5}, {"token": 7, "bias": None}, *ends]
    assert banned["generation_settings"]["logit_bias"] == expected and banned["generation_settings"]["ignore_eos"]
    assert all(value >= 0 for value in plain["timings"].values()) and plain["timings"]["predicted_per_token_ms"] > 0
    images = {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}
    assert "prompt.multimodal_data is not supported" in failed(
        client.post("/completion", json=ask | images), 400, "invalid_request_error"
    )


def test_completion_is_that_of_the_library(client: TestClient, served: Served) -> None:
    prompt = "def add(a, b):\n    return"
    found = post(client, "/completion", prompt=prompt, n_predict=12, seed=5, return_tokens=True, n_probs=3)
    with engine.load(device="cpu", n_ctx=512) as llm:
        answer = llm.complete(prompt, max_tokens=12, seed=5, logprobs=3)
    assert (found["content"], found["tokens"]) == (answer.text, answer.ids)
    assert found["prompt"] == prompt
    assert (found["tokens_evaluated"], found["tokens_predicted"]) == (
        len(answer.prompt_ids),
        answer.timings.predicted_n,
    )
    given = [(p["id"], p["logprob"], [t["id"] for t in p["top_logprobs"]]) for p in found["completion_probabilities"]]
    assert given == [(t.id, t.logprob, [other.id for other in t.top]) for t in answer.logprobs]
    assert found["generation_settings"]["seed"] == 5


def test_completion_of_ids_and_mixed_prompts(client: TestClient, served: Served) -> None:
    options = {"n_predict": 4, "temperature": 0}
    text = post(client, "/completion", prompt="for i in range(", **options)
    ids = served.llm.tokenizer.encode("for i in range(")
    assert post(client, "/completion", prompt=ids, **options)["content"] == text["content"]
    mixed = [served.llm.tokenizer.decode(ids[:-2]), *ids[-2:]]
    assert post(client, "/completion", prompt=mixed, **options)["content"] == text["content"]
    assert text["tokens"] == []


@pytest.mark.parametrize(
    ("more", "kind", "word"),
    [
        ({"n_predict": 3}, "limit", ""),
        ({"n_predict": 0}, "limit", ""),
        ({"stop": ["+", "\n"], "n_predict": 40}, "word", "+"),
    ],
)
def test_how_completions_end(client: TestClient, more: dict[str, Any], kind: str, word: str) -> None:
    body = {"prompt": "def add(a, b):\n    return", "temperature": 0, **more}
    whole = post(client, "/completion", **body)
    assert (whole["stop_type"], whole["stopping_word"], whole["stop"]) == (kind, word, True)
    lines = client.post("/completion", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1]["stop_type"], chunks[-1]["stopping_word"]) == (kind, word)
    assert sum(len(chunk["tokens"]) for chunk in chunks) == chunks[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_completion_without_room(client: TestClient) -> None:
    answer = client.post("/completion", json={"prompt": [1] * 600})
    assert "context" in failed(answer, 400, "exceed_context_size_error")
    error = answer.json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
    # A text of which only a part has been tokenized has at least so many.
    error = client.post("/completion", json={"prompt": "word " * 100_000}).json()["error"]
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512 and error["type"] == "exceed_context_size_error"


def test_progress_of_a_prompt(client: TestClient) -> None:
    """Objects as llama-server's before the first token, also when the cache has a part; then the answer as without them."""
    body = {"prompt": [7, *range(300, 700)], "n_predict": 4, "temperature": 0}

    def streamed(**more: Any) -> list[dict[str, Any]]:
        lines = client.post("/completion", json=body | {"stream": True} | more).text.split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    for cached in (False, True):
        chunks = streamed(return_progress=True)
        told = [chunk.pop("prompt_progress") for chunk in chunks if "prompt_progress" in chunk]
        before, answer = chunks[: len(told)], chunks[len(told) :]
        assert all(chunk["content"] == "" and chunk["tokens"] == [] and not chunk["stop"] for chunk in before)
        assert all(set(each) == {"total", "cache", "processed", "time_ms"} and each["total"] == 401 for each in told)
        (cache,) = {each["cache"] for each in told}
        assert (cache > 0) == cached and cache == answer[-1]["timings"]["cache_n"]
        assert told[0]["processed"] == cache and told[0]["time_ms"] == 0 and told[-1]["processed"] == 401
        assert len(told) > (1 if cached else 3)  # passes of 128 tokens
        for name in ("processed", "time_ms"):
            assert [each[name] for each in told] == sorted(each[name] for each in told)
        plain = streamed()
        assert "".join(chunk["content"] for chunk in answer) == "".join(chunk["content"] for chunk in plain)
    assert not any("prompt_progress" in chunk for chunk in plain)
    whole = client.post("/completion", json=body | {"return_progress": True}).json()
    assert whole["content"] == "".join(chunk["content"] for chunk in plain) and "prompt_progress" not in whole


# --- counts --------------------------------------------------------------------------------------------------------


def chat(client: TestClient, text: str = "def f(x):", n: int = 6) -> Any:
    messages = [{"role": "user", "content": text}]
    options = {"max_tokens": n, "ignore_eos": True, "seed": 1}
    return post(client, "/v1/chat/completions", messages=messages, **options)


def test_metrics_agree_with_usage(client: TestClient) -> None:
    chat(client)
    before = counts(client)
    usages = [chat(client, "x = 1\n" * 40, 6)["usage"] for _ in range(2)]
    after = counts(client)
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    prompts, cached = sum(u["prompt_tokens"] for u in usages), usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert grown["vllm:prompt_tokens_total",] == grown["vllm:prefix_cache_queries_total",] == prompts
    hits = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert grown["vllm:prefix_cache_hits_total",] == grown["vllm:gpu_prefix_cache_hits_total",] == hits
    assert grown["vllm:generation_tokens_total",] == sum(u["completion_tokens"] for u in usages) == 12
    assert grown["vllm:request_success_total", "length"] == 2
    assert grown["vllm:time_to_first_token_seconds_count",] == grown["vllm:e2e_request_latency_seconds_count",] == 2
    assert 1 <= grown["vllm:inter_token_latency_seconds_count",] <= 10
    first, whole = "vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum"
    assert grown[first,] + grown["vllm:inter_token_latency_seconds_sum",] <= grown[whole,]
    assert after["vllm:num_requests_running",] == after["vllm:num_requests_waiting",] == 0


def test_an_answer_that_is_left_early(client: TestClient, served: Served) -> None:
    before = counts(client)

    async def leave() -> int:
        parser = partial(select.parser, "plain", single=lambda tag: False)
        [answer] = await served.answers(Ask([1, 2, 3], parser, {"max_tokens": 400, "ignore_eos": True}))
        client.app.state.metrics.begin("bundled", answer)  # type: ignore[attr-defined]
        async with aclosing(answer.__aiter__()) as deltas:  # type: ignore[type-var]
            await anext(deltas)
        while served.driver.n_answers:
            await asyncio.sleep(0.01)
        return len(answer.generation.ids)

    assert client.portal is not None
    n = client.portal.call(leave)
    after = counts(client)
    assert after["vllm:request_success_total", "abort"] - before["vllm:request_success_total", "abort"] == 1
    assert after["vllm:prompt_tokens_total",] - before["vllm:prompt_tokens_total",] == 3
    assert 1 <= after["vllm:generation_tokens_total",] - before["vllm:generation_tokens_total",] <= n < 400


def test_the_share_of_pages(client: TestClient, served: Served) -> None:
    chat(client, "y = 2\n" * 40)
    held = {
        page
        for slot in served.llm.slots
        for paging in served.llm.cache.pools
        for page in slot.sequence.pages(paging).values()
    }
    n_pages = sum(pool.n_pages for pool in served.llm.cache.pools.values())
    found = counts(client)
    assert found["vllm:kv_cache_usage_perc",] == found["vllm:gpu_cache_usage_perc",] == len(held) / n_pages > 0
    assert pages_held(served.llm) == len(held) / n_pages


def test_where_memory_is(client: TestClient, served: Served) -> None:
    """The kinds of memory add up, and pages move between them."""

    def kinds() -> dict[str, float]:
        found = counts(client)
        assert found["bitmirror:snapshots_limit_bytes",] == served.llm.states.budget
        return {key[1]: value for key, value in found.items() if key[0] == "bitmirror:memory_bytes"}

    llm = served.llm
    llm.reset()
    empty = kinds()
    assert empty == llm.memory.kinds and empty["weights"] == llm.n_bytes
    assert empty["pages_held"] == empty["pages_kept"] == 0 < empty["pages_free"]
    chat(client, "z = 3\n" * 40)
    held = kinds()
    n_pages = sum(len(slot.sequence.pages(paging)) for slot in llm.slots for paging in llm.cache.pools)
    [page] = llm.cache.page_bytes.values()
    assert held["pages_held"] == n_pages * page > page and held["pages_kept"] == 0 < held["buffers"]
    for slot in llm.slots:
        slot.clear()
    kept = kinds()
    # The last page was not full, so nobody can share it.
    assert kept["pages_held"] == 0 < kept["pages_kept"] == held["pages_held"] - page
    for found in (empty, held, kept):
        assert sum(n for kind, n in found.items() if kind.startswith("pages_")) + found["rings"] == llm.cache_bytes
    llm.reset()
    assert kinds() == empty | {"buffers": kept["buffers"]}


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_memory_of_the_process(client: TestClient) -> None:
    found = counts(client)["process_resident_memory_bytes",]
    assert abs(found - psutil.Process().memory_info().rss) < 100 << 20


@pytest.mark.parametrize(
    ("finish", "error", "reason"),
    [("stop", None, "stop"), ("tool_calls", None, "stop"), ("", None, "abort"), ("", ValueError(), "error")],
)
def test_reasons(finish: str, error: Exception | None, reason: str) -> None:
    generation = SimpleNamespace(finish_reason="")
    answer: Any = SimpleNamespace(finish_reason=finish, error=error, generation=generation, n_read=0, age=1.0)
    metrics = Metrics()
    metrics.begin("m", answer)
    answer.on_end(answer)
    labels = {"model_name": "m", "finished_reason": reason}
    assert metrics.registry.get_sample_value("vllm:request_success_total", labels) == 1
    # A prompt that nobody has read counts nowhere.
    assert metrics.registry.get_sample_value("vllm:prompt_tokens_total", {"model_name": "m"}) is None
