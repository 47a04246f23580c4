"""How few tokens a text can have, against its tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.bound import LONG, Bound
from engine.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import GEMMA4, texts
from tests.vocabularies import CONTROL, NORMAL, UNUSED, USER, bpe_metadata, made, metadata, spm_metadata, tokenizer


def without_a_byte() -> dict[str, Any]:
    """A vocabulary that cannot express "!"."""
    values = bpe_metadata(["a b"])
    at = values["tokenizer.ggml.tokens"].index("!")
    del values["tokenizer.ggml.tokens"][at]
    values["tokenizer.ggml.token_type"] = np.delete(values["tokenizer.ggml.token_type"], at)
    return values


MARKS = {"<|a b|>": CONTROL, "<tool>": USER, "\u2581\u2581 ": USER, "!!!!": USER, "éé": USER}
PHI3 = {"general.architecture": "phi3"}
TINY: dict[str, dict[str, Any]] = {
    "bytes": bpe_metadata(["a b", "ab ab", "Ġ Ġ", "ĠĠ Ġ"], MARKS),
    "a token that is not used": bpe_metadata(["Ġ a", "Ġa Ġa"]),
    "a byte without a token": without_a_byte(),
    "pieces": spm_metadata(dict.fromkeys(["\u2581", "a", "b", "ab", "\u2581\u2581", "\u2581ab"], -1.0), MARKS),
    "no blank": spm_metadata({"a": -1.0, "aa": -2.0}, MARKS, add_space_prefix=False),
    "no blank after a tag": PHI3 | spm_metadata({"\u2581": -1.0, "a": -1.0}, {"<|a|>": CONTROL, "<b>": USER}),
    "no bytes": metadata("llama", {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "a": NORMAL}, scores=np.zeros(4)),
}
TINY["a token that is not used"]["tokenizer.ggml.token_type"][-1] = UNUSED
NAMES = ["bundled", "smollm2-135m", "gemma3-270m", GEMMA4]

PIECES = ("<|a b|>", "<tool>", "<|a|>", "<b>", "<b>      ", "\u2581", " ", "  ", "a", "ab", "!", "!!!!", "\n", "é", "Ġ")
pieces = st.sampled_from(PIECES)
runs = st.builds(lambda text, n: text * n, st.lists(pieces, min_size=1, max_size=3).map("".join), st.integers(1, 9))
many = st.lists(runs | texts, max_size=8).map("".join)


def opened(name: str) -> Tokenizer:
    return made(TINY[name]) if name in TINY else tokenizer(name)


@pytest.mark.parametrize("name", [*TINY, *NAMES])
def test_no_text_has_fewer_tokens(name: str) -> None:
    tok = opened(name)
    bound = Bound(tok.vocabulary)

    @settings(max_examples=150, deadline=None)
    @given(many, st.booleans())
    def check(text: str, special: bool) -> None:
        assert bound.least(text) <= len(tok.encode(text, add_special=False, parse_special=special))

    check()


@pytest.mark.parametrize("name", [*TINY, *NAMES])
def test_the_texts_of_tokens_have_no_fewer(name: str) -> None:
    tok = opened(name)
    bound = Bound(tok.vocabulary)
    for id in range(0, tok.n_vocab, 29 if name in NAMES else 1):
        for text in (tok.decode([id], special=True) * 3, tok.vocabulary.tokens[id] * 3):
            assert bound.least(text) <= len(tok.encode(text, add_special=False, parse_special=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["def add(a, b):\n    return a + b\n", "The cat sat on the mat. ", "x", "日本語", "🙂"]
)
def test_a_long_text_is_known_to_be_long(name: str, text: str) -> None:
    tok = tokenizer(name)
    long = text * (LONG // len(text) + 1)
    told: list[int] = []
    ids = tok.encode(long, at_least=told.append)
    assert len(told) == 1
    assert len(ids) / 40 <= told[0] <= len(ids)
    assert ids == tok.encode(long)
    # A short one is not looked at.
    tok.encode(text, at_least=told.append)
    assert len(told) == 1
