"""A slot: the place of one sequence in a model's memory."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.cache.recurrent import States
from engine.cache.sequence import Sequence as TokenSequence
from engine.cache.sequence import keys_of
from engine.cache.types import CHUNK
from engine.decode.request import Request
from engine.models.base import Model
from engine.text.tokenizer import Tokenizer

MOST_STATES = 8
"""The most snapshots taken while one prompt is read: each one is a copy from the device, and takes host memory."""


class Store(Protocol):
    """Where the pages and snapshots of texts are kept besides memory (``engine/decode/disk_cache.py``)."""

    def keep(self, sequence: TokenSequence) -> None:
        """Keep what memory holds of the text of a sequence."""

    def fetch(self, slot: "Slot", tokens: np.ndarray, have: int) -> bool:
        """Copy pages and snapshots of a prefix of ``tokens``, int32 [n], longer than ``have``, to memory.  Returns whether
        something was copied; then the slot is empty."""

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Take into account that tokens of a prompt were computed in some seconds."""


class Slot:
    """The place of one sequence of a model.

    ``owner`` is the request that uses it, or None.  A slot without an owner keeps the tokens of the last one, so that a text
    with the same prefix is not read again.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, sequence: TokenSequence, states: States, state_bytes: int
    ) -> None:
        """states: the snapshots of all slots; state_bytes: the size of one, 0 if the model needs none."""
        self.sequence = sequence
        self.owner: Request | None = None
        #: The latest owner.
        self.latest: Request | None = None
        #: The tokens of a thinned sequence that the slot no longer holds.
        self.gone: list[int] = []
        #: The count of uses of all slots when it was used last.
        self.used = 0
        #: Where texts are kept besides memory, if anywhere.
        self.store: Store | None = None
        self._model = model
        self._tokenizer = tokenizer
        self._states = states
        self._state_bytes = state_bytes

    def common(self, tokens: np.ndarray, salt: str) -> int:
        """The length of the common prefix with ``tokens``, int32 [n], of a salt; at most n - 1, because at least one token
        must be read."""
        if self.sequence.salt != salt:
            return 0
        held = self.sequence.array[: tokens.size - 1]
        differs = np.flatnonzero(held != tokens[: held.size])
        return int(differs[0]) if differs.size else held.size

    def shared(self, tokens: np.ndarray) -> int:
        """The length of the prefix of ``tokens``, int32 [n], whose pages can be shared with sequences of the same salt; less
        than n."""
        return self.sequence.find(tokens[:-1], self._states if self._state_bytes else None)[0]

    def rewind(self, tokens: np.ndarray) -> tuple[int, str | None]:
        """Truncate to the longest reusable prefix of ``tokens``, int32 [n], shorter than n: its own, or shared pages with the
        same salt.  Returns its length, and a sentence if it is shorter by more than a page than the common prefix."""
        sequence, common = self.sequence, self.common(tokens, self.sequence.salt)
        after = sequence.tokens[common : common + 1]
        kept = next((n for n in (common, common // CHUNK * CHUNK) if sequence.can_truncate(n)), 0)
        needs_state = bool(self._state_bytes)
        length, keys = sequence.find(tokens[:-1], self._states if needs_state else None)
        own, key = self._resumable(tokens[:common])
        if self.store is not None and self.store.fetch(self, tokens[:-1], max(own, kept, length)):
            own = kept = 0
            length, keys = sequence.find(tokens[:-1], self._states if needs_state else None)
        if own > max(kept, length):
            self._model.restore(self._states.get(key), sequence)
            kept = own
        elif length > kept and (needs_state or not self._model.cache.rings):
            sequence.adopt(tokens[:length].tolist(), keys)
            if needs_state:
                self._model.restore(self._states.get(keys[-1]), sequence)
            kept = length
        else:
            sequence.truncate(kept)
        return kept, self._why(tokens, common, kept, after) if kept < common // CHUNK * CHUNK else None

    def _resumable(self, tokens: np.ndarray) -> tuple[int, bytes]:
        """The length of the longest prefix of ``tokens``, which the sequence contains, that has a snapshot, and its key.

        Unlike shared pages, it may end inside a page, such as those of compressed rows, which span many positions.
        """
        if not self._state_bytes or not self._model.cache.restorable:
            return 0, b""  # keys and values of windows are not part of a snapshot
        keys = keys_of(tokens, self.sequence.begin)
        for chunks in range(len(keys), 0, -1):
            if keys[chunks - 1] in self._states and self.sequence.can_resume(CHUNK * chunks):
                return CHUNK * chunks, keys[chunks - 1]
        return 0, b""

    @property
    def text(self) -> Sequence[int]:
        """The tokens of the latest text."""
        return self.sequence.tokens or self.gone

    def let_go(self) -> None:
        """Empty a thinned sequence, from which no text may continue: what follows would depend on what was dropped."""
        if self.sequence.thinned:
            text = list(self.sequence.tokens)
            self.clear()
            self.gone = text

    def clear(self) -> None:
        """Forget the sequence."""
        self.gone = []
        self.sequence.truncate(0)

    def stops(self, tokens: np.ndarray, kept: int) -> set[int]:
        """The numbers of tokens after which to take a snapshot.

        They are the last page borders at or before the ends of the first and the latest messages, the last one before the
        last token, which is read again if the prompt is repeated, and the end of the prefix that other sequences have read.
        """
        if not self._state_bytes or self._states.budget < self._state_bytes:
            return set()
        ends = np.flatnonzero(np.isin(tokens, list(self._tokenizer.eog_ids))) + 1
        borders = sorted({int(end) // CHUNK * CHUNK for end in (*ends, tokens.size - 1)})
        branch, _ = self.sequence.find(tokens[:-1])
        keys = keys_of(tokens, self.sequence.begin)
        borders = [border for border in borders if max(kept, 1) <= border < tokens.size]
        wanted = {*borders[:1], *borders[-MOST_STATES + 1 :], *([branch] if branch > kept else [])}
        return {at for at in wanted if keys[at // CHUNK - 1] not in self._states}

    def save(self, length: int) -> None:
        """Take a snapshot after the first ``length`` tokens, a whole number of pages."""
        key = keys_of(self.sequence.tokens[:length], self.sequence.begin)[-1]
        self._states.add(key, self._model.save(self.sequence, length))

    def _why(self, tokens: np.ndarray, common: int, kept: int, after: Sequence[int]) -> str:
        """Why tokens are read again, as a sentence; after: the token that followed the common prefix, if there was one."""
        again = f"{common - kept} tokens are read again"
        if not after:
            return f"{again}: the model's state after them was not kept"
        was, now = (repr(self._tokenizer.decode([int(i)], special=True)) for i in (after[0], tokens[common]))
        if common == tokens.size - 1 and was == now:
            return f"{again}: the prompt is part of what was read, and no state was kept nearer to its end"
        return f"{again}: token {common} is {now} and was {was}, and no state was kept nearer to it"
