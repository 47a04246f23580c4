"""A model as a draft source: which models can draft for which, what they propose, and what they read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.sequence import Sequence
from engine.errors import ModelError, UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import MOST_EXTRA, DraftModel, confidence
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape

N_CTX = 64
PROMPT = [3, 7, 11, 250, 3, 7]
ALWAYS = SpeculationParams(draft_max=3)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Random models as small as can be, with vocabularies that begin alike."""
    folder = tmp_path_factory.mktemp("models")

    def file(n_vocab: int = 300, seed: int = 0) -> Path:
        path = folder / f"{n_vocab}-{seed}.gguf"
        shape = Shape("qwen3", 1, 32, 1, 1, 32, 32, n_vocab, N_CTX, 1e4, 1e-6)
        return path if path.exists() else make_model(path, shape, "Q8_0", seed)

    return file


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


def load(target: Path, draft: Path | None = None) -> engine.LLM:
    return engine.load(target, device="cpu", n_ctx=N_CTX, n_threads=1, draft_model=draft)


def drafter(target: Path, draft: Path) -> tuple[DraftModel, Sequence]:
    """A draft model, and the sequence of the model that it drafts for."""
    llm = load(target, draft)
    assert isinstance(llm.draft, DraftModel)
    return llm.draft, llm.sequence


def sampler(n_vocab: int, **options: Any) -> Sampler:
    return Sampler(SamplerParams(**{"seed": 5, "temperature": 1.0} | options), n_vocab)


# --- vocabularies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(300, 300), (300, 289), (289, 300), (300, 300 + MOST_EXTRA)])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "temperature": 1.5, "top_k": 0, "min_p": 0}])
def test_padding_at_the_end_of_either_does_not_matter(
    make: Make, target: int, draft: int, options: dict[str, Any]
) -> None:
    llm = load(make(target), make(draft, 1))
    assert llm.draft is not None
    assert llm.draft.n_vocab == min(target, draft)
    expected = load(make(target)).complete(PROMPT, max_tokens=30, ignore_eos=True, **options)
    found = llm.complete(PROMPT, max_tokens=30, ignore_eos=True, speculation=ALWAYS, **options)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted > 10


@pytest.mark.parametrize("sizes", [(300, 300 + MOST_EXTRA + 1), (300 + MOST_EXTRA + 1, 300)])
def test_vocabularies_of_other_sizes_are_refused(make: Make, sizes: tuple[int, int]) -> None:
    target, draft = sizes
    with pytest.raises(ModelError) as caught:
        load(make(target), make(draft))
    sentence = str(caught.value)
    assert f"it has {draft} tokens and the model {target}; choose a draft model of its family." in sentence
    assert str(make(target)) in sentence and str(make(draft)) in sentence
    assert "\n" not in sentence


def test_a_token_that_differs_is_named(make: Make, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = make(300).read_bytes()
    assert data.count(b"[PAD291]") == 1
    other.write_bytes(data.replace(b"[PAD291]", b"[BAD291]"))
    for target, draft, said in (
        (make(300), other, "token 291 is '[BAD291]' in it and '[PAD291]' in the model"),
        (other, make(295), "token 291 is '[PAD291]' in it and '[BAD291]' in the model"),
    ):
        with pytest.raises(ModelError, match="cannot draft for") as caught:
            load(target, draft)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert load(other, make(291)).draft is not None  # it lacks the token that differs


def test_an_unknown_device_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="abacus"):
        engine.load(make(), device="cpu", n_ctx=N_CTX, draft_model=make(), device_draft="abacus")


@pytest.mark.parametrize("prompt", [[3, 295, 7], [299, 3, 7, 11, 5]])
def test_a_prompt_that_the_draft_model_cannot_read(make: Make, prompt: list[int]) -> None:
    llm = load(make(300), make(289, 1))
    expected = load(make(300)).complete(prompt, max_tokens=20, seed=1, ignore_eos=True)
    found = llm.complete(prompt, max_tokens=20, seed=1, ignore_eos=True, speculation=ALWAYS)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted == 0
    assert llm.draft is not None and llm.draft.llm.n_cached == 0
    # The next answer is drafted again.
    again = llm.complete(PROMPT, max_tokens=20, seed=1, speculation=ALWAYS)
    assert again.speculation is not None and again.speculation.drafted > 0


