"""Sequence breakers: texts beyond which DRY does not follow a repetition, as token ids."""

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from engine.errors import UsageError
from engine.text.tokenizer import Tokenizer

BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's breakers."""

_KNOWN: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()
"""What was found before: a search through a large vocabulary takes longer than a token."""


def breaker_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences of token ids in which one of ``texts`` occurs, as llama.cpp determines them.

    These are, alone, the tokens whose text contains a breaker, and, if a token ends with the beginning of a breaker, that
    token followed by the tokens of the rest.  Control tokens count with the text of their names.
    Raises UsageError unless ``texts`` is a sequence of texts that are not empty.
    """
    listed = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not listed or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"dry_sequence_breakers must be a list of texts that are not empty, not {texts!r}")
    known = _KNOWN.setdefault(tokenizer, {})
    key = tuple(texts)
    if key not in known:
        known[key] = _search(tokenizer, key) if key else ()
    return known[key]


def _search(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    words = [tokenizer.token_bytes(i, special=True) for i in range(tokenizer.n_vocab)]
    breaker = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
    alone = [token for token, word in enumerate(words) if breaker.search(word)]
    found = dict.fromkeys((token,) for token in alone)
    for text in texts:
        for n in range(1, len(text)):
            begun, rest = text[:n].encode(), _continuation(tokenizer, text[n:])
            heads = [token for token, word in enumerate(words) if word.endswith(begun) and text.encode() not in word]
            found |= dict.fromkeys((token, *rest) for token in heads)
    return tuple(found)


def _continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows other text, without control tokens."""
    return tokenizer.encode_marked(text, bytes(len(text)), add_special=False, continued=True)
