"""What clients are known to trip over, each with the client that does."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")
import httpx

from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.served import Spec
from engine.text.template.builtin import TEMPLATES
from engine.text.template.chat import ChatTemplate
from tests.serving.bundled import bundled
from tests.serving.live import live

pytestmark = pytest.mark.together("serving")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": ["first", "second"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "parameters": PARAMETERS}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]
CALLING: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
CALLING["reasoning_effort"] = "none"
THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": True},
    "max_tokens": 24,
    "temperature": 1,
    "seed": 2,
}
"""The model thinks until its answer is cut off."""

TEMPLATE = (
    '{# <think> </think> <tool_call> "arguments" #}'
    + TEMPLATES["chatml"]
    + "{% if add_generation_prompt and enable_thinking %}{{ '<think>\n' }}{% endif %}"
)
"""The chat template of a model that thinks and calls."""


def opened() -> Any:
    llm = bundled(n_ctx=512)
    llm.chat_template = ChatTemplate.from_source(TEMPLATE, llm.tokenizer)
    return llm


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(app([Spec("pycoder", opened)], limits=Limits())) as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[Any]:
    with pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Any]:
    with pytest.importorskip("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat(http: Any, path: str = "/v1/chat/completions", **body: Any) -> Any:
    asked: dict[str, Any] = {} if path.endswith("/completions") and "chat" not in path else {"messages": HELLO}
    answer = http.post(path, json=asked | {"max_tokens": 4, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer


def frames(http: Any, **body: Any) -> list[Any]:
    """The chunks of a stream, cut as ``vllm bench serve`` cuts them."""
    text = chat(http, **body, stream=True).text
    found = text.split("\n\n")
    assert found.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in found)
    assert found.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in found]


def test_openai_sdk_every_part_of_a_call_has_an_index(openai: Any) -> None:
    """The SDK's helper appends calls to a list and finds them by their index: null raises TypeError."""
    with openai.chat.completions.stream(model="", messages=HELLO, seed=1, **CALLING) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    assert call.function.name == "add" and list(json.loads(call.function.arguments)) == ["a"]
    assert final.finish_reason == "tool_calls"
    parts = [part for e in events if e.type == "chunk" for c in e.chunk.choices for part in c.delta.tool_calls or ()]
    assert len(parts) > 2 and {part.index for part in parts} == {0}
    assert [bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1)


def test_openai_sdk_repeats_no_request_that_would_fail_again(openai: Any, http: Any) -> None:
    """It repeats each request with a status of 500 and more twice, unless a header says that this is useless."""
    with pytest.raises(pytest.importorskip("openai").InternalServerError) as refused:
        openai.embeddings.create(model="", input="a")  # asks for base64 unless it is told otherwise
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_anthropic_sdk_frames_have_names_and_indices_in_a_row(anthropic: Any) -> None:
    """The SDK drops frames without a known name, appends blocks, and finds them by their index."""
    tool = {"name": "add", "input_schema": PARAMETERS}
    asked: dict[str, Any] = {"model": "", "max_tokens": 8, "messages": HELLO, "tools": [tool]}
    asked["extra_body"] = {"temperature": 0}
    with anthropic.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert final.content and final.usage.output_tokens


