"""Grammars on a simulated GPU: masks, and steps of answers with and without them, of the models of ``test_steps.py``."""

import string
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)
pytest.importorskip("llguidance", reason="grammars need the extra serve")

from engine.cpu import sample as on_cpu
from engine.cuda.permit import PARTS, Masks, permit
from engine.cuda.runtime.simulator import run
from engine.decode.running import InFlightRequest
from engine.errors import NoToken
from engine.grammar import masks
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.proposal import Proposal
from engine.text.tokenizer import Tokenizer
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_steps import N_VOCAB, NAMES, PROMPTS, SAMPLERS, Tables, draft_model, ops, own_layer
from tests.vocabularies import CONTROL, NORMAL, made, metadata

__all__ = ["ops"]  # a fixture

MASKED: Any = {"temperature": 0.9, "top_k": 25, "top_p": 0.95, "seed": 4, "repeat_penalty": 1.2, "logit_bias": {3: 1.5}}
GRAMMARS = [None, r"[a-f]{2,6}(,[0-9]{1,3}){2,9}", r"(.|\n)*"]


@cache
def letters() -> Tokenizer:
    """The 40 tokens of a table: an end, letters, digits, and three others."""
    texts = [*string.ascii_lowercase, *string.digits, "ab", "12", ","]
    return made(
        metadata("gpt2", {"<|end|>": CONTROL} | dict.fromkeys(texts, NORMAL), merges=["a b", "1 2"], eos_token_id=0)
    )


