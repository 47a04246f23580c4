"""Sequence breakers as token ids, against the texts of all tokens and of random token sequences."""

import numpy as np
import pytest

import engine
from engine.errors import UsageError
from engine.text.breakers import BREAKERS, breaker_ids
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return engine.load(device="cpu", n_ctx=64).tokenizer


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, special=True)


def test_single_characters_are_tokens_that_contain_one(tokenizer: Tokenizer) -> None:
    ids = breaker_ids(tokenizer, BREAKERS)
    assert all(len(tokens) == 1 for tokens in ids)
    contained = [i for i in range(tokenizer.n_vocab) if set(text_of(tokenizer, [i])) & set(BREAKERS)]
    assert [tokens[0] for tokens in ids] == contained
    assert tokenizer.token_id("<|endoftext|>") not in contained
    assert len(contained) > 100
    assert breaker_ids(tokenizer, BREAKERS) == ids
    assert breaker_ids(tokenizer, []) == ()


@pytest.mark.parametrize("text", ["return", "):\n", "self.", "é", "\n\n", " naïve", "in range(", "<|endoftext|>"])
def test_every_sequence_spells_the_breaker(tokenizer: Tokenizer, text: str) -> None:
    ids = breaker_ids(tokenizer, [text])
    assert ids and len(set(ids)) == len(ids)
    for tokens in ids:
        assert text in text_of(tokenizer, list(tokens))
        assert text not in text_of(tokenizer, list(tokens[:-1]))
        assert text not in text_of(tokenizer, list(tokens[1:]))


@pytest.mark.parametrize("text", ["return", "):\n", "in range(10)", "naïve", "é", "日本"])
def test_a_breaker_is_found_in_text(tokenizer: Tokenizer, text: str) -> None:
    """However the tokenizer cuts the text around it."""
    ids = breaker_ids(tokenizer, [text])
    rng = np.random.default_rng(1)
    pieces = ["    ", "x", "for i ", "(", "a", "foo", "\n", " ", "ad"]
    for _ in range(50):
        around = ["".join(rng.choice(pieces, 3)) for _ in range(2)]
        tokens = tuple(tokenizer.encode(around[0] + text + around[1]))
        whole = any(tokens[i : i + len(b)] == b for b in ids for i in range(len(tokens)))
        # What follows may be joined with the end of the breaker to one token; llama.cpp does not find these either.
        spelled = [tokens[i:j] for i in range(len(tokens)) for j in range(i, len(tokens) + 1)]
        ends = any(text_of(tokenizer, list(part)).endswith(text) for part in spelled)
        assert whole or not ends


def test_several_texts(tokenizer: Tokenizer) -> None:
    both = breaker_ids(tokenizer, ["return", ":"])
    assert set(both) == set(breaker_ids(tokenizer, ["return"])) | set(breaker_ids(tokenizer, [":"]))


@pytest.mark.parametrize("texts", ["abc", [""], [1], 5, None, ["a", ""]])
def test_texts_are_checked(tokenizer: Tokenizer, texts: object) -> None:
    with pytest.raises(UsageError, match="dry_sequence_breakers must be a list of texts that are not empty"):
        breaker_ids(tokenizer, texts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"), [("x" * 41, "at most 40 characters long, not a text of 41"), ("a\ud800", "lone surrogate")]
)
def test_texts_that_are_too_long_or_no_text(tokenizer: Tokenizer, text: str, said: str) -> None:
    assert breaker_ids(tokenizer, ["x" * 40])
    with pytest.raises(UsageError, match=said) as caught:
        breaker_ids(tokenizer, [text])
    assert str(caught.value).isprintable()
