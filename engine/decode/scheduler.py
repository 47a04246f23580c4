"""The scheduler: a step of all requests of a model, from the choice of its rows to its tokens.

The bits of a row do not depend on the other rows of its pass, so nothing here can change an answer: not the order, nor the
size of the slices in which prompts are read, nor which request is preempted when slots or pages are short.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from engine.cache.pages import NoPages
from engine.decode.pace import Pace, Read
from engine.decode.preemption import CannotGoOn, Displaced, NoRoom, Preemption, as_failed_step
from engine.decode.prefill_queue import PrefillQueue
from engine.decode.request import Request
from engine.decode.running import InFlightRequest, Running, Step, Steps, launch, note_time
from engine.decode.running_batch import RunningBatch
from engine.decode.served_model import ServedModel
from engine.decode.waiting_queue import WaitingQueue
from engine.errors import DeviceError


class InFlightBatch(NamedTuple):
    """A step that has been started and not taken, and what of prompts was started before it."""

    steps: Steps
    requests: Sequence[InFlightRequest]
    read: Read


class Scheduler:
    """Computes steps: chooses a batch, runs it, takes its tokens.  Its caller holds the lock of the model."""

    def __init__(self, served: ServedModel) -> None:
        self.batch = RunningBatch(served)
        self.waiting = WaitingQueue(self.batch)
        #: Batches launched but not taken, oldest first.
        self.in_flight: deque[InFlightBatch] = deque()
        self.preemption = Preemption(self.batch, self.waiting, self.in_flight, self.drain, self.end)
        self._pace = Pace()
        self._prefill = PrefillQueue(self.batch, self._pace, self.in_flight, self.preemption.alone)
        self._n_steps = 0

    def step(self, wanted: Request | None = None) -> bool:
        """Advance ``wanted``, or all requests that are not paused.  Returns whether there was something to do."""
        if wanted is None and not self.in_flight and self._all_paused():
            return False
        if self.waiting.requests and not self._admit(wanted):
            return False
        if self.batch.prefilling and self._read(wanted):
            return True
        while group := self._choose(wanted):
            if not self._run(group, wanted):
                break
        self.take()
        return True

    def _all_paused(self) -> bool:
        return all(request.paused for request in chain(self.batch.requests, self.waiting.requests))

    # --- choose ------------------------------------------------------------------------------------------------------

    def _admit(self, wanted: Request | None) -> bool:
        """Give slots to requests that wait; returns False if ``wanted`` still waits and nothing can be computed for it."""
        while self.waiting.admit(wanted, self.preemption.alone) and self.preemption.free_slot(wanted):
            pass
        return wanted is None or wanted not in self.waiting.requests or not self.preemption.blocked(wanted)

    def _read(self, wanted: Request | None) -> bool:
        """Start or finish a pass over prompts; returns whether more of prompts is to be read before the next step."""
        if len(self.in_flight) >= self.batch.ahead_prefill:
            return False
        try:
            self._prefill.read()
        except CannotGoOn as error:
            self.preemption.make_way(error, wanted)
        if not self._prefill.goes_on:
            return False
        self.drain()
        return True

    def _choose(self, wanted: Request | None) -> Sequence[Running]:
        """The requests of the next step; empty if a result must be awaited first."""
        if len(self.in_flight) >= self.batch.ahead:
            return []
        group = self.batch.next_group([each for each in self.batch.running if self.batch.moves(each.request, wanted)])
        return group if group and len(self.in_flight) < self.batch.ahead_of(group) else []

    # --- run ---------------------------------------------------------------------------------------------------------

    def _run(self, group: Sequence[Running], wanted: Request | None) -> bool:
        """Start one step of a group; returns whether another one may follow.  Raises FailedStep."""
        try:
            with as_failed_step(running.request for running in group):
                return self._start(group)
        except CannotGoOn as error:
            self.preemption.make_way(error, wanted)
            return True

    def _start(self, group: Sequence[Running]) -> bool:
        begun, steps = time.perf_counter(), group[0].steps
        for running in group:
            if not running.in_flight and not running.sequence.intact:
                raise Displaced(running.request)
        batch = self.batch.propose(group, self.end)
        if not batch:
            return False
        if steps is self.batch.host:
            self.batch.on_wait()  # the logits are awaited
        requests = [running.request for running, _ in batch]
        try:
            with self.batch.reserved(requests):
                launch(steps, batch)
        except NoPages:
            raise NoRoom(max(requests, key=lambda request: request.number)) from None
        if not self.in_flight and not self._pace.reads:
            self._pace.ended = begun  # drafting counts, and so does what the host computes at once
        self._n_steps += 1
        for request in requests:
            request.turn = self._n_steps
        self.in_flight.append(InFlightBatch(steps, batch, self._pace.started()))
        return True

    # --- take --------------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Wait for the oldest batch in flight, if there is one, and hand its tokens out.  Raises FailedStep."""
        if not self.in_flight:
            self._pace.started()  # all requests wait for their readers: no step follows what was read
            return
        batch = self.in_flight[0]
        with as_failed_step(running.request for running, _ in batch.requests):
            self._take(batch)

    def _take(self, batch: InFlightBatch) -> None:
        self.batch.on_wait()
        steps = batch.steps.take()
        self.in_flight.popleft()
        begun, self._pace.ended = self._pace.ended, time.perf_counter()
        seconds = self._pace.ended - begun
        self._pace.stepped(seconds, batch.read)
        note_time(batch.requests, None if batch.read else seconds)
        for (running, _), step in zip(batch.requests, steps, strict=True):
            try:
                self._deliver(running, step, seconds)
            except DeviceError:
                raise
            except Exception as error:
                self.end(running.request, error)

    def _deliver(self, running: Running, step: Step, seconds: float) -> None:
        request = running.request
        if request.done:
            running.in_flight.popleft()
        else:
            for i, token in enumerate(running.took(step, seconds)):
                if step.rows:
                    request.rows.append(step.rows[i])
                request.items.append((token, step.row(i)))
                request.failures = 0
                if token in request.ends:
                    del request.known[len(request.known) - (len(step.tokens) - 1 - i) :]
                    request.done = True
                    break
            request.error = request.error if step.error is None else step.error
            request.done = request.done or request.left == 0 or request.error is not None
        if request.done:
            self.end(request)

    def end(self, request: Request, error: Exception | None = None) -> None:
        """End a request when its steps in flight have ended; error: why, if that is an error."""
        request.done, request.error = True, request.error or error
        self.waiting.leave(request)
        in_flight = any(running.request is request for batch in self.in_flight for running, _ in batch.requests)
        if request.has_slot and not in_flight:
            self.batch.leave(self.batch.state_of(request))

    def drain(self) -> None:
        """Wait for all batches in flight."""
        while self.in_flight:
            self.take()

    def drop(self) -> None:
        """Drop the results of all batches in flight, when the device has ended them."""
        self.in_flight.clear()
        self._prefill.drop()
        self._pace.started()
        self.batch.drop()
