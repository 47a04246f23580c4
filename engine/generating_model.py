"""A model and its drafts: compiling, generating tokens, closing."""

import gc
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np

from engine.cache.kv import KVCache
from engine.cached_model import CachedModel, Closed
from engine.compile.jobs import Job
from engine.decode.core import POLL_SECONDS, EngineCore
from engine.decode.device import can_sample, load_step_kernels, step_jobs
from engine.decode.request import Request
from engine.locking import in_turn
from engine.memory import Memory
from engine.models.base import Model
from engine.sampling import row_digest
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.mtp import MTPDraft
from engine.speculative.speculation import Speculation
from engine.text.tokenizer import Tokenizer

CHOICES = (SamplerParams(temperature=0.0, seed=1), SamplerParams(temperature=0.8, seed=1))
"""Ways to choose tokens whose kernels are compiled ahead.  The host needs them on every device: it chooses the first token of
an answer from the logits of the prompt."""


class GeneratingModel(CachedModel):
    """A model that reads and generates tokens, with the source of its drafts. Each method, and each round, holds ``lock``."""

    def __init__(self, model: Model, tokenizer: Tokenizer, snapshot_bytes: int) -> None:
        super().__init__(model, tokenizer, snapshot_bytes)
        self.draft: DraftModel | MTPDraft | None = None
        #: The number of answers that threads wait for.
        self._answering = 0

    def renew(self) -> None:
        """In a process that was forked: nobody else waits for answers."""
        super().renew()
        self._answering = 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the model open."""
        with self.lock:
            self._answering += 1
        try:
            yield
        finally:
            with self.lock:
                self._answering -= 1

    # --- kernels -----------------------------------------------------------------------------------------------

    @in_turn
    def jobs(self) -> list[Job]:
        """The compile jobs of every kernel that this model and its draft model use."""
        self.reset()
        model, drafter = self.model, self.model.drafter
        jobs: dict[Job, None] = dict.fromkeys(model.jobs())
        if not self.config.causal:
            return list(jobs)
        jobs.update(dict.fromkeys(step_jobs(model)))
        if drafter is not None:
            for each, rows in drafter.listed:
                jobs.update(dict.fromkeys(drafter.ops.pass_jobs(each, rows)))
        for params in CHOICES:
            jobs.update(dict.fromkeys(Sampler(params, self.config.n_vocab).jobs()))
        jobs.update(dict.fromkeys(row_digest.jobs(self.config.n_vocab)))
        if isinstance(self.draft, DraftModel):
            jobs.update(dict.fromkeys(self.draft.llm.jobs()))
        return list(jobs)

    @in_turn
    def warm_up(self) -> None:
        """Load every kernel by running a pass of one token; the sampler's only if tokens are chosen on the host. Clears
        the cache."""
        self.reset()
        drafter = self.model.drafter
        try:
            self.model.warm_up()
            if not self.config.causal:
                return
            load_step_kernels(self.model)
            if drafter is not None:
                for each, rows in drafter.listed:
                    drafter.ops.load_pass(each, rows)
        finally:
            self.reset()
        for params in CHOICES:
            if not can_sample(self.model, params):
                Sampler(params, self.config.n_vocab).warm_up()

    # --- generation --------------------------------------------------------------------------------------------

    def decode(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        count: int,
        speculation: Speculation | None = None,
        with_logits: bool = False,
        salt: str = "",
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Generate ``count`` tokens after ``ids``, each with the logits that it was chosen from, float32 [n_vocab].
        Without ``with_logits``, the logits may be empty.  salt: that of the text.

        The last of ``ids`` is read in the step that chooses the first token.
        """
        yield from self.tokens(Request(ids, sampler, count, speculation, with_logits, salt=salt, begun=True))

    def tokens(self, request: Request) -> Generator[tuple[int, np.ndarray], None, None]:
        """The tokens of a request, computed when they are wanted."""
        if request.speculation is not None:
            with self.lock:
                self.check_open()
                self.model.expect_drafts()
        try:
            while (item := self.core.next(request)) is not None:
                yield item
        finally:
            # An abandoned answer may be collected in any thread, and in the middle of a pass, or after the model was closed.
            core = self.core
            if isinstance(core, EngineCore):
                core.close(request)

    def can_sample(self, sampler: Sampler) -> bool:
        """Whether the device can choose tokens by the rules of this sampler, so that logits need not leave the
        device."""
        return can_sample(self.model, sampler.params)

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """The memory of the model and of its draft model, by what it is for."""
        self.check_open()
        cache, states = self.cache, self.states
        pools = [(pool, cache.page_bytes[paging]) for paging, pool in cache.pools.items()]
        pages = sum(n_bytes * pool.n_pages for pool, n_bytes in pools)
        kept = sum(n_bytes * pool.n_kept for pool, n_bytes in pools)
        free = sum(n_bytes * pool.n_empty for pool, n_bytes in pools)
        own = Memory(
            weights=self.model.gguf.n_bytes,
            pages_held=pages - kept - free,
            pages_kept=kept,
            pages_free=free,
            rings=cache.n_bytes - pages,
            snapshots=states.n_bytes,
            buffers=sum(ops.buffer_bytes() for ops in self.model.devices),
            snapshots_limit=states.budget,
        )
        return own + self.draft.llm.memory if isinstance(self.draft, DraftModel) else own

    @in_turn
    def rest(self, forget: bool = False) -> None:
        """Give memory back to the system that holds nothing while there is nothing to compute; forget: also forget the texts
        that no slot holds, if their pages are in memory of the system."""
        if self.closed:
            return
        if forget and any(ops.device_memory() is None for ops in self.model.devices):
            self.slots.forget_others(self.states)
            self.histories.clear()
        self.model.rest()
        if isinstance(self.draft, DraftModel):
            self.draft.llm.rest(forget)

    @in_turn
    def resume(self) -> None:
        """Prepare for passes after :meth:`rest`, which are slower without it."""
        if self.closed:
            return
        self.model.resume()
        if isinstance(self.draft, DraftModel):
            self.draft.llm.resume()

    # --- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the cache, the weights, the memory of a GPU, and the draft model.

        Waits until calls of ``complete`` and ``chat`` in other threads have returned. Any later use of the model, or of an
        unfinished answer, raises UsageError. Closing a closed model has no effect.

        Raises
        ------
        UsageError
            If ``on_prefill`` or a logits processor calls it.
        """
        self.check_free()
        while self._answering > 0:
            time.sleep(POLL_SECONDS)
        if self.disk is not None:
            self.disk.close()
        with self.lock:
            if self.closed:
                return
            self.disk = None
            draft, self.draft = self.draft, None
            try:
                self.reset()
            finally:
                self.model = cast(Model, Closed())
                self.cache = cast(KVCache, Closed())
                self.core = cast(EngineCore, Closed())
                self._device_steps = self._tracer = None
                self.slots.close()
                if isinstance(draft, DraftModel):
                    draft.llm.close()
            del draft
        gc.collect()  # recorded passes refer to their model, and it refers to them
