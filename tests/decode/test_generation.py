"""Answers: what is shown, when they end, what is remembered, and that none of it depends on the path taken."""

import gc
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine.errors import ContextError, UsageError
from engine.text.shown import Shown
from engine.text.tokenizer import Tokenizer
from tests import vocabularies

PROMPT = "def add(a, b):\n    "


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(n_ctx=256)


def test_greedy_is_the_argmax_of_logits(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, max_tokens=12, temperature=0)
    rows = llm.logits(answer.prompt_ids + answer.ids)[len(answer.prompt_ids) - 1 :]
    assert answer.ids == rows.argmax(axis=1)[: len(answer.ids)].tolist()
    assert answer.text == llm.detokenize(answer.ids)
    assert answer.finish_reason == "length"
    assert len(answer.ids) == 12


def test_a_seed_is_a_text(llm: engine.LLM) -> None:
    first = llm.complete(PROMPT, max_tokens=24, seed=7)
    llm.reset()
    assert llm.complete(PROMPT, max_tokens=24, seed=7).ids == first.ids
    assert engine.load(n_ctx=200, n_threads=1).complete(PROMPT, max_tokens=24, seed=7).ids == first.ids
    others = {tuple(llm.complete(PROMPT, max_tokens=24, seed=s).ids) for s in range(8, 13)}
    assert len(others) > 1
    drawn = llm.complete(PROMPT, max_tokens=24)
    assert llm.complete(PROMPT, max_tokens=24, seed=drawn.seed).ids == drawn.ids


def test_the_cache_is_reused_and_does_not_show(llm: engine.LLM) -> None:
    llm.reset()
    long = PROMPT + "return a + b\n\n\ndef sub(a, b):\n"
    first = llm.complete(PROMPT, max_tokens=8, temperature=0)
    warm = llm.complete(long, max_tokens=8, temperature=0)
    assert first.timings.cache_n == 0
    assert warm.timings.cache_n >= len(first.prompt_ids) - 1
    assert warm.timings.cache_n + warm.timings.prompt_n == len(warm.prompt_ids)
    again = llm.complete(long, max_tokens=8, temperature=0)
    assert again.timings.prompt_n == 1
    llm.reset()
    cold = llm.complete(long, max_tokens=8, temperature=0)
    assert cold.ids == warm.ids == again.ids


