"""Answers of a trained model with drafts: token for token those without, whatever the drafts; and the share that is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.hub.resolve import resolve
from engine.speculative.draft_model import DraftModel
from engine.speculative.params import SpeculationParams
from engine.speculative.statistics import Statistics
from tests.conftest import golden, shared_model

PROMPTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    for j in range(10):\n        for k in range(10):\n",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "try:\n    value = int(text)\nexcept ValueError:\n    raise",
    "def test_add():\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4\n    assert add(3,",
    "with open(path, encoding='utf-8') as file:\n    for line in file:\n",
    "a = {'one': 1, 'two': 2, 'three': 3, 'one': 1, 'two': 2,",
    "@property\ndef width(self):\n    return self._width\n\n@property\ndef height(self):\n",
    '"""A module for reading and writing configuration files."""\n\n',
    "if __name__ == '__main__':\n",
    "lambda x: x + 1\nlambda x: x + 2\nlambda x: x + 3\nlambda",
    "# Copyright 2020 The Authors. All rights reserved.\n#\n#",
    "SELECT = 'select name, age from people where age > %s'\n",
    "from typing import Any, Dict, List, Optional\n\n\ndef merge(a: Dict[str, Any], b: Dict[str, Any]) ->",
    "parser.add_argument('--verbose', action='store_true')\nparser.add_argument('--quiet', action='store_true')\nparser.",
    "async def fetch(session, url):\n    async with session.get(url) as response:\n",
    "np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]])\nnp.array([[1, 0, 0],",
    "é = 'naïve café'\nprint(é)\nprint(",
]
TEMPERATURES = [0.0, 0.2, 0.7, 1.0]
PENALIZED = {
    "repeat_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "logit_bias": {201: 1.5, 10: -2.0},
}
N_CTX = 256
COUNT = 24


def options_do_not_show(llm: engine.LLM, params: dict[str, Any], count: int) -> None:
    """Answers of ``count`` tokens with these options of speculation are repeatable, and equal the plain ones wherever they
    must."""
    given: dict[str, Any] = {"max_tokens": count, "seed": 4, "ignore_eos": True}
    for temperature in (0.0, 0.9):
        plain = llm.complete(
            PROMPTS[6], temperature=temperature, speculation=SpeculationParams(enabled=False), **given
        ).ids
        found = [
            llm.complete(PROMPTS[6], temperature=temperature, speculation=SpeculationParams(**params), **given)
            for _ in range(2)
        ]
        assert found[0].ids == found[1].ids
        if "accept" not in params or temperature == 0:
            assert found[0].ids == plain
        assert found[0].speculation is not None and found[0].speculation.accepted > 0


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(device="cpu", n_ctx=N_CTX, n_threads=1)


@pytest.fixture(scope="module")
def drafts(llm: engine.LLM) -> dict[str, DraftModel]:
    """Perfect: has the target's own weights; useless: made so by a script; real: was trained to draft."""
    real = engine.load("pycoder-draft", device="cpu", n_ctx=N_CTX, n_threads=1)
    own = engine.load(device="cpu", n_ctx=N_CTX, n_threads=1)
    return {"perfect": DraftModel(own, llm), "useless": DraftModel(real, llm), "real": DraftModel(real, llm)}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses: decisions by time have no effect, and tests should not depend on them."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


@pytest.fixture(autouse=True)
def without_draft(llm: engine.LLM) -> Iterator[None]:
    yield
    llm.draft = None


SOURCES = [
    ("lookup", None),
    *((source, draft) for source in ("model", "both") for draft in ("perfect", "useless", "real")),
]

Plain = dict[tuple[int, float], list[int]]


@pytest.fixture(scope="module")
def plain(llm: engine.LLM) -> Plain:
    """The answer without drafts."""
    found: Plain = {}
    for i, prompt in enumerate(PROMPTS):
        for temperature in TEMPERATURES:
            found[i, temperature] = llm.complete(prompt, **options(i, temperature)).ids
    return found


def options(i: int, temperature: float) -> dict[str, Any]:
    given = {"max_tokens": COUNT, "temperature": temperature, "seed": i, "ignore_eos": True}
    return given | PENALIZED if i == 3 else given


