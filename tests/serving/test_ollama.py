"""Ollama's interface, as its own package sees it."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine import LLM, Grammar
from engine.decode.core import EngineCore
from engine.text.template.chat import ChatTemplate

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("ollama")
pytest.importorskip("httpx")
pytest.importorskip("jsonschema")
import httpx
import jsonschema
import ollama
import uvicorn

from engine.serving import streams
from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.models import Models
from engine.serving.ollama.card import human
from engine.serving.served import Spec
from tests.serving.bundled import bundled
from tests.serving.conftest import WAIT_SECONDS

pytestmark = pytest.mark.together("serving")

HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]
GREEDY: Any = {"temperature": 0, "num_predict": 8}

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "sub"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    with ollama.Client(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def web(server: str) -> Iterator[Any]:
    """Sends requests that no client of Ollama sends."""
    with httpx.Client(base_url=server) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(llm: LLM) -> Any:
    """The file of the model, as the package ``gguf`` reads it."""
    return gguf.GGUFReader(llm.path)


@pytest.fixture(scope="module")
def name(client: Any) -> str:
    """The name of the model, which ends in ``:latest``."""
    (model,) = client.list().models
    return model.model


def openai(web: Any, **body: Any) -> Any:
    """The answer of OpenAI's interface to the same server."""
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def joined(chunks: list[Any], field: str = "content") -> str:
    return "".join(getattr(chunk.message, field) or "" for chunk in chunks)


# --- chat ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: Any, name: str, llm: LLM) -> None:
    answer = client.chat(name, HELLO, options=GREEDY)
    expected = llm.chat(HELLO, max_tokens=8, temperature=0, chat_template="chatml")
    assert (answer.message.role, answer.message.content) == ("assistant", expected.text)
    assert (answer.done, answer.done_reason, answer.model) == (True, expected.finish_reason, name)
    assert answer.prompt_eval_count == len(expected.prompt_ids)
    assert answer.eval_count == expected.timings.predicted_n
    assert answer.message.thinking is None and answer.message.tool_calls is None and answer.logprobs is None


def test_durations_are_nanoseconds(client: Any, name: str) -> None:
    begun = time.monotonic_ns()
    answer = client.chat(name, HELLO, options=GREEDY | {"num_predict": 20})
    assert 0 < answer.eval_duration < answer.total_duration <= time.monotonic_ns() - begun
    assert 0 <= answer.load_duration < answer.total_duration
    assert answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        (
            {"temperature": 1.2, "top_k": 0, "top_p": 0.7, "min_p": 0.01, "repeat_penalty": 1.3, "typical_p": 0.9},
            {"temperature": 1.2, "top_k": 0, "top_p": 0.7, "min_p": 0.01, "repetition_penalty": 1.3, "typical_p": 0.9},
        ),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        ({"stop": ["\n"], "num_ctx": 99999, "num_gpu": 99, "num_thread": 1}, {"stop": ["\n"]}),
    ],
)
def test_texts_are_those_of_other_interfaces(
    client: Any, name: str, web: Any, options: dict[str, Any], same: dict[str, Any]
) -> None:
    """With Ollama's own defaults for what is missing."""
    answer = client.chat(name, HELLO, options={"seed": 5, "num_predict": 16} | options)
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
    expected = openai(web, messages=HELLO, seed=5, max_tokens=16, **defaults | same)
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert answer.done_reason == expected["choices"][0]["finish_reason"]
    assert answer.eval_count == expected["usage"]["completion_tokens"]


def test_penalties_consider_recent_tokens_only(client: Any, name: str, llm: LLM) -> None:
    options: Any = {"repeat_penalty": 5.0, "repeat_last_n": 2}
    answer = client.chat(name, HELLO, options=GREEDY | options | {"num_predict": 24})
    expected = llm.chat(HELLO, max_tokens=24, temperature=0, chat_template="chatml", **options)
    assert answer.message.content == expected.text
    all_of_them = client.chat(name, HELLO, options=GREEDY | options | {"num_predict": 24, "repeat_last_n": -1})
    assert answer.message.content != all_of_them.message.content


def test_a_stream_says_the_same(client: Any, name: str) -> None:
    options = {"seed": 3, "num_predict": 12}
    whole = client.chat(name, HELLO, options=options, logprobs=True, top_logprobs=2)
    chunks = list(client.chat(name, HELLO, options=options, logprobs=True, top_logprobs=2, stream=True))
    assert joined(chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1].done_reason, chunks[-1].eval_count) == (whole.done_reason, whole.eval_count)
    assert [token for chunk in chunks for token in chunk.logprobs or ()] == whole.logprobs