def test_pieces_join_to_the_text_and_progress_counts_tokens(llm: engine.LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.reset()
    ids = llm.tokenize("x = 1\n" * 40)
    generation = llm.generate(ids, max_tokens=20, seed=1, on_prefill=lambda done, total: seen.append((done, total)))
    assert generation.ids == []
    pieces = list(generation)
    assert "".join(pieces) == generation.text
    assert seen[0] == (0, len(ids))
    assert seen[-1] == (len(ids), len(ids))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    t = generation.timings
    assert (t.prompt_n, t.predicted_n) == (len(ids), len(generation.ids) + (generation.finish_reason == "stop"))
    assert 0 < t.prompt_s <= t.first_token_s
    assert t.predicted_per_second > 0


def test_stop_text_is_not_shown(llm: engine.LLM) -> None:
    whole = llm.complete(PROMPT, max_tokens=40, temperature=0).text
    stop = whole[5:9]
    answer = llm.complete(PROMPT, max_tokens=40, temperature=0, stop=["never to be seen", stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


@cache
def marked_tokenizer() -> Tokenizer:
    return vocabularies.made(vocabularies.bpe_metadata(["a b"], {"<s>": vocabularies.USER}))


@given(st.lists(st.text("ab<s", min_size=1, max_size=4), max_size=3), st.data())
@settings(deadline=None)
def test_held_back_text_never_shows_a_stop(stops: list[str], data: st.DataObject) -> None:
    """Fed in any tokens, some of them special, the shown text ends before the first stop text that is complete."""
    tokenizer = marked_tokenizer()
    texts = data.draw(st.lists(st.sampled_from(["a", "b", "ab", "<", "s", "<s>"]), max_size=20))
    tokens = [tokenizer.vocabulary.index[text] for text in texts]
    own, pieces, whole = Shown(tokenizer, stops), [], ""
    for token, text in zip(tokens, texts, strict=True):
        whole += text
        pieces += own.feed(token)
        if any(stop in whole for stop in stops):
            break
    stopped = own.stopped
    pieces += own.flush()
    shown = "".join(piece.text for piece in pieces)
    assert all(piece.text == "<s>" for piece in pieces if piece.special)
    assert bool(stopped) == any(stop in whole for stop in stops)
    assert whole.startswith(shown + stopped)
    assert not any(stop in shown for stop in stops)
    assert stopped or (shown == whole and sum(piece.special for piece in pieces) == texts.count("<s>"))


def test_closing_early_keeps_the_model_usable(llm: engine.LLM) -> None:
    reference = llm.complete(PROMPT, max_tokens=6, temperature=0).ids
    generation = llm.generate(PROMPT, max_tokens=50, temperature=0)
    next(generation)
    generation.close()
    assert list(generation) == []
    assert generation.finish_reason is None
    assert llm.complete(PROMPT, max_tokens=6, temperature=0).ids == reference


def test_two_answers_at_once_do_not_mix(llm: engine.LLM) -> None:
    alone = llm.complete(PROMPT, max_tokens=10, temperature=0).ids
    generation = llm.generate(PROMPT, max_tokens=10, temperature=0)
    next(generation)
    llm.complete("import os\n", max_tokens=3)
    list(generation)
    assert generation.ids == alone


def test_end_tokens_and_ignore_eos(llm: engine.LLM) -> None:
    eos = next(iter(llm.tokenizer.eog_ids))
    ended = llm.complete(PROMPT, max_tokens=9, logit_bias={eos: 1e4})
    assert (ended.ids, ended.text, ended.finish_reason) == ([], "", "stop")
    assert ended.timings.predicted_n == 1
    endless = llm.complete(PROMPT, max_tokens=9, logit_bias={eos: 1e4}, ignore_eos=True)
    assert len(endless.ids) == 9
    assert not set(endless.ids) & llm.tokenizer.eog_ids


def test_suppressed_tokens_are_never_chosen(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = llm.complete(PROMPT, max_tokens=9, temperature=0).ids
    monkeypatch.setattr(llm.tokenizer, "suppressed_ids", frozenset(usual[:1]))
    others = llm.complete(PROMPT, max_tokens=9, temperature=0, logit_bias={usual[0]: 1e4}).ids
    assert len(others) == 9 and usual[0] not in others


def test_the_context_ends_the_answer(llm: engine.LLM) -> None:
    ids = llm.tokenize(PROMPT) * 60
    prompt = ids[: llm.n_ctx - 5]
    answer = llm.complete(prompt, ignore_eos=True)
    assert (len(answer.ids), answer.finish_reason) == (5, "length")
    with pytest.raises(ContextError, match="fills the context"):
        llm.generate(ids[: llm.n_ctx])
    with pytest.raises(ContextError, match=r"has 257 tokens.*larger context"):
        llm.generate(ids[:257])
    assert llm.complete(ids[: llm.n_ctx], max_tokens=0).text == ""


def test_logprobs_are_those_of_the_logits(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, max_tokens=5, seed=3, logprobs=4)
    rows = llm.logits(answer.prompt_ids + answer.ids)[len(answer.prompt_ids) - 1 : -1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    for entry, token, row in zip(answer.logprobs, answer.ids, rows, strict=True):
        assert entry.id == token
        assert abs(entry.logprob - row[token]) < 1e-5
        best = np.argsort(-row, kind="stable")[:4]
        assert [likely.id for likely in entry.top] == best.tolist()
        assert np.allclose([likely.logprob for likely in entry.top], row[best], atol=1e-5)
        assert [likely.text for likely in (entry, *entry.top)] == [llm.detokenize([i]) for i in (token, *best.tolist())]


def test_healing_lets_the_last_token_grow(llm: engine.LLM) -> None:
    text = "def fibonacci(n):"
    ids = llm.tokenize(text)
    plain = llm.complete(text, max_tokens=20, temperature=0)
    healed = llm.complete(text, max_tokens=20, temperature=0, heal=True)
    assert plain.prompt_ids == ids
    assert healed.prompt_ids == ids[:-1]
    assert text + healed.text == llm.detokenize(healed.prompt_ids + healed.ids)
    assert healed.text.startswith("\n    ")
    # The first token is the likeliest of those that begin with the text of the removed token.
    last = llm.tokenizer.token_bytes(ids[-1])
    allowed = [i for i in range(llm.config.n_vocab) if llm.tokenizer.token_bytes(i).startswith(last)]
    assert healed.ids[0] == max(allowed, key=lambda i: llm.logits(ids[:-1])[-1][i])
    # Token ids are used unchanged, and a single token cannot be removed.
    assert llm.complete(ids, max_tokens=3, temperature=0, heal=True).prompt_ids == ids
    assert llm.complete("x", max_tokens=3, temperature=0, heal=True).prompt_ids == llm.tokenize("x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"top_p": -1}, "top_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"logit_bias": {99999999: 1}}, "vocabulary"),
    ],
)
def test_bad_options(llm: engine.LLM, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        llm.generate(PROMPT, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("ids", [[], [-1], [8192]])
def test_bad_ids(llm: engine.LLM, ids: list[int]) -> None:
    with pytest.raises(UsageError):
        llm.generate(ids)
    with pytest.raises(UsageError):
        llm.logits(ids)


@pytest.mark.parametrize("token", [-1, 8192, 2_000_000_000, 2**70, 1.5, None])
def test_bad_steps(llm: engine.LLM, token: Any) -> None:
    with pytest.raises(UsageError):
        llm.step(token)


@pytest.mark.parametrize("options", [{"device": "tpu"}, {"cache_type": "q3"}, {"n_ctx": -1}, {"n_threads": -1}])
def test_bad_load_options(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        engine.load(**options)  # type: ignore[arg-type]


def test_compile_announces_kernels_and_leaves_no_trace() -> None:
    model = engine.load(n_ctx=64)
    seen: list[tuple[str, int, int]] = []
    assert model.compile(lambda *step: seen.append(step)) > 0
    assert seen[0][:2] == ("compile", 0)
    assert seen[-1][1] == seen[-1][2]
    assert model.sequence.length == 0
    fresh = engine.load(n_ctx=64).complete(PROMPT, max_tokens=4, temperature=0)
    assert model.complete(PROMPT, max_tokens=4, temperature=0).ids == fresh.ids
    gc.collect()