def test_claude_code_a_billing_line_breaks_no_prefix(anthropic: Any) -> None:
    """The first block of the system prompt differs with each request; it must not change the prompt."""
    text = "You are a programmer who writes short functions, and tests for each of them."
    counts = []
    for i in range(2):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={i:05x};"}
        system: Any = [line, {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        usage = anthropic.beta.messages.create(
            model="", max_tokens=1, messages=HELLO, system=system, betas=["no-such-beta-2031-01-01"]
        ).usage
        counts.append((usage.cache_read_input_tokens, usage.input_tokens))
    assert sum(counts[0]) == sum(counts[1])
    assert counts[1][0] > counts[0][0] and counts[1][1] < 8


def test_claude_code_a_later_system_message_stays_in_its_place(http: Any) -> None:
    """Moved to the front it would change the beginning of the prompt with each request."""
    start: Any = [{"role": "user", "content": "What is the time? " * 8}, {"role": "assistant", "content": "Noon."}]
    asked: dict[str, Any] = {"path": "/v1/messages", "max_tokens": 1}
    chat(http, **asked, messages=[*start, *HELLO])
    more = [*start, {"role": "system", "content": "100 tokens are left."}, *HELLO]
    usage = chat(http, **asked, messages=more).json()["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def test_codex_tools_of_a_service_are_left_out(http: Any) -> None:
    """Tools of the types web_search, namespace, image_generation and custom come with the functions."""
    kinds = [{"type": kind, "name": "x"} for kind in ("web_search", "namespace", "image_generation", "custom")]
    plain, more = (chat(http, tools=tools).json() for tools in ([TOOL], [*kinds, TOOL]))
    assert more["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    flat = {"type": "function", **FUNCTION}
    asked = [
        http.post("/v1/responses", json={"input": "def add(a, b):", "max_output_tokens": 16, "tools": tools})
        for tools in ([flat], [*kinds, flat])
    ]
    assert [answer.status_code for answer in asked] == [200, 200], asked[1].text
    assert len({answer.json()["usage"]["input_tokens"] for answer in asked}) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_open_webui_every_choice_has_an_index(http: Any, n: int) -> None:
    """A delta without one is dropped, and the chat hangs."""
    chunks = frames(http, n=n, **CALLING)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == set(range(n))
    calls = [c for chunk in chunks for choice in chunk["choices"] for c in choice["delta"].get("tool_calls", ())]
    assert calls and all(type(call["index"]) is int for call in calls)


def test_litellm_and_langchain_thoughts_have_both_names(http: Any) -> None:
    """litellm reads ``reasoning_content``, others ``reasoning``; a content of null counts as an empty answer."""
    message = chat(http, **THINKING).json()["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"] == message["reasoning"] != ""
    deltas = [choice["delta"] for chunk in frames(http, **THINKING) for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    assert all(delta.get("content", "") is not None for delta in deltas)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_litellm_thoughts_are_taken_back_under_both_names(http: Any, name: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, name: "hm", "tool_calls": []}, *HELLO]
    assert chat(http, messages=messages).json()["choices"]


def test_continue_reads_the_context_and_completes(http: Any) -> None:
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert chat(http, path="/completion", prompt="def add(a, b):", n_predict=2).json()["stop_type"] == "limit"


def test_aider_options_of_another_server_are_ignored(http: Any) -> None:
    assert chat(http, num_ctx=8192, extra_headers={}).json()["choices"]


def test_lm_eval_an_echo_scores_the_prompt(http: Any) -> None:
    """It reads ``token_logprobs[ctx:-1]``, and takes equal numbers for a greedy token: a server that answers with the new
    token alone gets the score of chance."""
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"]
    body = {"prompt": "def add(a, b):", "add_special_tokens": False}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    asked = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    found = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(ids) + 1
    assert found["token_logprobs"][0] is None
    pairs = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    greedy = [value == max(top.values()) for value, top in pairs if top]
    assert greedy[-1] is True and False in greedy


def test_guidellm_probes_and_fields(http: Any) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"ignore_eos": True, "stop": None, "max_completion_tokens": 6, "stream_options": options}
    chunks = frames(http, **more)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert chunks[-1]["choices"] == []
    (call,) = chat(http, **CALLING).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"


def test_the_usage_of_a_chunk_counts_what_has_been_sent(http: Any) -> None:
    for more in ({"ignore_eos": True, "n": 3}, {"n": 4, "seed": 1}, {}):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = frames(http, **more, max_tokens=40, logprobs=True, stream_options=options)
        sent, ends = 0, 0
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            sent += len(choice["logprobs"]["content"]) if choice["logprobs"] else 0
            # The token that ends an answer has no log-probability here.
            ends += choice["finish_reason"] == "stop"
            if choice["logprobs"]:
                assert chunk["usage"]["completion_tokens"] == sent + ends
        assert chunks[-1]["usage"]["completion_tokens"] == sent + ends


def test_vllm_bench_first_chunk_is_the_first_token_and_usage_has_no_choices(http: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}]}]
    more: dict[str, Any] = {"ignore_eos": True, "repetition_penalty": 1.0, "logprobs": None, "max_completion_tokens": 5}
    chunks = frames(http, messages=messages, **more, stream_options={"include_usage": True})
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_llama_benchy_one_chunk_is_one_token_and_usage_is_never_null(http: Any) -> None:
    """It counts chunks, calls ``.get`` on any ``usage``, and warms up with an empty message."""
    assert chat(http, messages=[{"role": "user", "content": ""}], cache_prompt=False).json()["choices"]
    chunks = frames(http, cache_prompt=False, max_tokens=12, ignore_eos=True, stream_options={"include_usage": True})
    assert not [chunk for chunk in chunks if chunk.get("usage", {}) is None]
    said = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
    assert 10 <= len(said) <= chunks[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion"])
def test_no_answer_has_numbers_that_json_lacks(http: Any, path: str) -> None:
    body = {"prompt": "a", "logprobs": True, "logit_bias": {"5": -100}, "n_probs": 20, "top_logprobs": 20}
    body |= {"logprobs": 20, "top_logprobs": None} if path == "/v1/completions" else {}
    text = chat(http, path, **body).text
    assert not re.search(r"\b(NaN|Infinity)\b", text)
