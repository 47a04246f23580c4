"""A running request, and the steps that compute its tokens."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.request import Request, State
from engine.limits import DECODE_ROWS, MOST_DRAFTS
from engine.sampling.row_digest import PackedDigest, RowDigest
from engine.speculative.allotment import Wish, allot
from engine.speculative.params import SpeculationParams
from engine.speculative.passes import PassTimes
from engine.speculative.proposal import Proposal, StepLimits
from engine.speculative.speculation import NOTHING

_NO_LOGITS = np.empty(0, np.float32)


@dataclass
class Step:
    """The result of one step of a request: the accepted drafts, the token after them, and, if they are on the host, the
    logits that each was chosen from.  error: why the next token could not be chosen; then there are only the tokens before
    it; rows: the digests of the logits, if the request wants them."""

    tokens: list[int]
    logits: list[np.ndarray] = field(default_factory=list)
    error: Exception | None = None
    rows: list[RowDigest | PackedDigest] = field(default_factory=list)

    def row(self, i: int) -> np.ndarray:
        """The logits of token i; empty if they stayed on the device."""
        return self.logits[i] if self.logits else _NO_LOGITS


class InFlightRequest(NamedTuple):
    """The rows of one request in a batch: its last sampled token, and the drafts after it."""

    running: "Running"
    proposal: Proposal


class Steps(StepLimits, Protocol):
    """Steps of the requests of one model.  Call ``begin`` for each request, then ``start`` and ``take`` equally often, then
    ``end``."""

    def begin(self, running: "Running") -> None:
        """Add a request; its sequence holds all known tokens but the last."""

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        """Start a pass that reads the last sampled token and the drafts of each request.  Raises NoPages if pages run out;
        then nothing has been started."""

    def take(self) -> list[Step]:
        """Wait for the oldest pass in flight, and return the result of each of its requests, in their order.  Their sequences
        hold the tokens that were read and kept."""

    def end(self, running: "Running") -> None:
        """Remove a request: wait for its steps in flight, and drop their results."""

    def drop(self) -> None:
        """Remove all requests, also after an error in ``start`` or ``take``: wait for the steps in flight, and drop their
        results."""


class Running(State):
    """A request whose prompt has been read.  ``sequence`` holds all of ``known`` but the last sampled token."""

    def __init__(
        self, request: Request, sequence: TokenSequence, steps: Steps, params: SpeculationParams | None = None
    ) -> None:
        """params: how drafts are accepted, by default those of the request's speculation."""
        self.request = request
        self.sequence = sequence
        self.steps = steps
        self.sampler = request.sampler
        self.known = request.known
        self.speculation = request.speculation
        self.params = params or (self.speculation.params if self.speculation is not None else SpeculationParams())
        #: The proposals of the steps in flight, oldest first.  Only :func:`launch` and :meth:`took` change it.
        self.in_flight: deque[Proposal] = deque()

    @property
    def adapts(self) -> bool:
        """Whether the number of drafts may depend on time and load."""
        return self.speculation is None or self.speculation.adapts

    @property
    def passes(self) -> PassTimes:
        """The times of passes by which the number of drafts is chosen."""
        nominal = self.speculation.nominal if self.speculation is not None else None
        return nominal or self.steps.passes

    def wanted(self, room: int) -> Proposal | None:
        """The drafts that a step that starts now could have, at most ``room``; None if the next result must be awaited first,
        or if no token is left to be computed."""
        steps, speculation, started = self.steps, self.speculation, len(self.in_flight)
        if started >= max(steps.ahead, steps.ahead_drafted):
            return None
        given = started if speculation is None else started + sum(map(len, self.in_flight))
        # It must be possible to roll everything in flight back.
        free = (steps.rewind if speculation is None else min(steps.rewind, speculation.rewind(steps))) - given
        left = self.request.left - given
        if left < 1 or free < 1:
            return None
        if speculation is None:
            return NOTHING if started < steps.ahead else None
        room = min(room, left - 1, free - 1, steps.room(len(self.known) + given))
        return speculation.choose(self.known, room, self.passes)

    @property
    def _drafted(self) -> bool:
        """Whether steps in flight have drafts."""
        return any(proposal.source for proposal in self.in_flight)

    def wish(self, proposal: Proposal) -> Wish:
        """What decides how many drafts of a proposal are made."""
        return Wish() if self.speculation is None else self.speculation.wish(proposal)._replace(stays=self._drafted)

    def turns(self, proposal: Proposal, n: int) -> bool:
        """Whether n drafts of a proposal cannot follow the steps in flight, which have drafts, or have none."""
        return bool(proposal.source and self.in_flight) and (n > 0) != self._drafted

    def allotted(self, proposal: Proposal, n: int, known: bool, others: bool) -> Proposal:
        """The first n drafts of a proposal; known: whether their number follows from times that are known; others: whether
        other requests of the pass have drafts."""
        return proposal if self.speculation is None else self.speculation.allotted(proposal, n, known, others)

    def propose(self, proposal: Proposal) -> Proposal | None:
        """The drafts of a step to start now, as many as the proposal has; None if the next result must be awaited first."""
        steps, speculation, started = self.steps, self.speculation, len(self.in_flight)
        if speculation is None:
            return proposal
        if not proposal.source:
            ahead = steps.ahead_drafted if speculation.rides else speculation.ahead(steps.ahead)
            return proposal if not self._drafted and started < ahead else None
        if started:
            # Drafts made on the device continue from what is stored there; all others need the tokens before them.
            if not self._drafted or started >= steps.ahead_drafted or not speculation.drafts_blindly(steps):
                return None
            return speculation.made(self.known, proposal, steps, self.sequence)
        return proposal if proposal.tokens else speculation.made(self.known, proposal, steps, self.sequence)

    def drafts_on_device(self, proposal: Proposal) -> bool:
        """Whether the device makes the drafts of a proposal."""
        return proposal.count > 0 and self.speculation is not None and self.speculation.on_device(self.steps)

    def took(self, step: Step, seconds: float) -> list[int]:
        """Record the result of the oldest step in flight, ``seconds`` after the one before it.  Returns its tokens, as many
        as are left to be computed."""
        proposal = self.in_flight.popleft()
        if self.speculation is not None and proposal.source:
            self.speculation.verified(proposal.source, len(proposal), len(step.tokens) - 1, seconds)
        elif self.speculation is not None:
            self.speculation.passed(seconds)
        tokens = step.tokens[: self.request.left]
        self.known += tokens
        self.request.left -= len(tokens)
        return tokens


