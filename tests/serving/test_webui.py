"""The page of the server in a browser, which asks a server with the bundled model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from docs.browser import CTRL, Page, page
from docs.screenshots import BROWSERS, find_browser
from engine.serving.app import app
from engine.serving.guard import Guard
from engine.serving.served import Spec
from tests.serving.bundled import bundled
from tests.serving.live import live

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}"),
    pytest.mark.together("webui"),
]

QUESTION = "def add(a, b):"

LONG = "3528704971"
"""A seed with which an answer fills the context."""

LAST = "[...document.querySelectorAll('article.answer')].at(-1)"

IDLE = f"document.querySelector('#stop').hidden && {LAST}?.getAttribute('aria-busy') === 'false'"


@pytest.fixture(scope="module")
def application() -> Guard:
    return app([Spec("pycoder", lambda: bundled(2, 1024))])


@pytest.fixture(scope="module")
def url(application: Guard) -> Iterator[str]:
    with live(application) as (host, port):
        yield f"http://{host}:{port}/"


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    with page() as made:
        yield made


@pytest.fixture
def web(window: Page, url: str) -> Iterator[Page]:
    """The page, without conversations; its answers are short."""
    window.look(1280, 900)
    window.open(url)
    window.run("localStorage.clear(); sessionStorage.clear()")
    window.open(url + "?")
    window.wait("document.querySelector('#state').textContent.includes('context')")
    settings(window, max_tokens="12", seed="7")
    yield window
    window.wait("document.querySelector('#stop').hidden")
    assert not window.problems


def settings(web: Page, **values: str) -> None:
    for name, value in values.items():
        web.run(f"""(() => {{
          const field = document.querySelector("#{name}");
          field.value = {json.dumps(value)};
          field.dispatchEvent(new Event("input", {{bubbles: true}}));
        }})()""")


def say(web: Page, text: str = QUESTION, *, wait: bool = True) -> None:
    web.click("#message")
    web.type(text)
    web.press("Enter", CTRL)
    if wait:
        web.wait(IDLE)


def kept(web: Page) -> list[dict[str, Any]]:
    """The conversations in the browser's storage."""
    return [json.loads(each) for each in web.run("Object.values(localStorage)")]


def last(web: Page) -> dict[str, Any]:
    """The answer that was added last."""
    (conversation,) = kept(web)
    return dict(conversation["messages"][-1])


