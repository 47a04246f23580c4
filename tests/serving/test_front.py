"""What a browser and Ollama's clients find at the address of the server, and paths without ``/v1``."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.front import FOLDER, INDEX
from engine.serving.served import Spec

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}

GREETING = ("Ollama is running", "text/plain; charset=utf-8")

FILES = sorted(path.name for path in FOLDER.iterdir() if path.name != INDEX)


def never() -> Any:
    raise AssertionError("no model is opened")


def client_of(**flags: Any) -> TestClient:
    specs = [Spec("a", never), Spec("b", never)]
    return TestClient(app(specs, preload=False, **flags), "http://localhost:8080")


@pytest.fixture
def client() -> TestClient:
    return client_of()


class Page(HTMLParser):
    """What a page loads, and what may run in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.labels: set[str | None] = set()
        self.fields: set[str | None] = set()
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._script = tag in ("script", "style")
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.loaded += [given[name] or "" for name in ("src", "href") if name in given and tag != "a"]
        if tag == "label":
            self.labels.add(given["for"])
        if tag in ("input", "select", "textarea") and "aria-label" not in given:
            self.fields.add(given["id"])

    def handle_data(self, data: str) -> None:
        if self._script:
            self.inline.append(data.strip())


def test_a_browser_gets_a_page_that_runs_its_own_files_only(client: TestClient) -> None:
    answer = client.get("/", headers=BROWSER)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["vary"] == "Accept"
    page = Page(answer.text)
    assert not any(page.inline)
    assert page.loaded and set(page.loaded) <= {f"webui/{name}" for name in FILES}
    assert page.fields == page.labels


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_page_is_served_and_used(client: TestClient, name: str) -> None:
    answer = client.get(f"/webui/{name}")
    assert answer.content == (FOLDER / name).read_bytes()
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"] == kinds[Path(name).suffix] + "; charset=utf-8"
    texts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert any(re.search(rf"[\"/]{re.escape(name)}\"", text) for file, text in texts.items() if file != name)
    # Nothing is loaded from elsewhere, and nothing is parsed as HTML.
    text = re.sub(r"http://www\.w3\.org/2000/svg", "", texts[name])
    assert not re.search(r"""["'(]https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b""", text)


def test_a_browser_asks_whether_a_file_has_changed(client: TestClient) -> None:
    for path in ("/", "/webui/style.css"):
        first = client.get(path, headers=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for held in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = client.get(path, headers={**BROWSER, "if-none-match": held})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert client.get(path, headers={**BROWSER, "if-none-match": '"other"'}).status_code == 200
        head = client.head(path, headers=BROWSER)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
        assert head.headers["content-length"] == str(len(first.content))
        assert client.post(path).status_code == 405


def test_there_is_nothing_beside_the_files(client: TestClient) -> None:
    for path in (
        "/webui",
        "/webui/",
        "/webui/index.html",
        "/webui/../front.py",
        "/webui/%2e%2e/front.py",
        "/favicon.ico",
    ):
        answer = client.get(path, headers=BROWSER)
        assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_the_page_needs_no_key_and_the_api_does() -> None:
    client = client_of(keys=["secret"])
    for path in ("/", *(f"/webui/{name}" for name in FILES)):
        assert client.get(path, headers=BROWSER).status_code == 200
    for path in ("/v1/models", "/props", "/webui/other.js", "/webui"):
        assert client.get(path).status_code == 401


def test_the_page_is_for_names_of_this_machine_only(client: TestClient) -> None:
    answer = client.get("/", headers={**BROWSER, "host": "attacker.example"})
    assert answer.status_code == 403 and "content-security-policy" not in answer.headers


def test_without_the_page() -> None:
    client = client_of(webui=False)
    answer = client.get("/", headers=BROWSER)
    assert (answer.text, answer.headers["content-type"]) == GREETING
    assert {client.get(f"/webui/{name}").status_code for name in FILES} == {404}
    assert client_of(webui=False, keys=["secret"]).get("/", headers=BROWSER).status_code == 401


def test_ollamas_clients_are_greeted(client: TestClient) -> None:
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        answer = client.get("/", headers=headers)
        assert (answer.text, answer.headers["content-type"]) == GREETING
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