def speculated(
    llm: engine.LLM, prompt: Any, params: SpeculationParams, **rest: Any
) -> tuple[engine.Generation, Statistics]:
    found = llm.complete(prompt, speculation=params, **rest)
    assert found.speculation is not None
    return found, found.speculation


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("source", "draft"), SOURCES)
def test_drafts_do_not_show(
    llm: engine.LLM, drafts: dict[str, DraftModel], plain: Plain, source: str, draft: str | None, temperature: float
) -> None:
    turn = SOURCES.index((source, draft)) + TEMPERATURES.index(temperature)
    counts = np.zeros(2, int)
    for i, prompt in enumerate(PROMPTS):
        if i != 3 and (i + turn) % len(SOURCES) not in (0, 3):
            continue
        expected = plain[i, temperature]
        llm.draft = drafts[draft] if draft is not None else None
        if llm.draft is not None:
            n = len(llm.tokenize(prompt))
            llm.draft.script = np.full(N_CTX, -1, np.int32) if draft == "useless" else None
            if llm.draft.script is not None:
                llm.draft.script[n : n + COUNT] = [(token + 1) % llm.config.n_vocab for token in expected]
        params = SpeculationParams(lookup=source != "model", draft_max=(0, 3, 7, 15)[i % 4])
        found, statistics = speculated(llm, prompt, params, **options(i, temperature))
        assert found.ids == expected
        assert set(statistics.drafted_by) <= NAMES[source]
        n_made, n_kept = statistics.drafted_by["model"], statistics.accepted_by["model"]
        if draft == "perfect":
            assert n_kept == n_made
        if draft == "useless":
            assert n_kept == 0
        if source == "model":
            assert n_made > 0
        counts += statistics.drafted, statistics.accepted
    assert counts[0] > 0
    if draft != "useless" or source == "both":
        assert counts[1] > 0


NAMES = {"lookup": {"lookup", "history"}, "model": {"model"}, "both": {"lookup", "history", "model"}}

CASES = [
    ({"temperature": 0}, 1),
    ({"temperature": 0.7, "seed": 3}, 6),
    ({"temperature": 1.0, "seed": 4} | PENALIZED, 0),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("given", "i"), CASES)
@pytest.mark.parametrize(
    "params",
    [
        {"sequential": True},
        {"draft_p_min": 0.5, "draft_max": 8},
        {"draft_p_min": 1.0},
        {"draft_p_min": 0.3, "draft_min": 3, "draft_max": 5},
        {"lookup": True, "draft_min": 4},
    ],
)
def test_options_do_not_show(
    llm: engine.LLM, drafts: dict[str, DraftModel], params: dict[str, Any], given: dict[str, Any], i: int
) -> None:
    options = given | {"max_tokens": COUNT}
    expected = llm.complete(PROMPTS[i], **options)
    assert expected.speculation is None
    llm.draft = drafts["real"]
    found, statistics = speculated(llm, PROMPTS[i], SpeculationParams(**params), **options)
    assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
    most = params.get("draft_max", 7 if params.get("lookup") else 4)
    assert max(statistics.drafted_at, default=0) < most
    least = params.get("draft_min", 1)
    if statistics.drafted:
        assert statistics.drafted_at[least - 1] == statistics.verifications
    assert statistics.drafted > 0 or params == {"draft_p_min": 1.0}
    # And off means off.
    llm.draft.llm.reset()
    without = llm.complete(PROMPTS[i], speculation=SpeculationParams(enabled=False, **params), **options)
    assert (without.ids, without.speculation, llm.draft.llm.n_cached) == (expected.ids, None, 0)


@pytest.mark.parametrize(("given", "i"), CASES)
def test_log_probabilities_are_the_same(
    llm: engine.LLM, drafts: dict[str, DraftModel], given: dict[str, Any], i: int
) -> None:
    options = given | {"max_tokens": COUNT, "logprobs": 3}
    expected = llm.complete(PROMPTS[i], **options)
    llm.draft = drafts["real"]
    found, statistics = speculated(llm, PROMPTS[i], SpeculationParams(lookup=True), **options)
    assert found.logprobs == expected.logprobs  # every bit
    assert len(found.logprobs) == len(found.ids)
    assert statistics.accepted > 0


def test_two_answers_at_once_do_not_mix(llm: engine.LLM, drafts: dict[str, DraftModel]) -> None:
    """Alternately a token of one answer and of the other, on one target and one draft model."""
    asked = [(PROMPTS[1], {"temperature": 0.0}), (PROMPTS[6], {"temperature": 0.8, "seed": 1})]
    expected = [llm.complete(prompt, max_tokens=COUNT, **given).ids for prompt, given in asked]  # type: ignore[call-overload]
    llm.draft = drafts["real"]
    params = SpeculationParams(lookup=True)
    answers = [llm.generate(prompt, max_tokens=COUNT, speculation=params, **given) for prompt, given in asked]  # type: ignore[call-overload]
    running = list(answers)
    while running:
        running = [answer for answer in running if next(answer, None) is not None]
    assert [answer.ids for answer in answers] == expected
    for answer in answers:
        assert answer.speculation is not None and answer.speculation.drafted > 0


