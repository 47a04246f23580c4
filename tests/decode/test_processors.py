"""Logits processors: what they are given, what they may return, and that answers with them do not depend on the path."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import ModelError, UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.params import SpeculationParams

PROMPT = "def add(a, b):\n    "
N_VOCAB = 6


def sampler(*processors: Any, **options: Any) -> Sampler:
    given: dict[str, Any] = {"temperature": 0.0, "seed": 1} | options
    return Sampler(SamplerParams(**given, logits_processors=processors), N_VOCAB)


def random_logits(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=N_VOCAB).astype(np.float32)


def test_a_change_in_place_and_a_returned_array_are_the_same() -> None:
    logits = random_logits()
    before, history = logits.copy(), [3, 1]
    seen: list[Any] = []

    def in_place(ids: Sequence[int], x: np.ndarray) -> None:
        seen.append(ids)
        x[ids[-1]] += 9

    def returned(ids: Sequence[int], x: np.ndarray) -> np.ndarray:
        y = np.zeros(2 * N_VOCAB, np.float32)[::2]
        y[:] = x
        y[ids[-1]] += 9
        return y

    for processor in (in_place, returned):
        assert sampler(processor).sample(logits, 2, history) == 1
        ids, values = sampler(processor, temperature=1.0, top_k=0, top_p=1, min_p=0).candidates(logits, history)
        assert ids.tolist() == list(range(N_VOCAB))
        assert values.tolist() == (before + np.float32(9) * (np.arange(N_VOCAB) == 1)).tolist()
    assert np.array_equal(logits, before)
    assert set(seen) == {(3, 1)}


def test_each_has_the_result_of_the_one_before_and_bias_comes_later() -> None:
    def double(_: Sequence[int], x: np.ndarray) -> np.ndarray:
        return x * np.float32(2)

    def increment(_: Sequence[int], x: np.ndarray) -> None:
        x += 1

    given: dict[str, Any] = {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1, "logit_bias": {0: 0.5}}
    given |= {"repeat_penalty": 2.0, "dry_multiplier": 4.0, "dry_allowed_length": 1}
    logits = np.full(N_VOCAB, 3, np.float32)
    values = sampler(increment, double, **given).candidates(logits, [0, 1, 0])[1]
    assert values.tolist() == [(8 + 0.5) / 2, 8 / 2 - 4, 8, 8, 8, 8]


def test_an_array_that_is_kept_may_change_later() -> None:
    kept = random_logits()

    def shared(ids: Sequence[int], x: np.ndarray) -> np.ndarray:
        return kept

    def destroy(_: Sequence[int], x: np.ndarray) -> None:
        x[:] = -5

    before = kept.copy()
    sampler(shared, destroy).sample(random_logits(2), 0)
    assert np.array_equal(kept, before)


def nothing_but(value: Any) -> Any:
    def processor(ids: Sequence[int], logits: np.ndarray) -> Any:
        return value

    return processor


WANTED = f"the logits processor processor must return None or an array float32 [{N_VOCAB}], not "


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(N_VOCAB), WANTED + f"float64 [{N_VOCAB}]"),
        (np.zeros(N_VOCAB - 1, np.float32), WANTED + f"float32 [{N_VOCAB - 1}]"),
        (np.zeros((1, N_VOCAB), np.float32), WANTED + f"float32 [1, {N_VOCAB}]"),
        ([0.0] * N_VOCAB, WANTED + "list"),
        (True, WANTED + "bool"),
        (
            np.array([0, math.nan, 1, 2, 3, 4], np.float32),
            "the logits processor processor made a logit NaN; logits must be finite, or -inf to ban a token",
        ),
        (
            np.array([0, math.inf, 1, 2, 3, 4], np.float32),
            "the logits processor processor made a logit infinite; logits must be finite, or -inf to ban a token",
        ),
        (
            np.full(N_VOCAB, -math.inf, np.float32),
            "logit_bias or a logits processor bans every token that the model could choose; ban fewer",
        ),
    ],
)
def test_what_it_must_not_return(value: Any, message: str) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            sampler(nothing_but(value), temperature=temperature).sample(random_logits(), 0)


def test_a_damaged_model_is_not_its_fault() -> None:
    calls: list[int] = []
    logits = random_logits()
    logits[2] = math.nan
    with pytest.raises(ModelError, match="the model produced NaN"):
        sampler(lambda ids, x: calls.append(1)).sample(logits, 0)
    assert not calls


@pytest.mark.parametrize("processors", [5, [None], ["f"], {1}])
def test_processors_are_functions(processors: Any) -> None:
    with pytest.raises(UsageError, match="logits_processors must be a list of functions"):
        SamplerParams(logits_processors=processors)


# --- answers of a model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(device="cpu", n_ctx=128, n_threads=1)


@pytest.fixture(scope="module")
def small() -> engine.LLM:
    return engine.load("pycoder-draft", device="cpu", n_ctx=128, n_threads=1)


@pytest.fixture
def drafting(llm: engine.LLM, small: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> engine.LLM:
    """The model with a draft model, which drafts from the first step on."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    monkeypatch.setattr(llm, "draft", DraftModel(small, llm))
    return llm


