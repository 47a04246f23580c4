"""A model with slots: from tokens to logits, with a cache of what was read before."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from engine.arrays import Array, Batch
from engine.cache.pages import NoPages
from engine.cache.recurrent import States
from engine.cache.sequence import Sequence as TokenSequence
from engine.checks import function, token_ids
from engine.decode.core import EngineCore
from engine.decode.device import can_sample, device_steps, row_reader
from engine.decode.disk_cache import DiskCache
from engine.decode.prefill import PrefillPass, PrefillSlice
from engine.decode.request import RowReader
from engine.decode.running import Steps
from engine.decode.slot import Slot
from engine.decode.slots import Slots
from engine.errors import ContextError, UsageError
from engine.forks import renew_in_children
from engine.limits import MOST_LOGITS
from engine.locking import IN_USE, Lock, in_turn
from engine.models.base import Model
from engine.models.needs import recurrent_bytes, snapshot_bytes
from engine.ops.executor import Forward
from engine.sampling.finite import check_rows
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.history import Histories
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.trace.tracer import Tracer

R = TypeVar("R")

CLOSED = "this model is closed; open it again with engine.load()."

ON_GPU = (
    "a forked process cannot use a GPU that its parent uses: start processes with the method 'spawn' of multiprocessing, and "
    "open the model in them."
)


class Closed:
    """Takes the place of the parts of a closed model: any use of it raises UsageError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(CLOSED)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise UsageError(CLOSED)


