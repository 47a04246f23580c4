"""The Python API: compute logits and generate text.  ``engine/loading.py`` opens a model."""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from engine.cache.recurrent import Snapshots
from engine.compile.jobs import Job, noted
from engine.compile.pool import compile_all
from engine.decode.generation import Generation
from engine.decode.sampler import LogitsProcessor, Sampler, SamplingParams
from engine.errors import ContextError, UsageError
from engine.gguf.file import GGUF
from engine.models.base import Model, slot_bytes
from engine.models.traffic import weight_bytes_per_token
from engine.ops import Progress
from engine.speculative.draft_model import DraftModel
from engine.speculative.loop import Speculation, follow
from engine.speculative.mtp import MTPDraft
from engine.speculative.params import SpeculationParams
from engine.speculative.steps import HostSteps, Steps
from engine.text.breakers import BREAKERS, breaker_ids
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer

MOST_SNAPSHOTS = 8
"""The most snapshots taken while one prompt is read: each one interrupts the reading and copies from the device."""

MOST_LOGITS = 128
"""Rows of a pass that returns the logits of all its rows; few, because a vocabulary is large."""

CHOICES = (SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=0.8, seed=1))
"""Ways to choose tokens whose kernels are compiled ahead.  The host needs them on every device: it chooses the first token of
an answer from the logits of the prompt."""

log = logging.getLogger(__name__)


