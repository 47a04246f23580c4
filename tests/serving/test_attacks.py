"""Requests that no honest client sends: the bytes of the protocol, times, and values that try to break something."""

import contextlib
import importlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from engine.serving import budget as budget_of_requests
from engine.serving.app import app
from engine.serving.aside import SMALL
from engine.serving.guard import PART
from engine.serving.limits import Limits
from engine.serving.served import Spec
from engine.text.bound import LONG
from engine.text.bpe import BPE
from tests.serving.bundled import bundled
from tests.serving.live import live
from tests.tiers import amount
from tests.vocabularies import tokenizer

pytestmark = pytest.mark.together("serving")

SECONDS = 0.3
CHAT = "/v1/chat/completions"
JSON = "application/json"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

ROUTES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": HELLO,
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": HELLO,
    "/api/chat": HELLO | {"stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    limits = Limits(header_seconds=SECONDS, body_seconds=SECONDS, json_items=1000)
    with live(app([Spec("pycoder", partial(bundled, parallel=2))], limits=limits, keys=["secret"])) as found:
        yield found


@pytest.fixture(scope="module")
def http(address: tuple[str, int]) -> Iterator[Any]:
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", headers=headers, timeout=120) as client:
        yield client


def sent(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> str:
    """What the server answers to bytes, until it closes the connection."""
    with socket.create_connection(address, timeout=120) as connection:
        data = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            if not pause:
                connection.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        try:
            while more := connection.recv(1 << 16):
                data += more
        except ConnectionResetError:
            pass
    return data.decode()


def status(answer: str) -> int:
    return int(answer.split()[1]) if answer else 0


def posted(*headers: str, body: str = "{}") -> bytes:
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        "Authorization: Bearer secret",
        f"Content-Type: {JSON}",
        *headers,
    ]
    return "\r\n".join([*lines, "", body]).encode()


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 2", "Content-Length: 30"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 2"),
        ("Content-Length: -2",),
        ("Content-Length: +2",),
        ("Content-Length: 2, 30",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Content-Length : 2",),
        ("Host: evil.example",),
        ("X: a\x00b",),
        ("X: " + "a" * (70 << 10),),
    ],
    ids=lambda headers: headers[0][:30] + str(len(headers)),
)
def test_an_ambiguous_or_damaged_header_is_refused(address: tuple[str, int], headers: tuple[str, ...]) -> None:
    """And what follows it is not taken for another request."""
    answer = sent(address, posted(*headers, body="0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert status(answer) in (400, 431, 501)
    assert answer.count("HTTP/1.1 ") == 1 or "smuggled" not in answer
    assert '"object":"list"' not in answer


def test_a_request_without_a_host_is_refused(address: tuple[str, int]) -> None:
    assert status(sent(address, b"GET /health HTTP/1.1\r\n\r\n")) == 400
    assert status(sent(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")) == 400
    assert status(sent(address, b"GET /health HTTP/1.1\r\nHost: \r\n\r\n")) == 403


@pytest.mark.parametrize(
    "target",
    [
        *(
            "//v1/models",
            "/health/../v1/models",
            "/health/%2e%2e/v1/models",
            "/v1%2Fmodels",
            "/health%2F..%2Fv1/models",
        ),
        *(
            "/v1/models?x=/health",
            "/v1/models#/health",
            "/health;/v1/models",
            "/V1/MODELS",
            "/v1/models/",
            "/health%00",
        ),
        *("http://localhost/v1/models", "http://evil.example/health", "*", "/v1/models%0aGET%20/health", "/health/"),
        *("/v1/models\\..\\health", "/%68ealth/../v1/models", "/invocations", "/pause", "/update_weights", "/slots"),
    ],
)
def test_no_way_to_write_a_path_goes_round_the_key(address: tuple[str, int], target: str) -> None:
    """The Host header and the query are no part of the path, and the path is taken as it is."""
    answer = sent(address, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert status(answer) in (400, 401)
    assert "owned_by" not in answer and "n_ctx" not in answer


def test_a_silent_connection_is_closed(address: tuple[str, int]) -> None:
    begun = time.monotonic()
    assert sent(address, b"", pause=0.01) == ""
    assert time.monotonic() - begun >= SECONDS / 2


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "further"])
def test_a_header_that_takes_too_long_is_refused(address: tuple[str, int], before: bytes) -> None:
    """Also one that arrives byte by byte (slowloris)."""
    parts = [bytes([byte]) for byte in b"GET /health HTTP"]
    # The last byte comes before the time is over: after that, a reset could take the answer away.
    answer = sent(address, before + parts[0], *parts[1:5], pause=SECONDS / 6)
    assert answer.startswith("HTTP/1.1 408 " if not before else "HTTP/1.1 200 ")
    assert "--header-seconds" in answer and answer.count("HTTP/1.1 408 ") == 1


def test_a_body_that_takes_too_long_is_refused(address: tuple[str, int]) -> None:
    answer = sent(address, posted("Content-Length: 10", body='{"a":'), pause=0.01)
    assert status(answer) == 408 and "--body-seconds" in answer


# --- values --------------------------------------------------------------------------------------------------------


VALUES: list[Any] = [
    *(10**400, ["\ud800"], {"\ud800": 1, "1" * 5000: 1}, [{"role": "user", "content": "\ud800"}], {"1" * 5000: 1}),
    *(True, -1, 1.5, 2**70, "1e999", "\ud800", [None], [[[]]], {"a": {}}),
    [{"type": "text", "text": "\ud800"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "\ud800", "arguments": "[1]"}}]}],
    [{"type": "function", "function": {"name": "\ud800", "parameters": {"\ud800": 0}}}],
]
FIELDS = (
    *(
        "messages",
        "prompt",
        "content",
        "tokens",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "n_predict",
        "n",
        "stop",
    ),
    *(
        "temperature",
        "top_p",
        "top_k",
        "typical_p",
        "repeat_last_n",
        "logit_bias",
        "logprobs",
        "n_probs",
        "echo",
        "seed",
    ),
    *("input", "instructions", "stream_options", "chat_template_kwargs", "response_format", "thinking", "model"),
    *("structured_outputs", "guided_choice", "grammar", "dry_sequence_breakers", "stop_token_ids", "min_tokens"),
)


