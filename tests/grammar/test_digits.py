"""Numbers in JSON have a bounded number of digits, whatever the model prefers, and other digits do not."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.grammar.digits import MOST_DIGITS
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.text.tokenizer import Tokenizer
from tests.vocabularies import bpe_metadata, made

pytest.importorskip("llguidance", reason="grammars need the extra serve")


@cache
def digits() -> Tokenizer:
    """All bytes, and tokens of several digits, with a point, and with what ends a number."""
    merges = ["1 2", "12 1", "1 .", "1 ,", "2 }", ". 1", "e 1"]
    return made(bpe_metadata(merges, eos_token_id=0))


def written(grammar: Grammar, prefers: Callable[[bytes], Any], most: int = 400) -> str:
    """The answer of a model that takes what it prefers most of what is permitted."""
    tokenizer = digits()
    matcher = Matcher(grammar, tokenizer, 0)
    texts = [tokenizer.token_bytes(id, special=True) for id in range(tokenizer.n_vocab)]
    answer: list[int] = []
    while len(answer) < most:
        mask = matcher.mask(answer)
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(texts)])
        best = max(found.tolist(), key=lambda id: (id not in tokenizer.eog_ids, prefers(texts[id]), id))
        if best in tokenizer.eog_ids:
            return b"".join(texts[id] for id in answer).decode()
        answer.append(best)
    pytest.fail(f"the answer does not end: {b''.join(texts[id] for id in answer)[:200]!r}")


def digits_first(text: bytes) -> tuple[int, int]:
    """One digit, several digits, anything else."""
    return (2 if text.isdigit() else 1 if text in (b".", b"e", b"E") else 0, -len(text))


def long_first(text: bytes) -> tuple[int, int]:
    """Several digits, one digit, anything else."""
    return (2 if text.isdigit() else 0, len(text))


@pytest.mark.parametrize("prefers", [digits_first, long_first])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "number"},
        {"type": "integer", "minimum": 3},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False},
    ],
)
def test_numbers_end(schema: dict[str, Any], prefers: Callable[[bytes], Any]) -> None:
    text = written(Grammar.json_schema(schema), prefers)
    jsonschema.validate(json.loads(text), schema)
    runs = "".join(character if character.isdigit() else " " for character in text).split()
    assert max(map(len, runs)) == MOST_DIGITS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[0-9]{50}$"},
        {"type": "string", "minLength": 60, "maxLength": 60},
        {"type": "string", "pattern": "^[0-9a-f]{50}$"},
    ],
)
def test_what_a_schema_asks_for_is_written(schema: dict[str, Any]) -> None:
    text = written(Grammar.json_schema(schema), digits_first)
    jsonschema.validate(json.loads(text), schema)
    assert sum(map(str.isdigit, text)) > MOST_DIGITS


def test_other_grammars_have_no_such_bound() -> None:
    assert len(written(Grammar.regex("[0-9]{1,50}"), digits_first)) == 50


@pytest.mark.parametrize("tokens", [[], [b"1"], [b"a", b"1", b"2"], [b"1", b".", b"2"], [b"1"] * 90])
def test_the_digits_at_the_end_are_counted(tokens: Sequence[bytes]) -> None:
    from engine.grammar.tokens import tokens_of

    ids = [id for each in tokens for id in digits().encode(each.decode(), add_special=False)]
    text = b"".join(tokens)
    expected = len(text) - len(text.rstrip(b"0123456789"))
    assert min(tokens_of(digits()).digits.count(ids), MOST_DIGITS) == min(expected, MOST_DIGITS)
