"""Pages of other web sites: which of them a browser lets read answers."""

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.hosts import is_origin
from engine.serving.served import Spec

ALLOWED = "access-control-allow-origin"
CHAT = "/v1/chat/completions"


def never() -> Any:
    raise AssertionError("no model is opened")


def client(*origins: str) -> TestClient:
    return TestClient(app([Spec("a", never)], preload=False, keys=["secret"], origins=origins), "http://localhost:8080")


def asks(opened: TestClient, origin: str) -> Any:
    """What a browser asks before a page may send JSON with a key."""
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return opened.options(CHAT, headers=headers | {"access-control-request-headers": "authorization,content-type"})


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (["https://chat.example"], "https://chat.example", "https://chat.example"),
        (["https://chat.example", "http://b"], "http://b", "http://b"),
        (["https://chat.example"], "http://chat.example", None),
        (["https://chat.example"], "https://chat.example.evil.example", None),
        (["localhost"], "http://localhost:3000", "http://localhost:3000"),
        (["localhost"], "https://127.0.0.1:1", "https://127.0.0.1:1"),
        (["localhost"], "http://[::1]:5", "http://[::1]:5"),
        (["localhost"], "http://localhost.evil.example", None),
        (["localhost"], "null", None),
        (["localhost"], "http://[", None),
        (["*"], "https://any.example", "*"),
    ],
)
def test_only_these_pages_may_read(origins: list[str], origin: str, allowed: str | None) -> None:
    opened = client(*origins)
    asked = asks(opened, origin)
    assert (asked.status_code == 200) is (allowed is not None)
    assert asked.headers.get(ALLOWED) == allowed
    if allowed:
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    # What is permitted to ask has no key yet, but what follows needs it; a page can read why it was refused.
    for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 200)):
        answer = opened.get("/v1/models", headers=headers | {"origin": origin})
        assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, allowed)
    assert "access-control-allow-credentials" not in asked.headers


def test_no_page_may_read_unless_a_flag_says_so() -> None:
    opened = client()
    assert asks(opened, "https://chat.example").status_code == 401
    answer = opened.get("/health", headers={"origin": "https://chat.example"})
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize(
    "text", ["", "chat.example", "https://", "https://a/b", "https://a?b", "//a", "null", "http://["]
)
def test_what_is_no_origin(text: str) -> None:
    assert not is_origin(text)
