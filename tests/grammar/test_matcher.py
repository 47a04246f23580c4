"""Matchers: which tokens they permit, compared with partial matches of the package ``regex``, and going back."""

import json
import math
from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NoToken, UsageError
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import UNSETTLED, Mask, Matcher
from engine.grammar.tokens import tokens_of
from engine.sampling.sampler import Sampler, SamplerParams
from engine.text.tokenizer import Tokenizer
from tests.tiers import examples
from tests.vocabularies import CONTROL, USER, bpe_metadata, made, metadata, spm_metadata, tokenizer

pytest.importorskip("llguidance", reason="grammars need the extra serve")

PROMPT = [5, 6, 7]

PATTERNS = [
    r"[a-c]{2,5}",
    r"(ab|abc)*d?",
    r"-?[0-9]+(\.[0-9]{1,3})?",
    r"(?i)yes|no|n/a",
    r"[^x]*",
    r"\d{4}-\d\d( to é+)?",
]


@cache
def grammar(pattern: str) -> Grammar:
    return Grammar.regex(pattern)


@cache
def small() -> Tokenizer:
    """All bytes and a few longer tokens, with special tokens that look like text."""
    merges = ["a b", "ab c", "1 2", "- 1", "ab ab", "Ġ t", "Ã ©", "e s", "y es", "n o"]
    special = {"<|end|>": CONTROL, "<abc>": USER, "user text": USER, "<|other|>": CONTROL}
    return made(bpe_metadata(merges, special, eos_token_id=256 + len(merges)))


def bits(mask: Mask, n_vocab: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:n_vocab]).tolist()


def is_beginning(pattern: str, text: str) -> bool:
    """Whether a text is the beginning of a match."""
    return regex.fullmatch(pattern, text, partial=True) is not None


@examples(30)
@given(st.sampled_from(PATTERNS), st.randoms(use_true_random=False))
def test_a_token_is_permitted_if_its_text_is(pattern: str, random: Random) -> None:
    tk, text = small(), ""
    matcher, tokens = Matcher(grammar(pattern), tk, len(PROMPT)), list(PROMPT)
    # The bytes of a character that is not whole are no text.
    texts = {id: tk.decode([id]) for id in range(tk.n_vocab)}
    texts = {id: found for id, found in texts.items() if found and "\ufffd" not in found}
    special = {tk.token_id("<abc>")}
    for _ in range(8):
        found = set(bits(matcher.mask(tokens), tk.n_vocab))
        assert found & tk.eog_ids == (tk.eog_ids if regex.fullmatch(pattern, text) else set())
        expected = {id for id, more in texts.items() if id not in special and is_beginning(pattern, text + more)}
        assert found & texts.keys() == expected
        if not expected:
            break
        tokens.append(random.choice(sorted(expected)))
        text += texts[tokens[-1]]