PLAIN = SpeculationParams(enabled=False)


def by_ids(ids: Sequence[int], logits: np.ndarray) -> None:
    """Bans half of the tokens, depending on every id so far."""
    logits[(np.arange(logits.size) + sum(ids) + len(ids)) % 2 == 0] = -np.inf


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("params", [{}, {"lookup": True}, {"sequential": True}])
def test_drafts_do_not_show(drafting: engine.LLM, options: dict[str, Any], params: dict[str, Any]) -> None:
    given: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logits_processors": [by_ids]} | options
    expected = drafting.complete(PROMPT, speculation=PLAIN, **given)
    for i, token in enumerate(expected.ids):
        assert (token + sum(expected.prompt_ids + expected.ids[:i]) + len(expected.prompt_ids) + i) % 2 == 1
    found = drafting.complete(PROMPT, speculation=SpeculationParams(**params), **given)
    assert found.ids == expected.ids
    # The draft model's choices go through the function, too: else half of them would be banned.
    assert found.speculation is not None and found.speculation.acceptance > 0.3


def test_without_drafts_it_is_called_once_per_token(llm: engine.LLM) -> None:
    seen: list[tuple[int, ...]] = []

    def note(ids: Sequence[int], logits: np.ndarray) -> None:
        assert logits.dtype == np.float32 and logits.shape == (llm.config.n_vocab,)
        seen.append(tuple(ids))

    answer = llm.complete(PROMPT, max_tokens=8, seed=1, ignore_eos=True, logits_processors=[note])
    whole = tuple(answer.prompt_ids + answer.ids)
    assert seen == [whole[: len(answer.prompt_ids) + i] for i in range(8)]
    assert answer.ids == llm.complete(PROMPT, max_tokens=8, seed=1, ignore_eos=True).ids


def uses(llm: engine.LLM) -> list[Callable[[], object]]:
    """Everything that may change the cache."""
    other = llm.generate("x = ", max_tokens=4)
    ids = llm.tokenize("x = ")
    return [
        llm.reset,
        lambda: llm.complete("x = ", max_tokens=2),
        lambda: next(other),
        lambda: llm.logits(ids),
        lambda: llm.prefill(ids),
        lambda: llm.step(1),
        llm.warm_up,
        llm.close,
    ]


@pytest.mark.parametrize("use", range(8))
def test_functions_that_an_answer_calls_must_not_use_the_model(use: int) -> None:
    with engine.load(n_ctx=128, batch_size=16) as llm:
        prompt, given = list(range(100, 160)), {"max_tokens": 6, "temperature": 0}
        expected = llm.complete(prompt, **given).ids  # type: ignore[call-overload]
        llm.reset()
        refused = "{} must not use the model that has called it"
        for at in (0, 32, 60):
            options: Any = given | {"on_prefill": lambda done, total, at=at: uses(llm)[use]() if done == at else None}
            with pytest.raises(UsageError, match=refused.format("on_prefill")):
                llm.complete(prompt, **options)
            llm.reset()
        for at in (60, 62):
            options = given | {
                "logits_processors": [lambda ids, _, at=at: uses(llm)[use]() and None if len(ids) == at else None]
            }
            with pytest.raises(UsageError, match=refused.format("a logits processor")):
                llm.complete(prompt, **options)
        # A function that goes on after the error has changed nothing.
        seen: list[int] = []

        def insist(done: int, total: int) -> None:
            with pytest.raises(UsageError):
                uses(llm)[use]()
            seen.append(done)

        llm.reset()
        assert llm.complete(prompt, on_prefill=insist, **given).ids == expected  # type: ignore[call-overload]
        assert seen == [0, 16, 32, 48, 60]


