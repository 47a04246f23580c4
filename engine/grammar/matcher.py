"""Which tokens may come next in one answer."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import NoToken
from engine.grammar.grammar import Grammar
from engine.grammar.messages import problem
from engine.grammar.tokens import tokens_of
from engine.limits import MOST_DRAFTS
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

UNSETTLED = MOST_DRAFTS + 1
"""The most tokens of an answer that may turn out differently: those of one pass."""

Mask = np.ndarray[Any, np.dtype[np.int32]]
"""One bit per token, the lowest bit of the first word for token 0, int32 [words]: 1 if the token is permitted."""


class Matcher:
    """The position of one answer in a grammar.

    It is asked about the tokens so far, and follows them from where it was asked last.  So it is the same whether an answer
    goes on, is interrupted and resumed, or continues in another way than its drafts did.

    ``grammar`` and ``ends_late`` are those that it was made with.

    Two texts that it is asked about may differ in nothing but their last ``UNSETTLED`` tokens.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, n_prompt: int, *, ends_late: bool = False) -> None:
        """n_prompt: the number of tokens before the answer; ends_late: whether the answer ends only when nothing else is
        permitted.

        Raises UsageError if the grammar does not suit the model, or is too large.
        """
        self.grammar = grammar
        self._tokenizer = tokenizer
        self._n_prompt = n_prompt
        self.ends_late = ends_late
        self._tokens = tokens_of(tokenizer)
        self._state = self._tokens.matcher(grammar)
        self._check()
        #: The tokens of the answer that it has followed, without one that ends it.
        self._followed: list[int] = []
        #: The mask after these, once it is known.
        self._mask: Mask | None = None

    @property
    def words(self) -> int:
        """The number of words of a mask."""
        return self._tokens.words

    @cached_property
    def ahead(self) -> "Matcher":
        """Another matcher of the same answer, for tokens that may turn out differently: drafts.

        What llguidance has computed counts towards its limits.  With two matchers, those of an answer do not depend on its
        drafts, so that it fails with drafts where it fails without.
        """
        return Matcher(self.grammar, self._tokenizer, self._n_prompt, ends_late=self.ends_late)

    def mask(self, tokens: Sequence[int]) -> Mask:
        """The tokens that may follow ``tokens``, prompt included; int32 [words].  Raises NoToken if the grammar does not
        permit ``tokens``, or if a limit is exceeded."""
        if not self._follow(tokens):
            return self._tokens.end_mask
        if self._mask is None:
            self.settle(np.frombuffer(self._state.compute_bitmask(), np.int32)[: self._tokens.words])
        assert self._mask is not None
        return self._mask

    def permitted(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the first ``drafts`` may follow ``tokens``, prompt included; 0 if that cannot be found out."""
        try:
            if not self._follow(tokens):
                return 0
        except NoToken:
            return 0
        if self._state.is_stopped():  # nothing but the end may follow
            return int(any(draft in self._tokens.ends for draft in drafts[:1]))
        return self._state.validate_tokens(list(drafts))

    def masks(self, tokens: Sequence[int], drafts: Sequence[int]) -> Mask:
        """The tokens that may follow ``tokens``, prompt included, and those that may follow each of the first drafts that the
        grammar permits; int32 [1 + n, words], n <= the number of drafts.  Raises NoToken as :meth:`mask` does."""
        rows, history = [self.mask(tokens)], list(tokens)
        for draft in drafts[: self.ahead.permitted(tokens, drafts) if drafts else 0]:
            history.append(draft)
            try:
                rows.append(self.ahead.mask(history))
            except NoToken:  # a limit that the answer itself may not reach
                break
        return np.stack(rows)

    def following(self, tokens: Sequence[int]) -> "LLMatcher | None":
        """What computes the mask after ``tokens``, for :meth:`settle`; None if :meth:`mask` need not compute it.  Raises
        NoToken as :meth:`mask` does.

        The tokens of a step with drafts come several at once.  Their masks are computed all the same, so that the limits of
        an answer do not depend on its drafts.
        """
        passed = self._n_prompt + len(self._followed)
        if len(tokens) - passed <= UNSETTLED:
            for n in range(passed + 1, len(tokens)):
                self.mask(tokens[:n])
        return self._state if self._follow(tokens) and self._mask is None else None

    def settle(self, mask: Mask) -> None:
        """Take the mask, int32 [words], that what :meth:`following` returned has computed.  Raises NoToken if a limit is
        exceeded."""
        self._check()
        if self.grammar.has_json:
            mask = self._tokens.digits.bounded(mask, self._followed)
        if self.ends_late and (others := mask & ~self._tokens.end_mask).any():
            mask = others
        self._mask = mask

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Move to the end of ``tokens``; returns False if the answer has ended before."""
        followed, first = self._followed, self._n_prompt
        least = min(len(followed), len(tokens) - first)
        common = max(0, least - UNSETTLED)
        while common < least and followed[common] == tokens[first + common]:
            common += 1
        if common < len(followed):
            self._mask = None
            self._state.rollback(len(followed) - common)
            del followed[common:]
        new = list(tokens[first + common :])
        end = next((i for i, token in enumerate(new) if token in self._tokens.ends), len(new))
        if end:
            self._mask = None
            done = self._state.try_consume_tokens(new[:end])
            followed += new[:done]
            self._check()
            if done < end:
                raise NoToken("the text so far does not follow the grammar; this is a defect of this program.")
        return end == len(new)

    def _check(self) -> None:
        """Raise NoToken if llguidance has given up."""
        if self._state.is_error():
            found = problem(self._state.get_error())
            raise NoToken(f"the {self.grammar.kind} cannot be followed any further: {found}; correct or simplify it.")
