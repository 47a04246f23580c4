"""Answers drafted by the model's own layer: token for token those without; the share of drafts kept; what drafting stores."""

from typing import Any

import numpy as np
import pytest

import engine
from engine.speculative.mtp import MTPDraft
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.conftest import golden, shared_model
from tests.speculative.test_drafted_answers import PROMPTS, options_do_not_show

N_CTX = 256
COUNT = 24
PLAIN = SpeculationParams(enabled=False)


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load("pycoder-moe-mtp", device="cpu", n_ctx=N_CTX, n_threads=1, draft_max=7, cache_type="f16")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


def script(llm: engine.LLM, tokens: list[int], first: int) -> None:
    """Make the layer propose other tokens than these, from position ``first`` on."""
    assert isinstance(llm.draft, MTPDraft)
    llm.draft.script = np.full(N_CTX, -1, np.int32)
    llm.draft.script[first : first + len(tokens)] = [(token + 1) % llm.config.n_vocab for token in tokens]


@pytest.mark.covering(1)
@pytest.mark.parametrize("useless", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_do_not_show(llm: engine.LLM, temperature: float, useless: bool) -> None:
    assert llm.draft is not None
    drafted = accepted = 0
    for i, prompt in enumerate(PROMPTS):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": i, "ignore_eos": True}
        expected = llm.complete(prompt, speculation=PLAIN, **given).ids
        if useless:
            script(llm, expected, len(llm.tokenize(prompt)))
        params = SpeculationParams(draft_max=(0, 1, 2, 7)[i % 4], lookup=i % 5 == 4)
        found = llm.complete(prompt, speculation=params, **given)
        llm.draft.script = None
        assert found.ids == expected
        assert found.speculation is not None and found.speculation.drafted > 0
        drafted += found.speculation.drafted_by["mtp"]
        accepted += found.speculation.accepted_by["mtp"]
    assert accepted == 0 if useless else accepted > drafted / 4


@pytest.mark.parametrize(
    "params", [{"sequential": True}, {"draft_p_min": 0.5}, {"accept": "ratio"}, {"accept": "p-min"}]
)
def test_options(llm: engine.LLM, params: dict[str, Any]) -> None:
    options_do_not_show(llm, params, COUNT)


def test_log_probabilities_are_the_same(llm: engine.LLM) -> None:
    given: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.8, "seed": 1, "logprobs": 3}
    expected = llm.complete(PROMPTS[1], speculation=PLAIN, **given)
    assert llm.complete(PROMPTS[1], **given).logprobs == expected.logprobs  # every bit


def test_without_the_layer_the_answer_is_the_same(llm: engine.LLM) -> None:
    bare = engine.load("pycoder-moe-mtp", device="cpu", n_ctx=N_CTX, n_threads=1, mtp=False)
    assert bare.draft is None and not bare.config.mtp and len(bare.cache.layers) == len(llm.cache.layers) - 1
    for temperature in (0.0, 1.0):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": 9}
        assert bare.complete(PROMPTS[0], **given).ids == llm.complete(PROMPTS[0], **given).ids


def test_a_draft_model_comes_before_it() -> None:
    llm = engine.load("pycoder-moe-mtp", device="cpu", n_ctx=N_CTX, n_threads=1, draft_model="pycoder-draft")
    expected = llm.complete(PROMPTS[2], max_tokens=COUNT, temperature=0, speculation=PLAIN).ids
    found = llm.complete(PROMPTS[2], max_tokens=COUNT, temperature=0)
    assert llm.model.drafter is None and found.ids == expected
    assert found.speculation is not None and set(found.speculation.drafted_by) == {"model"}


def test_a_hybrid_drafts_for_another() -> None:
    """States are also rolled back in a draft model."""
    llm = engine.load(device="cpu", n_ctx=N_CTX, n_threads=1, draft_model="pycoder-moe-mtp")
    expected = llm.complete(PROMPTS[4], max_tokens=40, temperature=0, speculation=PLAIN).ids
    for most in (1, 3, 4):
        found = llm.complete(PROMPTS[4], max_tokens=40, temperature=0, speculation=SpeculationParams(draft_max=most))
        assert found.ids == expected and found.speculation is not None and found.speculation.drafted > 0


def test_what_a_pass_leaves_for_drafts_does_not_depend_on_drafts(llm: engine.LLM) -> None:
    """Keys, values and outputs that drafting stored are overwritten: as if nothing had been drafted."""
    ids = llm.tokenize(PROMPTS[1])
    answers = {}
    for name, params in (("plain", PLAIN), ("drafted", SpeculationParams(draft_max=7))):
        llm.reset()
        found = llm.complete(ids, max_tokens=COUNT, temperature=0, speculation=params, ignore_eos=True).ids
        llm.prefill(ids + found)
        layer = llm.cache.layers[-1]
        n = len(ids) + COUNT
        model: Any = llm.model
        hidden = model.drafter.hidden
        keys, values = layer.keys[:, layer.table[0]].swapaxes(2, 3), layer.values[:, layer.table[0]]
        keys, values = (x.reshape(x.shape[0], -1, x.shape[3])[:, :n] for x in (keys, values))
        rows = [p % hidden.shape[1] for p in range(n - 8, n)]
        answers[name] = (keys.tobytes(), values.tobytes(), hidden[0, rows].tobytes())
    assert answers["plain"] == answers["drafted"]


@pytest.mark.parametrize("shape", ["tiny-qwen35", "tiny-qwen35moe", "tiny-deepseek2"])
def test_random_models(tmp_path: Any, shape: str) -> None:
    """With drafts that are hardly ever right."""
    llm = engine.load(make_model(tmp_path / "m.gguf", shape, "Q8_0"), n_ctx=128, n_threads=1)
    for temperature in (0.0, 1.0):
        given: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 2, "ignore_eos": True}
        expected = llm.complete([5, 6, 7], speculation=PLAIN, **given).ids
        found = llm.complete([5, 6, 7], **given)
        assert found.ids == expected and found.speculation is not None and found.speculation.drafted > 0


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kept"), [("hybrid", 0.830), ("moe", 0.842)])
def test_acceptance(name: str, kept: float) -> None:
    """llama.cpp keeps this share of three drafts, decoding greedily."""
    llm = engine.load(shared_model(f"pycoder-{name}-mtp-Q4_K_M.gguf"), device="cpu", n_ctx=320, n_threads=1)
    drafted = accepted = 0
    for item in golden("models", "golden", f"pycoder-{name}-mtp-Q4_K_M.json")["items"]:
        given: dict[str, Any] = {"max_tokens": 64, "temperature": 0}
        expected = llm.complete(item["prompt_tokens"], speculation=PLAIN, **given).ids
        params = SpeculationParams(draft_max=3, draft_min=3)
        found = llm.complete(item["prompt_tokens"], speculation=params, **given)
        assert found.ids == expected and found.speculation is not None
        drafted, accepted = drafted + found.speculation.drafted, accepted + found.speculation.accepted
    assert drafted > 100
    assert abs(accepted / drafted - kept) < 0.1
