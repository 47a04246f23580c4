"""The tokens of a model as llguidance takes them."""

import json
import os
import threading
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from engine.errors import UsageError
from engine.grammar.digits import Digits
from engine.grammar.grammar import Grammar
from engine.grammar.library import LIMITS, llguidance
from engine.grammar.trial import TRIAL
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import TokenType

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MARKS = ((b"<", b">"), ("｜".encode(), "｜".encode()))
"""What the texts of user-defined tokens that are special begin and end with; DeepSeek's have bars."""

MOST_TRIED = 256
"""The number of grammars that are remembered as good for a tokenizer."""


class Tokens:
    """The tokens of one tokenizer, and the tokens that end an answer.

    Control, unknown and unused tokens, and user-defined ones in angle brackets or between bars, are *special*: only a grammar
    that names them permits them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UsageError if no token ends an answer."""
        if not tokenizer.eog_ids:
            raise UsageError(
                "this model has no token that ends an answer, which a grammar needs; leave the grammar out."
            )
        library = llguidance()
        texts = [tokenizer.token_bytes(id, special=True) for id in range(tokenizer.n_vocab)]
        special = [id for id, text in enumerate(texts) if _is_special(tokenizer.token_type(id), text)]
        self.ends = tokenizer.eog_ids
        #: The tokens that only a grammar that names them permits.
        self.special = frozenset(special)
        #: The number of words, int32, of a mask.
        self.words = -(-tokenizer.n_vocab // 32)
        #: The mask of the tokens that end an answer, int32 [words].
        self.end_mask = np.zeros(self.words, np.int32)
        for id in self.ends:
            self.end_mask.view(np.uint32)[id // 32] |= np.uint32(1 << id % 32)
        self.digits = Digits(texts, self.words)
        ends = sorted(self.ends)
        given = SimpleNamespace(eos_token_id=ends[0], bos_token_id=None, tokens=texts, special_token_ids=special)
        self._tokenizer = library.LLTokenizer(library.TokenizerWrapper(given), eos_token=ends)
        self._limits = library.LLParserLimits(**LIMITS)
        known = {id: texts[id].decode("latin-1") for id in range(tokenizer.n_vocab) if len(texts[id]) == 1}
        known |= {id: texts[id].decode("latin-1") for id in special}
        vocabulary = json.dumps({"size": tokenizer.n_vocab, "ends": ends, "special": special, "texts": known})

        @lru_cache(MOST_TRIED)
        def tried(grammar: Grammar) -> None:
            grammar.check(TRIAL.problem(grammar.source, vocabulary))

        self._try = tried

    def check(self, grammar: Grammar) -> None:
        """Raise UsageError if a grammar is too large, or names a special token that the model does not have.  The first time
        may take a second."""
        self._try(grammar)

    def matcher(self, grammar: Grammar) -> "LLMatcher":
        """llguidance's matcher of one answer, at its beginning.

        Copies of a matcher would share limits, so that an answer could fail because of another one.
        Raises UsageError if the grammar is too large, or names a special token that the model does not have.
        """
        self.check(grammar)
        return llguidance().LLMatcher(self._tokenizer, grammar.source, limits=self._limits, log_level=0)  # type: ignore[no-any-return]


def _is_special(kind: TokenType, text: bytes) -> bool:
    if kind == TokenType.USER_DEFINED:
        return any(text.startswith(begin) and text.endswith(end) for begin, end in _MARKS)
    return kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)


_TOKENS: WeakKeyDictionary[Tokenizer, Tokens] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _renew() -> None:
    # A thread that does not exist in a forked process may hold it.
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def tokens_of(tokenizer: Tokenizer) -> Tokens:
    """The tokens of a tokenizer, which are prepared once: half a second for 150,000."""
    with _LOCK:
        found = _TOKENS.get(tokenizer)
        if found is None:
            found = _TOKENS[tokenizer] = Tokens(tokenizer)
        return found