@pytest.mark.parametrize("params", [{}, {"lookup": True}])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_processor_may_close_its_answer(llm: engine.LLM, at: int, params: dict[str, Any]) -> None:
    given: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "speculation": SpeculationParams(**params)}
    whole = llm.complete(PROMPT, **given)

    def close(ids: Sequence[int], logits: np.ndarray) -> None:
        if len(ids) == len(whole.prompt_ids) + at:
            answer.close()

    answer = llm.generate(PROMPT, logits_processors=[close], **given)
    assert "".join(answer) == answer.text
    assert answer.ids == whole.ids[:at] and answer.done and answer.finish_reason is None
    assert llm.complete(PROMPT, **given).ids == whole.ids


@pytest.mark.parametrize("closes", [True, False])
def test_what_a_processor_does_concerns_its_own_answer(closes: bool) -> None:
    """Also if the thread of another answer computes the token that is being chosen."""
    with engine.load(n_ctx=128, parallel=2) as llm:
        given: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        whole, other = (llm.complete(prompt, **given) for prompt in (PROMPT, "x = "))

        def end(ids: Sequence[int], logits: np.ndarray) -> None:
            if len(ids) == len(whole.prompt_ids) + 4:
                if not closes:
                    raise ZeroDivisionError("mine")
                answer.close()

        answer = llm.generate(PROMPT, logits_processors=[end], **given)
        next(answer)
        assert llm.complete("x = ", **given).ids == other.ids  # it goes on with both
        if closes:
            list(answer)
        else:
            with pytest.raises(ZeroDivisionError, match="mine"):
                list(answer)
        assert answer.ids == whole.ids[:4] and answer.done and answer.finish_reason is None


def test_closing_an_answer_while_its_prompt_is_read() -> None:
    with engine.load(n_ctx=128, batch_size=16) as llm:
        calls: list[int] = []

        def close(done: int, total: int) -> None:
            calls.append(done)
            if done == 32:
                answer.close()

        answer = llm.generate(list(range(100, 160)), max_tokens=4, on_prefill=close)
        assert list(answer) == [] and answer.done and answer.finish_reason is None
        assert calls == [0, 16, 32] and llm.n_cached == 32


def test_an_answer_does_not_continue_itself(llm: engine.LLM) -> None:
    def go_on(ids: Sequence[int], logits: np.ndarray) -> None:
        next(answer)

    answer = llm.generate(PROMPT, max_tokens=4, logits_processors=[go_on])
    with pytest.raises(UsageError, match="must not continue it"):
        list(answer)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_exception_leaves_the_model_usable(drafting: engine.LLM, at: int) -> None:
    class Mine(Exception):
        pass

    n_prompt = len(drafting.tokenize(PROMPT))

    def fail(ids: Sequence[int], logits: np.ndarray) -> None:
        if len(ids) >= n_prompt + at:
            raise Mine("enough")

    given: dict[str, Any] = {"max_tokens": 10, "temperature": 0}
    expected = drafting.complete(PROMPT, speculation=PLAIN, **given).ids
    for speculation in (PLAIN, SpeculationParams()):
        answer = drafting.generate(PROMPT, speculation=speculation, logits_processors=[fail], **given)
        with pytest.raises(Mine, match="enough"):
            list(answer)
        assert answer.ids == expected[: len(answer.ids)] and len(answer.ids) <= at
        assert drafting.complete(PROMPT, speculation=speculation, **given).ids == expected
