"""Prompt lookup: propose what followed the last time (Saxena 2023, "prompt lookup decoding").

Answers that quote, correct or summarize repeat long runs of earlier text. So the latest tokens are searched for among the
earlier ones of prompt and answer; the longest match wins, the most recent among equally long ones, and what followed it is
the draft. This costs a few passes over an integer array and no model.
"""

from collections.abc import Sequence

import numpy as np

LEAST = 2
"""The fewest tokens that must match."""

LONGEST = 64
"""The length from which longer matches are no longer preferred."""


class PromptLookup:
    """The tokens of one answer and its prompt, indexed for the search."""

    name = "lookup"

    def __init__(self) -> None:
        #: The length of the match of the last proposal.
        self.matched = 0
        self._tokens = np.empty(1024, np.int32)
        self._n = 0

    def propose(self, known: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest earlier occurrence of the end of ``known``; fewer, or none, if
        there is no match of at least two tokens.

        ``known`` may only have grown since the last call.  A match that reaches the end continues with its own continuation:
        after "a b a b" come "a b a b ...".
        """
        tokens = self._extend(known)
        n = tokens.size
        # Where the last token occurred before; then, one token further back at a time, those that still match.
        ends = np.flatnonzero(tokens[: n - 1] == tokens[n - 1])
        length = 1
        while ends.size and length < LONGEST:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[n - 1 - length]] if length < n else longer[:0]
            if not longer.size:
                break
            ends, length = longer, length + 1
            if ends.size == 1 and length >= LEAST:
                break
        self.matched = length if ends.size else 0
        if self.matched < LEAST:
            return []
        period = n - 1 - int(ends[-1])
        following = tokens[n - period : n - period + count].tolist()
        while len(following) < count:
            following.append(following[len(following) - period])
        return following

    def _extend(self, known: Sequence[int]) -> np.ndarray:
        n = len(known)
        if n > self._tokens.size:
            self._tokens = np.concatenate([self._tokens[: self._n], np.empty(2 * n - self._n, np.int32)])
        self._tokens[self._n : n] = known[self._n :]
        self._n = n
        return self._tokens[:n]