def test_an_answer_that_the_draft_model_cannot_read(make: Make) -> None:
    """A token outside its vocabulary ends drafting, not the answer; the bias of that token is not lost."""
    bias = {295: 6.0, 298: 6.0}
    options: dict[str, Any] = {"max_tokens": 30, "seed": 2, "ignore_eos": True, "temperature": 1.5, "logit_bias": bias}
    options |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    expected = load(make(300)).complete(PROMPT, **options)
    assert {295, 298} & set(expected.ids) and set(expected.ids[:1]) - set(bias)
    found = load(make(300), make(289, 1)).complete(PROMPT, speculation=ALWAYS, **options)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted > 0


# --- what is proposed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"repeat_penalty": 1.5, "logit_bias": {17: 2.0, 299: 9.0}}]
)
def test_drafts_are_the_draft_models_own_answer(make: Make, options: dict[str, Any]) -> None:
    source, target = drafter(make(289), make(300, 1))
    proposal = source.propose(PROMPT, 7, source.sampler(sampler(289, **_known(options, 289))), 0.0, False, target)
    alone = load(make(300, 1))
    banned = {token: float("-inf") for token in range(289, 300)}
    params = {"seed": 5, "temperature": 1.0} | options
    params["logit_bias"] = _known(options, 289).get("logit_bias", {}) | banned
    expected = list(alone.decode(PROMPT, Sampler(SamplerParams(**params), 300), 7))
    assert proposal.tokens == [token for token, _ in expected]
    assert proposal.distributions is None


def _known(options: dict[str, Any], n_vocab: int) -> dict[str, Any]:
    """Options without the bias of tokens outside a vocabulary."""
    bias = {token: value for token, value in options.get("logit_bias", {}).items() if token < n_vocab}
    return options | ({"logit_bias": bias} if bias else {})


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "temperature": 0.5}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
def test_distributions_are_what_drafts_are_drawn_from(make: Make, options: dict[str, Any]) -> None:
    source, target = drafter(make(), make(300, 1))
    draw = sampler(300, **options)
    proposal = source.propose(PROMPT, 5, draw, 0.0, True, target)
    assert proposal.distributions is not None and len(proposal.distributions) == 5
    rows = load(make(300, 1)).logits(PROMPT + proposal.tokens)[len(PROMPT) - 1 :]
    for row, token, (ids, p) in zip(rows, proposal.tokens, proposal.distributions, strict=False):
        expected_ids, logits = draw.candidates(row, [])
        assert ids.tolist() == expected_ids.tolist()
        wide = np.exp((logits.astype(np.float64) - logits.max()) / draw.params.temperature)
        assert np.allclose(p, wide / wide.sum(), rtol=1e-5, atol=1e-12)
        assert token in ids


def test_drafting_ends_where_it_is_unsure(make: Make) -> None:
    source, target = drafter(make(), make(300, 1))
    draw = sampler(300, temperature=1.5)
    alone = load(make(300, 1))
    lengths: dict[bool, set[int]] = {False: set(), True: set()}
    for seed in range(30):
        known = np.random.default_rng(seed).integers(0, 300, 5).tolist()
        whole = source.propose(known, 4, draw, 0.0, False, target).tokens
        rows = alone.logits(known + whole)[len(known) - 1 : -1]
        for likeliest in (False, True):
            # Where distributions are requested, the drawn token must not decide whether it is proposed.
            judged = rows.argmax(axis=1).tolist() if likeliest else whole
            sure = [confidence(row, token) for row, token in zip(rows, judged, strict=True)]
            for p_min in (0.0, 0.1, 0.2, 0.3, 0.4, 1.0):
                n = next((i for i, value in enumerate(sure) if value < p_min), 4)
                assert source.propose(known, 4, draw, p_min, likeliest, target).tokens == whole[:n]
                lengths[likeliest].add(n)
    assert lengths == {False: {0, 1, 2, 3, 4}, True: {0, 1, 2, 3, 4}}


@pytest.mark.parametrize("size", [3, 10, 11, 400])
def test_confidence_against_float64(size: int) -> None:
    random = np.random.default_rng(size)
    for scale in (0.1, 3, 60):
        logits = (random.standard_normal(size) * scale).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        top = np.exp(logits[order[:10]].astype(np.float64) - np.float64(logits[order[0]]))
        for i, token in enumerate(order[:10]):
            assert confidence(logits, int(token)) == pytest.approx(top[i] / top.sum(), rel=1e-12)
        assert all(confidence(logits, int(token)) == 0 for token in order[10:])
    assert confidence(np.array([-np.inf, 2.0, -np.inf], np.float32), 1) == 1
    assert confidence(np.array([-np.inf, 2.0, -np.inf], np.float32), 2) == 0