class CachedModel:
    """A model with slots for sequences, which reads tokens into them.

    What a slot holds is an optimization: each method is given a whole text, keeps what a slot already holds of it, and reads
    the rest, or takes over what others have read of it.  Each method holds ``lock``.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int) -> None:
        """budget: the most host memory for snapshots, in bytes."""
        self.lock = Lock()
        self.config = model.config
        self.tokenizer = tokenizer
        self.model = model
        self.cache = model.cache
        self.n_ctx = model.cache.n_ctx
        self.batch_size = min(model.prompt_rows, self.n_ctx)
        #: Bytes of a segment of recurrent layers, a state and the lists of its tokens; 0 if the model has none.
        self.recurrent_bytes = recurrent_bytes(self.config)
        #: Bytes of a snapshot; 0 if the model needs none.
        self.snapshot_bytes = snapshot_bytes(self.config)
        #: Snapshots after whole pages of texts that were read, if the model needs them.
        self.states = States(budget if self.snapshot_bytes else 0)
        kept = self.states, self.snapshot_bytes
        slots = [Slot(model, tokenizer, sequence, *kept) for sequence in model.sequences]
        self.slots = Slots(slots, model.cache, model.ops.decode_rows)
        #: Where texts are kept besides memory, if anywhere.
        self.disk: DiskCache | None = None
        #: The texts of earlier answers, for lookup.
        self.histories = Histories()
        #: The steps of ``device_steps``, once they were wanted.
        self._device_steps: Steps | None = None
        #: What traces tokens, once one was traced.
        self._tracer: Tracer | None = None
        self.core = EngineCore(self)
        #: The function of the user that may be running in the middle of a pass, and its thread.
        self._caller, self._thread = "", 0
        renew_in_children(self)

    def renew(self) -> None:
        """In a process that was forked: refuse to go on if other threads were using the model, or if it is on a GPU."""
        if self.closed:
            return
        if not all(ops.n_threads for ops in self.model.devices):
            self.lock.lose(ON_GPU)
        elif self.core.asked_by_others():
            self.lock.lose(IN_USE)

    # --- slots -----------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> TokenSequence:
        """The sequence that was used last."""
        self.check_open()
        return self.slots.current.sequence

    @property
    def reread(self) -> str | None:
        """A sentence if more than a page of the latest text that had been read before had to be read again; else None."""
        self.check_open()
        return self.slots.reread

    @in_turn
    def hold(self, slot: int, ids: Sequence[int], salt: str = "") -> None:
        """Make the sequence in a slot hold exactly ``ids`` with a salt, without computing logits."""
        own, tokens = self.slots[slot], self._checked(ids)
        if own.owner is not None:
            self.core.interrupt()
        own.sequence.belong(salt)
        # All but the last token may already be there.
        first = self.slots.rewind(own, np.append(tokens, tokens[-1:]))
        while first < tokens.size:
            end = first + self.model.next_rows(tokens.size - first)
            self._forward(own, tokens[first:end], 0)
            first = end

    @in_turn
    def check_pages(self) -> None:
        """Raise AssertionError unless every page of the cache is held by sequences, kept for others, or free, and by nobody
        twice."""
        self.slots.check_pages()

    def _own_slot(self, tokens: np.ndarray, salt: str) -> Slot:
        """A slot for a text that is read now; requests give theirs back if there is no other."""
        slot = self.slots.free(tokens, salt)
        if slot is None:
            self.core.interrupt()
            slot = self.slots.free(tokens, salt)
        assert slot is not None
        return slot

    # --- steps -----------------------------------------------------------------------------------------------------

    def device_steps(self, params: SamplerParams) -> Steps | None:
        """The steps of this model whose tokens its device chooses, for answers with these parameters; None if the host has to
        choose the tokens."""
        if not can_sample(self.model, params):
            return None
        if self._device_steps is None:
            self._device_steps = device_steps(self.model)
        return self._device_steps

    @in_turn
    def row_reader(self, sampler: Sampler, text: Sequence[int]) -> RowReader | None:
        """What reads the logits of a text on the device of the model (:func:`engine.decode.device.row_reader`)."""
        self.check_open()
        return row_reader(self.model, sampler, text)

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
        self.check_free()
        self.check_open()
        self.core.interrupt()
        self.forget()
        self.histories.clear()

    def forget(self) -> None:
        """Forget all tokens in the cache.  No request has a slot."""
        for slot in self.slots:
            slot.clear()
        for pool in self.cache.pools.values():
            pool.clear()
        self.states.clear()

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
        ModelError
            If logits are not finite, because the file is damaged or its arithmetic overflowed: the message names the tokens
            after which they come.

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
        self.check_free()
        slot = self._own_slot(tokens, "")
        slot.clear()
        self.slots.use(slot)
        rows = np.empty((tokens.size, self.config.n_vocab), np.float32)
        most = min(self.batch_size, MOST_LOGITS)
        for first in range(0, tokens.size, most):
            batch = tokens[first : first + most]
            rows[first : first + batch.size] = self._forward(slot, batch, batch.size)
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
        ModelError
            If the logits are not finite.
        """
        logits, kept = self._read(ids, 1, on_prefill)
        return logits[0], kept

    @in_turn
    def read(self, ids: Sequence[int]) -> None:
        """Make the cache hold exactly ``ids``, without computing logits. Raises ContextError if they do not fit into
        the context."""
        self._read(ids, 0, None)

    def _read(
        self, ids: Sequence[int], n_logits: int, on_prefill: Callable[[int, int], None] | None, salt: str = ""
    ) -> tuple[np.ndarray, int]:
        tokens = self._checked(ids)
        function("on_prefill", on_prefill)
        self.check_free()
        slot = self._own_slot(tokens, salt)
        kept = first = self.slots.rewind(slot, tokens)
        stops = slot.stops(tokens, kept)
        logits = np.empty((0, 0), np.float32)
        if first in stops:
            slot.save(first)
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = stops if self.recurrent_bytes else set()
        while first < tokens.size:
            if on_prefill:
                with self.reserved("on_prefill"):
                    on_prefill(first, tokens.size)
            stop = min((stop for stop in borders if stop > first), default=tokens.size)
            end = first + self.model.next_rows(stop - first)
            logits = self._forward(slot, tokens[first:end], n_logits if end == tokens.size else 0, stops)
            first = end
        if on_prefill:
            with self.reserved("on_prefill"):
                on_prefill(tokens.size, tokens.size)
        return logits, kept

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
        ModelError
            If the logits are not finite.
        """
        tokens = self._checked([token])
        self.check_free()
        slot = self.slots.current
        if slot.owner is not None:
            self.core.interrupt()
        return self._forward(slot, tokens, 1)[0]

    @in_turn
    def extend(self, ids: list[int], salt: str = "") -> np.ndarray:
        """Logits after ``ids`` with a salt, float32 [n_vocab]; fastest if a slot holds all but the last token."""
        tokens = self._checked(ids)
        slot = self.slots.free(tokens, salt)
        if slot is None or slot.sequence.tokens != ids[:-1]:
            return self._read(ids, 1, None, salt)[0][0]
        self.slots.use(slot)
        return self._forward(slot, tokens[-1:], 1)[0]

    @property
    def n_cached(self) -> int:
        """The number of tokens in the cache, of the text that was used last."""
        return 0 if self.closed else self.sequence.length

    def _forward(self, slot: Slot, tokens: np.ndarray, n_logits: int, stops: Collection[int] = ()) -> np.ndarray:
        """Read tokens after those that a slot without an owner holds; what an interrupted pass has overwritten is read again
        before, and slots that nobody uses are cleared if pages run out.  Raises NotFinite."""
        if not slot.sequence.intact:
            self._read(list(slot.sequence.tokens), 0, None, slot.sequence.salt)
        part = PrefillSlice(slot, tokens.tolist(), n_logits, stops)
        with self.core.guarded():
            passing = self.with_pages(slot, lambda: PrefillPass(self.model, [part], at_once=True))
            passing.advance(passing.pieces)
            (logits,) = passing.finish()
            part.commit()
        check_rows(logits, slot.sequence.length - len(logits))
        return logits

    @in_turn
    def read_by(self, ids: Sequence[int], forward: Forward[Array], salt: str = "") -> tuple[Slot, np.ndarray]:
        """Make the cache hold exactly ``ids`` with a salt.  A pass of its own, whose operations are ``forward``, reads the
        last of them.  Returns the slot, and the result of this pass for one row."""
        tokens = self._checked(ids)
        if tokens.size > 1:
            self._read(ids[:-1], 0, None, salt)
            slot = self.slots.current
        else:
            slot = self._own_slot(tokens, salt)
            slot.clear()
            self.slots.use(slot)
        position = np.array([tokens.size - 1], np.int32)
        with self.core.guarded():
            self.with_pages(slot, lambda: self.model.prepare(tokens.size - 1, 1, slot.sequence))
            batch = Batch(tokens[-1:], position, np.array([slot.sequence.slot], np.int32))
            result = self.model.ops.run(forward, batch, 1)
        assert result is not None
        slot.sequence.commit(tokens[-1:].tolist())
        slot.sequence.settle()
        return slot, result

    def with_pages(self, slot: Slot, call: Callable[[], R]) -> R:
        """The result of ``call()``, which is called again while it raises NoPages and other slots than ``slot``, which nobody
        uses, can be cleared."""
        while True:
            try:
                return call()
            except NoPages:
                self.core.interrupt()
                if not self.slots.free_pages(besides=slot):
                    raise

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""
        if self.closed:
            raise UsageError(CLOSED)

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        self.check_open()
        return self.check_ids(
            token_ids(ids, "token ids must be a sequence of whole numbers, as tokenize() returns them")
        )

    def check_ids(self, ids: list[int]) -> np.ndarray:
        """Whole numbers as token ids int32 [n]. Raises UsageError if there are none or if the vocabulary lacks one, and
        ContextError if they do not fit into the context."""
        self.check_generates()
        if not ids:
            raise UsageError("the prompt has no tokens; give some text.")
        self.check_length(len(ids))
        return self.check_vocabulary(ids)

    def check_generates(self) -> None:
        """Raise UsageError if the model is an encoder, which generates no text."""
        if not self.config.causal:
            raise UsageError(
                f"{self.model.gguf.path.name} turns texts into vectors and generates no text: ask it for embeddings, or use "
                "another model."
            )

    def check_vocabulary(self, ids: list[int]) -> np.ndarray:
        """Whole numbers, at least one, as token ids int32 [n]. Raises UsageError if the vocabulary lacks one."""
        try:
            tokens = np.array(ids, np.int32)
            valid = tokens.min() >= 0 and tokens.max() < self.config.n_vocab
        except OverflowError:  # no int32
            valid = False
        if not valid:
            raise UsageError(f"token ids must be 0 to {self.config.n_vocab - 1}.")
        return tokens

    def check_length(self, n_prompt: int, about: str = "") -> None:
        """Raise ContextError if a prompt of so many tokens does not fit into the context; about: precedes the number in the
        message, such as "at least "."""
        if n_prompt > self.n_ctx:
            raise ContextError(
                f"the prompt has {about}{n_prompt} tokens and the context {self.n_ctx}; "
                "shorten the prompt or choose a larger context (n_ctx=...).",
                n_prompt,
                self.n_ctx,
            )

    def check_least(self, n_prompt: int) -> None:
        """Raise ContextError if a prompt of at least so many tokens does not fit into the context."""
        self.check_length(n_prompt, "at least ")

    @contextmanager
    def reserved(self, caller: str) -> Iterator[None]:
        """Refuse any use of the model by ``caller``, a function of the user that is called in the middle of a pass or of
        an answer."""
        outer, self._caller, self._thread = self._caller, caller, threading.get_ident()
        try:
            yield
        finally:
            self._caller = outer

    def check_free(self) -> None:
        """Raise UsageError if this thread is in a function of the user that this model has called."""
        if self._caller and self._thread == threading.get_ident():
            raise UsageError(f"{self._caller} must not use the model that has called it; use another one.")
