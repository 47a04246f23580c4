"""DRY and XTC with drafts: the text of exact acceptance is that without drafts, the other modes keep what they promise."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.host_steps import HostSteps
from engine.decode.request import Request
from engine.decode.running import Running, follow
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.acceptance import distribution
from engine.speculative.params import SpeculationParams
from engine.speculative.speculation import Speculation
from tests.speculative.test_ratio import (
    DRAFTS,
    N_VOCAB,
    PLAIN,
    PROMPT,
    TARGET,
    TOKENS,
    Chain,
    draft_model,
    p_value,
    softmax,
)
from tests.speculative.test_ratio import answers as chain_answers

PROMPTS = [
    "for i in range(10):\n    for j in range(10):\n        for k in range(10):\n",
    "parser.add_argument('--verbose', action='store_true')\nparser.add_argument('--quiet', action='store_true')\nparser.",
]
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0, "dry_multiplier": 0.8},
    {"temperature": 0.0, "dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["range(", "--"]},
    {"temperature": 0.8, "seed": 1, "dry_multiplier": 0.8, "xtc_probability": 0.5, "dry_sequence_breakers": []},
    {"temperature": 0.8, "seed": 2, "dry_multiplier": 2.0, "dry_penalty_last_n": 40, "xtc_probability": 1.0},
    {"temperature": 0.8, "seed": 3, "xtc_probability": 0.3, "xtc_threshold": 0.02, "top_k": 0, "top_p": 1.0},
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


@pytest.fixture(scope="module", params=["draft model", "own layer"])
def llm(request: pytest.FixtureRequest) -> Iterator[engine.LLM]:
    if request.param == "own layer":
        yield engine.load("pycoder-moe-mtp", device="cpu", n_ctx=256, n_threads=1)
    else:
        yield engine.load(device="cpu", n_ctx=256, n_threads=1, draft_model="pycoder-draft")


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [{}, {"lookup": True}, {"draft_p_min": 0.2}, {"sequential": True}])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_drafts_do_not_show(llm: engine.LLM, case: int, params: dict[str, Any]) -> None:
    given = CASES[case] | {"max_tokens": 24, "ignore_eos": True}
    prompt = PROMPTS[case % len(PROMPTS)]
    expected = llm.complete(prompt, speculation=SpeculationParams(enabled=False), **given)
    found = llm.complete(prompt, speculation=SpeculationParams(**params), **given)
    assert (found.ids, found.text) == (expected.ids, expected.text)
    assert found.speculation is not None and found.speculation.accepted > 0


def test_the_text_is_another_one_than_without(llm: engine.LLM) -> None:
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    texts = [llm.complete(PROMPTS[0], **given | more).text for more in ({}, CASES[2])]
    assert len(set(texts)) == 2


@pytest.mark.parametrize("accept", ["ratio", "p-min"])
def test_other_ways_to_accept_are_repeatable(llm: engine.LLM, accept: str) -> None:
    given = CASES[2] | {"max_tokens": 16, "ignore_eos": True}
    params = SpeculationParams(accept=accept, accept_p_min=0.2)
    one, other = (llm.complete(PROMPTS[0], speculation=params, **given) for _ in range(2))
    assert one.ids == other.ids
    assert one.speculation is not None and one.speculation.accepted > 0


def test_a_draft_model_of_fewer_tokens() -> None:
    """Its sampler keeps the breakers that it knows, and excludes at the positions of the target's."""
    logits = np.zeros(20, np.float32)
    params = SamplerParams(
        **PLAIN, dry_multiplier=1.0, dry_breakers=[(3,), (15,), (2, 17)], xtc_probability=0.5, xtc_threshold=0, seed=9
    )
    whole = Sampler(params, 20)
    narrow = whole.narrowed(10)
    for n in range(40):
        history = [1, 2, 3, 1, 2, 4, 1, 2, *range(4, 10)] * 3
        wide, small = (s.candidates(logits[: s.n_vocab], history[:n]) for s in (whole, narrow))
        assert (wide[0].size < 20) == (small[0].size < 10)
        assert small[1].min() == wide[1].min()


