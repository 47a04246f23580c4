"""The fields of each route: one that is obeyed changes what the model is asked for, and one that is refused is named."""

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")

from starlette.testclient import TestClient

import engine
from docs import tables
from engine.serving.accepted import OPTIONS, READING, ROUTES, Effect
from engine.serving.app import app
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.served import Spec
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

MESSAGES = {"messages": [{"role": "user", "content": "x"}]}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": MESSAGES | {"max_tokens": 4},
    "/completion": {"prompt": "x"},
    "/api/chat": MESSAGES,
    "/api/generate": {"prompt": "x"},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/chat/completions/input_tokens": MESSAGES,
    "/v1/responses/input_tokens": {"input": "x"},
    "/apply-template": MESSAGES,
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [5]},
}
"""The least request of each route."""

TABLES = {**ROUTES, **READING}

SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (7, {"top_k": 7}),
    "min_p": (0.5, {"min_p": 0.5}),
    "typical_p": (0.5, {"typical_p": 0.5}),
    "repeat_penalty": (1.5, {"repeat_penalty": 1.5}),
    "repetition_penalty": (1.5, {"repeat_penalty": 1.5}),
    "repeat_last_n": (7, {"repeat_last_n": 7}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "seed": (7, {"seed": 7}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "logit_bias": ({"7": -3}, {"logit_bias": {7: -3.0}}),
    "dry_multiplier": (0.5, {"dry_multiplier": 0.5}),
    "dry_base": (2, {"dry_base": 2.0}),
    "dry_allowed_length": (3, {"dry_allowed_length": 3}),
    "dry_penalty_last_n": (9, {"dry_penalty_last_n": 9}),
    "dry_sequence_breakers": (["\n"], {"dry_sequence_breakers": ["\n"]}),
    "xtc_probability": (0.5, {"xtc_probability": 0.5}),
    "xtc_threshold": (0.25, {"xtc_threshold": 0.25}),
}
"""Fields of sampling: a value, and the arguments of ``LLM.generate`` that it becomes."""

LANGUAGE = 'root ::= "a"\n'

FORMS: dict[str, tuple[Any, str]] = {
    "guided_json": ({"enum": ["a"]}, "JSON schema"),
    "guided_regex": ("a", "regular expression"),
    "guided_choice": (["a", "b"], "grammar"),
    "guided_grammar": (LANGUAGE, "grammar"),
    "structured_outputs": ({"regex": "a"}, "regular expression"),
    "grammar": (LANGUAGE, "grammar"),
    "json_schema": ({"enum": ["a"]}, "JSON schema"),
}
"""Fields that describe an answer: a value, and the kind of the grammar."""


def fields_of(path: str, effect: Effect) -> list[str]:
    """The fields on which a route has an effect, with those of ``options`` for Ollama's routes."""
    own = [name for name, rule in TABLES[path].items() if rule.effect is effect]
    if path.startswith("/api/"):
        own += [f"options.{name}" for name, rule in OPTIONS.items() if rule.effect is effect]
    return own


def body_of(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """The least request of a route with more fields, which may be in objects: ``options.seed``."""
    body = dict(BODIES[path])
    for name, value in given.items():
        *outer, inner = name.split(".")
        place = body
        for part in outer:
            place = place.setdefault(part, {})
        place[inner] = value
    return body


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(app([Spec("bundled", bundled)], local=False)) as made:
        yield made


Asked = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture
def asked(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Send a request, and return what the model is asked for; it refuses, so that nothing is computed."""
    seen: list[dict[str, Any]] = []
    generate = engine.LLM.generate

    def refusing(llm: engine.LLM, prompt: Any, **options: Any) -> None:
        with closing(generate(llm, prompt, **options)):
            seen.append(options | {"prompt": prompt})
        raise Refusal("seen", 400)

    monkeypatch.setattr(engine.LLM, "generate", refusing)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "seen" in answer.text, answer.text
        return seen[-1]

    return post


@pytest.mark.parametrize("path", TABLES)
def test_what_is_refused_is_named(client: TestClient, path: str) -> None:
    names = fields_of(path, Effect.REFUSED)
    assert names or path == "/detokenize"
    for name in names:
        answer = client.post(path, json=body_of(path, {name: 2}))
        assert answer.status_code == 400
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(name), message


@pytest.mark.parametrize("path", ROUTES)
def test_what_is_without_effect_changes_nothing(asked: Asked, path: str) -> None:
    assert asked(path, body_of(path, dict.fromkeys(fields_of(path, Effect.IDLE), 2))) == asked(path, BODIES[path])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("without", ["repeat_penalty", "repetition_penalty"])
def test_fields_of_sampling_reach_the_model(asked: Asked, path: str, without: str) -> None:
    names = [name for name in fields_of(path, Effect.OBEYED) if name.removeprefix("options.") in SAMPLING]
    assert len(names) >= len(SAMPLING) - 1
    names = [name for name in names if name.removeprefix("options.") != without]
    given = {name: SAMPLING[name.removeprefix("options.")] for name in names}
    found = asked(path, body_of(path, {name: value for name, (value, _) in given.items()}))
    plain = asked(path, BODIES[path])
    expected = {key: value for _, options in given.values() for key, value in options.items()}
    assert {key: value for key, value in found.items() if value != plain.get(key)} == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion"])
def test_the_form_of_an_answer_reaches_the_model(asked: Asked, path: str) -> None:
    assert asked(path, BODIES[path])["grammar"] is None
    assert set(FORMS) <= set(fields_of(path, Effect.OBEYED))
    for name, (value, kind) in FORMS.items():
        assert asked(path, body_of(path, {name: value}))["grammar"].kind == kind


@pytest.mark.parametrize("path", ROUTES)
def test_the_table_lists_what_the_code_reads(asked: Asked, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    read: set[str] = set()
    get = Fields.get

    def noting(fields: Fields, name: str) -> Any:
        if fields.path in ("", "options") and (fields.values or fields.path):
            read.add(fields.name(name))
        return get(fields, name)

    monkeypatch.setattr(Fields, "get", noting)
    body = BODIES[path] | ({"options": {"seed": 1}} if path.startswith("/api/") else {})
    asked(path, body)
    # These are read when the answer is written, or only if there are others.
    read |= {"stream", "keep_alive", "cache_salt"} & set(ROUTES[path])
    assert read == set(fields_of(path, Effect.OBEYED))


@pytest.mark.parametrize("path", READING)
def test_routes_that_read_a_prompt(client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """They read what their tables say and nothing else, whatever it is; what they do not know is named in the log."""
    read: set[str] = set()
    get = Fields.get

    def noting(fields: Fields, name: str) -> Any:
        if fields.path == "" and fields.values:
            read.add(name)
        return get(fields, name)

    monkeypatch.setattr(Fields, "get", noting)
    plain = client.post(path, json=BODIES[path]).json()
    if path == "/tokenize":  # one of two forms
        assert client.post(path, json={"prompt": "x"}).status_code == 200
    assert read == set(fields_of(path, Effect.OBEYED))
    idle = dict.fromkeys(fields_of(path, Effect.IDLE), "x")
    notes: list[str] = []
    monkeypatch.setattr("engine.serving.guard.log.info", lambda _, *words: notes.append(words[-1]))
    assert client.post(path, json=BODIES[path] | idle | {"unheard_of": 1}).json() == plain
    assert "ignored=unheard_of" in notes[0]
    if path.endswith("/input_tokens"):
        answering = path.removesuffix("/input_tokens")
        usage = client.post(answering, json=BODIES[path]).json()["usage"]
        assert plain["input_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))


@pytest.mark.parametrize("path", ROUTES)
def test_tokens_that_may_come(asked: Asked, client: TestClient, path: str) -> None:
    place = "options." if path.startswith("/api/") else ""
    allowed = asked(path, body_of(path, {f"{place}allowed_token_ids": [3, 5]}))["logits_processors"][0]
    logits = np.zeros(allowed_size(client), np.float32)
    allowed((1, 2), logits)
    assert np.flatnonzero(logits == 0).tolist() == [3, 5]
    found = asked(path, body_of(path, {f"{place}min_tokens": 2}))
    (least,), n_prompt = found["logits_processors"], len(found["prompt"])
    for n, banned in ((0, True), (1, True), (2, False)):
        logits[:] = 0
        least(tuple(range(n_prompt + n)), logits)
        assert bool(np.any(np.isneginf(logits))) == banned


def allowed_size(client: TestClient) -> int:
    size: int = client.app.state.models.entries["bundled"].served.llm.config.n_vocab  # type: ignore[attr-defined]
    return size


def test_a_token_that_ends_the_answer(client: TestClient) -> None:
    body = {"prompt": "def add(a, b):", "seed": 1, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = client.post("/completion", json=body | {"return_tokens": True}).json()
    end = whole["tokens"][5]
    first = whole["tokens"].index(end)
    cut = client.post("/completion", json=body | {"return_tokens": True, "stop_token_ids": [end]}).json()
    assert cut["tokens"] == whole["tokens"][: first + 1]
    assert whole["content"].startswith(cut["content"]) and cut["stop_type"] == "eos"
    text = client.post("/v1/completions", json=body | {"stop_token_ids": [end]}).json()["choices"][0]
    assert text["finish_reason"] == "stop" and text["text"] == cut["content"]


def test_min_tokens_keep_an_answer_going(client: TestClient) -> None:
    llm = client.app.state.models.entries["bundled"].served.llm  # type: ignore[attr-defined]
    bias = {str(id): 100 for id in llm.tokenizer.eog_ids}
    body = {"prompt": "a", "logit_bias": bias, "max_tokens": 9}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 1
    assert client.post("/v1/completions", json=body | {"min_tokens": 4}).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"guided_choice": ['say "no"\n', "ja\\🙂"]}, ['say "no"\n', "ja\\🙂"]),
        ({"structured_outputs": {"choice": ["one", "two"]}}, ["one", "two"]),
        ({"grammar": 'root ::= x "!"\nx ::= "yes" | "no"'}, ["yes!", "no!"]),
        ({"guided_grammar": 'start: "yes" | "no"'}, ["yes", "no"]),
        ({"json_schema": {"enum": [1, 2]}}, ["1", "2"]),
        ({"guided_json": '{"enum": [1, 2]}'}, ["1", "2"]),
    ],
)
def test_answers_follow_the_form(client: TestClient, path: str, given: dict[str, Any], texts: list[str]) -> None:
    answer = client.post(path, json=BODIES[path] | {"max_tokens": 40, "seed": 1} | given).json()
    assert (answer["content"] if "content" in answer else answer["choices"][0]["message"]["content"]) in texts, answer


@pytest.mark.parametrize(
    ("path", "given", "named"),
    [
        ("/v1/chat/completions", {"guided_regex": "a", "grammar": LANGUAGE}, "grammar"),
        ("/v1/chat/completions", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ("/v1/chat/completions", {"guided_choice": []}, "guided_choice"),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
        (
            "/v1/chat/completions",
            {
                "messages": [*MESSAGES["messages"], {"role": "assistant", "content": "y"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt",
        ),
        ("/v1/chat/completions", {"guided_choice": "a"}, "guided_choice"),
        ("/v1/chat/completions", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ("/v1/chat/completions", {"grammar": "root ::= other"}, "grammar"),
        ("/v1/chat/completions", {"grammar": "root ::= " + '("a"' * 5000}, "grammar"),
        ("/v1/chat/completions", {"grammar": 'root ::= "a"\n' * 2000}, "grammar"),
        ("/v1/chat/completions", {"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ("/v1/chat/completions", {"stop": "a", "min_tokens": 2}, "min_tokens"),
        ("/v1/chat/completions", {"guided_regex": "a", "allowed_token_ids": [2]}, "allowed_token_ids"),
        ("/v1/chat/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/chat/completions", {"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
        ("/v1/chat/completions", {"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ("/v1/chat/completions", {"logit_bias": [[1, 2], 3]}, "logit_bias[1]"),
        ("/v1/chat/completions", {"logit_bias": [[None, 2]]}, "logit_bias[0][0]"),
        ("/v1/chat/completions", {"logit_bias": {"1": True}}, "logit_bias.1"),
        ("/v1/chat/completions", {"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ("/v1/chat/completions", {"max_tokens": -2}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, path: str, given: dict[str, Any], named: str) -> None:
    answer = client.post(path, json=BODIES[path] | given)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named, answer.text


@pytest.mark.parametrize("given", [{"7": False}, [[7, False]], [["7", -100]], {"7": -100}])
def test_bias_as_llama_server_takes_it(asked: Asked, given: Any) -> None:
    assert asked("/completion", {"prompt": "x", "logit_bias": given})["logit_bias"] == {7: -np.inf}


def test_bias_of_a_text(asked: Asked, client: TestClient) -> None:
    llm = client.app.state.models.entries["bundled"].served.llm  # type: ignore[attr-defined]
    ids = llm.tokenizer.encode("def add", add_special=False, parse_special=False)
    assert asked("/completion", {"prompt": "x", "logit_bias": {"def add": 2}})["logit_bias"] == dict.fromkeys(ids, 2.0)


@pytest.mark.parametrize(
    ("path", "given"),
    [
        *(("/v1/chat/completions", {name: -1}) for name in ("max_tokens", "max_completion_tokens", "n_predict")),
        ("/v1/completions", {"max_tokens": -1}),
        ("/v1/completions", {"n_predict": -1}),
    ],
)
def test_no_limit(asked: Asked, path: str, given: dict[str, int]) -> None:
    found = asked(path, BODIES[path] | given)
    assert found["max_tokens"] == 256 - len(found["prompt"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_llama_servers_name_of_the_limit(asked: Asked, path: str) -> None:
    assert asked(path, BODIES[path] | {"n_predict": 3})["max_tokens"] == 3


def test_the_book_shows_the_table_and_describes_fields_that_there_are() -> None:
    book = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = book.partition("\n## Fields\n")[2].partition("\n## ")[0]
    assert "<!-- table: accepted -->" in section
    section = tables.PLACE.sub("", section)
    described = [
        name for line in section.splitlines() if line.startswith("| `") for name in line.split("|")[1].split(",")
    ]
    obeyed = fields_of("/v1/chat/completions", Effect.OBEYED)
    assert len(described) >= 8
    for name in described:
        assert fnmatch.filter(obeyed, name.strip(" `")), name