class LLM:
    """A loaded model with one key-value cache.  It is not thread-safe.

    Attributes: ``config``, ``tokenizer``, ``chat_template`` (None if the file has none), ``path``, ``n_ctx``, ``batch_size``
    (rows of a pass that reads a prompt), ``n_threads``, ``n_params``, ``n_bytes`` (bytes of weights), ``n_bytes_read``
    (bytes of weights that one token reads), ``cache_bytes`` (bytes of a full cache), ``load_seconds``, ``compile_seconds``,
    ``model`` (the forward pass), ``cache``, ``draft`` (None without a draft model or a layer that drafts), ``notes``
    (sentences about requests that could not be met), ``snapshots`` (states along the text, for recurrent models) and
    ``reread`` (a sentence if tokens of the latest prompt that had been read before had to be read again; else None).
    """

    def __init__(
        self,
        gguf: GGUF,
        tokenizer: Tokenizer,
        model: Model,
        load_seconds: float,
        notes: Sequence[str] = (),
        snapshot_bytes: int = 0,
    ) -> None:
        self.path = gguf.path
        self.config = model.config
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate.from_gguf(gguf, tokenizer)
        self.model = model
        self.cache = model.cache
        self.n_ctx = model.cache.n_ctx
        self.batch_size = min(model.ops.max_rows, self.n_ctx)
        self.n_threads = model.ops.n_threads
        self.n_params = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in gguf.tensors.values())
        self.n_bytes = gguf.n_bytes
        self.n_bytes_read = weight_bytes_per_token(gguf)
        self.cache_bytes = model.cache.n_bytes
        self.load_seconds = load_seconds
        self.compile_seconds = 0.0
        self.notes = list(notes)
        self.draft: DraftModel | MTPDraft | None = MTPDraft(self) if model.mtp is not None else None
        #: Bytes of the states of recurrent layers after one token; 0 if the model has none.
        self.slot_bytes = slot_bytes(self.config)
        self.snapshots = Snapshots(snapshot_bytes if self.slot_bytes else 0)
        self.reread: str | None = None
        self._cached: list[int] = []
        self._user: object = None
        #: The steps that may still be in flight.
        self._running: Steps | None = None

    # --- text and tokens ---------------------------------------------------------------------------------------

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The token ids of ``text``.

        special: add the tokens that the model expects at the beginning and end, and recognize control tokens in the text.
        """
        return self.tokenizer.encode(text, add_special=special, parse_special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens have none.  Raises TokenizerError for an id outside the vocabulary."""
        return self.tokenizer.decode(ids)

    # --- the forward pass --------------------------------------------------------------------------------------

    def compile(self, progress: Progress | None = None) -> float:
        """Compile every missing kernel of this model and of its draft model, with one process per core; returns the time in
        seconds, close to 0 if none is missing.

        progress: called as ``progress("compile", done, total)``; it counts the kernels that were missing.
        """
        started = time.perf_counter()
        compile_all(self.jobs(), progress)
        self.warm_up()
        if isinstance(self.draft, DraftModel):
            self.draft.llm.warm_up()
        self.compile_seconds = time.perf_counter() - started
        return self.compile_seconds

    def jobs(self) -> list[Job]:
        """The compile jobs of every kernel that this model and its draft model use."""
        self.reset()
        jobs: dict[Job, None] = dict.fromkeys(self.model.ops.jobs(self.model))
        with noted(jobs):
            for params in CHOICES:
                Sampler(params, self.config.n_vocab).warm_up()
        if isinstance(self.draft, DraftModel):
            jobs.update(dict.fromkeys(self.draft.llm.jobs()))
        return list(jobs)

    def warm_up(self) -> None:
        """Load every kernel by running a pass of one token; the sampler's only if tokens are chosen on the host.  Clears the
        cache."""
        self.reset()
        try:
            self.model.ops.warm_up(self.model)
        finally:
            self.reset()
        for params in CHOICES:
            if not self.model.ops.can_sample(params):
                Sampler(params, self.config.n_vocab).warm_up()

    def reset(self) -> None:
        """Forget all cached tokens."""
        self._interrupt()
        self._cached = []
        self._user = None
        self.cache.truncate(0)
        self.snapshots.forget(0)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each token of ``ids``: float32 [len(ids), n_vocab].  Raises ContextError if they do not fit into the
        context."""
        tokens = self._checked(ids)
        self.reset()
        rows = np.empty((tokens.size, self.config.n_vocab), np.float32)
        most = min(self.batch_size, MOST_LOGITS)
        for first in range(0, tokens.size, most):
            batch = tokens[first : first + most]
            rows[first : first + batch.size] = self._forward(batch, batch.size)
        return rows

    def prefill(
        self, ids: Sequence[int], on_prefill: Callable[[int, int], None] | None = None
    ) -> tuple[np.ndarray, int]:
        """Make the cache hold exactly ``ids``.  Returns the logits after the last one, float32 [n_vocab], and the number of
        tokens that the cache already held.

        on_prefill: called as ``on_prefill(done, total)``, in tokens.
        Raises ContextError if the tokens do not fit into the context.
        """
        logits, kept = self._read(ids, 1, on_prefill)
        return logits[0], kept

    def read(self, ids: Sequence[int]) -> None:
        """Make the cache hold exactly ``ids``, without computing logits.  Raises ContextError if they do not fit into the
        context."""
        self._read(ids, 0, None)

    def _read(
        self, ids: Sequence[int], n_logits: int, on_prefill: Callable[[int, int], None] | None
    ) -> tuple[np.ndarray, int]:
        tokens = self._checked(ids)
        self.reread = None
        kept = self._rewind(tokens)
        logits = np.empty((0, 0), np.float32)
        stops = self._stops(tokens, kept)
        first = kept
        if first in stops:
            self.snapshots.add(self.model.save())
        while first < tokens.size:
            if on_prefill:
                on_prefill(first, tokens.size)
            stop = min((stop for stop in stops if stop > first), default=tokens.size)
            end = first + self.model.ops.next_rows(stop - first)
            logits = self._forward(tokens[first:end], n_logits if end == tokens.size else 0)
            first = end
            if first in stops:
                self.snapshots.add(self.model.save())
        if on_prefill:
            on_prefill(tokens.size, tokens.size)
        return logits, kept

    def _stops(self, tokens: np.ndarray, kept: int) -> set[int]:
        """The numbers of tokens after which to take a snapshot: at the ends of the first and the latest messages, and before
        the last token, because that is read again if the prompt is repeated."""
        if not self.slot_bytes or self.snapshots.budget < self.slot_bytes:
            return set()
        ends = np.flatnonzero(np.isin(tokens, list(self.tokenizer.eog_ids))) + 1
        ends = ends[(ends >= kept) & (ends < tokens.size)].tolist()
        return {*ends[:1], *ends[-MOST_SNAPSHOTS + 2 :], tokens.size - 1} - {0, *self.snapshots.lengths}

    def step(self, token: int) -> np.ndarray:
        """Append one token to the cache and return the logits after it: float32 [n_vocab]."""
        return self._forward(self._checked([token]), 1)[0]

    def extend(self, ids: list[int]) -> np.ndarray:
        """Logits after ``ids``, float32 [n_vocab]: by ``step`` if the cache holds all but the last token, else (after
        something else has used this model) by ``prefill``."""
        return self.step(ids[-1]) if self._cached == ids[:-1] else self.prefill(ids)[0]

    def decode(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        count: int,
        speculation: Speculation | None = None,
        with_logits: bool = False,
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Generate ``count`` tokens after ``ids``, each with the logits that it was chosen from, float32 [n_vocab].  Without
        ``with_logits``, the logits may be empty.

        Steps in flight whose tokens are never requested are rolled back.
        """
        params = speculation.params if speculation is not None else SpeculationParams()
        history = list(ids)
        while count > 0:
            self._settle()
            if self._cached != history[:-1]:
                self.read(history[:-1])
            self._user = mine = object()
            if with_logits or params.sequential or not self.can_sample(sampler):
                steps: Steps = HostSteps(self.model, sampler, params)
            else:
                steps = self.model.ops.steps(self.model, sampler, params)
            stream = follow(steps, history, count, speculation)
            self._running = steps
            try:
                for token, logits in stream:
                    self._cached.append(history[-1])
                    history.append(token)
                    count -= 1
                    yield token, logits
                    if self._user is not mine:
                        break  # something else has used this model in between
            finally:
                stream.close()
                if self._user is mine and self.cache.can_truncate(len(self._cached)):
                    self.cache.truncate(len(self._cached))

    def can_sample(self, sampler: Sampler) -> bool:
        """Whether the device can choose tokens by the rules of this sampler, so that logits need not leave the device."""
        return self.model.ops.can_sample(sampler.params)

    @property
    def n_cached(self) -> int:
        """The number of tokens in the cache."""
        return len(self._cached)

    def used_by(self, user: object) -> bool:
        """Whether nothing else has used this model since it was lent to ``user``."""
        return self._user is user

    def lend(self, user: object) -> None:
        """Let ``user`` start passes on the device by itself; it reports what they have read with ``keep``."""
        self._settle()
        self._user = user

    def keep(self, tokens: Sequence[int], count: int) -> None:
        """Note that passes of a borrower have read ``count`` tokens after those in the cache, and that ``tokens``, the first
        of them, stay."""
        self.cache.advance(len(self._cached), count)
        self._cached.extend(tokens)
        self.cache.truncate(len(self._cached))

    def _forward(self, tokens: np.ndarray, n_logits: int) -> np.ndarray:
        self._settle()
        first = len(self._cached)
        self._user = None
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        logits = self.model.forward(tokens, positions, n_logits)
        self._cached.extend(tokens.tolist())
        return logits

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        tokens = np.asarray(ids if len(ids) else np.zeros(0, np.int64))
        if tokens.dtype.kind not in "iu":
            raise UsageError("token ids must be integers; give a text to tokenize() first.")
        if tokens.ndim != 1 or tokens.size == 0:
            raise UsageError("the prompt has no tokens; give some text.")
        if tokens.min() < 0 or tokens.max() >= self.config.n_vocab:
            raise UsageError(f"token ids must be 0 to {self.config.n_vocab - 1}.")
        if tokens.size > self.n_ctx:
            raise ContextError(
                f"the prompt has {tokens.size} tokens and the context {self.n_ctx}; "
                "shorten the prompt or choose a larger context (-c)."
            )
        return tokens.astype(np.int32)

    def _interrupt(self) -> None:
        """Wait for the steps in flight, which still write, before anything else uses the cache."""
        if self._running is not None:
            running, self._running = self._running, None
            running.end()

    def _settle(self) -> None:
        """Make the length of the cache match its contents: an interrupted pass has claimed positions that it did not fill."""
        self._interrupt()
        if self.cache.length == len(self._cached):
            return
        if self.cache.can_truncate(len(self._cached)):
            self.cache.truncate(len(self._cached))
            return
        self.read(self._cached)

    def _rewind(self, tokens: np.ndarray) -> int:
        """Rewind the cache to a prefix of ``tokens`` and return its length, which is less than the number of tokens: at
        least one is left to read."""
        self._interrupt()
        cached = np.asarray(self._cached[: tokens.size - 1], np.int32)
        differs = np.flatnonzero(cached != tokens[: cached.size])
        common = int(differs[0]) if differs.size else cached.size
        kept = common
        if self.cache.can_truncate(common):
            self.cache.truncate(common)
        elif (snapshot := self.snapshots.best(common)) is not None:
            kept = snapshot.length
            self.model.restore(snapshot)
        else:
            kept = 0
            self.cache.truncate(0)
        if kept < common:
            self.reread = self._why(tokens, common, kept)
            log.info("%s", self.reread)
        del self._cached[kept:]
        self._user = None
        self.snapshots.forget(kept)
        return kept

    def _why(self, tokens: np.ndarray, common: int, kept: int) -> str:
        """A sentence on why tokens that were read before are read again."""
        again = f"{common - kept} tokens are read again"
        if common >= len(self._cached):
            return f"{again}: the model's state after them was not kept"
        was, now = (repr(self.tokenizer.decode([int(i)], special=True)) for i in (self._cached[common], tokens[common]))
        if common == tokens.size - 1 and was == now:
            return f"{again}: the prompt is part of what was read, and no state was kept nearer to its end"
        return f"{again}: token {common} is {now} and was {was}, and no state was kept nearer to it"

    # --- generation --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = -1,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_sequence_breakers: Sequence[str] = BREAKERS,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        logits_processors: Sequence[LogitsProcessor] = (),
        seed: int = -1,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        heal: bool = False,
        logprobs: int = 0,
        on_prefill: Callable[[int, int], None] | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Generation:
        """Continue a text or a sequence of token ids.  Iterate over the result to get the text in pieces.

        max_tokens: the most tokens to generate; -1: until the model stops or the context is full.
        stop: texts that end the answer; they are not part of it.
        ignore_eos: never choose end-of-generation tokens.
        heal: remove the last token of the text, so that the answer may begin with a longer one (many models have a single
            token for "):" and the newline after it).
        dry_sequence_breakers: texts beyond which the repetitions that DRY penalizes do not reach back.
        logits_processors: functions ``f(ids, logits)`` that change the logits before bias and penalties, each with the result
            of the one before.  ``ids`` is the tuple of the tokens so far, prompt included; ``logits``, float32 [n_vocab], is
            a copy.  A function changes it and returns None, or returns an array float32 [n_vocab]; ``-inf`` bans a token.
            It must be a function of its arguments: it is called at least once per token, and also for drafts, including
            those that are rejected.
        logprobs: how many of the most probable tokens to record per token.
        on_prefill: called as ``on_prefill(done, total)``, in tokens, while the prompt is read.
        speculation: how to draft and which drafts to accept; None: the defaults, which use the draft model if one is loaded.
        The other arguments are described in ``engine.decode.sampler.SamplingParams``.

        Raises UsageError for an argument out of range, and ContextError for a prompt that leaves no room for an answer.
        While the answer is generated, an exception of a logits processor is raised as it is, and UsageError if it returns
        something else than logits.
        """
        ids = self.tokenize(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        begins_with = self._take_back(ids) if heal and isinstance(prompt, str) else ""
        bias = dict(logit_bias or {})
        never = self.tokenizer.suppressed_ids | (self.tokenizer.eog_ids if ignore_eos else frozenset())
        bias |= dict.fromkeys(never, float("-inf"))
        # Without DRY the vocabulary is not searched for breakers.
        breakers = breaker_ids(self.tokenizer, dry_sequence_breakers if dry_multiplier else ())
        given = locals() | {"logit_bias": bias, "dry_breakers": breakers}
        params = SamplingParams(**{f.name: given[f.name] for f in fields(SamplingParams)})
        if max_tokens < -1:
            raise UsageError(f"max_tokens must be -1 (no limit) or more, not {max_tokens}.")
        if not 0 <= logprobs <= self.config.n_vocab:
            raise UsageError(f"logprobs must be between 0 and {self.config.n_vocab}, not {logprobs}.")
        self._checked(ids)
        if len(ids) >= self.n_ctx and max_tokens != 0:
            raise ContextError(
                f"the prompt has {len(ids)} tokens, which fills the context of {self.n_ctx}; "
                "shorten the prompt or choose a larger context (-c)."
            )
        sampler = Sampler(params, self.config.n_vocab)
        return Generation(
            self,
            ids,
            sampler,
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            top_logprobs=logprobs,
            begins_with=begins_with,
            on_prefill=on_prefill,
            speculation=self._speculation(speculation or SpeculationParams(), sampler),
        )

    def _speculation(self, params: SpeculationParams, sampler: Sampler) -> Speculation | None:
        """The draft sources of one answer; None if there are none."""
        if not params.enabled or (self.draft is None and not params.lookup):
            return None
        return Speculation(params, sampler, self.draft, self.n_bytes_read)

    def _take_back(self, ids: list[int]) -> str:
        """Remove the last of ``ids`` and return its text.  Remove nothing and return "" if it is the only one, a control
        token, or a part of a character."""
        text = self.tokenizer.decode(ids[-1:]) if len(ids) > 1 else ""
        if not text or text.encode() != self.tokenizer.token_bytes(ids[-1]):
            return ""
        ids.pop()
        return text

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Run ``generate`` with these arguments to its end and return the finished answer.  Raises UsageError for an argument
        out of range, and ContextError for a prompt that leaves no room for an answer."""
        generation = self.generate(prompt, **options)
        for _ in generation:
            pass
        return generation
