"""Tokens that begin with a text: the same as those found by decoding every token."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from tests.vocabularies import BYTE, CONTROL, NORMAL, UNUSED, USER, bpe_metadata, made, metadata, spm_metadata
from tests.vocabularies import tokenizer as read

FILES = ["bundled", "smollm2-135m", "gemma3-270m", "pycoder-gemma4-Q4_K_M.gguf", "pycoder-hybrid-mtp-Q4_K_M.gguf"]

# Blanks as they are, as SentencePiece and as GPT-2's alphabet write them; bytes by name, in both spellings; characters
# of two to four bytes; control characters; what GPT-2's alphabet has no symbol for.
SYMBOLS = (*" \u2581ĠĊ\n\xad\x7fab", *"éÃ©日\u0144\u0143🙂", "<0x0A>", "<0x0a>", "<|", "Ã", "<0x61>")
texts = st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=4).map("".join)
kinds = st.sampled_from((NORMAL, USER, CONTROL, UNUSED, 0))


def decoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The definition."""
    return [i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i).startswith(text.encode())]


@cache
def tiny(name: str) -> Tokenizer:
    special = {"\u2581a": USER, " a": USER, "\n\n": USER, "<|end|>": CONTROL, "[PAD]": UNUSED} | {"é b": NORMAL}
    if name == "gpt2":
        return made(bpe_metadata(["Ġ a", "Ġa b", "Ã ©", "Ċ Ċ"], special))
    if name == "llama":
        scores = {"\u2581": -1.0, "\u2581\u2581": -2.0, "\u2581a ": -3.0, "a\u2581": -4.0, "é": -5.0, "\n": -6.0}
        return made(spm_metadata(scores, special))
    tokens = {"\u2581": NORMAL, "\u2581\u2581": USER, "A": NORMAL, "": NORMAL}
    tokens |= dict.fromkeys(("<0x0A>", "<0x0a>", "<0x41>", "<0xC3>"), BYTE)
    return made(metadata("gemma4", tokens | special, merges=[], bos_token_id=0))


@pytest.mark.parametrize("name", FILES)
def test_tokens_of_a_model(name: str) -> None:
    tokenizer = read(name)
    some = [" ", "\n", "\n\n", ":", "é", "日", "\u2581", " the", "<", "<0x", "\x00", "<eos>", "no token has this"]
    for id in range(7, tokenizer.n_vocab, tokenizer.n_vocab // 10):
        some.append(tokenizer.token_bytes(id).decode(errors="ignore") or "x")
    for text in some:
        assert tokenizer.beginning_with(text).tolist() == decoded(tokenizer, text), text
    assert tokenizer.beginning_with(" ").size > 100


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma4"])
@given(texts)
def test_ways_of_storing_a_text(name: str, text: str) -> None:
    assert tiny(name).beginning_with(text).tolist() == decoded(tiny(name), text)


@pytest.mark.parametrize("model", ["gpt2", "gemma4"])
@given(st.dictionaries(texts, kinds, min_size=1), texts)
def test_random_vocabularies(model: str, tokens: dict[str, int], text: str) -> None:
    tokenizer = made(metadata(model, tokens, merges=[], bos_token_id=0))
    for start in (text, text[0], *tokens):
        assert tokenizer.beginning_with(start).tolist() == decoded(tokenizer, start)


def test_byte_tokens() -> None:
    tokenizer = tiny("gemma4")
    assert [tokenizer.vocabulary.tokens[id] for id in tokenizer.beginning_with("\n")] == ["<0x0A>", "<0x0a>", "\n\n"]
    assert [tokenizer.vocabulary.tokens[id] for id in tokenizer.beginning_with("A")] == ["A", "<0x41>"]
    # The first byte of a character is no text.
    assert [tokenizer.vocabulary.tokens[id] for id in tokenizer.beginning_with("é")] == ["é b"]
