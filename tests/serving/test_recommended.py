"""Sampling parameters in every interface: the request, before a flag, before the file, before the default."""

import logging
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

import engine
from engine.cli.serve_flags import parser
from engine.decode.generation import request_of
from engine.sampling.params import SamplerParams
from engine.serve import specs
from engine.serving.app import app
from engine.serving.errors import Refusal
from engine.serving.served import Spec
from tests import recommended
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

FILE = {"temp": 0.25, "top_k": 3, "penalty_repeat": 1.25, "penalty_last_n": 9, "xtc_probability": 0.5, "mirostat": 2}
PARAMS = {"temperature": 0.25, "top_k": 3, "repeat_penalty": 1.25, "repeat_last_n": 9, "xtc_probability": 0.5}

MESSAGES = {"messages": [{"role": "user", "content": "x"}]}

LLAMA_CPP = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
OLLAMA = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0}

FLAGS = {"temperature": 0.5, "min_p": 0.25, "presence_penalty": 0.5, "dry_multiplier": 0.75}

FLAGS_GIVEN = "--temp 0.5 --min-p 0.25 --presence-penalty 0.5 --dry-multiplier 0.75 --top-k 40"

INTERFACES: dict[str, tuple[dict[str, Any], str, dict[str, float]]] = {
    "/v1/chat/completions": (MESSAGES, "", LLAMA_CPP),
    "/v1/completions": ({"prompt": "x"}, "", LLAMA_CPP),
    "/v1/responses": ({"input": "x"}, "", LLAMA_CPP),
    "/v1/messages": (MESSAGES | {"max_tokens": 4}, "", LLAMA_CPP),
    "/completion": ({"prompt": "x"}, "", LLAMA_CPP),
    "/api/chat": (MESSAGES, "options", OLLAMA),
    "/api/generate": ({"prompt": "x"}, "options", OLLAMA),
}
"""Each interface: a request, the field of its parameters, and its own defaults."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path = recommended.model(tmp_path_factory.mktemp("model") / "x.gguf", FILE)
    offered = [Spec("file", partial(bundled, path=path), path=str(path)), Spec("plain", bundled)]
    offered.append(Spec("flag", partial(bundled, path=path), path=str(path), sampling=FLAGS))
    with TestClient(app(offered, local=False)) as made:
        yield made


@pytest.fixture
def params(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Send a request, and return the parameters that reach the model, which then refuses it: nothing is computed."""
    seen: list[SamplerParams] = []
    generate = engine.LLM.generate

    def refusing(llm: engine.LLM, *args: Any, **options: Any) -> None:
        with closing(generate(llm, *args, **options)) as generation:
            seen.append(request_of(generation).sampler.params)
        raise Refusal("seen", 400)

    monkeypatch.setattr(engine.LLM, "generate", refusing)

    def post(path: str, model: str, **given: Any) -> dict[str, Any]:
        body, place, _ = INTERFACES[path]
        body = body | {"model": model} | ({place: given} if place else given)
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "seen" in answer.text, answer.text
        return {name: getattr(seen[-1], name) for name in dict.fromkeys(("top_p", *PARAMS, *FLAGS))}

    return post


@pytest.mark.parametrize("path", INTERFACES)
def test_the_request_is_before_the_file_and_the_file_before_the_interface(path: str, params: Any) -> None:
    own = INTERFACES[path][2]
    plain = {"repeat_penalty": 1.0, "repeat_last_n": 64, "xtc_probability": 0.0} | own
    plain |= {"presence_penalty": 0.0, "dry_multiplier": 0.0}
    assert params(path, "plain") == plain
    assert params(path, "file") == plain | PARAMS
    # Also if a request asks for what the interface does by default.
    given = {"temperature": own["temperature"], "top_k": own["top_k"]}
    assert params(path, "file", **given) == plain | PARAMS | given
    assert params(path, "file", temperature=0)["temperature"] == 0


@pytest.mark.parametrize("path", INTERFACES)
def test_the_request_is_before_a_flag_and_a_flag_before_the_file(path: str, params: Any) -> None:
    plain = {"top_p": INTERFACES[path][2]["top_p"]} | PARAMS | FLAGS
    assert params(path, "flag") == plain
    given = {"temperature": 0.25, "min_p": 0.0, "presence_penalty": 0.0}
    assert params(path, "flag", **given) == plain | given


def test_flags_of_the_server() -> None:
    plain, flagged = (specs(parser().parse_args(flags.split()))[0].sampling for flags in ("", FLAGS_GIVEN))
    assert plain == {}
    assert flagged == FLAGS | {"top_k": 40}


def test_what_clients_are_told(client: TestClient) -> None:
    settings = client.get("/props?model=file").json()["default_generation_settings"]["params"]
    assert {name: settings[name] for name in ("top_p", *PARAMS)} == {"top_p": 0.95} | PARAMS
    lines = client.post("/api/show", json={"model": "file"}).json()["parameters"].splitlines()
    shown = {name: float(value) for name, value in map(str.split, lines)}
    assert {name: shown[name] for name in ("top_p", *PARAMS)} == {"top_p": 0.9} | PARAMS
    settings = client.get("/props?model=flag").json()["default_generation_settings"]["params"]
    assert {name: settings[name] for name in FLAGS} == FLAGS
    lines = client.post("/api/show", json={"model": "flag"}).json()["parameters"].splitlines()
    shown = {name: float(value) for name, value in map(str.split, lines)}
    assert {name: shown[name] for name in FLAGS} == FLAGS


def test_a_response_names_what_it_used(client: TestClient) -> None:
    answer = client.post("/v1/responses", json={"model": "file", "input": "x", "max_output_tokens": 0}).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.95)


def test_what_is_ignored_is_logged(caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = recommended.model(tmp_path_factory.mktemp("model") / "x.gguf", {"mirostat": 2})
    with caplog.at_level(logging.WARNING), TestClient(app([Spec("file", partial(bundled, path=path))], local=False)):
        pass
    assert "file: general.sampling.mirostat asks for a sampler that is not supported: the key is ignored" in caplog.text
