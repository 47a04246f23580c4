"""Steps of a target whose logits the host reads: always on the CPU, and on a GPU if it cannot choose the tokens itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.sampler import Sampler
from engine.limits import STEP_ROWS
from engine.speculative.acceptance import by_p_min, by_ratio, distribution
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import DeviceDraft, Proposal

_NO_LOGITS = np.empty(0, np.float32)


@dataclass
class Step:
    """The result of one step: the accepted drafts, the token after them, and, if they are on the host, the logits that each
    was chosen from."""

    tokens: list[int]
    logits: list[np.ndarray] = field(default_factory=list)

    def row(self, i: int) -> np.ndarray:
        """The logits of token i; empty if they stayed on the device."""
        return self.logits[i] if self.logits else _NO_LOGITS


class Steps(Protocol):
    """Steps of one model.  Call ``begin``, then ``start`` and ``take`` equally often, then ``end``.

    ``ahead``: the number of plain steps that may be in flight; ``ahead_drafted``: that of steps with drafts.
    """

    ahead: int
    ahead_drafted: int

    @property
    def rewind(self) -> int:
        """The number of tokens that may be read before they are committed."""

    def room(self, n_known: int) -> int:
        """The number of drafts that a step can read after ``n_known`` tokens."""

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source computes its drafts as part of a step."""

    def begin(self, known: Sequence[int]) -> object:
        """Set the tokens so far; the cache holds all but the last.  Returns an object that identifies this answer to
        ``end``."""

    def start(self, proposal: Proposal) -> None:
        """Start a step that reads the last known token and the drafts."""

    def take(self) -> Step:
        """Wait for the first step whose result has not been taken, and return it."""

    def end(self, turn: object = None) -> None:
        """End the answer: wait for the steps in flight; no further step follows."""


class Readable(Protocol):
    """The interface of a model that steps use."""

    cache: KVCache
    sequence: TokenSequence

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int) -> np.ndarray:
        """Run a pass and return the logits of its last rows, float32 [n_logits, n_vocab]."""


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
        return min(cache.n_ctx - n_known, STEP_ROWS - 1, cache.max_rows - 1)


class HostSteps(ModelSteps):
    """Steps of one model whose tokens are chosen on the host.  Call ``begin``, then ``start`` and ``take`` in turn.  The
    cache holds all known tokens but the last."""

    ahead = 1
    """The number of plain steps that may be in flight: started, with their result not yet taken."""
    ahead_drafted = 1
    """The number of steps with drafts that may be in flight."""

    def __init__(self, model: Readable, sampler: Sampler, params: SpeculationParams) -> None:
        self._model = model
        self._sampler = sampler
        self._params = params
        self._known: list[int] = []
        self._steps: list[Step] = []

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source computes its drafts as part of a step."""
        return False

    def begin(self, known: Sequence[int]) -> None:
        """Set the tokens so far; the cache holds all but the last."""
        self._known = list(known)

    def start(self, proposal: Proposal) -> None:
        """Read the last known token and the drafts, and choose the tokens that follow."""
        drafts, known = proposal.tokens, self._known
        first = len(known) - 1
        tokens = np.array([known[-1], *drafts], np.int32)
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        if self._params.sequential:
            rows = [self._model.forward(tokens[i : i + 1], positions[i : i + 1], 1)[0] for i in range(tokens.size)]
        else:
            rows = list(self._model.forward(tokens, positions, tokens.size))
        step = Step([], rows)
        for i, logits in enumerate(rows):
            history = known + drafts[:i]
            token, kept = self._choose(logits, history, proposal, i)
            step.tokens.append(token)
            if not kept:
                break
        known += step.tokens
        self._model.sequence.truncate(len(known) - 1)
        self._steps.append(step)

    def _choose(self, logits: np.ndarray, history: list[int], proposal: Proposal, i: int) -> tuple[int, bool]:
        """The token after ``history``, and whether it is draft i."""
        drafts, mode, sampler = proposal.tokens, self._params.accept, self._sampler
        if i == len(drafts) or mode == "exact" or sampler.params.greedy:
            token = sampler.sample(logits, len(history), history)
            return token, i < len(drafts) and token == drafts[i]
        target = distribution(sampler, logits, history)
        if mode == "p-min":
            sampled = sampler.sample(logits, len(history), history)
            return by_p_min(target, drafts[i], sampled, self._params.accept_p_min)
        draft = proposal.distributions[i] if proposal.distributions is not None else None
        return by_ratio(target, draft, drafts[i], sampler.seed, len(history))

    def take(self) -> Step:
        """Return the result of the first step whose result has not been taken."""
        return self._steps.pop(0)

    def end(self, turn: object = None) -> None:
        """End the answer: no further step follows."""