def test_log_probabilities_are_those_of_other_interfaces(client: Any, name: str, web: Any) -> None:
    answer = client.chat(name, HELLO, options=GREEDY, logprobs=True, top_logprobs=3)
    expected = openai(web, messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    shown = [
        (token.token, token.logprob, [(other.token, other.logprob) for other in token.top_logprobs])
        for token in answer.logprobs
    ]
    assert shown == [
        (token["token"], token["logprob"], [(other["token"], other["logprob"]) for other in token["top_logprobs"]])
        for token in expected["choices"][0]["logprobs"]["content"]
    ]


def test_silence_is_filled(templated: Any, special: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = templated.generate("plain", "x = ", options=GREEDY)
    monkeypatch.setattr(streams, "PING_SECONDS", 1e-5)
    step = EngineCore.step

    def slowly(*given: Any) -> bool:
        time.sleep(0.01)  # otherwise all tokens may be there before the server looks at the time
        return step(*given)

    monkeypatch.setattr(EngineCore, "step", slowly)
    body = {"model": "plain", "prompt": "x = ", "options": GREEDY}
    text = httpx.post(f"{special}/api/generate", json=body, headers=HEADERS, timeout=WAIT_SECONDS).text
    assert any(line.startswith(" ") for line in text.splitlines())
    chunks = list(templated.generate("plain", "x = ", options=GREEDY, stream=True))
    assert "".join(chunk.response for chunk in chunks) == expected.response


def test_an_error_ends_a_stream(templated: Any, llm: LLM) -> None:
    (one,) = llm.tokenizer.encode("1", add_special=False)
    banned = GREEDY | {"logit_bias": {str(one): -100}}
    answer = templated.generate("plain", "x = ", format={"const": 1}, options=banned, stream=True)
    with pytest.raises(ollama.ResponseError) as error:
        list(answer)
    assert error.value.status_code == -1  # the status was sent before


def test_an_answer_is_a_stream_unless_told_otherwise(web: Any) -> None:
    body = {"messages": HELLO, "options": GREEDY}
    with web.stream("POST", "/api/chat", json=body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert len(lines) >= 2  # pieces that are ready together are one line
    assert [set(line) for line in lines[:-1]] == [{"model", "created_at", "message", "done"}] * (len(lines) - 1)
    whole = web.post("/api/chat", json=body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["content"] == "".join(line["message"]["content"] for line in lines)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("given", [{}, {"messages": HELLO, "prompt": "x =", "options": GREEDY, "stream": False}])
def test_half_a_character_in_the_name_of_a_model(web: Any, path: str, given: dict[str, Any]) -> None:
    """JSON can hold it, and UTF-8 cannot."""
    body = json.dumps({"model": "a\ud800", **given})
    answer = web.post(path, content=body)
    assert answer.status_code == 200 and answer.json()["model"] == "a?"


def test_a_last_message_of_the_assistant_is_continued(client: Any, name: str, web: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "return a"}]
    answer = client.chat(name, messages, options=GREEDY)
    expected = openai(web, messages=messages, temperature=0, max_tokens=8, continue_final_message=True)
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]


# --- generate ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_message(client: Any, name: str) -> None:
    for system in ("", "You write Python."):
        messages = [{"role": "system", "content": system}] * bool(system) + HELLO
        expected = client.chat(name, messages, options=GREEDY)
        answer = client.generate(name, HELLO[0]["content"], system=system, options=GREEDY)
        assert answer.response == expected.message.content
        assert (answer.prompt_eval_count, answer.done_reason) == (expected.prompt_eval_count, expected.done_reason)
        chunks = list(client.generate(name, HELLO[0]["content"], system=system, options=GREEDY, stream=True))
        assert "".join(chunk.response for chunk in chunks) == answer.response
        assert chunks[-1].eval_count == answer.eval_count


def test_a_raw_prompt_is_continued(client: Any, name: str, llm: LLM) -> None:
    text = "<|im_start|>user\nx = 1<|im_end|>\n"
    answer = client.generate(name, text, raw=True, options=GREEDY)
    expected = llm.complete(llm.tokenizer.encode(text, parse_special=True), max_tokens=8, temperature=0)
    assert (answer.response, answer.prompt_eval_count) == (expected.text, len(expected.prompt_ids))


# --- formats -------------------------------------------------------------------------------------------------------


def test_an_answer_follows_a_schema(client: Any, name: str) -> None:
    said = [client.chat(name, HELLO, format=SCHEMA, options={"seed": i}).message.content for i in range(2)]
    said.append(client.generate(name, "A call, as JSON.", format=SCHEMA, options={"seed": 2}).response)
    for text in said:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_an_answer_is_an_object(client: Any, name: str, llm: LLM) -> None:
    answer = client.chat(name, HELLO, format="json", options={"seed": 1, "num_predict": 24})
    options: Any = {"seed": 1, "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
    grammar = Grammar.json_schema({"type": "object"})
    expected = llm.chat(HELLO, chat_template="chatml", grammar=grammar, **options)
    assert answer.message.content == expected.text
    assert answer.message.content.startswith("{")


# --- models --------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_shown(client: Any, name: str, llm: LLM, file: Any) -> None:
    n_bytes = sum(int(tensor.n_bytes) for tensor in file.tensors)
    (listed,), (running,) = client.list().models, client.ps().models
    assert name == "pycoder:latest"
    assert (listed.size, running.size, running.size_vram) == (n_bytes, n_bytes, 0)
    assert (running.name, running.context_length) == (name, 512)
    assert re.fullmatch("[0-9a-f]{64}", listed.digest) and listed.digest == running.digest
    for details in (listed.details, running.details, client.show(name).details):
        assert (details.format, details.family, details.families) == ("gguf", "qwen3", ["qwen3"])
        assert (details.parameter_size, details.quantization_level) == (human(llm.n_params), "Q4_K_M")
    shown = client.show(name.removesuffix(":latest"))
    assert abs(shown.modified_at.timestamp() - Path(llm.path).stat().st_mtime) <= 1
    assert shown.modelinfo["qwen3.context_length"] == file.fields["qwen3.context_length"].contents()
    assert shown.modelinfo["general.parameter_count"] == sum(int(tensor.n_elements) for tensor in file.tensors)
    assert shown.modelinfo["general.basename"] == "pycoder"
    assert shown.modelinfo["tokenizer.ggml.tokens"] == []
    assert "im_start" in shown.template and shown.capabilities == ["completion", "tools"]
    assert dict(line.split() for line in shown.parameters.splitlines())["num_ctx"] == "512"


def test_a_model_is_shown_with_everything(web: Any, name: str, file: Any) -> None:
    shown = web.post("/api/show", json={"name": name, "verbose": True}).json()
    assert shown["model_info"]["tokenizer.ggml.tokens"] == file.fields["tokenizer.ggml.tokens"].contents()
    types = file.fields["tokenizer.ggml.token_type"].contents()
    assert shown["model_info"]["tokenizer.ggml.token_type"] == types
    assert [(t["name"], t["type"], t["shape"]) for t in shown["tensors"]] == [
        (t.name, t.tensor_type.name, t.shape.tolist()) for t in file.tensors
    ]


def test_a_client_finds_a_server_of_a_version_that_it_knows(web: Any) -> None:
    assert web.head("/").status_code == 200
    version = web.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (18_358_272, "18.36M"), (2 * 10**6, "2M"), (7_615_616_512, "7.6B"), (8 * 10**9, "8B")],
)
def test_numbers_of_parameters(number: int, text: str) -> None:
    assert human(number) == text


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "none", "keep_alive": 0}, 404, "no model 'none'"),
        ("chat", {"messages": "hi"}, 400, "messages must be a list"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "messages[0].images"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "messages"),
        ("chat", {"messages": HELLO, "think": True}, 400, "does not support thinking"),
        ("chat", {"messages": HELLO, "think": "little"}, 400, "think must be true, false, low"),
        ("chat", {"messages": HELLO, "format": "xml"}, 400, "format must be"),
        ("chat", {"messages": HELLO, "format": {"type": "zebra"}}, 400, "format: "),
        ("chat", {"messages": HELLO, "keep_alive": "soon"}, 400, "keep_alive must be"),
        ("chat", {"messages": HELLO, "keep_alive": "1" * 40_000}, 400, "keep_alive must be"),
        ("chat", {"messages": HELLO, "keep_alive": "\u0661s"}, 400, "keep_alive must be"),
        ("chat", {"messages": HELLO, "options": {"num_ctx": -1}}, 400, "options.num_ctx must be"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, 400, "options.temperature must be"),
        ("chat", {"messages": HELLO, "options": {"num_predict": -3}}, 400, "options.num_predict must be"),
        ("chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("chat", {"messages": HELLO, "options": []}, 400, "options must be an object"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ("chat", {"messages": [{"role": "user", "content": "a b " * 600}]}, 400, "context 512"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
        ("generate", {"prompt": "a", "context": [1, 2]}, 400, "context is not supported"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, 400, "images is not supported"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system needs a chat template"),
        ("embed", {"input": "a"}, 501, "not made for embeddings"),
        ("embeddings", {"prompt": "a"}, 501, "not made for embeddings"),
        ("pull", {"model": "a"}, 501, "neither fetches nor changes"),
        ("push", {"model": "a"}, 501, "neither fetches nor changes"),
        ("create", {"model": "a"}, 501, "neither fetches nor changes"),
        ("copy", {"source": "a", "destination": "b"}, 501, "neither fetches nor changes"),
        ("tags", {}, 405, "/api/tags"),
        ("nowhere", {}, 404, "/api/nowhere"),
    ],
)
def test_a_refusal_is_one_sentence(web: Any, path: str, body: Any, status: int, words: str) -> None:
    answer = web.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"] and answer.json()["error"].endswith(".")


