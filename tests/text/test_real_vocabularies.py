"""Vocabularies of real models against the libraries that their makers use, on text in 36 scripts.

The vocabularies are those in the package ``mistral-common``: Tekken, which ``tiktoken`` executes, and SentencePiece models.
Without the packages the tests are skipped.
"""

import base64
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from engine.text.bpe import byte_alphabet
from engine.text.tokenizer import Tokenizer
from tests.text.test_pre_tokenizers import BLOCKS, CORPUS
from tests.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, made, metadata

pytestmark = pytest.mark.thorough


def data(name: str) -> Path:
    spec = find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.skip("mistral-common is not installed")
    return Path(spec.origin).parent / "data" / name


def merged(tokens: Sequence[bytes], pre: str) -> Tokenizer:
    """A vocabulary by rank, with the rule that makes each token: the one of the two parts that better rules leave of it."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    alphabet = byte_alphabet()
    texts = ["".join(alphabet[byte] for byte in token) for token in tokens]
    merges = []
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            at = joined.index(min(joined))
            assert joined[at] < rank
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(" ".join(texts[ranks[part]] for part in parts))
    return made(metadata("gpt2", dict.fromkeys(texts, NORMAL), merges=merges, pre=pre, add_bos_token=False))


def test_tekken() -> None:
    tiktoken: Any = pytest.importorskip("tiktoken")
    values = json.loads(data("tekken_240911.json").read_text(encoding="utf-8"))
    config = values["config"]
    entries = values["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    ours = merged(tokens, "tekken")
    for text in (*BLOCKS, CORPUS):
        ids = ours.encode(text)
        assert ids == theirs.encode_ordinary(text)
        assert ours.decode(ids) == text


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece(name: str) -> None:
    theirs = SentencePieceProcessor()
    theirs.Load(str(data(name)))
    kinds = (
        (theirs.is_unknown, UNKNOWN),
        (theirs.is_control, CONTROL),
        (theirs.is_byte, BYTE),
        (theirs.is_unused, UNUSED),
    )
    ids = range(theirs.vocab_size())
    tokens = {theirs.id_to_piece(id): next((kind for test, kind in kinds if test(id)), NORMAL) for id in ids}
    scores = np.array([theirs.get_score(id) for id in ids], np.float32)
    ours = made(metadata("llama", tokens, scores=scores, add_bos_token=False))
    for text in (*BLOCKS, CORPUS):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