def test_what_time_decides_does_not_show(
    llm: engine.LLM, drafts: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pauses, and a number of drafts that changes."""
    monkeypatch.undo()
    expected = llm.complete(PROMPTS[4], max_tokens=80, temperature=0.7, seed=2, ignore_eos=True).ids
    llm.draft = drafts["useless"]
    random = np.random.default_rng(0)
    script = np.full(N_CTX, -1, np.int32)
    script[::3] = random.integers(0, llm.config.n_vocab, script[::3].size)  # every third draft is wrong
    llm.draft.script = script
    found, statistics = speculated(
        llm, PROMPTS[4], SpeculationParams(), max_tokens=80, temperature=0.7, seed=2, ignore_eos=True
    )
    assert found.ids == expected
    assert statistics.plain_n >= 2 and 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("accept", ["ratio", "p-min"])
def test_other_ways_to_accept_are_repeatable(llm: engine.LLM, drafts: dict[str, DraftModel], accept: str) -> None:
    """A seed always gives the same text, which differs from that of exact acceptance; at temperature 0 they are equal."""
    llm.draft = drafts["real"]
    params = SpeculationParams(accept=accept, accept_p_min=0.05)
    given: dict[str, Any] = {"max_tokens": 2 * COUNT, "temperature": 1.0, "ignore_eos": True}
    same = []
    for seed in range(3):
        ids = [llm.complete(PROMPTS[1], speculation=params, seed=seed, **given).ids for _ in range(2)]
        assert ids[0] == ids[1]
        same.append(ids[0] == llm.complete(PROMPTS[1], seed=seed, **given).ids)
    assert not all(same)
    given["temperature"] = 0
    exact = llm.complete(PROMPTS[1], speculation=SpeculationParams(enabled=False), **given).ids
    assert llm.complete(PROMPTS[1], speculation=params, **given).ids == exact


@pytest.mark.parametrize("n", [2, 5])
def test_two_answers_to_one_prompt_take_turns(llm: engine.LLM, drafts: dict[str, DraftModel], n: int) -> None:
    """One stops where the other continues, in the middle of a step that gave several tokens."""
    llm.draft = drafts["perfect"]
    given: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
    expected = llm.complete(PROMPTS[1], **given).ids
    answers = [llm.generate(PROMPTS[1], **given) for _ in range(2)]
    for answer in answers:
        while len(answer.ids) < n:
            next(answer)
    for answer in answers:
        assert [*answer] and answer.ids == expected


def test_a_named_draft_model_is_loaded_beside_the_model() -> None:
    llm = engine.load(device="cpu", n_ctx=64, n_threads=1, cache_type="f32", draft_model="pycoder-draft")
    assert llm.draft is not None
    assert Path(llm.draft.llm.path) == Path(resolve("pycoder-draft"))
    assert llm.draft.llm.n_ctx == llm.n_ctx and llm.draft.llm.cache.layers[0].keys.dtype == np.float32
    assert llm.draft.llm.cache is not llm.cache


# --- how good drafts are ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_acceptance_of_a_draft_model() -> None:
    """llama.cpp keeps 78 % of three drafts of this pair, decoding greedily."""
    items = golden("models", "golden", "pycoder-dense-Q4_K_M.json")["items"]
    models = [shared_model(f"pycoder-{name}-Q4_K_M.gguf") for name in ("dense", "draft")]
    llm = engine.load(models[0], device="cpu", n_ctx=320, n_threads=1, draft_model=models[1])
    drafted = accepted = 0
    for item in items:
        expected = llm.complete(
            item["prompt_tokens"], max_tokens=64, temperature=0, speculation=SpeculationParams(enabled=False)
        )
        params = SpeculationParams(draft_max=3, draft_min=3)
        found = llm.complete(item["prompt_tokens"], max_tokens=64, temperature=0, speculation=params)
        assert found.ids == expected.ids
        assert found.speculation is not None
        drafted, accepted = drafted + found.speculation.drafted, accepted + found.speculation.accepted
    assert drafted > 100
    assert accepted / drafted > 0.6


def test_acceptance_of_lookup(llm: engine.LLM) -> None:
    """Text that repeats itself is found; where nothing does, nothing is proposed."""
    block = "    def area(self):\n        return self.width * self.height\n\n"
    _, repeated = speculated(
        llm, "class Box:\n" + 3 * block + "    def area", SpeculationParams(lookup=True), max_tokens=16, temperature=0
    )
    assert repeated.acceptance > 0.6 and repeated.drafted >= 10
    llm.reset()
    given: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "presence_penalty": 1000.0, "repeat_last_n": -1}
    found, nothing = speculated(llm, "x", SpeculationParams(lookup=True), ignore_eos=True, **given)
    assert len(set(found.ids)) == 40  # no token comes twice
    assert (nothing.drafted, nothing.plain_n) == (0, 38)  # the first is the prompt's, the next not counted