@pytest.mark.more
@pytest.mark.parametrize("path", ROUTES)
def test_no_value_of_a_field_is_a_defect(http: Any, path: str) -> None:
    """Halves of characters, numbers that are no float, and every type: refused with a sentence, or answered."""
    for field in FIELDS:
        for value in VALUES[: amount(len(VALUES), 3)]:
            body = json.dumps({**ROUTES[path], field: value}).replace('"1e999"', "1e999")
            answer = http.post(path, content=body, headers={"content-type": JSON})
            assert answer.status_code in (200, 400, 404), (field, value, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert re.search(r"\w.*[.]$", error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("text", ["[1," * 600, '{"a": "' + "," * 2000 + '"}'])
def test_too_many_values_are_refused(http: Any, path: str, text: str) -> None:
    answer = http.post(path, content=text, headers={"content-type": JSON})
    assert answer.status_code == 413 and "--json-items" in answer.text


HUGE = "a b " * LONG
HUGE_CHAT = {"messages": [{"role": "user", "content": HUGE}], "max_tokens": 1, "stream": False}
HUGE_BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HUGE_CHAT),
    (CHAT, HUGE_CHAT | {"messages": [*HELLO["messages"], {"role": "assistant", "content": HUGE}]}),
    (CHAT, {"messages": [*HELLO["messages"], {"role": "assistant", "content": HUGE}], "continue_final_message": True}),
    ("/v1/completions", {"prompt": HUGE}),
    ("/v1/completions", {"prompt": ["a", HUGE], "max_tokens": 0, "echo": True}),
    ("/v1/messages", HUGE_CHAT),
    ("/v1/responses", {"input": HUGE}),
    ("/v1/responses/input_tokens", {"input": HUGE}),
    ("/completion", {"prompt": [1, HUGE]}),
    ("/api/chat", HUGE_CHAT),
    ("/api/generate", {"prompt": HUGE, "stream": False}),
    ("/api/generate", {"prompt": HUGE, "stream": False, "raw": True}),
]