@pytest.mark.parametrize(("n_vocab", "threads"), [(1, 32), (31, 32), (70, 32), (1100, 32)])
def test_permit(n_vocab: int, threads: int) -> None:
    """The logits of the CPU, in the rows that have a mask; whole words of both kinds, and words of more than one block."""
    rng = np.random.default_rng(n_vocab)
    words = -(-n_vocab // 32)
    logits = rng.standard_normal((5, n_vocab + 3)).astype(np.float32)
    given = rng.integers(-(2**31), 2**31, (3, 1 + words)).astype(np.int32)
    given[1, 1::2], given[2, 1::2] = -1, 0
    given[:, 0] = 4, 0, 2
    expected = logits.copy()
    for row, *mask in given.tolist():
        on_cpu.permit(expected[row, :n_vocab], np.array(mask, np.int32).view(np.uint32))
    run(permit(threads), (-(-words // threads), 3), threads, [logits, n_vocab + 3, n_vocab, given], seed=1)
    assert np.array_equal(logits.view(np.int32), expected.view(np.int32))


def test_parts_of_pinned_memory_take_turns() -> None:
    """A pass in flight still reads its own."""
    device: Any = SimulatedDevice()
    given = []
    device.launch = lambda kernel, grid, block, arguments: given.append((grid, device.at(arguments[3]).view(np.int32)))
    pinned = Masks(device, 70)
    for i in range(PARTS + 1):
        pinned.apply(
            0, 70, [(i, np.full(3, i, np.int32)), (i + 1, np.full(4, -i, np.int32))] if i else [(0, np.ones(3))]
        )
    pinned.apply(0, 70, [])
    assert [grid for grid, _ in given] == [(1, 1), *[(1, 2)] * PARTS]
    assert [part[:8].tolist() for _, part in given[1:]] == [[i] * 4 + [i + 1] + [-i] * 3 for i in range(1, PARTS + 1)]


class Masked(Tables):
    """Answers b and c have a grammar; b also has noise and changes of its logits."""

    def __init__(self, ops: Any, draft: Any = None) -> None:
        self.matchers: dict[int, Matcher] = {}
        super().__init__(ops, draft)

    def sampler(self, i: int) -> Sampler:
        pattern = GRAMMARS[i]
        params = SamplerParams(**(MASKED if i == 1 else SAMPLERS[i]))
        if pattern is None:
            return Sampler(params, N_VOCAB)
        self.matchers[i] = Matcher(Grammar.regex(pattern), letters(), len(PROMPTS[i]))
        return Sampler(params, N_VOCAB, self.matchers[i])


def test_answers_with_grammars_ride_with_others(ops: Any) -> None:
    """They are the answers of the host, which follow the grammars: with steps in flight, drafts of the host that the grammar
    permits, that it does not, and that are not chosen, and prompts that are read in between."""
    party = Masked(ops)
    text = letters().decode(party.alone["b"][len(PROMPTS[1]) :])
    assert regex.fullmatch(GRAMMARS[1], text, partial=True) and "," in text
    party.join("b")
    party.step(b="")
    party.start(b="")
    party.start(b="")
    party.take()
    party.read("a")
    party.start(b="")
    party.take()
    party.take()
    party.step(b="++")
    party.step(b="+-+")
    party.join("a")
    party.join("c")
    for _ in range(3):
        party.start(b="", a="", c="")
    for _ in range(3):
        party.take()
    party.step(a="+", b="++", c="+-")
    party.start(a="", c="")
    party.start(b="")
    party.take()
    party.take()
    party.leave(*NAMES)
    assert party.sizes == {"a": [1, 1, 1, 2, 1], "b": [1, 1, 1, 1, 3, 2, 1, 1, 1, 3, 1], "c": [1, 1, 1, 2, 1]}


def test_two_models_of_a_backend_take_turns(ops: Any) -> None:
    """Each has steps of its own, in flight at the same time, which share rows and results: what one has left is read before
    the other overwrites it."""
    party, other = Masked(ops), Masked(ops)
    for each in (party, other):
        each.join("b")
        each.join("c")
    party.start(b="")
    other.start(b="", c="")
    party.start(b="")
    other.start(b="", c="")
    for each in (party, other, party, other):
        each.take()
    for word in ("", "+-", ""):
        party.step(b=word)
        other.step(b=word, c=word)
    party.step(c="")
    other.leave("b", "c")
    party.leave("b", "c")
    assert party.sizes == {"a": [], "b": [1, 1, 1, 2, 1], "c": [1]}
    assert other.sizes == {"a": [], "b": [1, 1, 1, 2, 1], "c": [1, 1, 1, 2, 1]}


def test_an_answer_leaves_before_its_tokens_are_chosen(ops: Any) -> None:
    """Those of the others are chosen all the same, and nothing is written to its slot afterwards."""
    party = Masked(ops)
    for name in NAMES:
        party.join(name)
    party.start(a="", b="", c="")
    party.start(a="", b="", c="")
    party.abandon("b")
    party.join("b", n=2)
    party.take()
    party.take()
    party.step(b="", c="")
    party.start(b="")
    party.abandon("b")
    party.leave("a", "c")
    assert party.sizes == {"a": [1, 1], "b": [1], "c": [1, 1, 1]}


@pytest.mark.parametrize("draft", [own_layer, draft_model])
def test_beside_drafts_of_the_device(ops: Any, draft: Any) -> None:
    party = Masked(ops, draft)
    party.script("a", wrong=8)
    party.join("a")
    party.draft.script = None
    party.join("b")
    party.start(a=2, b=0)
    party.start(a=1, b=0)
    party.take()
    party.take()
    party.step(b="+")
    party.leave("a", "b")
    assert party.sizes["b"] == [1, 1, 2] and party.sizes["a"][0] == 3


def test_a_limit_that_only_drafts_reach(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is right is kept although the mask after it is missing; the answer goes on as if it had not been read."""
    party = Masked(ops)
    for name in "ab":
        party.join(name)
    ahead = party.matchers[1].ahead

    def limited(tokens: list[int]) -> Any:
        raise NoToken("a limit")

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "mask", limited)
        party.step(a="", b="+++")
        party.step(a="", b="++")
    party.start(a="", b="")
    party.start(a="", b="")
    party.take()
    party.take()
    party.leave("a", "b")
    assert party.sizes == {"a": [1] * 4, "b": [1, 1, 1, 1], "c": []}


def test_an_answer_that_fails_leaves_others_alone(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that cannot be followed any further, after a draft and at once: there are the tokens before that, and the
    reason."""
    party = Masked(ops)
    for name in NAMES:
        party.join(name)
    party.step(a="", b="", c="")

    def limit(matcher: Matcher, n: int) -> None:
        mask = matcher.mask

        def limited(tokens: list[int]) -> Any:
            if len(tokens) >= n:
                raise NoToken("a limit")
            return mask(tokens)

        monkeypatch.setattr(matcher, "mask", limited)

    for matcher, n in ((party.matchers[1], 4), (party.matchers[1].ahead, 4), (party.matchers[2], 3)):
        limit(matcher, n)
    runs = [party.runs[name] for name in NAMES]
    following = [party.alone[name][len(run.known) :] for name, run in zip(NAMES, runs, strict=True)]
    party.steps.start(
        [
            InFlightRequest(runs[0], Proposal()),
            InFlightRequest(runs[1], Proposal(following[1][:3])),
            InFlightRequest(runs[2], Proposal()),
        ]
    )
    first, second, third = party.steps.take()
    assert (first.tokens, first.error) == (following[0][:1], None)
    assert second.tokens == following[1][:1] and third.tokens == []
    assert str(second.error) == str(third.error) == "a limit"


def test_what_a_grammar_permits_is_banned(ops: Any) -> None:
    """The sentence is that of the host."""
    party = Masked(ops)
    party.join("b")
    run = party.runs["b"]
    bias = {token: -float("inf") for token in (*range(1, 7), letters().token_id("ab"))}
    run.sampler = Sampler(SamplerParams(temperature=0, logit_bias=bias), N_VOCAB, run.sampler.matcher)
    party.steps.begin(run)
    party.steps.start([InFlightRequest(run, Proposal())])
    (step,) = party.steps.take()
    assert step.tokens == [] and "bans every token that the grammar permits" in str(step.error)


@pytest.mark.parametrize("patience", [0.0, 9.0])
def test_masks_of_several_answers(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of each alone, also of one that has ended and one that cannot go on."""
    monkeypatch.setattr(masks, "PATIENCE", patience)
    rng, tk = np.random.default_rng(1), letters()
    texts = ["ab", "abc,1", "f", "bbbb,12,123,9", "zz"]
    asked, expected = [], []
    for i, text in enumerate(texts):
        tokens = [*PROMPTS[0], *tk.encode(text)]
        tokens += [0] * (i == 3)
        drafts = tk.encode(",7,") if i == 1 else []
        one, other = (
            Matcher(Grammar.regex(GRAMMARS[1] or ""), tk, len(PROMPTS[0]), ends_late=i == 2) for _ in range(2)
        )
        asked.append((one, tokens, drafts))
        expected.append(None if i == 4 else other.masks(tokens, drafts))
    for given in (asked, [asked[int(i)] for i in rng.permutation(5)]):
        results = masks.masks_of(given)  # type: ignore[arg-type]
        for each, found in zip(given, results, strict=True):
            wanted = expected[next(i for i, other in enumerate(asked) if other is each)]
            assert found.shape[0] == (0 if wanted is None else 1 + len(each[2]))
            assert wanted is None or np.array_equal(found, wanted)
