"""Steps whose tokens the host chooses: always on the CPU, and on a GPU for answers whose tokens it cannot choose itself."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.limits import STEP_ROWS
from engine.sampling.sampler import Sampler
from engine.speculative.acceptance import by_p_min, by_ratio, distribution
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import DeviceDraft, Proposal

_NO_LOGITS = np.empty(0, np.float32)


@dataclass
class Step:
    """The result of one step of an answer: the accepted drafts, the token after them, and, if they are on the host, the
    logits that each was chosen from.  error: why the next token could not be chosen; then there are only the tokens before
    it."""

    tokens: list[int]
    logits: list[np.ndarray] = field(default_factory=list)
    error: Exception | None = None

    def row(self, i: int) -> np.ndarray:
        """The logits of token i; empty if they stayed on the device."""
        return self.logits[i] if self.logits else _NO_LOGITS


class Answering(Protocol):
    """What steps use of an answer; ``engine.speculative.run.Run`` implements it."""

    sequence: TokenSequence
    sampler: Sampler
    params: SpeculationParams
    known: list[int]


class Ride(NamedTuple):
    """The part of one answer in a pass: its certain token, and the drafts after it."""

    run: Answering
    proposal: Proposal


class Steps(Protocol):
    """Steps of the answers of one model.  Call ``begin`` for each answer, then ``start`` and ``take`` equally often, each
    with any answers, then ``end``.

    ``ahead``: the number of plain steps of an answer that may be in flight; ``ahead_drafted``: that of steps with drafts.
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

    def begin(self, run: Answering) -> None:
        """Let an answer take part; its sequence holds all known tokens but the last."""

    def start(self, rides: Sequence[Ride]) -> None:
        """Start a pass that reads the last known token and the drafts of each answer.  Raises NoPages if pages run out; then
        nothing has been started."""

    def take(self) -> list[Step]:
        """Wait for the first pass whose results have not been taken, and return them, in the order of its answers."""

    def end(self, run: Answering) -> None:
        """End an answer: wait for its steps in flight; none follows.  Their results are dropped."""

    def drop(self) -> None:
        """End all answers, also after an error in ``start`` or ``take``: wait for the steps in flight, and drop their
        results."""


class Readable(Protocol):
    """The interface of a model that steps use."""

    cache: KVCache

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, n_logits: int, sequence: TokenSequence | None = None
    ) -> np.ndarray:
        """Run a pass and return the logits of its last rows, float32 [n_logits, n_vocab]."""

    def forward_many(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass of several sequences and return the logits of the rows of each."""


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
    """Steps of one model whose tokens are chosen on the host."""

    ahead = 1
    """The number of plain steps of an answer that may be in flight: started, with their result not yet taken."""
    ahead_drafted = 1
    """The number of steps with drafts that may be in flight."""

    def __init__(self, model: Readable) -> None:
        self._model = model
        self._taken: deque[list[Step]] = deque()

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source computes its drafts as part of a step."""
        return False

    def begin(self, run: Answering) -> None:
        """Let an answer take part: nothing needs to be prepared."""

    def start(self, rides: Sequence[Ride]) -> None:
        """Read the last known token and the drafts of each answer, and choose the tokens that follow."""
        steps = []
        for ride, rows in zip(rides, self._read(rides), strict=True):
            step = self._chosen(ride, rows)
            kept = len(ride.run.known) + len(step.tokens) - 1
            ride.run.sequence.truncate(kept)
            ride.run.sequence.settle()
            steps.append(step)
        self._taken.append(steps)

    def _read(self, rides: Sequence[Ride]) -> list[np.ndarray]:
        """The logits of the rows of each answer, float32 [1 + drafts, n_vocab]."""
        parts = [(ride.run.sequence, [ride.run.known[-1], *ride.proposal.tokens]) for ride in rides]
        if len(parts) > 1:
            return self._model.forward_many(parts)
        ((sequence, ids),) = parts
        tokens, first = np.array(ids, np.int32), sequence.length
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        if not rides[0].run.params.sequential:
            return [self._model.forward(tokens, positions, tokens.size, sequence)]
        rows = [self._model.forward(tokens[i : i + 1], positions[i : i + 1], 1, sequence) for i in range(tokens.size)]
        return [np.concatenate(rows)]

    def _chosen(self, ride: Ride, rows: np.ndarray) -> Step:
        step, drafts = Step([], list(rows)), ride.proposal.tokens
        for i, logits in enumerate(rows):
            try:
                token, kept = _choose(ride, logits, ride.run.known + drafts[:i], i)
            except Exception as error:  # of a logits processor, or because no token can be chosen
                step.error = error
                break
            step.tokens.append(token)
            if not kept:
                break
        return step

    def take(self) -> list[Step]:
        """The results of the first pass whose results have not been taken."""
        return self._taken.popleft()

    def end(self, run: Answering) -> None:
        """End an answer: none of its steps is in flight."""

    def drop(self) -> None:
        """Drop the results that have not been taken."""
        self._taken.clear()


def _choose(ride: Ride, logits: np.ndarray, history: list[int], i: int) -> tuple[int, bool]:
    """The token after ``history``, and whether it is draft i."""
    run, proposal = ride.run, ride.proposal
    drafts, mode, sampler = proposal.tokens, run.params.accept, run.sampler
    if i == len(drafts) or mode == "exact" or sampler.params.greedy:
        token = sampler.sample(logits, len(history), history)
        return token, i < len(drafts) and token == drafts[i]
    target = distribution(sampler, logits, history)
    if mode == "p-min":
        sampled = sampler.sample(logits, len(history), history)
        return by_p_min(target, drafts[i], sampled, run.params.accept_p_min)
    draft = proposal.distributions[i] if proposal.distributions is not None else None
    return by_ratio(target, draft, drafts[i], sampler.seed, len(history))