@pytest.mark.parametrize(("path", "body"), HUGE_BODIES, ids=[path for path, _ in HUGE_BODIES])
def test_a_huge_prompt_is_refused_before_it_is_tokenized(
    http: Any, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(model: BPE, text: str) -> list[int]:
        assert len(text) < 1000, "a huge text is tokenized"
        return encoded(model, text)

    encoded = BPE.encode
    monkeypatch.setattr(BPE, "encode", encode)
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    found = re.search(r"the prompt has at least (\d+) tokens and the context 256;", answer.text)
    assert found, answer.text
    assert LONG // 8 < int(found[1]) <= len(HUGE)


def test_the_tokens_of_a_huge_text_are_counted(http: Any) -> None:
    ids = tokenizer("bundled").encode(HUGE, add_special=False)
    assert http.post("/tokenize", json={"content": HUGE}).json()["tokens"] == ids
    n = http.post("/v1/messages/count_tokens", json=HUGE_CHAT).json()["input_tokens"]
    assert len(ids) < n < len(ids) + 50


def test_a_template_of_a_client_is_not_rendered(http: Any) -> None:
    answer = http.post(CHAT, json=HELLO | {"chat_template": "{{ 7 * 7 }}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    written = {
        "messages": [{"role": "user", "content": "{{ 7 * 7 }}{% for %}"}],
        "chat_template_kwargs": {"x": "{{ 1 }}"},
    }
    assert "{{ 7 * 7 }}{% for %}" in http.post("/apply-template", json=written).json()["prompt"]


def test_no_file_and_no_address_is_read(http: Any) -> None:
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/", "http:\\\\evil.example"):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        answer = http.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": content}]})
        assert answer.json()["error"]["param"] == "messages[0].content[0].type"
    for path in ("/api/pull", "/api/create", "/slots/0?action=save", "/props", "/lora-adapters"):
        assert http.post(path, json={"filename": "../x"}).status_code in (404, 405, 501)


