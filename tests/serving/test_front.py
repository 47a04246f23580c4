"""What a browser and Ollama's clients find at the address of the server, and paths without ``/v1``."""

from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.served import Spec

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def never() -> Any:
    raise AssertionError("no model is opened")


@pytest.fixture
def client() -> TestClient:
    specs = [Spec("<script>alert(1)</script>", never), Spec("b", never)]
    return TestClient(app(specs, preload=False), "http://localhost:8080")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_browser_sees_the_models_and_links_that_answer(client: TestClient) -> None:
    answer = client.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == "default-src 'none'"
    page = Page(answer.text)
    assert "script" not in page.tags
    assert "<script>alert(1)</script> (unloaded), b (unloaded)" in page.text
    assert "http://localhost:8080/v1" in page.text
    assert page.links == ["/health", "/v1/models", "/metrics"]
    for link in page.links:
        assert link is not None and client.get(link).status_code == 200


def test_ollamas_clients_are_greeted(client: TestClient) -> None:
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        answer = client.get("/", headers=headers)
        assert (answer.text, answer.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    answer = client.head("/")
    assert (answer.status_code, answer.text) == (200, "")
    assert client.post("/").status_code == 405


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/embeddings"])
def test_v1_may_be_left_out(client: TestClient, path: str) -> None:
    """The same error for the same body, in the same shape."""
    answers = [client.post(prefix + path, json={"model": "none"}) for prefix in ("/v1", "")]
    assert answers[0].status_code == answers[1].status_code in (400, 404, 501)
    if path != "/embeddings":  # which names the path
        assert answers[0].json() == answers[1].json()


def test_models_are_listed_without_v1(client: TestClient) -> None:
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/models/b").json() == client.get("/v1/models/b").json()
    assert client.get("/models/b").json()["id"] == "b"
