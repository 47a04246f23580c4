"""Reading: from tokens to logits, with a cache of what was read before."""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from engine.cache.recurrent import Snapshots
from engine.checks import function, token_ids
from engine.errors import ContextError, UsageError
from engine.locking import in_turn
from engine.models.base import Model
from engine.models.needs import slot_bytes, snapshot_bytes
from engine.text.tokenizer import Tokenizer

MOST_SNAPSHOTS = 8
"""The most snapshots taken while one prompt is read: each one interrupts the reading and copies from the device."""

MOST_LOGITS = 128
"""Rows of a pass that returns the logits of all its rows; few, because a vocabulary is large."""

CLOSED = "this model is closed; open it again with engine.load()."

log = logging.getLogger(__name__)


class Closed:
    """Takes the place of the parts of a closed model: any use of it raises UsageError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(CLOSED)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise UsageError(CLOSED)


class Reader:
    """A model with one cache, which reads tokens into it.

    The cache is an optimization: each method is given a whole text, keeps what the cache already holds of it, and reads
    the rest. Threads use the model in turns: each method holds ``lock``.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int) -> None:
        """budget: the most host memory for snapshots, in bytes."""
        self.lock = threading.RLock()
        self.config = model.config
        self.tokenizer = tokenizer
        self.model = model
        self.cache = model.cache
        self.sequence = model.sequence
        self.n_ctx = model.cache.n_ctx
        self.batch_size = min(model.ops.max_rows, self.n_ctx)
        #: Bytes of a chunk of recurrent layers, a state and the lists of its tokens; 0 if the model has none.
        self.slot_bytes = slot_bytes(self.config)
        #: Bytes of a snapshot; 0 if the model needs none.
        self.snapshot_bytes = snapshot_bytes(self.config)
        self.snapshots = Snapshots(budget if self.snapshot_bytes else 0)
        self.reread: str | None = None
        self._user: object = None
        #: The tokens that were generated last: their steps may still be in flight.
        self._running: Generator[Any, None, None] | None = None
        #: The function of the user that may be running in the middle of a pass.
        self._caller = ""

    # --- the forward pass --------------------------------------------------------------------------------------

    @in_turn
    def reset(self) -> None:
        """Forget all tokens in the cache, so that the next prompt is read from its beginning.

        Answers do not depend on it, only the time that they take.

        Raises
        ------
        UsageError
            If the model is closed.
        """
        self._interrupt()
        self.sequence.truncate(0)
        self._user = None
        self.snapshots.forget(0)

    @property
    def closed(self) -> bool:
        """Whether the model has been closed."""
        return isinstance(self.model, Closed)

    @in_turn
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each token of a text. Afterwards, the cache holds the text.

        Parameters
        ----------
        ids : sequence of int
            Token ids, at least one.

        Returns
        -------
        ndarray
            float32 [len(ids), n_vocab]. Row i scores the tokens that may follow ``ids[: i + 1]``.

        Raises
        ------
        UsageError
            If ``ids`` are not token ids of this model, or if the model is closed.
        ContextError
            If they do not fit into the context.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> ids = llm.tokenize("def add(a, b):")
        >>> rows = llm.logits(ids)
        >>> rows.shape
        (6, 8192)
        >>> llm.detokenize([rows[-1].argmax()])
        ' '
        """
        tokens = self._checked(ids)
        self.reset()
        rows = np.empty((tokens.size, self.config.n_vocab), np.float32)
        most = min(self.batch_size, MOST_LOGITS)
        for first in range(0, tokens.size, most):
            batch = tokens[first : first + most]
            rows[first : first + batch.size] = self._forward(batch, batch.size)
        return rows

    @in_turn
    def prefill(
        self, ids: Sequence[int], on_prefill: Callable[[int, int], None] | None = None
    ) -> tuple[np.ndarray, int]:
        """Make the cache hold exactly the tokens of a text. Tokens at its beginning that the cache holds are not read again.

        Parameters
        ----------
        ids : sequence of int
            Token ids, at least one.
        on_prefill : callable, optional
            Called as ``on_prefill(done, total)``, in tokens. It must not use the model.

        Returns
        -------
        logits : ndarray
            Logits after the last token, float32 [n_vocab].
        kept : int
            Number of tokens that the cache already held.

        Raises
        ------
        UsageError
            If ``ids`` are not token ids of this model, if ``on_prefill`` uses the model, or if the model is closed.
        ContextError
            If they do not fit into the context.
        """
        logits, kept = self._read(ids, 1, on_prefill)
        return logits[0], kept

    @in_turn
    def read(self, ids: Sequence[int]) -> None:
        """Make the cache hold exactly ``ids``, without computing logits. Raises ContextError if they do not fit into
        the context."""
        self._read(ids, 0, None)

    def _read(
        self, ids: Sequence[int], n_logits: int, on_prefill: Callable[[int, int], None] | None
    ) -> tuple[np.ndarray, int]:
        tokens = self._checked(ids)
        function("on_prefill", on_prefill)
        self.reread = None
        kept = self._rewind(tokens)
        logits = np.empty((0, 0), np.float32)
        stops = self._stops(tokens, kept)
        first = kept
        if first in stops:
            self.snapshots.add(self.model.save())
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = stops if self.slot_bytes else set()
        while first < tokens.size:
            if on_prefill:
                with self.reserved("on_prefill"):
                    on_prefill(first, tokens.size)
            stop = min((stop for stop in borders if stop > first), default=tokens.size)
            end = first + self.model.ops.next_rows(stop - first)
            logits = self._forward(tokens[first:end], n_logits if end == tokens.size else 0)
            for stop in sorted(stop for stop in stops if first < stop <= end):
                self.snapshots.add(self.model.save(stop))
            first = end
        if on_prefill:
            with self.reserved("on_prefill"):
                on_prefill(tokens.size, tokens.size)
        return logits, kept

    def _stops(self, tokens: np.ndarray, kept: int) -> set[int]:
        """The numbers of tokens after which to take a snapshot: at the ends of the first and the latest messages, and
        before the last token, because that is read again if the prompt is repeated."""
        if not self.snapshot_bytes or self.snapshots.budget < self.snapshot_bytes:
            return set()
        ends = np.flatnonzero(np.isin(tokens, list(self.tokenizer.eog_ids))) + 1
        ends = ends[(ends >= kept) & (ends < tokens.size)].tolist()
        return {*ends[:1], *ends[-MOST_SNAPSHOTS + 2 :], tokens.size - 1} - {0, *self.snapshots.lengths}

    @in_turn
    def step(self, token: int) -> np.ndarray:
        """Append one token to those in the cache.

        Parameters
        ----------
        token : int
            Token id.

        Returns
        -------
        ndarray
            Logits after the token, float32 [n_vocab].

        Raises
        ------
        UsageError
            If ``token`` is not a token id of this model, or if the model is closed.
        ContextError
            If the context is full.
        """
        return self._forward(self._checked([token]), 1)[0]

    @in_turn
    def extend(self, ids: list[int]) -> np.ndarray:
        """Logits after ``ids``, float32 [n_vocab]: by ``step`` if the cache holds all but the last token, else (after
        something else has used this model) by ``prefill``."""
        return self.step(ids[-1]) if self.sequence.tokens == ids[:-1] else self.prefill(ids)[0]

    @property
    def n_cached(self) -> int:
        """The number of tokens in the cache."""
        return 0 if self.closed else self.sequence.length

    def used_by(self, user: object) -> bool:
        """Whether nothing else has used this model since it was lent to ``user``."""
        return self._user is user

    @in_turn
    def lend(self, user: object) -> None:
        """Let ``user`` start passes on the device by itself; it reports what they have read with ``keep``."""
        self._settle()
        self._user = user

    @in_turn
    def keep(self, tokens: Sequence[int], count: int) -> None:
        """Note that passes of a borrower have read ``count`` tokens after those in the cache, and that ``tokens``, the
        first of them, stay."""
        self.sequence.claim(self.sequence.length, count)
        self.sequence.commit(tokens)

    def _forward(self, tokens: np.ndarray, n_logits: int) -> np.ndarray:
        self._settle()
        first = self.sequence.length
        self._user = None
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        return self.model.forward(tokens, positions, n_logits)

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""
        if self.closed:
            raise UsageError(CLOSED)

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        self.check_open()
        tokens = token_ids(ids, "token ids must be a sequence of whole numbers, as tokenize() returns them")
        if not tokens:
            raise UsageError("the prompt has no tokens; give some text.")
        if min(tokens) < 0 or max(tokens) >= self.config.n_vocab:
            raise UsageError(f"token ids must be 0 to {self.config.n_vocab - 1}.")
        if len(tokens) > self.n_ctx:
            raise ContextError(
                f"the prompt has {len(tokens)} tokens and the context {self.n_ctx}; "
                "shorten the prompt or choose a larger context (-c)."
            )
        return np.array(tokens, np.int32)

    @contextmanager
    def reserved(self, caller: str) -> Iterator[None]:
        """Refuse any use of the model by ``caller``, a function of the user that is called in the middle of a pass or of
        an answer."""
        outer, self._caller = self._caller, caller
        try:
            yield
        finally:
            self._caller = outer

    def _check_free(self) -> None:
        if self._caller:
            raise UsageError(f"{self._caller} must not use the model that has called it; use another one.")

    def _interrupt(self) -> None:
        """Wait for the steps in flight, which still write, before anything else uses the cache. Raises UsageError if that
        is a function which the model has called."""
        self._check_free()
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def _settle(self) -> None:
        """Make the cache hold what the next pass needs: an interrupted one may have overwritten it."""
        self._interrupt()
        if not self.sequence.intact:
            self.read(list(self.sequence.tokens))

    def _rewind(self, tokens: np.ndarray) -> int:
        """Rewind the cache to a prefix of ``tokens`` and return its length, which is less than the number of tokens: at
        least one is left to read."""
        self._interrupt()
        held = self.sequence.tokens
        cached = np.asarray(held[: tokens.size - 1], np.int32)
        differs = np.flatnonzero(cached != tokens[: cached.size])
        common = int(differs[0]) if differs.size else cached.size
        kept, after = common, held[common : common + 1]
        if self.sequence.can_truncate(common):
            self.sequence.truncate(common)
        elif (snapshot := self.snapshots.best(common)) is not None:
            kept = snapshot.length
            self.model.restore(snapshot)
        else:
            kept = 0
            self.sequence.truncate(0)
        if kept < common:
            self.reread = self._why(tokens, common, kept, after)
            log.info("%s", self.reread)
        self._user = None
        self.snapshots.forget(kept)
        return kept

    def _why(self, tokens: np.ndarray, common: int, kept: int, after: list[int]) -> str:
        """A sentence on why tokens that were read before are read again; after: the token that followed the common ones, if
        there was one."""
        again = f"{common - kept} tokens are read again"
        if not after:
            return f"{again}: the model's state after them was not kept"
        was, now = (repr(self.tokenizer.decode([int(i)], special=True)) for i in (after[0], tokens[common]))
        if common == tokens.size - 1 and was == now:
            return f"{again}: the prompt is part of what was read, and no state was kept nearer to its end"
        return f"{again}: token {common} is {now} and was {was}, and no state was kept nearer to it"