def walk(matcher: Matcher, n: int, seed: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """A prompt and up to n random tokens that the matcher permits."""
    rng, tokens = np.random.default_rng(seed), list(prompt)
    ends = set(matcher._tokens.ends)
    for _ in range(n):
        choices = [id for id in bits(matcher.mask(tokens), 32 * matcher._tokens.words) if id not in ends]
        if not choices:
            break
        tokens.append(int(rng.choice(choices)))
    return tokens


OBJECTS = Grammar.json_schema({"type": "array", "items": {"type": "object"}, "minItems": 3})


@examples(20)
@given(
    st.integers(0, 1 << 20),
    st.lists(st.tuples(st.integers(0, UNSETTLED - 1), st.integers(0, UNSETTLED - 1)), max_size=8),
)
def test_going_back_leaves_no_trace(seed: int, moves: list[tuple[int, int]]) -> None:
    """Drafts that other tokens replace change nothing, however far back."""
    tk = tokenizer("bundled")
    matcher = Matcher(OBJECTS, tk, len(PROMPT))
    known = walk(matcher, 20, seed)
    for i, (back, drafts) in enumerate(moves):
        other = walk(matcher, drafts, seed + i, known)
        assert matcher.mask(other) is matcher.mask(other)
        fresh = Matcher(OBJECTS, tk, len(PROMPT))
        known = other[: max(len(known), len(other) - back)]
        for tokens in (known, other, known):
            assert np.array_equal(matcher.mask(tokens), fresh.mask(tokens))


def test_masks_of_drafts_are_those_of_the_texts() -> None:
    tk = tokenizer("bundled")
    one, matcher, fresh = (Matcher(OBJECTS, tk, len(PROMPT)) for _ in range(3))
    whole = walk(one, 30, 3)
    known, drafts = whole[:25], whole[25:]
    masks = matcher.masks(known, [*drafts, 0, 0])  # token 0 ends the answer, which is not complete
    assert masks.dtype == np.int32 and masks.shape == (1 + len(drafts), tk.n_vocab // 32)
    for i, mask in enumerate(masks):
        assert np.array_equal(mask, fresh.mask(whole[: 25 + i]))
    assert matcher.masks(known, []).shape[0] == 1
    wrong = next(id for id in range(3, tk.n_vocab) if id not in bits(masks[2], tk.n_vocab))
    assert matcher.masks(known, [*drafts[:2], wrong, *drafts[2:]]).shape[0] == 3
    assert matcher.ahead.permitted(known, [*drafts[:2], wrong]) == 2
    with pytest.raises(NoToken, match="does not follow the grammar"):
        matcher.mask([*known, *drafts[:2], wrong])


def test_an_answer_that_is_complete_ends() -> None:
    tk = small()
    (end,) = tk.eog_ids
    a, b = (tk.encode(text)[0] for text in "ab")
    matcher = Matcher(Grammar.regex("ab?"), tk, 3)
    late = Matcher(Grammar.regex("ab?"), tk, 3, ends_late=True)
    assert bits(matcher.mask([*PROMPT, a]), tk.n_vocab) == sorted([b, end])
    assert bits(late.mask([*PROMPT, a]), tk.n_vocab) == [b]
    for each in (matcher, late):
        assert bits(each.mask([*PROMPT, a, b]), tk.n_vocab) == [end]
        assert bits(each.mask([*PROMPT, a, b, end, a]), tk.n_vocab) == [end]
        assert bits(each.mask([*PROMPT, a, end]), tk.n_vocab) == [end]
        assert each.permitted([*PROMPT, a], [b, end, a]) == 2
        assert each.permitted([*PROMPT, a, b], [end, a]) == 1
        assert each.permitted([*PROMPT, a, b], [a]) == each.permitted([*PROMPT, a, b], []) == 0
        assert each.permitted([*PROMPT, a, end], [b]) == 0


def test_special_tokens_only_where_they_are_named() -> None:
    tk = small()
    mark, other, user = (tk.token_id(text) for text in ("<abc>", "<|other|>", "user text"))
    anything = bits(Matcher(Grammar.regex("(?s:.*)"), tk, 0).mask([]), tk.n_vocab)
    assert user in anything and mark not in anything and other not in anything
    named = Matcher(Grammar.lark('start: <abc> "x" <|other|>'), tk, 0)
    assert bits(named.mask([]), tk.n_vocab) == [mark]
    assert mark is not None
    assert bits(named.mask([mark, *tk.encode("x")]), tk.n_vocab) == [other]


def test_pieces_of_sentencepiece() -> None:
    tk = made(spm_metadata({"▁": -1.0, "▁yes": -2.0, "yes": -3.0, "y": -4.0}))
    found = bits(Matcher(Grammar.regex(" ?yes"), tk, 0).mask([]), tk.n_vocab)
    assert [tk.vocabulary.tokens[id] for id in found] == ["<0x20>", "<0x79>", "▁", "▁yes", "yes", "y"]


def test_a_model_whose_answers_never_end_is_refused() -> None:
    tk = made(metadata("gpt2", {"a": 1, "b": 1}, merges=[], pre="gpt-2"))
    with pytest.raises(UsageError, match="no token that ends an answer, which a grammar needs"):
        Matcher(Grammar.regex("a"), tk, 0)


def test_tokens_are_prepared_once_and_forgotten_with_their_tokenizer() -> None:
    from engine.grammar import tokens

    tk = made(bpe_metadata([], {"<|end|>": CONTROL}, eos_token_id=256))
    found = tokens_of(tk)
    assert tokens_of(tk) is found
    n = len(tokens._TOKENS)
    del tk
    assert len(tokens._TOKENS) == n - 1


# --- sampling --------------------------------------------------------------------------------------------------


def test_the_mask_comes_after_processors_and_before_everything_else() -> None:
    tk = small()
    a, b, c = (tk.encode(text)[0] for text in "abc")
    matcher = Matcher(Grammar.regex("[ab]+"), tk, 0)

    def prefers_c(ids: Sequence[int], logits: np.ndarray) -> None:
        logits[:] = 0
        logits[c] = 100

    params = SamplerParams(1.0, 0, 1, 0, logits_processors=[prefers_c], logit_bias={b: 3}, repeat_penalty=2, seed=1)
    sampler = Sampler(params, tk.n_vocab, matcher)
    ids, values = sampler.candidates(np.zeros(tk.n_vocab, np.float32), [b])
    left = {int(id): float(value) for id, value in zip(ids, values, strict=True) if value > -math.inf}
    ab = {id for id in range(tk.n_vocab) if set(tk.token_bytes(id)) <= {97, 98} and tk.token_bytes(id)}
    assert left == dict.fromkeys(ab | tk.eog_ids, 0.0) | {b: 1.5}
    for temperature in (0.0, 1.0):
        banned = SamplerParams(temperature, logit_bias=dict.fromkeys({*ab, *tk.eog_ids}, -math.inf), seed=1)
        with pytest.raises(NoToken, match="bans every token that the grammar permits"):
            Sampler(banned, tk.n_vocab, matcher).sample(np.zeros(tk.n_vocab, np.float32), 0, [])


def test_a_grammar_of_json_is_written_as_json_dumps_does() -> None:
    tk = tokenizer("bundled")
    value = {"a": [1, 2.5, None, True], "b": {"c": 'd é " \n'}, "e": []}
    text = json.dumps(value, ensure_ascii=False)
    matcher = Matcher(Grammar.json_schema({"type": "object"}), tk, 0)
    for written, n in ((text, len(tk.encode(text))), (json.dumps(value, separators=(",", ":")), 0)):
        ids = tk.encode(written)
        found = matcher.permitted([], ids)
        assert found == n if n else found < len(ids)
