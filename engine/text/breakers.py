"""Sequence breakers: texts beyond which DRY does not follow a repetition, as token ids."""

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from engine.checks import described, require
from engine.errors import UsageError
from engine.text.tokenizer import Tokenizer

BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's breakers."""

MOST_CHARACTERS = 40
"""The most characters of a breaker: the search compares every beginning of it with every token.  It is llama.cpp's limit."""

Ids = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""

_LATEST: WeakKeyDictionary[Tokenizer, tuple[tuple[str, ...], Ids]] = WeakKeyDictionary()
"""The latest breakers of a tokenizer, and their ids: a search through a large vocabulary takes longer than a token."""


def breaker_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    """The sequences of token ids in which one of ``texts`` occurs, as llama.cpp determines them.

    These are, alone, the tokens whose text contains a breaker, and, if a token ends with the beginning of a breaker, that
    token followed by the tokens of the rest.  Control tokens count with the text of their names.
    Raises UsageError unless ``texts`` is a sequence of texts of 1 to 40 characters without lone surrogates.
    """
    listed = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not listed or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"dry_sequence_breakers must be a list of texts that are not empty, not {described(texts)}.")
    for text in texts:
        require(len(text) <= MOST_CHARACTERS, "a sequence breaker", f"at most {MOST_CHARACTERS} characters long", text)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the sequence breaker {text!r} has a lone surrogate, which is no character.") from None
    if not texts:
        return ()
    wanted = tuple(texts)
    latest, ids = _LATEST.get(tokenizer, ((), ()))
    if latest != wanted:
        ids = _search(tokenizer, wanted)
        _LATEST[tokenizer] = wanted, ids
    return ids


def _search(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Ids:
    words = [tokenizer.token_bytes(i, special=True) for i in range(tokenizer.n_vocab)]
    breaker = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
    alone = [token for token, word in enumerate(words) if breaker.search(word)]
    found: dict[tuple[int, ...], None] = {(token,): None for token in alone}
    for text in texts:
        for begun, rest in _splits(tokenizer, text).items():
            heads = [token for token, word in enumerate(words) if word.endswith(begun) and text.encode() not in word]
            found |= dict.fromkeys((token, *rest) for token in heads)
    return tuple(found)


def _splits(tokenizer: Tokenizer, text: str) -> dict[bytes, list[int]]:
    """Every beginning of a text, with the tokens of the rest: up to a character, or up to a token within a character."""
    found = {text[:n].encode(): _continuation(tokenizer, text[n:]) for n in range(1, len(text))}
    for n in range(len(text)):
        begun, rest = text[:n].encode(), _continuation(tokenizer, text[n:])
        while len(rest) > 1:
            begun += tokenizer.token_bytes(rest.pop(0))
            found.setdefault(begun, rest.copy())
    return found


def _continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows other text, without control tokens."""
    return tokenizer.encode_marked(text, bytes(len(text)), add_special=False, continued=True)