# --- ratio and p-min on chains of tokens with known probabilities ----------------------------------------------

CHAIN: dict[str, Any] = {
    "dry_multiplier": 0.7,
    "dry_base": 1.5,
    "dry_allowed_length": 1,
    "xtc_probability": 0.4,
    "xtc_threshold": 0.15,
}


def probabilities() -> dict[tuple[int, ...], float]:
    """The probability of each answer: at each position a mixture of always and never excluding."""
    share = CHAIN["xtc_probability"]
    struck, spared = (
        Sampler(SamplerParams(**PLAIN | CHAIN | {"xtc_probability": p, "seed": 1}), N_VOCAB) for p in (1.0, 0.0)
    )

    def following(answer: tuple[int, ...]) -> np.ndarray:
        history = [*PROMPT, *answer]
        mixed = np.zeros(N_VOCAB)
        for sampler, weight in ((struck, share), (spared, 1 - share)):
            ids, logits = sampler.candidates(TARGET[history[-2], history[-1]], history)
            mixed[ids] += weight * softmax(logits, 1.0)
        return mixed

    return {
        answer: math.prod(float(following(answer[:i])[token]) for i, token in enumerate(answer))
        for answer in product(range(N_VOCAB), repeat=TOKENS)
    }


@pytest.mark.parametrize(("accept", "draft"), [("ratio", "good"), ("ratio", "adversarial"), ("exact", "good")])
def test_the_distribution_is_that_of_the_target(accept: str, draft: str) -> None:
    params = SpeculationParams(accept=accept)
    found, kept = chain_answers(SamplerParams(**PLAIN | CHAIN), params, DRAFTS[draft], range(2_000))
    assert p_value(found, probabilities()) > 1e-4
    assert kept > 100


@pytest.mark.parametrize("bound", [0.3, 0.6])
def test_p_min_judges_what_is_left(bound: float) -> None:
    """A draft is kept by its probability among the tokens that XTC has left."""
    sampler = Sampler(SamplerParams(**PLAIN | CHAIN), N_VOCAB)
    params = SpeculationParams(accept="p-min", accept_p_min=bound, draft_max=1)
    row, kept = TARGET[PROMPT[-2], PROMPT[-1]], 0
    for seed in range(200):
        sampler.seed = seed
        model: Any = Chain(TARGET)
        model.tokens = list(PROMPT[:-1])
        speculation = Speculation(params, sampler, draft_model(DRAFTS["bad"]), 10.0)
        found = [
            token for token, _ in follow(Running(Request(PROMPT, sampler, 2, speculation), model, HostSteps(model)))
        ]
        draft = sampler.sample(DRAFTS["bad"][PROMPT[-2], PROMPT[-1]], 2, PROMPT)
        plain = sampler.sample(row, 2, PROMPT)
        ids, logits = sampler.candidates(row, PROMPT, position=2)
        left = dict(zip(ids.tolist(), softmax(logits, 1.0).tolist(), strict=True))
        keeps = left.get(draft, 0.0) >= bound or draft == plain
        assert found[0] == (draft if keeps else plain)
        kept += keeps
    assert 30 < kept < 200


def test_what_is_drawn_from_depends_on_the_position() -> None:
    """The distribution that ratio and p-min use has the exclusions of the position that the token will have."""
    sampler = Sampler(SamplerParams(**PLAIN, xtc_probability=0.5, xtc_threshold=0.2, seed=4), 3)
    logits = np.zeros(3, np.float32)
    sizes = [distribution(sampler, logits, [0] * n)[0].size for n in range(50)]
    assert sizes == [sampler.candidates(logits, position=n)[0].size for n in range(50)]
    assert set(sizes) == {1, 3}
