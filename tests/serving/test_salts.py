"""Whose prompts a request shares what the cache holds with: those of its key and its ``cache_salt``, as ``usage`` shows."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

opened = partial(bundled, parallel=2, n_ctx=512)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUMBERS = itertools.count()


@contextmanager
def server(keys: Sequence[str]) -> Iterator[TestClient]:
    with TestClient(app([Spec("pycoder", opened)], keys=keys), "http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def two() -> Iterator[TestClient]:
    """A server with two keys."""
    with server(["one", "two", "one"]) as client:
        yield client


@pytest.fixture(scope="module")
def free() -> Iterator[TestClient]:
    """A server without a key."""
    with server([]) as client:
        yield client


def new(n: int) -> list[int]:
    """A prompt of n tokens that no other one begins like."""
    return [300 + next(NUMBERS), *range(400, 399 + n)]


def cached(client: TestClient, ids: list[int], key: str = "", **fields: Any) -> int:
    """How many tokens of a prompt the cache held."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    answer = client.post(COMPLETIONS, content=json.dumps(body), headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("n", [20, 150])
def test_two_keys_do_not_share(two: TestClient, n: int) -> None:
    """Prompts shorter than a page, and longer ones."""
    ids = new(n)
    assert [cached(two, ids, key) for key in ("one", "one", "two", "two")] == [0, n - 1, 0, n - 1]
    # The first key again: its slot is still there.
    assert cached(two, ids, "one") == n - 1


def test_a_key_is_the_same_in_both_headers(two: TestClient) -> None:
    ids = new(100)
    assert cached(two, ids, "two") == 0
    body = {"prompt": ids, "max_tokens": 1}
    for key, held in (("one", 0), ("two", 99)):
        answer = two.post(COMPLETIONS, json=body, headers={"x-api-key": key})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == held


def test_one_key_or_none_shares_with_everybody(free: TestClient) -> None:
    ids = new(100)
    assert [cached(free, ids), cached(free, ids, "any")] == [0, 99]
    with server(["one"]) as client:
        assert [cached(client, ids, "one"), cached(client, ids, "one")] == [0, 99]


@pytest.mark.parametrize("n", [20, 150])
def test_salts_of_a_request(free: TestClient, n: int) -> None:
    ids = new(n)
    assert [cached(free, ids, cache_salt=salt) for salt in ("a", "a", "b", "b")] == [0, n - 1, 0, n - 1]
    ids = new(n)
    assert [cached(free, ids, cache_salt=salt) for salt in (None, "a", None)] == [0, 0, n - 1]


def test_salts_and_keys(two: TestClient) -> None:
    """No salt leads to what another key has read, however it is written."""
    ids = new(100)
    assert [cached(two, ids, "one", cache_salt="a"), cached(two, ids, "one", cache_salt="a")] == [0, 99]
    assert cached(two, ids, "two", cache_salt="a") == 0
    for salt in ("0:a", ":a", "one:a", "0", "one", "\ud83d"):
        assert cached(two, ids, "two", cache_salt=salt) == 0


CONVERSATION = {"messages": [{"role": "user", "content": "def add(a, b):\n    return a + b\n" * 8}], "max_tokens": 1}
TEXT = CONVERSATION["messages"][0]["content"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, CONVERSATION, "usage.prompt_tokens_details.cached_tokens"),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}, "usage.input_tokens_details.cached_tokens"),
        ("/v1/messages", CONVERSATION, "usage.cache_read_input_tokens"),
        ("/completion", {"prompt": TEXT, "n_predict": 1}, "timings.cache_n"),
    ],
)
def test_each_interface(two: TestClient, path: str, body: Mapping[str, Any], where: str) -> None:
    def held(key: str, salt: str) -> int:
        answer = two.post(path, json={**body, "cache_salt": path + salt}, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for name in where.split("."):
            found = found[name]
        return int(found)

    first, again, other_key, other_salt = (
        held(*given) for given in (("one", ""), ("one", ""), ("two", ""), ("one", "b"))
    )
    assert first == other_key == other_salt == 0 and again > 64


def test_a_stream_says_what_was_cached(two: TestClient) -> None:
    ids = new(100)
    cached(two, ids, "one")
    body = {"prompt": ids, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    for key, held in (("two", 0), ("one", 99)):
        answer = two.post(COMPLETIONS, json=body, headers={"x-api-key": key})
        assert f'"cached_tokens":{held}' in answer.text.replace(" ", "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("salt", ["", 3, ["a"], {"a": 1}, True])
def test_what_is_no_salt_is_refused_by_name(free: TestClient, path: str, salt: object) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    answer = free.post(path, json={**prompt, "max_tokens": 1, "cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt"), answer.text


def test_a_salt_is_neither_an_unknown_field_nor_in_the_log(free: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "bitmirror.serving.access"):
        cached(free, new(10), cache_salt="secret", zebra=1)
    assert "ignored=zebra " in caplog.messages[-1] and "secret" not in caplog.text
