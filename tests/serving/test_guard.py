"""What every request passes: host, key, size, nesting and type of its body."""

import re
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.body import parse
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.served import Spec
from engine.text.tokenizer import TokenType
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}

opened = partial(bundled, parallel=2)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    limits = Limits(body_bytes=4096, messages=3, json_depth=8, n=2, stop=2, logit_bias=2, tools=1)
    guarded = app([Spec("pycoder", opened)], limits=limits, keys=["secret", "other"])
    with TestClient(guarded, "http://localhost:8080", headers={"authorization": "Bearer secret"}) as client:
        yield client


def test_a_conversation_is_answered(client: TestClient) -> None:
    answer = client.post(CHAT, json=HELLO)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer secre"},
        {"authorization": "Bearer secrets"},
        {"authorization": "Basic secret"},
        {"authorization": "", "x-api-key": "wrong"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "//v1/chat/completions", "/nowhere", "/health/../v1/models"])
def test_without_the_key_no_route_answers(client: TestClient, path: str, headers: dict[str, str]) -> None:
    answer = client.post(path, json=HELLO, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("beside", [0, 20])
def test_the_limit_of_nesting_is_exact(beside: int) -> None:
    """Also with lists that are beside each other; a text with few brackets is not walked."""
    limits = Limits(json_depth=8)

    def nested(depth: int) -> bytes:
        return b"[" + b"[]," * beside + b"[" * (depth - 1) + b"]" * depth

    assert parse(nested(8), limits)
    with pytest.raises(Refusal, match="nested more than 8 deep"):
        parse(nested(9), limits)


def test_a_path_is_not_taken_for_the_pattern_of_a_route(client: TestClient) -> None:
    literal, other = (client.get(f"/v1/models/{name}") for name in ("%7Bname:path%7D", "x"))
    assert literal.status_code == other.status_code == 404


def test_each_key_is_accepted_in_both_headers(client: TestClient) -> None:
    headers = {"authorization": "", "x-api-key": "other"}
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8080", "x/health?"])
def test_other_hosts_are_refused(client: TestClient, host: str) -> None:
    """A page of another web site cannot reach the server under its own name, and a Host that looks like a path opens none."""
    assert client.post(CHAT, json=HELLO, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"])
def test_names_of_this_machine_are_accepted(client: TestClient, host: str) -> None:
    assert client.post(CHAT, json=HELLO, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b"\xff", 400, "UTF-8"),
        (b"[]", 400, "object"),
        (b'{"temperature": NaN}', 400, "NaN"),
        (b'{"x": ' + b"[" * 9 + b"]" * 9 + b"}", 400, "--json-depth"),
        (b"[" * 4000, 400, "--json-depth|JSON"),
        (b" " * 5000, 413, "--body-bytes"),
        (rb'{"messages": [{"role": "user"}], "logit_bias": {"\ud83d": 1}}', 400, "logit_bias.? is no token id"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(client: TestClient, body: bytes, status: int, words: str) -> None:
    answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert any(word in answer.json()["error"]["message"] for word in words.split("|"))
    assert answer.headers["x-should-retry"] == "false"


def test_a_body_of_unknown_length_is_counted_while_it_is_read(client: TestClient) -> None:
    answer = client.post(CHAT, content=iter([b" " * 3000] * 2), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_form_of_another_site_is_refused(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post(CHAT, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 3}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"1": 0, "2": 0, "3": 0}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias.99999999"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 4}, "messages"),
        ({"messages": [{"role": "queen", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
def test_a_refusal_names_the_field(client: TestClient, change: dict[str, object], param: str) -> None:
    answer = client.post(CHAT, json=HELLO | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].endswith(".")


def test_a_prompt_that_is_too_long_is_refused_by_name(client: TestClient) -> None:
    answer = client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "a b " * 600}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_unknown_field_is_named_in_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "bitmirror.serving.access"):
        assert (
            client.post(CHAT, json=HELLO | {"ze\nbra": 1, "user": "me", "stream_options": {"a": 1}}).status_code == 200
        )
    line = caplog.messages[-1]
    assert r"ignored=ze\nbra,stream_options.a" in line
    assert "Hello" not in line


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        (CHAT, {"temperature": 3}, " 400 .*refused=temperature must be a number, 0 to 2"),
        (CHAT, {"messages": 1}, " 400 .*refused=messages must be a list"),
        ("/nowhere\n", {}, r" 404 .*refused=there is no /nowhere\\n here; "),
        ("/api/pull", {}, " 501 .*refused=this server neither fetches nor changes models"),
        ("/metrics", {}, " 405 .*refused=/metrics does not answer POST"),
    ],
)
def test_the_log_says_why_a_request_was_refused(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, change: dict[str, object], says: str
) -> None:
    """In the line of the request, which is one line whatever the request holds."""
    with caplog.at_level("INFO", "bitmirror.serving.access"):
        assert client.post(path.replace("\n", "%0A"), json=HELLO | change).status_code >= 400
        assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    first, second = (line for line in caplog.messages if " id=" in line)
    assert re.search(says, first)
    assert second.endswith(
        "refused=the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key."
    )
    assert first.isprintable() and "Hello" not in first


def test_control_tokens_in_user_text_stay_text(client: TestClient) -> None:
    """A message that spells a control token is longer than one that uses it."""

    def n_prompt(text: str) -> int:
        answer = client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": text}]})
        return int(answer.json()["usage"]["prompt_tokens"])

    llm = opened()
    with llm:
        vocabulary = llm.tokenizer.vocabulary
        control = vocabulary.tokens[list(vocabulary.types).index(TokenType.CONTROL)]
        assert n_prompt(control) - n_prompt("") == len(llm.tokenizer.encode(control, add_special=False))
        assert len(llm.tokenizer.encode(control, add_special=False)) > 1