def test_a_body_need_not_be_declared_except_by_browsers(web: Any) -> None:
    body = json.dumps({"messages": HELLO, "options": GREEDY, "stream": False})
    kinds: Any = [{}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}]
    browser: Any = [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
    for kind in kinds:
        assert web.post("/api/chat", content=body, headers=kind).json()["eval_count"] == 8
        assert web.post("/v1/chat/completions", content=body, headers=kind).status_code == 415
        for more in browser:
            assert web.post("/api/chat", content=body, headers=kind | more).status_code == 415


def test_the_client_raises_what_the_server_refuses(client: Any, name: str) -> None:
    with pytest.raises(ollama.ResponseError, match="no model 'none'") as error:
        client.chat("none", keep_alive=0)
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="neither fetches nor changes"):
        client.delete(name)


def test_an_unknown_option_is_named_in_the_log(client: Any, name: str, process: tuple[Any, Path]) -> None:
    client.chat(name, HELLO, options=GREEDY | {"temprature": 1, "num_batch": 2})
    deadline = time.monotonic() + 10
    while " ignored=options.temprature" not in process[1].read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, "the log does not name it"  # the line is written after the answer
        time.sleep(0.01)
    assert "num_batch" not in process[1].read_text(encoding="utf-8")


# --- opening and closing -------------------------------------------------------------------------------------------