def allotted(wanted: Sequence[InFlightRequest], limit: int) -> list[InFlightRequest]:
    """The requests of a step of at most ``limit`` rows, each with as many of the drafts that it wants as pay off; none if
    results must be awaited first."""
    counts, known = [0] * len(wanted), False
    if any(proposal.source for _, proposal in wanted):
        passes = wanted[0].running.passes
        counts = allot([running.wish(proposal) for running, proposal in wanted], limit, passes)
        known = passes.known(len(wanted))
    if any(running.turns(proposal, n) for (running, proposal), n in zip(wanted, counts, strict=True)):
        return []
    return [
        InFlightRequest(running, running.allotted(proposal, n, known, any(counts)))
        for (running, proposal), n in zip(wanted, counts, strict=True)
    ]


def note_time(batch: Sequence[InFlightRequest], seconds: float | None) -> None:
    """Record the time of a pass for the number of drafts of later ones; None: something else took time, too."""
    if all(running.speculation is None for running, _ in batch):
        return
    proposals = [proposal for _, proposal in batch]
    # After a pause a draft model first reads what it has missed.
    if not any(proposal.resumes for proposal in proposals):
        # A draft that was judged not worth a pass has cost time, too.
        counts = [max(1, len(proposal)) if proposal.source else 0 for proposal in proposals]
        depth = max(0 if proposal.searched else n for proposal, n in zip(proposals, counts, strict=True))
        passes = batch[0].running.passes
        passes.add(passes.shape(len(batch), len(batch) + sum(counts), depth), seconds)


def launch(steps: Steps, batch: Sequence[InFlightRequest]) -> None:
    """Start a step of some requests, and record that it is in flight.  Raises NoPages."""
    steps.start(batch)
    for running, proposal in batch:
        running.in_flight.append(proposal)


def follow(running: Running) -> Generator[tuple[int, np.ndarray], None, None]:
    """The tokens of a request that runs alone, without a scheduler, each with its logits (empty if they stayed on the
    device)."""
    steps = running.steps
    steps.begin(running)
    ended = time.perf_counter()
    try:
        while running.request.left > 0:
            while (wanted := running.wanted(MOST_DRAFTS)) is not None:
                found = allotted([InFlightRequest(running, wanted)], DECODE_ROWS)
                if not found or (proposal := running.propose(found[0].proposal)) is None:
                    break
                launch(steps, [InFlightRequest(running, proposal)])
            batch = [InFlightRequest(running, running.in_flight[0])]
            (step,) = steps.take()
            # From result to result: what the reader of the tokens does in between counts for both kinds of steps.
            begun, ended = ended, time.perf_counter()
            note_time(batch, ended - begun)
            for i, token in enumerate(running.took(step, ended - begun)):
                yield token, step.row(i)
    finally:
        steps.end(running)
