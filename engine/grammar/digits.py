"""Numbers in JSON end: a weak model writes digits without end where a schema sets no bounds."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

MOST_DIGITS = 32
"""The most digits in a row in a number of JSON, before the point, after it or in the exponent, unless the schema asks for
more.  A float has 17, an integer of 64 bits at most 20."""

_DIGITS = b"0123456789"
_LETTERS = b"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ"
"""Letters that do not go on a number, as the e of an exponent does."""

_Mask = np.ndarray[Any, np.dtype[np.int32]]


class Digits:
    """The digits at both ends of the tokens of a vocabulary."""

    def __init__(self, texts: Sequence[bytes], words: int) -> None:
        """texts: those of the tokens; words: the number of words, int32, of a mask."""
        self._words = words
        self._first = np.array([len(text) - len(text.lstrip(_DIGITS)) for text in texts], np.int32)
        self._last = {id: n for id, text in enumerate(texts) if (n := len(text) - len(text.rstrip(_DIGITS)))}
        self._whole = {id for id, n in self._last.items() if n == len(texts[id])}
        self._letters = self._packed([text[:1] in _LETTERS and text != b"" for text in texts])
        self._within = cache(lambda left: self._packed(self._first <= left))

    def _packed(self, permitted: Any) -> _Mask:
        bits = np.zeros(32 * self._words, np.uint8)
        bits[: len(permitted)] = permitted
        return np.packbits(bits, bitorder="little").view(np.int32)

    def count(self, tokens: Sequence[int]) -> int:
        """The digits at the end of ``tokens``; more than :data:`MOST_DIGITS` need not be counted."""
        n = 0
        for token in reversed(tokens):
            n += self._last.get(token, 0)
            if token not in self._whole or n >= MOST_DIGITS:
                break
        return n

    def bounded(self, mask: _Mask, tokens: Sequence[int]) -> _Mask:
        """A mask after ``tokens``, int32 [words], without the tokens that would make a number too long.

        Where letters may follow, too, the digits are part of a text.  Where nothing but digits may follow, they do.
        """
        n = self.count(tokens)
        if not n or (mask & self._letters).any():
            return mask
        fewer = mask & self._within(max(0, MOST_DIGITS - n))
        return fewer if fewer.any() else mask