def test_a_model_is_opened_and_closed(client: Any, name: str, web: Any) -> None:
    answer = client.chat(name, HELLO, options=GREEDY)
    closed = client.chat(name, keep_alive=0)
    assert (closed.done_reason, closed.message.content, client.ps().models) == ("unload", "", [])
    # The file has no chat template; that of the server's flag is known while the model is open.
    assert client.show(name).capabilities == ["completion"]
    assert (client.ps().models, len(client.list().models)) == ([], 1)
    opened = client.generate(name, keep_alive="5m")
    assert (opened.done_reason, opened.response, len(client.ps().models)) == ("load", "", 1)
    assert web.post("/models/unload", json={"model": name}).json() == {"success": True}
    assert web.get("/models").json()["data"][0]["status"]["value"] == "unloaded"
    assert web.post("/models/load", json={"model": name}).json() == {"success": True}
    assert web.get("/models").json()["data"][0]["status"]["value"] == "loaded"
    assert client.chat(name, HELLO, options=GREEDY).message.content == answer.message.content
    for path in ("load", "unload"):
        for body, status in (({}, 400), ({"model": "none"}, 404)):
            assert web.post(f"/models/{path}", json=body).status_code == status


def test_an_answer_in_progress_ends_before_its_model_is_closed(client: Any, name: str) -> None:
    options = GREEDY | {"num_predict": 200, "ignore_eos": True}
    chunks = client.chat(name, HELLO, options=options, stream=True)
    first = next(chunks)
    assert client.generate(name, keep_alive="0s").done_reason == "unload"
    rest = list(chunks)
    assert rest[-1].eval_count == 200
    for _ in range(200):
        if not client.ps().models:
            break
        time.sleep(0.01)
    assert client.ps().models == []
    assert joined([first, *rest]) == client.chat(name, HELLO, options=options).message.content


