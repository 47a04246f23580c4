"""Drafts from the texts of earlier answers: what followed the latest tokens in another prompt or answer.

Requests to one server often resemble each other: the same file is edited again, the same question is asked in other words.
The texts of finished answers are kept.  What followed the latest 16 tokens where they occurred last is proposed; if they did
not, what followed the latest 8 or 4 (similar to "ngram-mod" of llama.cpp; Oliaro et al. 2024, "SuffixDecoding", use trees).

Memory is bounded.  Texts are in a ring of tokens, and the places of runs of tokens in tables that are addressed by a hash of
the run.  A later run replaces an earlier one with the same address, so a place is only proposed if its tokens are equal.

Texts with different salts are kept apart, since the time of an answer shows whether drafts were kept.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

RUNS = (16, 8, 4)
"""The lengths of runs of tokens that are found, the longest first."""

CAPACITY = 1 << 18
"""The number of tokens that are kept for each salt: 13.6 MB with the tables."""

SALTS = 8
"""The number of salts for which texts are kept: those used last."""

END = -1
"""What is stored between two texts."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)


class AnswerHistory:
    """The texts of earlier answers."""

    name = "history"

    def __init__(self, capacity: int = CAPACITY) -> None:
        """capacity: the number of tokens that are kept."""
        #: The length of the match of the last proposal.
        self.matched = 0
        self._tokens = np.full(capacity, END, np.int32)
        #: For each length of a run, the number of the token after a run, by the hash of the run; -1: none.
        self._places = {run: np.full(2 * capacity, -1, np.int64) for run in RUNS}
        self._powers = {run: np.cumprod(np.full(run, FACTOR)) for run in RUNS}
        #: The number of tokens that have been stored so far.
        self._n = 0

    def add(self, text: Sequence[int]) -> None:
        """Store the tokens of a text, or its end if it is longer than half of what is kept."""
        capacity = self._tokens.size
        tokens = np.array([END, *text[-(capacity // 2) + 1 :]], np.int32)
        self._tokens[(self._n + np.arange(tokens.size)) % capacity] = tokens
        for run, places in self._places.items():
            if tokens.size > run:
                windows = np.lib.stride_tricks.sliding_window_view(tokens[1:], run)
                # Of several equal indices, the last one counts.
                places[self._addresses(windows, run)] = self._n + 1 + run + np.arange(len(windows))
        self._n += tokens.size

    def propose(self, known: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the end of ``known`` in an earlier text; none if that has not occurred."""
        for run in RUNS:
            if len(known) < run:
                continue
            wanted = np.array(known[-run:], np.int32)
            place = int(self._places[run][self._addresses(wanted[None], run)[0]])
            if place < max(run, self._n - self._tokens.size + run) or not np.array_equal(
                self._at(place - run, run), wanted
            ):
                continue
            following = self._at(place, min(count, self._n - place))
            ends = np.flatnonzero(following == END)
            if found := following[: ends[0] if ends.size else None].tolist():
                self.matched = run
                return found
        return []

    def _at(self, first: int, count: int) -> np.ndarray:
        return self._tokens[(first + np.arange(count)) % self._tokens.size]

    def _addresses(self, windows: np.ndarray, run: int) -> np.ndarray:
        hashes = (windows.astype(np.uint64) * self._powers[run]).sum(axis=1, dtype=np.uint64)
        return (hashes * FACTOR >> np.uint64(33)) % np.uint64(self._places[run].size)


class Histories:
    """The texts of earlier answers for each salt."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, AnswerHistory] = OrderedDict()

    def of(self, salt: str) -> AnswerHistory:
        """The texts of answers with a salt."""
        history = self._kept.pop(salt, None) or AnswerHistory()
        self._kept[salt] = history
        while len(self._kept) > SALTS:
            self._kept.popitem(last=False)
        return history

    def clear(self) -> None:
        """Forget all texts."""
        self._kept.clear()
