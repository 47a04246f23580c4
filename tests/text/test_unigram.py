"""Unigram vocabularies, against models that ``sentencepiece`` trains, and against ``tokenizers`` with the same pieces."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from engine.errors import TokenizerError
from engine.text.bound import LONG
from engine.text.charsmap import Charsmap
from engine.text.spm import SPACE
from engine.text.tokenizer import Tokenizer
from engine.text.unigram import PART, UnigramBound
from engine.text.vocabulary import TokenType

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
CORPUS = [
    "the cats sat on the mat, unable to see the others",
    "another cat, other mats: and then the end of it all",
    "café naïve Ångström, eine Straße in Köln; 123 and 45",
    "日本語のテキスト ｶﾀｶﾅ １２３ ①②",
]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message of a protocol buffer: their numbers and values."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            n = 4 if key & 7 == 5 else varint()
            yield key >> 3, data[at : at + n]
            at += n


class Trained:
    """A model that ``sentencepiece`` trains."""

    def __init__(self, **options: Any) -> None:
        out = io.BytesIO()
        given: dict[str, Any] = {
            "vocab_size": 120,
            "model_type": "unigram",
            "hard_vocab_limit": False,
            "minloglevel": 2,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20), model_writer=out, **given, **options
        )
        self.proto = out.getvalue()
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
        pieces = [dict(fields(value)) for number, value in fields(self.proto) if number == 1]
        self.pieces = [(piece[1].decode(), float(np.frombuffer(piece[2], "<f4")[0])) for piece in pieces]
        spec = dict(fields(next(value for number, value in fields(self.proto) if number == 3)))
        self.charsmap: bytes = spec.get(2, b"")

    def ids(self, text: str) -> list[int]:
        """The ids of a text in the order of a file, as XLM-RoBERTa has it."""
        return [id + 1 if id else 3 for id in self.processor.encode(text)]

    def file(self, **keys: Any) -> Any:
        """The metadata of a file of the vocabulary, as llama.cpp's conversion writes it."""
        own = self.pieces[3:]
        given: dict[str, Any] = {
            "model": "t5",
            "pre": "default",
            "tokens": [*SPECIAL, *(text for text, _ in own), "[PAD9]"],
            "scores": np.array([0.0] * 4 + [score for _, score in own] + [-10000.0], np.float32),
            "token_type": np.array([3, 3, 3, 2] + [1] * len(own) + [5], np.int32),
            "add_space_prefix": True,
            "remove_extra_whitespaces": True,
            "precompiled_charsmap": np.frombuffer(self.charsmap, np.uint8) if self.charsmap else None,
            "bos_token_id": 0,
            "padding_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 3,
            "seperator_token_id": 2,
            "add_bos_token": True,
            "add_eos_token": True,
            **keys,
        }
        found = type("File", (), {})()
        found.path = Path("xlm-r.gguf")
        found.metadata = {f"tokenizer.ggml.{name}": value for name, value in given.items() if value is not None}
        return found


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@pytest.fixture(scope="module")
def ours(trained: Trained) -> Tokenizer:
    return Tokenizer.from_gguf(trained.file())


USUAL = "acehinorstu ACEé,;:.123 \t\n"
CHARACTERS = st.text(
    st.one_of(
        st.sampled_from(USUAL + "éß\u0301\u0308Åａ１ﬁ①ｶﾞ日本語\u00a0\u3000\u200b\u2581각\u1100\u1161\x00\x0b"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


def same(trained: Trained, found: list[int], expected: list[int]) -> bool:
    """Whether these ids are equal, or are as likely: sums of float32 may order such spellings in another way."""
    scores = np.array([0.0] * 4 + [score for _, score in trained.pieces[3:]])
    return found == expected or abs(scores[found].sum() - scores[expected].sum()) < 1e-4 * len(expected)


@given(CHARACTERS)
def test_ids_are_those_of_sentencepiece(trained: Trained, ours: Tokenizer, text: str) -> None:
    found = ours.encode(text)
    assert found[0] == 0 and found[-1] == 2
    assert same(trained, found[1:-1], trained.ids(text))


@given(st.text(st.sampled_from(USUAL + "xyzß日語"), max_size=80))
def test_ids_are_those_of_tokenizers(trained: Trained, ours: Tokenizer, text: str) -> None:
    """As ``transformers`` builds the tokenizer of XLM-RoBERTa."""
    library = Library(models.Unigram([*((text, 0.0) for text in SPECIAL), *trained.pieces[3:]], 3, False))
    library.normalizer = normalizers.Precompiled(trained.charsmap)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    expected = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False) == expected


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
        ({"remove_extra_whitespaces": False}, {"remove_extra_whitespaces": False}),
        ({"normalization_rule_name": "identity", "split_by_whitespace": False}, {}),
        ({"normalization_rule_name": "nfkc_cf"}, {}),
    ],
)
def test_other_normalizations(options: dict[str, Any], keys: dict[str, Any]) -> None:
    """Where pieces contain blanks, texts are not cut at them."""
    trained = Trained(**options)
    own = Tokenizer.from_gguf(trained.file(**keys))
    for text in (
        "  the  cats,\tunable ",
        "Äé ｶﾞ①",
        "",
        " ",
        "the end of it all and then",
        "ﬁ e\u0301 x\u00a0y",
        "$ the $",
    ):
        assert same(trained, own.encode(text, add_special=False), trained.ids(text)), text