def test_a_model_is_closed_when_nobody_uses_it() -> None:
    async def using() -> None:
        models = Models([Spec("pycoder", bundled)], Limits(), 1)
        entry = models.find("pycoder:latest")
        async with models.use("pycoder"):
            await models.release(entry)
            assert entry.served is not None
            async with models.use("pycoder"):  # it is wanted again
                pass
        assert entry.served is not None
        async with models.use("pycoder"):
            await models.release(entry)
        assert entry.served is None
        await models.release(entry)

    asyncio.run(using())


# --- calls and thoughts --------------------------------------------------------------------------------------------

CALLING = """{%- if tools %}{{ '{"name": …, "parameters": …}' }}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }} {{ message.name }}
{% for call in message.tool_calls or [] -%}
{{ '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant
{% endif %}"""
"""Calls as in Llama 3: an answer that is JSON."""

THINKING = """{%- for message in messages -%}
{{ message.role }}{{ reasoning_effort }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{%- endif %}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined or enable_thinking or
messages[0].content == "always" %}<think>
{% endif %}{% endif %}"""
"""Thoughts as in DeepSeek-R1: the prompt opens them."""

CALL: Any = {
    "type": "object",
    "properties": {
        "name": {"const": "weather"},
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Basel"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
"""What a call is."""

THOUGHT = "why</think>because"
"""A thought, and a text after it."""


def weather(city: str, days: int) -> str:
    """Tell the weather.

    Args:
      city: The city
      days: How many days ahead
    """
    return f"sunny in {city}, in {days} days"


def with_template(source: str | None, form: Any = None) -> LLM:
    """A model with a chat template.  form: the schema of what it writes unless a request has a grammar."""
    llm = bundled(parallel=2, n_ctx=512)
    llm.chat_template = None if source is None else ChatTemplate.from_source(source, llm.tokenizer)
    if form is not None:
        generate, grammar = llm.generate, Grammar.json_schema(form)

        def formed(prompt: Any, **options: Any) -> Any:
            return generate(prompt, **options | {"grammar": options.get("grammar") or grammar})

        setattr(llm, "generate", formed)  # noqa: B010
    return llm


@pytest.fixture(scope="module")
def special() -> Iterator[str]:
    """The address of a server of models with other chat templates than that of the process."""
    templates = {"caller": CALLING, "thinker": THINKING, "plain": None}
    specs = [Spec(name, partial(with_template, source)) for name, source in templates.items()]
    specs.append(Spec("calls", partial(with_template, CALLING, CALL)))
    specs.append(Spec("thinks", partial(with_template, THINKING, {"const": THOUGHT})))
    specs.append(Spec("lost", bundled, path="/nowhere/lost.gguf"))
    application = app(specs, limits=Limits(tools=2), keys=["secret"], preload=False)
    served = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None))
    thread = threading.Thread(target=served.run)
    thread.start()
    while not served.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    served.should_exit = True
    thread.join()


HEADERS = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def templated(special: str) -> Iterator[Any]:
    with ollama.Client(special, headers=HEADERS) as opened:
        yield opened


def alike(special: str, **body: Any) -> Any:
    """The answer of OpenAI's interface, as its message and the number of tokens of its prompt."""
    answer = httpx.post(f"{special}/v1/chat/completions", json=body, headers=HEADERS, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"], answer.json()["usage"]["prompt_tokens"]


def test_a_key_is_needed(special: str) -> None:
    answer = httpx.get(f"{special}/api/tags", timeout=WAIT_SECONDS)
    assert (answer.status_code, set(answer.json())) == (401, {"error"})
    assert "API key" in answer.json()["error"]


def test_a_function_is_called(templated: Any, special: str) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    answer = templated.chat("calls", messages, tools=[weather], options={"seed": 1})
    (call,) = answer.message.tool_calls
    assert (call.function.name, answer.message.content, answer.done_reason) == ("weather", "", "stop")
    jsonschema.validate(call.function.arguments, CALL["properties"]["parameters"])
    chunks = list(templated.chat("calls", messages, tools=[weather], options={"seed": 1}, stream=True))
    assert [each for chunk in chunks for each in chunk.message.tool_calls or ()] == [call]
    assert joined(chunks) == ""
    result = weather(**call.function.arguments)
    messages += [answer.message, {"role": "tool", "tool_name": "weather", "content": result}]
    final = templated.chat("caller", messages, tools=[weather], options=GREEDY)

    arguments = json.dumps(dict(call.function.arguments))
    same: Any = [
        messages[0],
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "name": "weather", "content": result},
    ]
    tool = ollama._utils.convert_function_to_tool(weather).model_dump(exclude_none=True)
    expected, n_prompt = alike(special, model="caller", messages=same, tools=[tool], temperature=0, max_tokens=8)
    assert (final.message.content, final.prompt_eval_count) == (expected["content"], n_prompt)
    without = templated.chat("caller", messages, options=GREEDY)
    assert without.prompt_eval_count < n_prompt