BOMBS = {
    "deep": {"type": "grammar", "grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "counted": {"type": "regex", "pattern": "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"},
    "slow": {"type": "regex", "pattern": "a?" * 20_000 + "a" * 20_000},
    "endless": {"type": "grammar", "grammar": "start: start start"},
    "schema": {"type": "json_schema", "schema": {"$ref": "#"}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_needs_too_much_work_ends_with_a_sentence(http: Any, name: str) -> None:
    """And nobody else waits for it."""
    pytest.importorskip("llguidance")
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(http.post, CHAT, json=HELLO | {"response_format": BOMBS[name]})
        others = [http.post(CHAT, json=HELLO).status_code for _ in range(3)]
        waits = not bomb.done()
        assert others == [200] * 3 and (waits or name != "slow")
        answer = bomb.result()
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"].startswith("response_format") and error["message"].endswith(".")
    else:
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


# --- other web sites, and clients that do not read -------------------------------------------------------------------


def test_other_web_sites_are_allowed_nothing(http: Any) -> None:
    asks = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for answer in (http.options(CHAT, headers=asks), http.post(CHAT, json=HELLO, headers=asks)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.thorough
def test_a_client_that_reads_nothing_is_disconnected() -> None:
    limits = Limits(reader_seconds=SECONDS, backlog=4)
    guarded = app([Spec("pycoder", bundled)], limits=limits)
    more = {"n": 8, "max_tokens": 240, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": True}
    body = json.dumps(HELLO | more)
    with live(guarded) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(posted(f"Content-Length: {len(body)}", body=body))
        served = guarded.state.models.entries["pycoder"].served
        assert served is not None
        deadline = time.monotonic() + 20
        while not served.driver.n_answers and time.monotonic() < deadline:
            time.sleep(0.01)
        while served.driver.n_answers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served.driver.n_answers == 0
        served.llm.check_pages()
        data = b""
        try:
            while more_data := connection.recv(1 << 16):
                data += more_data
        except ConnectionResetError:
            pass
    assert data.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in data


@pytest.mark.thorough
def test_a_client_that_reads_slowly_is_not_disconnected() -> None:
    """What is left unread is now more, now less, while it reads and the answer goes on."""
    patience = 0.6
    guarded = app([Spec("pycoder", bundled)], limits=Limits(reader_seconds=patience, backlog=4))
    more = {"max_tokens": 240, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": True}
    body = json.dumps(HELLO | more)
    with live(guarded, send_bytes=4096) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(posted(f"Content-Length: {len(body)}", body=body))
        begun, data = time.monotonic(), b""
        while part := connection.recv(8 << 10):
            data += part
            time.sleep(0.03)
        assert time.monotonic() - begun > 2 * patience
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_the_end_of_an_answer_that_nobody_reads() -> None:
    """Also what is left when the answer is complete, and less than makes a stream pause."""
    guarded = app([Spec("pycoder", bundled)], limits=Limits(reader_seconds=SECONDS))
    body = json.dumps({"content": "1" * 9000})
    with live(guarded, send_bytes=4096) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(4 * SECONDS)
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                data += part
    assert data.startswith(b"HTTP/1.1 200 ") and not data.endswith(b"]}")


@pytest.mark.parametrize(
    ("path", "body", "module", "name"),
    [
        (CHAT, HELLO, "openai.chat", "read_messages"),
        (CHAT, HELLO, "openai.chat", "read_tool_choice"),
        ("/v1/messages", HELLO, "anthropic.conversation", "read_messages"),
        ("/v1/messages", HELLO, "anthropic.messages", "read_tool_choice"),
        ("/v1/messages/count_tokens", HELLO, "anthropic.messages", "read_tool_choice"),
        ("/v1/responses", ROUTES["/v1/responses"], "responses.request", "read_messages"),
        ("/v1/responses", ROUTES["/v1/responses"], "responses.request", "read_metadata"),
        ("/api/chat", ROUTES["/api/chat"], "ollama.chat", "read_messages"),
        ("/api/chat", ROUTES["/api/chat"], "ollama.chat", "read_tools"),
        ("/detokenize", {"tokens": [1]}, "llama_server.tokens", "read_ids"),
        ("/apply-template", HELLO, "llama_server.template", "read_messages"),
        ("/apply-template", HELLO, "llama_server.template", "read_tool_choice"),
    ],
)
def test_the_fields_of_a_large_body_are_read_in_a_thread(
    http: Any, path: str, body: dict[str, Any], module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands of values take a second, in which nobody else would be answered."""
    owner = importlib.import_module(f"engine.serving.{module}")
    read, threads = getattr(owner, name), []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(owner, name, noted)
    for padding in ("", "x" * SMALL):
        assert http.post(path, json=body | {"padding": padding}).status_code == 200
    first, second = threads
    assert first != second and second.startswith("asyncio_")


def test_a_long_stop_text_is_refused(http: Any) -> None:
    """Every token is compared with all of its beginnings."""
    assert http.post(CHAT, json=HELLO | {"stop": ["a" * 1000]}).status_code == 200
    answer = http.post(CHAT, json=HELLO | {"stop": ["b", "a" * 1001]})
    assert answer.status_code == 400 and "has a text of 1001 characters" in answer.json()["error"]["message"]


def test_a_request_holds_memory_as_long_as_it_needs_it() -> None:
    """A body while it is read; during the answer, little; at the end, nothing."""
    guarded = app([Spec("pycoder", bundled)])
    body = HELLO | {"stream": True, "max_tokens": 200, "ignore_eos": True, "padding": "x" * 100_000}
    with live(guarded) as (host, port), httpx.stream("POST", f"http://{host}:{port}{CHAT}", json=body) as answer:
        budget, texts = guarded.state.budget, answer.iter_raw()
        next(texts)
        assert 0 < budget.held < 10_000
        for _ in texts:
            pass
        deadline = time.monotonic() + 10
        while budget.held:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_long_answer_is_sent_in_parts(http: Any) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 900))) * 40
    sent = http.post("/apply-template", json={"messages": [{"role": "user", "content": text}]})
    assert len(sent.content) > PART and text in sent.json()["prompt"]


def test_a_duration_of_many_digits(http: Any) -> None:
    """It is refused at once: an expression that tries every division of the digits would stop the server for a minute."""
    body = {"model": "pycoder", "keep_alive": "1" * 40_000}
    answer = http.post("/api/generate", json=body)
    assert answer.status_code == 400 and "keep_alive" in answer.json()["error"]
    assert len(answer.json()["error"]) < 300


def test_many_large_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for which there is no memory are refused, and can be sent again."""
    monkeypatch.setattr(budget_of_requests, "WAIT_SECONDS", 0)
    guarded = app([Spec("pycoder", bundled)])
    body = {"content": "x = 1\n" * 30_000, "with_pieces": True}
    with live(guarded) as (host, port), ThreadPoolExecutor(6) as pool:
        budget = guarded.state.budget
        budget.total = 150 << 20
        url = f"http://{host}:{port}/tokenize"
        answers = list(pool.map(lambda _: httpx.post(url, json=body, timeout=60), range(6)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "2" and "send the request again" in refused.json()["error"]["message"]
        assert budget.held == 0
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        answer = httpx.post(url, json={"content": "1" * 500_000}, timeout=60)
        assert answer.status_code == 413 and "send less text at once" in answer.json()["error"]["message"]
        # Words divide a text.
        assert httpx.post(url, json={"content": "one two " * 60_000}, timeout=60).status_code == 200
