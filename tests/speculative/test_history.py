"""Drafts from earlier answers, against their definition; what is kept apart, and what is forgotten."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

import engine
from engine.speculative.history import RUNS, SALTS, AnswerHistory, Histories
from engine.speculative.params import SpeculationParams
from tests.tiers import examples

LOOKUP = SpeculationParams(lookup=True, draft_min=1)

TEXT = st.lists(st.integers(0, 2), max_size=60)


def following(texts: Sequence[Sequence[int]], known: Sequence[int], count: int) -> list[int]:
    """What followed the last occurrence of the longest run at the end of ``known``."""
    for run in RUNS:
        tail = list(known[-run:])
        for text in reversed(texts) if len(tail) == run else ():
            ends = [i for i in range(run, len(text) + 1) if list(text[i - run : i]) == tail]
            if ends:
                if found := list(text[ends[-1] : ends[-1] + count]):
                    return found
                break
    return []


@seed(1)  # a run that is replaced by another one with the same address would be missed, in one of 10 000 examples
@given(st.lists(TEXT, max_size=5), TEXT, st.integers(1, 15))
@examples(200)
def test_it_is_the_definition(texts: list[list[int]], known: list[int], count: int) -> None:
    history = AnswerHistory()
    for text in texts:
        history.add(text)
    assert history.propose(known, count) == following(texts, known, count)


@given(st.lists(TEXT, min_size=3, max_size=40), TEXT)
@examples(100)
def test_a_small_memory_proposes_what_it_still_has(texts: list[list[int]], known: list[int]) -> None:
    """Places that later texts have overwritten are not proposed; nothing that is proposed was never a text."""
    history = AnswerHistory(capacity=64)
    for text in texts:
        history.add(text)
    found = history.propose(known, 5)
    if found:
        places = [
            text[i - run : i + len(found)] for text in texts for run in RUNS for i in range(run, len(text)) if i >= run
        ]
        assert any(place == [*known[-run:], *found] for run in RUNS for place in places)


def test_salts_and_what_is_forgotten() -> None:
    histories = Histories()
    first = histories.of("a")
    first.add(range(10))
    assert histories.of("b").propose([0, 1, 2, 3], 3) == [] and histories.of("a") is first
    for i in range(SALTS - 1):
        histories.of(str(i))
    assert histories.of("a") is first
    for i in range(SALTS):
        histories.of(str(i))
    assert histories.of("a") is not first


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load("pycoder", device="cpu", n_ctx=256, n_threads=1, parallel=2)


def test_an_answer_drafts_for_the_next_one(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same with any temperature; the drafts of the second answer come from the first one, but not with
    another salt, nor after a reset, nor where the text depends on the number of drafts."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    given: dict[str, Any] = {"max_tokens": 48, "seed": 3, "ignore_eos": True, "speculation": LOOKUP}
    prompts = ["def gcd(a, b):\n", "import math\n\ndef gcd(a, b):\n"]
    for temperature in (0.0, 0.9):
        llm.reset()
        given["temperature"] = temperature
        plain = llm.complete(prompts[0], **given | {"speculation": SpeculationParams(enabled=False)})
        first, second = (llm.complete(prompts[0], **given) for _ in range(2))
        assert first.ids == second.ids == plain.ids
        assert first.speculation is not None and second.speculation is not None
        assert first.speculation.drafted_by["history"] == 0
        assert second.speculation.accepted_by["history"] > 20
        other = llm.complete(prompts[0], **given, cache_salt="other")
        assert other.ids == plain.ids and other.speculation is not None
        assert other.speculation.drafted_by["history"] == 0
        p_min = SpeculationParams(lookup=True, accept="p-min")
        changed = llm.complete(prompts[0], **given | {"speculation": p_min, "temperature": 0.9})
        assert changed.speculation is not None and changed.speculation.drafted_by["history"] == 0
        together = llm.complete(prompts, **given)
        alone = llm.complete(prompts[1], **given | {"speculation": SpeculationParams(enabled=False)})
        assert [answer.ids for answer in together] == [plain.ids, alone.ids]
    llm.reset()
    assert llm.complete(prompts[0], **given).speculation.drafted_by["history"] == 0  # type: ignore[union-attr]