@pytest.mark.parametrize(
    ("think", "values"),
    [
        (None, {}),
        (True, {"chat_template_kwargs": {"enable_thinking": True}}),
        (False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("low", {"reasoning_effort": "low"}),
        ("max", {"reasoning_effort": "max"}),
    ],
)
def test_thoughts_are_separate(templated: Any, special: str, think: Any, values: dict[str, Any]) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "a", "thinking": "b c d"}, *HELLO]
    answer = templated.chat("thinker", messages, think=think, options=GREEDY)
    same = [dict(each) for each in messages]
    same[1]["reasoning_content"] = same[1].pop("thinking")
    expected, n_prompt = alike(special, model="thinker", messages=same, temperature=0, max_tokens=8, **values)
    said = answer.message
    assert (said.content, said.thinking) == (expected["content"], expected.get("reasoning_content"))
    assert answer.prompt_eval_count == n_prompt
    assert bool(said.thinking) is (think is not False)
    chunks = list(templated.chat("thinker", messages, think=think, options=GREEDY, stream=True))
    assert (joined(chunks), joined(chunks, "thinking")) == (said.content, said.thinking or "")


def test_a_text_follows_a_thought(templated: Any) -> None:
    answer = templated.generate("thinks", "always")
    assert (answer.thinking, answer.response) == ('"why', 'because"')
    chunks = list(templated.generate("thinks", "always", stream=True))
    assert "".join(chunk.thinking or "" for chunk in chunks) == '"why'
    assert "".join(chunk.response for chunk in chunks) == 'because"'


def test_what_has_a_format_is_text(templated: Any) -> None:
    messages: Any = [{"role": "user", "content": "always"}]
    said = templated.chat("caller", messages, format=CALL).message
    assert not said.tool_calls
    jsonschema.validate(json.loads(said.content), CALL)
    form = {"const": THOUGHT}
    said = templated.chat("thinker", messages, format=form).message
    assert (said.thinking, json.loads(said.content)) == (None, THOUGHT)
    answer = templated.generate("thinker", "always", format=form)
    assert (answer.thinking, json.loads(answer.response)) == (None, THOUGHT)


def test_what_models_can_do(templated: Any) -> None:
    able = {
        "caller": ["completion", "tools"],
        "thinker": ["completion", "tools", "thinking"],
        "plain": ["completion"],
    }
    for name in able:
        templated.generate(name)  # opens it, and with it the template that the test has given it
    assert {name: templated.show(name).capabilities for name in able} == able
    with pytest.raises(ollama.ResponseError, match="think must be false with a format"):
        templated.chat("thinker", HELLO, think=True, format="json")
    with pytest.raises(ollama.ResponseError, match="think must be false with a last message"):
        templated.chat("thinker", [*HELLO, {"role": "assistant", "content": "a"}], think=True)
    with pytest.raises(ollama.ResponseError, match="tools has 3 entries"):
        templated.chat("caller", HELLO, tools=[weather] * 3)
    with pytest.raises(ollama.ResponseError, match="no chat template"):
        templated.chat("plain", HELLO)


def test_a_model_whose_file_is_gone(templated: Any) -> None:
    lost = templated.list().models[-1]
    assert (lost.model, lost.size, lost.details.quantization_level) == ("lost:latest", 0, "unknown")
    with pytest.raises(ollama.ResponseError, match="lost.gguf") as error:
        templated.show("lost")
    assert error.value.status_code == 503


def test_without_a_chat_template_a_prompt_is_continued(templated: Any, llm: LLM) -> None:
    text = "def add(a, b):<|im_end|>"  # no control token: a user may have written it
    answer = templated.generate("plain", text, options=GREEDY)
    expected = llm.complete(llm.tokenizer.encode(text), max_tokens=8, temperature=0)
    assert (answer.response, answer.prompt_eval_count) == (expected.text, len(expected.prompt_ids))
