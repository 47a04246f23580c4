"""WordPiece, against BERT's tokenizer as ``tokenizers`` builds it from a vocabulary of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

from engine.errors import TokenizerError
from engine.text.bound import LONG
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import TokenType
from engine.text.wordpiece import LONGEST, PART, WordBound

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

PIECES = (
    *SPECIAL,
    *(
        "a",
        "b",
        "c",
        "the",
        "cat",
        "un",
        "able",
        "##able",
        "##ed",
        "##s",
        "##a",
        "##b",
        "##c",
        "##t",
        "e",
        "##e",
        "A",
        "É",
    ),
    *(
        ",",
        ".",
        "!",
        "'",
        "-",
        "[",
        "]",
        "sep",
        "1",
        "##2",
        "##3",
        "é",
        "ß",
        "日",
        "本",
        "##日",
        "#",
        "##!",
        "▁",
        "##▁",
    ),
)


class File:
    """The metadata of a file of a vocabulary, as llama.cpp's conversion writes it."""

    path = Path("bert.gguf")

    def __init__(self, **keys: Any) -> None:
        kinds = [TokenType.CONTROL if piece in SPECIAL else TokenType.NORMAL for piece in PIECES]
        stored = [p if p in SPECIAL else p[2:] if p.startswith("##") else "▁" + p for p in PIECES]
        given: dict[str, Any] = {
            "model": "bert",
            "pre": "jina-v2-en",
            "tokens": stored,
            "token_type": np.array(kinds, np.int32),
            "unknown_token_id": 1,
            "bos_token_id": 2,
            "seperator_token_id": 3,
            "padding_token_id": 0,
            **{name.replace("__", "."): value for name, value in keys.items()},
        }
        self.metadata = {f"tokenizer.ggml.{name}": value for name, value in given.items() if value is not None}


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_gguf(File())


def reference(lowercase: bool = True, strip_accents: bool | None = None) -> Any:
    vocab = {piece: id for id, piece in enumerate(PIECES)}
    return BertWordPieceTokenizer(vocab, lowercase=lowercase, strip_accents=strip_accents)


CHARACTERS = st.text(
    st.one_of(
        st.sampled_from("abcteABÉé,.!'-[]123 \t\n\u0301ßẞ日本#▁\u200b\x00\x0b\u00a0\u3000"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


@given(CHARACTERS)
def test_ids_are_those_of_the_library(ours: Tokenizer, text: str) -> None:
    expected = reference().encode(text, add_special_tokens=False).ids
    special = {PIECES.index(piece) for piece in SPECIAL} - {1}
    if not special & set(expected):  # the library recognizes control tokens in a text, and we do not
        assert ours.encode(text) == [2, *expected, 3]


@pytest.mark.parametrize(("lowercase", "strip"), [(False, None), (True, False), (False, True)])
def test_case_and_accents_are_kept_if_the_file_says_so(lowercase: bool, strip: bool | None) -> None:
    own = Tokenizer.from_gguf(File(normalizer__lowercase=lowercase, normalizer__strip_accents=strip))
    for text in ("É é A a", "e\u0301", "The cat"):
        assert (
            own.encode(text, add_special=False)
            == reference(lowercase, strip).encode(text, add_special_tokens=False).ids
        )


def test_control_tokens_are_text_unless_the_text_is_trusted(ours: Tokenizer) -> None:
    pieces = [PIECES[id] for id in ours.encode("[SEP]a", add_special=False)]
    assert pieces == ["[", "sep", "]", "a"]
    assert ours.encode("[SEP]a", add_special=False, parse_special=True) == [3, PIECES.index("a")]


def test_a_text_comes_back_in_lower_case(ours: Tokenizer) -> None:
    assert ours.decode(ours.encode("The cats, unable")) == "the cats , unable"
    assert ours.pair("a", "b") == [2, PIECES.index("a"), 3, PIECES.index("b"), 3]


def test_long_texts_are_encoded_in_parts(ours: Tokenizer) -> None:
    text = "the cats, " * (PART // 5)
    assert ours.encode(text) == [2, *reference().encode(text, add_special_tokens=False).ids, 3]
    assert ours.encode("a" * LONGEST, add_special=False) != [1] == ours.encode("a" * (LONGEST + 1), add_special=False)
    found: list[int] = []
    ours.encode("ab \x0b c! " * LONG, at_least=found.append)
    assert found == [2 * LONG]


@given(CHARACTERS)
def test_a_text_has_at_least_as_many_tokens(ours: Tokenizer, text: str) -> None:
    assert WordBound().least(text) <= len(ours.encode(text, add_special=False))


def test_a_vocabulary_without_the_token_for_unknown_words() -> None:
    with pytest.raises(TokenizerError, match="unknown_token_id is missing, and WordPiece needs it"):
        Tokenizer.from_gguf(File(unknown_token_id=None))
