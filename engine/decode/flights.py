"""Passes in flight: steps of answers that have been started, and whose results nobody has taken."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.pages import NoPages
from engine.decode.company import PROCESSOR, Broken, CannotGoOn, Company, Displaced, NoRoom
from engine.decode.groups import next_group
from engine.decode.pace import Pace, Read
from engine.decode.request import Request
from engine.errors import DeviceError
from engine.limits import STEP_ROWS
from engine.speculative.steps import Ride, Step, Steps

AHEAD_MASKED = 3
"""Passes in flight if the next one has answers with a grammar.  The masks of a pass need the tokens of the pass before it in
its group; they are computed while the device runs a pass of another group, and further passes would only wait for them."""


class Flight(NamedTuple):
    """A pass that has been started, the requests that have rows in it, and what of prompts was started before it."""

    steps: Steps
    requests: list[Request]
    read: Read


class Flights:
    """The passes of a company that are in flight, the first one first."""

    def __init__(self, company: Company, pace: Pace) -> None:
        self._company = company
        self._pace = pace
        self._flights: deque[Flight] = deque()
        self._passes = 0
        #: When the latest pass ended, or what is measured began.
        self._ended = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def follow(self, rows: int, pieces: int, begun: float) -> None:
        """Note that the next pass follows ``pieces`` pieces of a part of ``rows`` tokens of a prompt, which were begun at a
        time of ``time.perf_counter``."""
        if not self._flights and not self._pace.reading:
            self._ended = begun
        self._pace.read(rows, pieces)

    def forget(self) -> None:
        """Note that no pass follows what was read of prompts."""
        self._pace.started()

    def start(self, running: Sequence[Request]) -> bool:
        """Start one pass of some of these answers; returns whether there was one to start.  Raises Displaced, NoRoom, and
        Broken."""
        together = next_group(running)
        if not together:
            return False
        try:
            return self._start(together)
        except (CannotGoOn, DeviceError):
            raise
        except Exception as error:
            raise Broken(together, error) from error

    def _start(self, together: Sequence[Request]) -> bool:
        begun = time.perf_counter()
        for request in together:
            if request.run is not None and not request.run.started and not request.run.sequence.intact:
                raise Displaced(request)
        steps = together[0].steps
        assert steps is not None
        ahead = steps.ahead
        if self._company.n_reading:
            ahead = min(ahead, self.ahead_reading)
        if any(r.masked for r in together):
            ahead = min(ahead, AHEAD_MASKED)
        if len(self._flights) >= ahead:
            return False
        rides: list[Ride] = []
        requests, flights, rows = [], [], 0
        for i, request in enumerate(sorted(together, key=lambda request: request.masked)):
            run = request.run
            assert run is not None
            # Each may draft as much as the others, and what those before it have left.
            room = STEP_ROWS * (i + 1) // len(together) - rows - 1
            if request.masked and any(ride.proposal.device_draft is not None for ride in rides):
                room = 0  # drafts of the device replace those of the host, and masks cannot be made for them
            try:
                with self._company.reader.reserved(PROCESSOR):
                    following = run.following(steps, room)
            except Exception as error:  # of a logits processor, for example, while a draft was chosen
                self.end(request, error)
                continue
            if following is not None:
                rides.append(Ride(run, following[1]))
                requests.append(request)
                flights.append(following[0])
                rows += 1 + len(following[1])
        if not rides:
            return False
        if steps is self._company.host:
            self._company.on_wait()  # they wait for their logits
        try:
            with self._company.reader.reserved(PROCESSOR):
                steps.start(rides)
        except NoPages:
            raise NoRoom(max(requests, key=lambda request: request.number)) from None
        if not self._flights and not self._pace.reading:
            self._ended = begun  # drafting counts, and so does what the host computes at once
        for ride, flight in zip(rides, flights, strict=True):
            ride.run.started.append(flight)  # type: ignore[attr-defined]
        self._passes += 1
        for request in requests:
            request.turn = self._passes
        self._flights.append(Flight(steps, requests, self._pace.started()))
        return True

    @property
    def ahead_reading(self) -> int:
        """The most steps in flight while a prompt is read: pieces of it come between steps, and a device that runs them
        must not wait for the host to start the next ones."""
        return 2 if self._company.model.ops.splits else 1

    def take(self) -> None:
        """Wait for the first pass in flight and hand its tokens out.  Raises Broken."""
        flight = self._flights[0]
        try:
            self._take(flight)
        except DeviceError:
            raise
        except Exception as error:
            raise Broken(flight.requests, error) from error

    def _take(self, flight: Flight) -> None:
        self._company.on_wait()
        steps = flight.steps.take()
        self._flights.popleft()
        begun, self._ended = self._ended, time.perf_counter()
        self._pace.stepped(self._ended - begun, flight.read)
        for request, step in zip(flight.requests, steps, strict=True):
            try:
                self._deliver(request, step, self._ended - begun)
            except DeviceError:
                raise
            except Exception as error:
                self.end(request, error)

    def _deliver(self, request: Request, step: Step, seconds: float) -> None:
        run = request.run
        assert run is not None
        if request.done:
            run.started.popleft()
        else:
            for i, token in enumerate(run.took(step, seconds)):
                request.items.append((token, step.row(i)))
                request.failures = 0
                if token in request.ends:
                    del run.known[len(run.known) - (len(step.tokens) - 1 - i) :]
                    request.done = True
                    break
            if step.error is not None:
                request.error = step.error
            request.done = request.done or run.left == 0 or request.error is not None
        if request.done:
            self.end(request)

    def end(self, request: Request, error: Exception | None = None) -> None:
        """Let a request leave its slot, if it has one, when its passes in flight have ended; error: why, if that is an
        error."""
        request.done, request.error = True, request.error or error
        if request.slot is not None and not any(request in flight.requests for flight in self._flights):
            self._company.leave(request)

    def drop(self) -> None:
        """Drop the results of all passes in flight, when the device has ended them."""
        self._flights.clear()
        self._pace.started()
        self._company.drop()

    def drain(self) -> None:
        """Wait for all passes in flight."""
        while self._flights:
            self.take()
