"""How few tokens a text can have, without making them: the tokens of some megabytes take seconds and gigabytes."""

from collections.abc import Callable

import numpy as np

from engine.text.bpe import byte_alphabet
from engine.text.spm import SPACE
from engine.text.vocabulary import TokenType, Vocabulary

LONG = 1 << 17
"""Characters of a text that takes long enough to tokenize that it is worth knowing first how few tokens it can have."""

AtLeast = Callable[[int], None]
"""Is told how many tokens a text has at least."""

_BLANKS = b" \t\n\v\f\r"


class Bound:
    """The most that one token of a vocabulary holds of each byte.

    Where no token holds more than four bytes "e", a text with a thousand of them has at least 250 tokens. Bytes that a text
    can lose on its way to tokens do not count: those that the vocabulary cannot express, and blanks after the tokens of
    Phi-3.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytewise = vocabulary.model != "llama" and vocabulary.pre != "gemma4"
        self._alphabet = byte_alphabet()
        self._values = {ord(symbol): byte for byte, symbol in self._alphabet.items()}
        forms = list(map(self._held, vocabulary.tokens))
        kinds = np.frombuffer(vocabulary.types, np.uint8)
        # Tokens of other kinds also stand for their text as it is stored.
        others = np.flatnonzero(~np.isin(kinds, (TokenType.UNDEFINED, TokenType.NORMAL)))
        forms += [self._written(vocabulary.tokens[id]) for id in others.tolist()]
        held = np.frombuffer(b"".join(forms), np.uint8)
        owners = np.repeat(np.arange(len(forms)), list(map(len, forms)))
        found, counts = np.unique(owners * 256 + held, return_counts=True)
        self._most = np.ones(256, np.int64)
        np.maximum.at(self._most, found % 256, counts)
        self._lost = [*self._inexpressible(vocabulary), *(_BLANKS if vocabulary.stripping_ids else b"")]

    def least(self, text: str) -> int:
        """A number of tokens that ``text``, which has no lone surrogates, has at least."""
        counts = np.bincount(np.frombuffer(self._written(text), np.uint8), minlength=256)
        counts[self._lost] = 0
        return int((-(-counts // self._most)).max())

    def _written(self, text: str) -> bytes:
        """The bytes of a text. Where blanks are written as another character, both are the same."""
        return (text if self._bytewise else text.replace(SPACE, " ")).encode("utf-8")

    def _held(self, token: str) -> bytes:
        """The bytes of a text that become a token."""
        if self._bytewise:
            try:
                return token.translate(self._values).encode("latin-1")
            except UnicodeEncodeError:
                pass  # not in the alphabet of bytes, so no text becomes this token
        return self._written(token)

    def _inexpressible(self, vocabulary: Vocabulary) -> list[int]:
        """The bytes that have no token of their own; all of them where one does, and characters are tokens themselves."""

        def kind(token: str) -> TokenType | None:
            id = vocabulary.index.get(token)
            return None if id is None else TokenType(vocabulary.types[id])

        if self._bytewise:
            without = (None, TokenType.CONTROL, TokenType.UNKNOWN)
            return [byte for byte, symbol in self._alphabet.items() if kind(symbol) in without]
        complete = all(kind(f"<0x{byte:02X}>") == TokenType.BYTE for byte in range(256))
        return [] if complete else list(range(256))
