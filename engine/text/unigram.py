"""Unigram, model ``t5``: the pieces of a text whose scores have the largest sum (Kudo 2018); XLM-RoBERTa, BGE M3, T5.

A text is normalized as by SentencePiece: characters are mapped (``engine/text/charsmap.py``), runs of blanks become one and
those at the ends none if the file says so, and blanks are written as \u2581, one of them before the text.  The library
``tokenizers`` finds the pieces, in float64, from one blank to the next.  What no piece spells becomes the token for unknown
characters, once for several that follow one another.
"""

import re

from engine.text.charsmap import Charsmap
from engine.text.spm import SPACE
from engine.text.vocabulary import TokenType, Vocabulary

PART = 1 << 16
"""Characters of a text that are encoded at once, and then up to a blank: the library needs hundreds of bytes for each."""

_WORDS = re.compile("[A-Za-z0-9][^ ]*")
_UNKNOWN = "\0unknown"
"""The piece for unknown characters, which no normalized text has."""


class Unigram:
    """The encoder of one vocabulary; :meth:`encode` takes text whose special tokens have already been extracted."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        if vocabulary.unk_id is None:
            raise vocabulary.refuse(
                "unknown_token_id", "is missing, and a unigram model needs it; convert the model again"
            )
        assert vocabulary.scores is not None
        kinds = (TokenType.UNDEFINED, TokenType.NORMAL)
        self._ids = [vocabulary.unk_id]
        self._ids += [
            id for id in range(len(vocabulary.tokens)) if vocabulary.types[id] in kinds and id not in self._ids
        ]
        pieces = [(vocabulary.tokens[id], float(vocabulary.scores[id])) for id in self._ids[1:]]
        if not pieces:
            raise vocabulary.refuse("token_type", "calls no token a normal one, so no text can be spelled")
        # An unknown character has the least score of all pieces, less 10.
        least = min(score for _, score in pieces)
        self._model = Tokenizer(models.Unigram([(_UNKNOWN, least), *pieces], 0, False))
        #: Whether each word is spelled by itself, since no piece continues after a blank.
        self.by_word = any(text == SPACE for text, _ in pieces) and not any(SPACE in text[1:] for text, _ in pieces)
        if self.by_word:
            self._model.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
        try:
            self._charsmap = Charsmap(vocabulary.charsmap)
        except ValueError as error:
            raise vocabulary.refuse("precompiled_charsmap", f"{error}; convert the model again") from None
        self._merges_blanks = vocabulary.remove_extra_whitespaces
        self._begin = SPACE if vocabulary.add_space_prefix else ""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""
        normalized, ids, at = self.normalized(text), list[int](), 0
        while at < len(normalized):
            end = normalized.find(SPACE, at + PART) if self.by_word and len(normalized) - at > PART else -1
            end = len(normalized) if end < 0 else end
            ids += self._model.encode(normalized[at:end], add_special_tokens=False).ids
            at = end
        return [self._ids[i] for i in ids]

    def normalized(self, text: str) -> str:
        """``text`` as pieces spell it."""
        text = self._charsmap.apply(text)
        if self._merges_blanks:
            text = " ".join(filter(None, text.split(" ")))
        return self._begin + text.replace(" ", SPACE) if text else ""

    def working_bytes(self, text: str) -> int:
        """About the most memory that :meth:`encode` takes meanwhile."""
        size = len(text.encode())
        return 16 * size + 400 * (min(size, 8 * PART) if self.by_word else size)


class UnigramBound:
    """How few tokens a text can have: a run of characters between blanks has at least one, if words are spelled by themselves
    and it contains a letter or a digit of ASCII, which are never removed; otherwise nothing is known."""

    def __init__(self, by_word: bool) -> None:
        self._by_word = by_word

    def least(self, text: str) -> int:
        """A number of tokens that ``text`` has at least."""
        return sum(1 for _ in _WORDS.finditer(text)) if self._by_word else 0
