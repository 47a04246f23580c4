"""An answer while it is computed: its tokens, and the steps that give the next ones."""

import time
from collections import deque
from collections.abc import Generator, Iterable
from typing import NamedTuple

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.limits import MOST_DRAFTS
from engine.sampling.sampler import Sampler
from engine.speculative.loop import NOTHING, Speculation
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import Proposal
from engine.speculative.steps import Ride, Step, Steps


class Flight(NamedTuple):
    """A step that has been started: where its drafts came from ("" for none), and how many there are."""

    source: str
    drafted: int


class Run:
    """An answer while it is computed.  ``sequence`` holds all of ``known`` but the last token, the certain one.

    Steps are started with what :meth:`following` returns, and their results are given to :meth:`took`, in the same order.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        sampler: Sampler,
        known: Iterable[int],
        count: int,
        speculation: Speculation | None = None,
        params: SpeculationParams | None = None,
    ) -> None:
        """count: the number of tokens to compute; params: how drafts are accepted, by default those of ``speculation``."""
        self.sequence = sequence
        self.sampler = sampler
        #: The prompt and the answer so far.
        self.known = list(known)
        #: The number of tokens that are still to be computed.
        self.left = count
        self.speculation = speculation
        self.params = params or (speculation.params if speculation is not None else SpeculationParams())
        #: The steps in flight, the first one first.
        self.started: deque[Flight] = deque()

    @property
    def in_flight(self) -> int:
        """The most tokens that the steps in flight can give."""
        return sum(1 + flight.drafted for flight in self.started)

    def following(self, steps: Steps, room: int) -> tuple[Flight, Proposal] | None:
        """A step to start now, after those in flight, with at most ``room`` drafts; None if the next result must be awaited
        first, or if no token is left to be computed."""
        speculation, given = self.speculation, self.in_flight
        if len(self.started) >= max(steps.ahead, steps.ahead_drafted):
            return None
        plain = all(not flight.source for flight in self.started)
        # It must be possible to roll everything in flight back.
        free = (steps.rewind if speculation is None else min(steps.rewind, speculation.rewind(steps))) - given
        if given >= self.left or free < 1:
            return None
        if speculation is None:
            return (Flight("", 0), NOTHING) if len(self.started) < steps.ahead else None
        room = min(room, self.left - given - 1, free - 1, steps.room(len(self.known) + given))
        source, proposal = speculation.choose(self.known, room)
        if not source:
            ahead = plain and len(self.started) < speculation.ahead(steps.ahead)
            return (Flight("", 0), NOTHING) if ahead else None
        if self.started:
            # Drafts made on the device continue from what is stored there; all others need the tokens before them.
            if plain or len(self.started) >= steps.ahead_drafted or not speculation.drafts_blindly(steps):
                return None
            proposal = speculation.made(self.known, proposal, steps, self.sequence)
        elif not proposal.tokens:
            proposal = speculation.made(self.known, proposal, steps, self.sequence)
        return Flight(source, len(proposal)), proposal

    def took(self, step: Step, seconds: float) -> list[int]:
        """Record the result of the first step in flight, ``seconds`` after the one before it.  Returns its tokens, as many as
        are left to be computed."""
        flight = self.started.popleft()
        if self.speculation is not None and flight.source:
            self.speculation.verified(flight.source, flight.drafted, len(step.tokens) - 1, seconds)
        elif self.speculation is not None:
            self.speculation.passed(seconds)
        tokens = step.tokens[: self.left]
        self.known += tokens
        self.left -= len(tokens)
        return tokens


def follow(steps: Steps, run: Run) -> Generator[tuple[int, np.ndarray], None, None]:
    """The tokens of an answer that is computed alone, each with its logits (empty if they stayed on the device)."""
    steps.begin(run)
    ended = time.perf_counter()
    try:
        while run.left > 0:
            while (following := run.following(steps, MOST_DRAFTS)) is not None:
                steps.start([Ride(run, following[1])])
                run.started.append(following[0])
            (step,) = steps.take()
            # From result to result: what the reader of the tokens does in between counts for both kinds of steps.
            begun, ended = ended, time.perf_counter()
            for i, token in enumerate(run.took(step, ended - begun)):
                yield token, step.row(i)
    finally:
        steps.end(run)
