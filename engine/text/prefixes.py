"""Which tokens begin with a text: an index of the vocabulary, so that no token is decoded to find out.

The stored texts of all tokens are one array of code points.  A text that is looked up is spelled as tokens store it, and
the tokens are compared with it one character at a time, all at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.text.bpe import byte_alphabet
from engine.text.spm import SPACE
from engine.text.vocabulary import TokenType, Vocabulary, byte_value

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Prefixes:
    """The index of one vocabulary.

    ``codes`` (uint32) holds the code points of all stored texts, one token after another; those of token ``id`` are
    ``codes[starts[id] : ends[id]]``. ``literal`` are the ids of tokens whose text is what is stored, ``written`` of
    those that write blanks, or all bytes, as other characters. ``single`` has the ids of the byte tokens of each value.
    Tokens without text (control, unknown and unused ones) are in none of these.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.codes = np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4")
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        kinds = np.frombuffer(vocabulary.types, np.uint8)
        written = np.isin(kinds, (TokenType.UNDEFINED, TokenType.NORMAL))
        literal = kinds == TokenType.USER_DEFINED
        self.alphabet = byte_alphabet() if vocabulary.model == "gpt2" else None
        if self.alphabet:
            # A token with any other character, such as padding that calls itself normal, is what is stored.
            symbols = np.array(list(map(ord, self.alphabet.values())))
            known = np.zeros(symbols.max() + 2, bool)
            known[symbols] = True
            others = np.flatnonzero(~known[np.minimum(self.codes, symbols.max() + 1)])
            owners = np.searchsorted(self.ends, others, side="right")
            literal[owners] |= written[owners]
            written[owners] = False
        self.literal, self.written = np.flatnonzero(literal), np.flatnonzero(written)
        self.single: dict[int, list[int]] = {}
        for id in np.flatnonzero(kinds == TokenType.BYTE).tolist():
            self.single.setdefault(byte_value(tokens[id]), []).append(id)

    def ids(self, text: str) -> Ids:
        """The ids, ascending, of the tokens whose bytes begin with those of ``text``, which is not empty."""
        data = text.encode("utf-8")
        if self.alphabet:
            spelled = [self.alphabet[byte] for byte in data]
        else:
            alternatives = {" ": " " + SPACE, SPACE: ""}
            spelled = [alternatives.get(character, character) for character in text]
        found = [self._beginning(self.literal, text), self._beginning(self.written, spelled)]
        if len(data) == 1:
            found.append(np.array(self.single.get(data[0], []), np.int64))
        return np.sort(np.concatenate(found))

    def _beginning(self, ids: Ids, spelled: Sequence[str]) -> Ids:
        """Those of ``ids`` whose stored text begins with any character of ``spelled[0]``, then of ``spelled[1]``, ..."""
        ids = ids[self.ends[ids] - self.starts[ids] >= len(spelled)]
        for i, characters in enumerate(spelled):
            ids = ids[np.isin(self.codes[self.starts[ids] + i], [ord(character) for character in characters])]
        return ids