def asked(url: str, **more: Any) -> dict[str, Any]:
    """What the server answers to another client."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "seed": 7, **more}
    answer = httpx.post(url + "v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_a_conversation_has_the_answers_of_the_server(web: Page, url: str) -> None:
    say(web)
    first = asked(url)
    message = last(web)
    assert message["content"] == text_of(first)
    assert message["finish"] == first["choices"][0]["finish_reason"] and message["seed"] == 7
    assert message["stats"]["answerN"] == first["usage"]["completion_tokens"]
    assert message["stats"]["promptN"] == first["usage"]["prompt_tokens"]
    stats = web.run(f"{LAST}.querySelector('.stats').textContent")
    assert "tokens/s" in stats and "seed 7" in stats
    say(web, "Go on")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Go on"},
    ]
    assert last(web)["content"] == text_of(asked(url, messages=messages))
    assert last(web)["stats"]["cacheN"] > 0 and "from the cache" in web.run(f"{LAST}.innerText")
    # Screen readers hear the answer when it is complete.
    assert last(web)["content"] in web.run("document.querySelector('#announcement').textContent")
    assert web.run("document.activeElement.id") == "message"


def test_the_settings_are_those_of_the_request(web: Page, url: str) -> None:
    given = {"temperature": "1,5", "top_p": "0.9", "top_k": "50", "min_p": "0.01"}
    settings(web, system="Be brief.", **given)
    say(web)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    values = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    assert last(web)["content"] == text_of(asked(url, messages=messages, **values))
    params = httpx.get(url + "props").json()["default_generation_settings"]["params"]
    for name in given:
        assert float(web.run(f"document.querySelector('#{name}').placeholder")) == pytest.approx(params[name])


def test_an_answer_follows_a_schema(web: Page) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    settings(web, schema=json.dumps(schema), max_tokens="40")
    say(web)
    assert json.loads(last(web)["content"]) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("schema", "{", "The JSON schema is no JSON: "),
        ("temperature", "hot", 'Temperature must be a number, not "hot".'),
        ("top_k", "1.5", 'Top-k must be a whole number, not "1.5".'),
        ("temperature", "5", "temperature must be "),  # the server's sentence
    ],
)
def test_what_is_wrong_is_one_sentence(web: Page, name: str, value: str, sentence: str) -> None:
    settings(web, **{name: value})
    say(web)
    shown = web.run(f"{LAST}.querySelector('.error').textContent")
    assert shown.startswith(sentence) and shown == last(web)["error"]
    settings(web, **{name: ""})
    web.click("button", "Same seed")
    web.wait(IDLE)
    assert last(web)["content"] and "error" not in last(web)


def test_escape_stops_an_answer(web: Page, application: Guard) -> None:
    settings(web, max_tokens="", seed=LONG)
    say(web, "def fibonacci(n):\n    ", wait=False)
    web.wait(f"{LAST}?.querySelector('.main > .markdown').textContent.length > 20")
    assert web.run("document.activeElement.id") == "message"
    web.press("Escape")
    web.wait(IDLE)
    stopped = last(web)
    assert stopped["content"] and stopped["finish"] == "stopped" and stopped["stats"]["answerN"] < 1000
    assert "stopped" in web.run(f"{LAST}.querySelector('.stats').textContent")
    models = application.state.models
    for _ in range(200):
        if not models.n_answers:
            break
        web.run("new Promise((done) => setTimeout(done, 20))")
    assert models.n_answers == 0


def test_the_same_seed_gives_the_same_answer(web: Page) -> None:
    say(web)
    first = last(web)
    web.click("button", "Same seed")
    web.wait(IDLE)
    assert last(web)["content"] == first["content"] and last(web)["id"] != first["id"]
    assert "the same text as answer 1" in web.run(f"{LAST}.querySelector('.stats').textContent")
    assert web.run(f"{LAST}.querySelector('.branch').textContent") == "‹2 of 2›"
    web.click("button", "New seed")
    web.wait(IDLE)
    assert last(web)["seed"] != 7
    assert web.run(f"{LAST}.querySelector('.branch').textContent") == "‹3 of 3›"
    web.click("button.turn", "‹")
    web.click("button.turn", "‹")
    assert web.run(f"{LAST}.querySelector('.branch').textContent") == "‹1 of 3›"
    assert kept(web)[0]["messages"][0]["next"] == first["id"]


def test_a_message_is_edited_in_a_branch(web: Page, url: str) -> None:
    say(web)
    say(web, "Go on")
    web.click("article.user button", "Edit")
    web.run("document.querySelector('.edit textarea').select()")
    web.type("Stop")
    web.press("Enter", CTRL)
    web.wait(IDLE)
    texts = "[...document.querySelectorAll('article.user .typed')].map((each) => each.textContent)"
    assert web.run(texts) == [QUESTION, "Stop"]
    before = kept(web)[0]["messages"]
    assert len(before) == 6
    web.click("article.user button.turn", "‹")
    assert web.run(texts) == [QUESTION, "Go on"]
    # An answer that is edited is what the next one continues.
    web.click("article.answer button", "Edit")
    web.run("document.querySelector('.edit textarea').select()")
    web.type("    return a + b")
    web.click(".edit button", "Save")
    assert "edited" in web.run(f"{LAST}.querySelector('.stats').textContent")
    say(web, "More")
    messages = [
        *({"role": each["role"], "content": each["content"]} for each in before[:3]),
        {"role": "assistant", "content": "    return a + b"},
        {"role": "user", "content": "More"},
    ]
    assert last(web)["content"] == text_of(asked(url, messages=messages))
    # Escape leaves a message as it was.
    web.click("article.user button", "Edit")
    web.type("x")
    web.press("Escape")
    assert web.run("document.querySelector('.edit')") is None and len(kept(web)[0]["messages"]) == 9


def test_conversations_are_kept_renamed_and_deleted(web: Page, url: str) -> None:
    names = "[...document.querySelectorAll('#conversations button')].map((each) => each.textContent)"
    say(web)
    web.click("#new")
    say(web, "import os")
    assert web.run(names) == ["import os", QUESTION]
    web.click("#rename")
    web.run("document.querySelector('#dialog-input').select()")
    web.type("<b>Files</b>")
    web.press("Enter")
    web.wait(f"({names})[0] === '<b>Files</b>'")
    web.open(url)
    assert web.run(names) == ["<b>Files</b>", QUESTION]
    assert web.run("document.querySelector('#max_tokens').value") == "12"
    web.click("#conversations button", QUESTION)
    assert web.run("document.querySelector('.typed').textContent") == QUESTION
    web.click("#delete")
    web.press("Escape")
    web.wait("!document.querySelector('#dialog').open")
    assert len(kept(web)) == 2
    web.click("#delete")
    web.click("#dialog-confirm")
    web.wait(f"({names}).length === 1")
    assert [each["title"] for each in kept(web)] == ["<b>Files</b>"]


def given_file(web: Page, path: Path) -> None:
    node = web.command("Runtime.evaluate", expression="document.querySelector('#file')")["result"]["objectId"]
    web.command("DOM.setFileInputFiles", files=[str(path)], objectId=node)


def test_conversations_are_exported_and_imported(web: Page, tmp_path: Path) -> None:
    say(web)
    before = kept(web)
    web.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    web.click("#export-all")
    path = tmp_path / "bitmirror-conversations.json"
    for _ in range(500):
        if path.exists() and path.stat().st_size:
            break
        web.run("new Promise((done) => setTimeout(done, 10))")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["format"], found["version"]) == ("bitmirror.conversations", 1)
    assert found["conversations"] == before
    web.run("localStorage.clear()")
    given_file(web, path)
    web.wait("document.querySelector('#notice').textContent === '1 conversation was imported.'")
    (after,) = kept(web)
    assert after | {"id": ""} == before[0] | {"id": ""} and after["id"] != before[0]["id"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is no JSON"),
        ("[]", "it was not exported by this page"),
        ('{"format": "bitmirror.conversations", "version": 1}', ""),
        (
            '{"format": "bitmirror.conversations", "version": 1, "conversations": [{"messages": [{"id": 1}]}]}',
            "message",
        ),
        (
            '{"format": "bitmirror.conversations", "version": 1, "conversations": [{"messages": '
            '[{"id": 1, "parent": 2, "role": "user", "content": ""}]}]}',
            "message",
        ),
    ],
)
def test_other_files_are_not_imported(web: Page, tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    given_file(web, path)
    shown = web.wait("document.querySelector('#notice').textContent")
    assert shown.startswith("The file cannot be imported: ") and reason in shown and not kept(web)


def test_tokens_and_their_alternatives(web: Page, url: str) -> None:
    settings(web, seed="11")
    say(web)
    answer = last(web)
    # They were not asked for: the same seed gives them afterwards.
    web.click("button", "Tokens")
    web.wait("document.querySelector('.tokens')")
    expected = asked(url, seed=11, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]
    assert web.run("document.querySelectorAll('.tokens .token').length") == len(expected)
    assert web.run("document.querySelector('.tokens').textContent") == answer["content"]
    web.run("document.querySelector('.tokens .token').focus()")
    web.press("ArrowRight")
    rows = web.run(
        "[...document.querySelectorAll('.alternatives tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    tops = expected[1]["top_logprobs"]
    assert [row[2] for row in rows[:5]] == [f"{each['logprob']:.4f}" for each in tops]
    assert sum("chosen" in row[0] for row in rows) == 1
    web.press("End")
    assert web.run("document.activeElement === [...document.querySelectorAll('.tokens .token')].at(-1)")
    assert f"Token {len(expected)} of" in web.run("document.querySelector('.alternatives').textContent")
    web.click("button", "Tokens")
    assert web.run(f"!!{LAST}.querySelector('.markdown')") and "tokens" not in last(web)


def test_a_token_is_traced(web: Page, url: str) -> None:
    """By the keyboard, as the server traces it for another client, also on a phone."""
    say(web)
    web.click("button", "Tokens")
    web.wait("document.querySelector('.tokens')")
    web.run("document.querySelectorAll('.tokens .token')[2].focus()")
    web.press("Enter")
    web.wait("document.querySelector('.traced table')")
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
    tokens = asked(url, **options)["choices"][0]["logprobs"]["content"]
    body = {"messages": [{"role": "user", "content": QUESTION}], "answer": [token["id"] for token in tokens[:2]]}
    expected = httpx.post(url + "v1/trace", json=body, timeout=60).json()
    rows = web.run(
        "[...document.querySelectorAll('.traced tbody tr')].map((row) => row.cells[1].querySelectorAll('code').length)"
    )
    assert rows == [5] * (1 + len(expected["layers"]))
    said = web.run("[...document.querySelectorAll('.traced tbody tr:last-child code')].map((each) => each.textContent)")
    shown = [each["text"].replace(" ", "·").replace("\n", "↵") for each in expected["layers"][-1]["lens"]]
    assert said == shown
    assert expected["layers"][-1]["lens"][0]["logprob"] == tokens[2]["top_logprobs"][0]["logprob"]
    assert "token 3" in web.run("document.querySelector('.traced h3').textContent")
    heads = "[...document.querySelectorAll('.traced details')][0]"
    web.run(f"{heads}.querySelector('summary').focus()")
    web.press("Enter")
    assert web.run(f"{heads}.open && {heads}.querySelectorAll('li').length") == len(expected["layers"][0]["heads"])
    web.look(*PHONE)
    assert web.run("document.documentElement.scrollWidth") <= PHONE[0]
    # The button does the same for the token that is shown.
    web.run("document.querySelector('.tokens .token').focus()")
    web.click(".alternatives button", "Trace")
    web.wait("document.querySelector('.traced h3')?.textContent.includes('token 1')")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(window: Page) -> None:
    with live(app([Spec("pycoder", lambda: bundled(1, 256))], keys=["secret"])) as (host, port):
        window.look(1280, 900)
        window.open(f"http://{host}:{port}/")
        window.wait("document.querySelector('#dialog').open")
        assert window.run("document.querySelector('#dialog-input').type") == "password"
        window.type("wrong")
        window.press("Enter")
        window.wait("document.querySelector('#dialog-text').textContent === 'The server does not accept this key.'")
        window.type("secret")
        window.press("Enter")
        window.wait("document.querySelector('#state').textContent.includes('context')")
        settings(window, max_tokens="4")
        say(window)
        assert last(window)["content"]
        assert window.run("Object.values(sessionStorage)") == ["secret"]
        assert "secret" not in window.run("JSON.stringify(localStorage) + document.documentElement.outerHTML")
        window.run("document.querySelector('#forget').click()")
        assert window.run("sessionStorage.length") == 0
    assert not window.problems


def test_a_server_that_is_gone(window: Page) -> None:
    with live(app([Spec("pycoder", lambda: bundled(1, 256))])) as (host, port):
        window.open(f"http://{host}:{port}/")
        window.wait("document.querySelector('#state').textContent.includes('context')")
    say(window)
    assert last(window)["error"] == "The server cannot be reached: see whether it is running."
    assert not window.problems


class WithReceipts:
    """The application, with receipts as ``docs/webui.md`` says that a server gives them."""

    def __init__(self, inner: Guard) -> None:
        self.state = inner.state
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        response: Response | None = None
        if path == "/props":
            response = JSONResponse({"receipts": True})
        elif path == "/v1/chat/completions":
            asked = (await Request(scope, receive).json()).get("receipt") is True
            thought = {"choices": [{"delta": {"reasoning_content": "a *thought*"}}], "model": "pycoder"}
            end: dict[str, Any] = {"delta": {"content": "text"}, "finish_reason": "stop"}
            end |= {"receipt": {"chain": "abc"}} if asked else {}
            events = [f"data: {json.dumps(each)}\n\n" for each in (thought, {"choices": [end], "model": "pycoder"})]
            response = Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")
        elif path == "/v1/verify":
            same = await Request(scope, receive).json() == {"model": "pycoder", "receipt": {"chain": "abc"}}
            response = JSONResponse({"same": same, "problem": "token 3 differs.", "n_tokens": 7})
        await (self._inner if response is None else response)(scope, receive, send)


def test_an_answer_is_verified_by_its_receipt(window: Page) -> None:
    application = app([Spec("pycoder", lambda: bundled(1, 256))])
    verdict = f"{LAST}.querySelector('.verdict').textContent"
    with live(WithReceipts(application)) as (host, port):  # type: ignore[arg-type]
        window.look(1280, 900)
        window.open(f"http://{host}:{port}/")
        window.wait("!document.querySelector('#receipts-field').hidden")
        say(window)
        assert "Verify" not in window.run(f"{LAST}.textContent")
        window.run("document.querySelector('#receipts').click()")
        say(window)
        assert last(window)["receipt"] == {"chain": "abc"}
        thoughts = "document.querySelector('article.answer .thoughts')"
        assert window.run(f"[{thoughts}.hidden, {thoughts}.open, {thoughts}.querySelector('em').textContent]") == [
            False,
            False,
            "thought",
        ]
        window.click("button", "Verify this answer")
        window.wait(f"{verdict}.startsWith('Verified: the server gives these 7 tokens again')")
        window.run(
            "for (const name in localStorage) localStorage[name] = String(localStorage[name]).replace('abc', 'abd')"
        )
        window.open(f"http://{host}:{port}/?")
        window.click("button", "Verify this answer")
        window.wait(f"{verdict} === 'Not the same: token 3 differs.'")
    assert not window.problems


def test_another_conversation_while_an_answer_is_received(web: Page) -> None:
    say(web)
    web.click("#new")
    settings(web, max_tokens="", seed=LONG)
    say(web, "def fibonacci(n):\n    ", wait=False)
    web.wait(f"{LAST}?.querySelector('.main > .markdown').textContent.length > 20")
    web.click("#conversations button", QUESTION)
    assert web.run("document.querySelectorAll('article').length") == 2
    assert web.run("!document.querySelector('#stop').hidden")
    length = "document.querySelector('.markdown').textContent.length"
    before = web.run(length)
    web.click("#message")
    web.type("x")
    web.press("Enter", CTRL)
    assert web.run("document.querySelector('#notice').textContent").startswith("Wait for the end of the answer")
    web.click("#conversations button", "def fibonacci(n):")
    web.wait(f"{LAST}.querySelector('.main > .markdown').textContent.length > {before + 40}")
    web.click("#stop")
    web.wait(IDLE)
    assert [len(each["messages"]) for each in kept(web)] == [2, 2]
    assert web.run("document.querySelector('#message').value") == "x"
    # One that is deleted while it is received does not come back.
    web.click("button", "Same seed")
    web.wait(f"{LAST}.getAttribute('aria-busy') === 'true'")
    web.click("#delete")
    web.click("#dialog-confirm")
    web.wait("document.querySelectorAll('#conversations button').length === 1")
    assert len(kept(web)) == 1


def test_the_storage_of_the_browser(web: Page, url: str) -> None:
    """Another tab changes it, it is damaged, and it is full."""
    say(web)
    name = web.run("Object.keys(localStorage)[0]")
    changed = json.dumps(kept(web)[0] | {"title": "Elsewhere"})
    event = f"new StorageEvent('storage', {{key: {name!r}}})"
    web.run(f"localStorage[{name!r}] = {json.dumps(changed)}; dispatchEvent({event})")
    assert web.run("document.querySelector('#title').textContent") == "Elsewhere"
    web.run("""localStorage["bitmirror.conversation.0"] = "{"; localStorage["bitmirror.conversation.1"] = "null" """)
    web.open(url)
    web.wait("document.querySelector('#state').textContent.includes('context')")
    assert web.run("document.querySelectorAll('#conversations button').length") == 1
    web.run("""{
      let text = "x".repeat(1 << 22);
      for (let n = 0; text; n += 1)
        try { localStorage["other" + n] = text; } catch { text = text.slice(text.length >> 1 || 1); }
    }""")
    say(web, "Go on")
    shown = web.run("document.querySelector('#notice').textContent")
    assert shown == "The browser has no room for this conversation: export it, or delete others."
    assert web.run("document.querySelectorAll('article').length") == 4


PHONE = (390, 780)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, (1280, 800)], ids=["phone", "desktop"])
def test_nothing_is_wider_than_the_window_or_out_of_reach(web: Page, theme: str, size: tuple[int, int]) -> None:
    settings(web, max_tokens="40")
    say(web, "x" * 300)
    web.look(*size, theme)
    wide = """[...document.querySelectorAll("body *")].filter((each) => each.getClientRects().length
      && !each.closest("pre, .scrolls, .hidden-text, .skip") && each.getBoundingClientRect().right > innerWidth + 1)
      .map((each) => each.outerHTML.slice(0, 80))"""
    assert web.run(wide) == [] and web.run("document.documentElement.scrollWidth") <= size[0]
    for panel in ("settings", "list"):
        shown = web.run(f"!document.querySelector('#{panel}').hidden")
        if not shown:
            web.click(f"#{panel}-toggle")
        assert web.run(wide) == []
        if size == PHONE:
            assert web.run("document.querySelector('#main').inert")
            assert web.run(f"document.activeElement.id === '{panel}-close'")
            web.press("Escape")
            assert web.run(f"document.activeElement.id === '{panel}-toggle' && !document.querySelector('#main').inert")
    nodes = web.command("Accessibility.getFullAXTree")["nodes"]
    named = [
        node for node in nodes if node.get("role", {}).get("value") in ("button", "textbox", "combobox", "checkbox")
    ]
    assert len(named) > 8
    assert not [node for node in named if not node["name"]["value"]]
