"""Steps whose tokens the host chooses: always on the CPU, and on a GPU for requests whose tokens it cannot choose itself."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.running import InFlightRequest, Running, Step
from engine.limits import MOST_DRAFTS
from engine.sampling.row_digest import row_digest
from engine.speculative.acceptance import by_p_min, by_ratio, distribution
from engine.speculative.passes import PassTimes
from engine.speculative.proposal import DeviceDraft


class Readable(Protocol):
    """The interface of a model that steps use."""

    @property
    def cache(self) -> KVCache:
        """Its cache."""

    @property
    def ops(self) -> Any:
        """Its backend (``engine.ops.operations.Operations``)."""

    def step(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass that stores the tokens of some sequences, and return the logits of the rows of each, float32 [tokens,
        n_vocab].  The caller commits the tokens that it keeps."""


class ModelSteps:
    """The limits of steps that follow from a model's cache."""

    _model: Readable

    @property
    def rewind(self) -> int:
        """The number of tokens that may be read before they are committed."""
        return self._model.cache.rewind

    def room(self, n_known: int) -> int:
        """The most drafts that a step can read after ``n_known`` tokens."""
        cache = self._model.cache
        return min(cache.n_ctx - n_known, MOST_DRAFTS, self._model.ops.decode_rows - 1, cache.max_rows - 1)


class HostSteps(ModelSteps):
    """Steps of one model whose tokens are chosen on the host.  Nothing is in flight between ``start`` and ``take``."""

    ahead = 1
    ahead_drafted = 1

    def __init__(self, model: Readable) -> None:
        self._model = model
        self.passes = PassTimes(model.ops.padded_rows)
        self._taken: deque[list[Step]] = deque()

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """False: the host makes all drafts."""
        return False

    def begin(self, running: Running) -> None:
        """Add a request: nothing needs to be prepared."""

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        """Read the last sampled token and the drafts of each request, and choose the tokens that follow."""
        parts = [(running.sequence, [running.known[-1], *proposal.tokens]) for running, proposal in batch]
        if len(batch) == 1 and batch[0].running.params.sequential:
            self._taken.append([self._chosen(batch[0], self._one_by_one(*parts[0]))])
        else:
            rows = self._model.step(parts)
            self._taken.append([self._chosen(*pair) for pair in zip(batch, rows, strict=True)])

    def _one_by_one(self, sequence: TokenSequence, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """The logits of each token, float32 [n_vocab], which is read when they are wanted, after the one before has been
        kept."""
        for token in tokens:
            ((row,),) = self._model.step([(sequence, [token])])
            yield row
            sequence.commit([token])

    def _chosen(self, request: InFlightRequest, rows: Iterable[np.ndarray]) -> Step:
        """Choose the tokens after the rows of a request, and commit what was read and kept."""
        step, (running, proposal) = Step([]), request
        held = running.sequence.length
        for i, logits in enumerate(rows):
            try:
                token, kept = _choose(request, logits, running.known + proposal.tokens[:i], i)
            except Exception as error:  # of a logits processor, or because no token can be chosen
                step.error = error
                break
            step.tokens.append(token)
            step.logits.append(logits)
            if running.request.receipt:
                step.rows.append(row_digest(logits))
            if not kept:
                break
        if step.tokens:
            read = [running.known[-1], *step.tokens[:-1]]
            running.sequence.commit(read[running.sequence.length - held :])
            running.sequence.settle()
        return step

    def take(self) -> list[Step]:
        """The results of the oldest pass that have not been taken."""
        return self._taken.popleft()

    def end(self, running: Running) -> None:
        """Remove a request: none of its steps is in flight."""

    def drop(self) -> None:
        """Drop the results that have not been taken."""
        self._taken.clear()


def _choose(request: InFlightRequest, logits: np.ndarray, history: list[int], i: int) -> tuple[int, bool]:
    """The token after ``history``, and whether it is draft i."""
    running, proposal = request
    drafts, mode, sampler = proposal.tokens, running.params.accept, running.sampler
    if i == len(drafts) or mode == "exact" or sampler.params.greedy:
        token = sampler.sample(logits, len(history), history)
        return token, i < len(drafts) and token == drafts[i]
    target = distribution(sampler, logits, history)
    if mode == "p-min":
        sampled = sampler.sample(logits, len(history), history)
        return by_p_min(target, drafts[i], sampled, running.params.accept_p_min)
    draft = proposal.distributions[i] if proposal.distributions is not None else None
    return by_ratio(target, draft, drafts[i], sampler.seed, len(history))