@given(CHARACTERS)
def test_characters_are_mapped_as_by_sentencepiece(trained: Trained, text: str) -> None:
    mapped = " ".join(filter(None, Charsmap(trained.charsmap).apply(text).split(" ")))
    expected = trained.processor.Normalize(text)
    assert (SPACE + mapped.replace(" ", SPACE) if mapped else "") == expected


def test_control_tokens_are_text_unless_the_text_is_trusted(ours: Tokenizer) -> None:
    assert 2 not in ours.encode("</s>a", add_special=False)
    assert ours.encode("</s>a", add_special=False, parse_special=True)[0] == 2


def test_a_text_comes_back_normalized(ours: Tokenizer) -> None:
    assert ours.decode(ours.encode("  the ｃats,  unable ")) == "the cats, unable"
    a, b = (ours.encode(text, add_special=False) for text in ("the cat", "mats"))
    assert ours.pair("the cat", "mats") == [0, *a, 2, 2, *b, 2]


def test_the_token_between_two_texts(trained: Trained) -> None:
    """llama.cpp adds it if the file says so; older files do not say it."""
    for keys, between in (({"add_sep_token": False}, [2]), ({"add_sep_token": True}, [2, 2]), ({}, [2, 2])):
        own = Tokenizer.from_gguf(trained.file(**keys))
        a, b = (own.encode(text, add_special=False) for text in ("a", "b"))
        assert own.pair("a", "b") == [0, *a, *between, *b, 2]


def test_long_texts_are_encoded_in_parts(trained: Trained, ours: Tokenizer) -> None:
    text = "the cats, unable " * (PART // 8)
    part = ours.encode("the cats, unable", add_special=False)
    assert ours.encode(text, add_special=False) == part * (PART // 8)
    found: list[int] = []
    ours.encode("ab \x0b c! " * LONG, at_least=found.append)
    assert found == [2 * LONG]
    assert ours.working_bytes(text) > len(text)


@given(CHARACTERS)
def test_a_text_has_at_least_as_many_tokens(ours: Tokenizer, text: str) -> None:
    assert UnigramBound(True).least(text) <= len(ours.encode(text, add_special=False))
    assert UnigramBound(False).least(text) == 0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scores": None}, "scores is missing: without it SentencePiece cannot choose pieces"),
        ({"precompiled_charsmap": np.zeros(3, np.uint8)}, "precompiled_charsmap has 3 bytes, of which 0 are its array"),
        ({"precompiled_charsmap": np.full(9, 300)}, "precompiled_charsmap must be an array of bytes"),
        (
            {
                "tokens": ["a", "b"],
                "scores": np.zeros(2, np.float32),
                "token_type": None,
                **dict.fromkeys(("bos_token_id", "padding_token_id", "eos_token_id", "unknown_token_id")),
            },
            "unknown_token_id is missing, and a unigram model needs it",
        ),
        (
            {"tokens": list("abc"), "scores": np.zeros(3, np.float32), "token_type": np.full(3, 5, np.int32)},
            "token_type calls no token a normal one, so no text can be spelled",
        ),
        ({"token_type": None}, ""),
    ],
)
def test_damaged_vocabularies(trained: Trained, keys: dict[str, Any], words: str) -> None:
    file = trained.file(**keys)
    if not words:  # all tokens are normal
        assert Tokenizer.from_gguf(file).encode("the cat")
        return
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_gguf(file)


@given(st.binary(min_size=9, max_size=200), CHARACTERS)
def test_a_damaged_map_ends_no_process(data: bytes, text: str) -> None:
    size = (len(data) - 5) // 4 * 4
    assert isinstance(Charsmap(size.to_bytes(4, "little") + data[4:]).apply(text), str)


def test_unused_tokens_are_never_spelled(ours: Tokenizer) -> None:
    assert ours.token_type(ours.n_vocab - 1) == TokenType.UNUSED
    assert ours.n_vocab - 1 not in ours.encode("[PAD9]")