def test_a_script_takes_the_place_of_the_models_tokens(make: Make) -> None:
    source, target = drafter(make(), make(300, 1))
    greedy = sampler(300, temperature=0.0)
    n = len(PROMPT)
    source.script = np.full(N_CTX, -1, np.int32)
    assert source.propose(PROMPT, 5, greedy, 0.0, False, target).tokens == _greedy(make, PROMPT, 5)
    source.script[[n + 1, n + 2]] = 44, 55
    tokens = source.propose(PROMPT, 5, greedy, 0.0, False, target).tokens
    assert tokens[:3] == [*_greedy(make, PROMPT, 1), 44, 55]
    assert tokens[3:] == _greedy(make, PROMPT + tokens[:3], 2)  # it has read them


def _greedy(make: Make, known: list[int], count: int) -> list[int]:
    return load(make(300, 1)).complete(known, max_tokens=count, temperature=0, ignore_eos=True).ids


# --- what it reads ---------------------------------------------------------------------------------------------


def test_each_token_is_read_once_unless_it_was_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = drafter(make(), make(300, 1))
    read: list[int] = []
    split = source.llm.model.split

    def noting(tokens: np.ndarray, *given: Any) -> Any:
        read.extend(tokens.tolist())
        return split(tokens, *given)

    monkeypatch.setattr(source.llm.model, "split", noting)
    greedy = sampler(300, temperature=0.0)

    def propose(known: list[int]) -> list[int]:
        read.clear()
        return source.propose(known, 3, greedy, 0.0, False, target).tokens

    known = list(PROMPT)
    drafts = propose(known)
    assert read == known + drafts[:2]  # the last draft is not read
    known += [*drafts, 77]
    more = propose(known)
    assert read == [drafts[2], 77, *more[:2]]  # all accepted: the last draft, and the target's token after it
    known += [more[0], 78]
    drafts = propose(known)
    assert read == [78, *drafts[:2]]  # the rejected ones are forgotten
    assert source.llm.n_cached == source.llm.model.sequence.length == len(known) + 2


def test_it_catches_up_with_the_salt_of_the_target(make: Make) -> None:
    """What it holds with another salt is forgotten, even if it holds the same tokens."""
    llm = load(make(), make(300, 1))
    source = llm.draft
    assert isinstance(source, DraftModel)
    target, own = llm.model.sequences[0], source.sequence(0)
    kept: list[int] = []
    for salt in ("a", "a", "b", "", ""):
        target.belong(salt)
        before = own.changes
        source.catch_up(PROMPT, target)
        assert (own.salt, own.tokens) == (salt, PROMPT[:-1])
        kept.append(own.changes - before)
    # Nothing changes if it already holds the tokens with the salt.
    assert [changes > 0 for changes in kept] == [True, False, True, True, False]


def test_it_catches_up_with_another_text(make: Make) -> None:
    """Of the same length, in the same slot."""
    llm = load(make(), make(300, 1))
    source = llm.draft
    assert isinstance(source, DraftModel)
    target, own, other = llm.model.sequences[0], source.sequence(0), [*PROMPT[:-2], 7, 8]
    assert other[:-1] != PROMPT[:-1]
    for known in (PROMPT, other, list(other)):
        source.catch_up(known, target)
        assert own.tokens == known[:-1]
    before = own.changes
    source.catch_up(list(other), target)
    assert own.changes == before  # it already holds them


def test_to_the_end_of_the_context(make: Make) -> None:
    """Its context is as long as the target's, and no position beyond it is requested."""
    llm = load(make(), make())
    assert llm.draft is not None and llm.draft.llm.n_ctx == N_CTX
    expected = load(make()).complete(PROMPT, temperature=0, ignore_eos=True)
    for n in (1, 5, 15):
        found = llm.complete(PROMPT, temperature=0, ignore_eos=True, speculation=SpeculationParams(draft_max=n))
        assert (found.ids, found.finish_reason) == (expected.ids, "length")
        assert found.speculation is not None and found.speculation.accepted == found.speculation.drafted > 20
