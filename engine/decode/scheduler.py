"""The scheduler: which rows of which answers are in the next pass.

Threads that want a token of an answer call :meth:`Scheduler.next`.  Whoever finds none computes: it takes the lock and lets
the scheduler make one round, which reads a part of a prompt, if one waits, and completes one pass that has a row, or several
with drafts, of every answer that runs.  The tokens of the other answers are kept for those who want them.  So there is no
thread of its own, an answer that nobody asks for is not computed, and answers join and leave between passes.

The bits of a row do not depend on the other rows of its pass, so nothing here can change an answer: not the order, nor the
size of the parts in which prompts are read, nor which answer gives way when slots or pages are short.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np

from engine.cache.pages import NoPages
from engine.decode.groups import adapts, next_group
from engine.decode.pace import Pace, Read
from engine.decode.part import Part
from engine.decode.request import Item, Request
from engine.decode.slot import Slot
from engine.limits import MOST_LOGITS, STEP_ROWS
from engine.locking import Lock
from engine.models.base import Model
from engine.speculative.run import Run
from engine.speculative.steps import HostSteps, Ride, Step, Steps

AHEAD_TOKENS = 16
"""Tokens of an answer that are computed before somebody asks for them, if others are computed at the same time."""

PATIENCE = 0.5
"""Seconds after which an answer whose tokens nobody fetches gives its slot to one that has none."""

AHEAD_MASKED = 3
"""Passes in flight if the next one has answers with a grammar.  The masks of a pass need the tokens of the pass before it in
its group; they are computed while the device runs a pass of another group, and further passes would only wait for them."""

POLL_SECONDS = 1e-3
"""The time, in seconds, that a thread sleeps while it waits for others to fetch their tokens."""

PROCESSOR = "a logits processor"
"""What may run on the host while a token is chosen, as an error message calls it."""


class Reader(Protocol):
    """What a scheduler uses of the model with slots that it serves; ``engine.reading.Reader`` implements it."""

    lock: Lock
    model: Model
    slots: list[Slot]
    slot_bytes: int

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""

    def check_free(self) -> None:
        """Raise UsageError if this thread is in a function of the user that this model has called."""

    def reserved(self, caller: str) -> AbstractContextManager[None]:
        """Refuse any use of the model by ``caller``."""

    def free_slot(self, tokens: np.ndarray) -> Slot | None:
        """A slot without an owner for a text int32 [n]; None if all have owners."""

    def has_room(self, slot: Slot, tokens: np.ndarray) -> bool:
        """Whether there are pages for a text int32 [n] in a slot, and a few more tokens."""

    def rewind(self, slot: Slot, tokens: np.ndarray) -> int:
        """Cut what a slot holds to a prefix of ``tokens``, shorter than these, and return its length."""

    def settled(self, slot: Slot) -> None:
        """Note that a slot is the one that was used last."""

    def part(self, slot: Slot, tokens: Sequence[int], n_logits: int, stops: Collection[int] = ()) -> Part:
        """Tokens to be read after those that a slot holds, with the logits of the last ``n_logits`` and snapshots after the
        numbers of tokens in ``stops``."""

    def free_pages(self) -> bool:
        """Forget what a slot without an owner holds; returns whether there was one."""


class Flight(NamedTuple):
    """A pass that has been started, the requests that have rows in it, and what of prompts was started before it."""

    steps: Steps
    requests: list[Request]
    read: Read


class Scheduler:
    """Decides what the next pass of a model computes.  Its caller holds the lock of ``reader``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._model = reader.model
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._flights: deque[Flight] = deque()
        self._arrived = 0
        self._host: Steps = HostSteps(self._model)
        self._device: Steps | None = None
        self._ended = 0.0
        self._passes = 0
        self._pace = Pace()

    # --- what requests need ----------------------------------------------------------------------------------------

    def next(self, request: Request) -> Item | None:
        """The next token of an answer, computed if necessary; None if there is none.  Raises what ended the answer, if that
        was an error."""
        request.thread, request.asking = threading.get_ident(), True
        try:
            while not request.items:
                with self._reader.lock:
                    if request.items:
                        break
                    if request.error is not None:
                        error, request.error = request.error, None
                        raise error
                    if request.done:
                        return None
                    self._reader.check_open()
                    self._reader.check_free()
                    moved = self._round(request)
                if not moved:
                    time.sleep(POLL_SECONDS)
        finally:
            request.asking, request.served = False, time.perf_counter()
        request.fetched += 1
        return request.items.popleft()

    def submit(self, request: Request) -> None:
        """Let a request be computed by :meth:`step`; its tokens are in ``items`` from then on."""
        if not request.number:
            self._arrived += 1
            request.number = self._arrived
            self._waiting.append(request)

    def step(self) -> bool:
        """Compute something for all requests that were submitted, however many of their tokens have been fetched.  Returns
        whether there were any."""
        with self._reader.lock:
            self._reader.check_open()
            self._reader.check_free()
            if not self._active and not self._waiting:
                return False
            self._round(None)
            return True

    def close(self, request: Request) -> None:
        """End an answer: what nobody has fetched is forgotten, and its sequence ends where its reader does."""
        request.closing = True
        if not request.done:
            self._drop()
        elif request.items:
            for slot in self._reader.slots:
                if slot.latest is request and slot.owner is None:
                    self._cut(slot, request)
            request.items.clear()

    def interrupt(self) -> None:
        """Wait for the steps in flight and let all requests give their slots back; they continue later."""
        self._drop()
        self._drain()
        for request in list(self._active):
            self._preempt(request)

    @property
    def company(self) -> int:
        """The number of answers that have a slot."""
        return len(self._active)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _round(self, wanted: Request | None) -> bool:
        """Compute something that brings ``wanted``, or all requests, nearer to the next token; returns whether there was
        something to do."""
        if wanted is not None:
            self.submit(wanted)
        self._drop()
        self._admit(wanted)
        if (
            wanted is not None
            and wanted.slot is None
            and not self._flights
            and not any(self._moves(request, wanted) for request in self._active)
        ):
            # All others wait for their readers, who may be waiting for this one.
            idle = [r for r in self._active if not r.asking and self._idle(r, wanted)]
            if not idle:
                return False
            self._preempt(max(idle, key=lambda request: request.number))
            if wanted in self._waiting:
                self._waiting.remove(wanted)
                self._waiting.appendleft(wanted)
            self._admit(wanted)
        reading = min((r for r in self._active if r.reading), key=lambda r: r.number, default=None)
        if reading is not None and len(self._flights) < self._most_flights:
            self._read(reading, wanted)
            if self._reads_on:
                self._drain()
                return True
        self._steps(wanted)
        return True

    def _moves(self, request: Request, wanted: Request | None) -> bool:
        """Whether a request is computed while ``wanted``, or all, are waited for."""
        if request.paused:
            return False
        return request.reading or (wanted is None or request is wanted or len(request.items) < AHEAD_TOKENS)

    def _idle(self, request: Request, wanted: Request) -> bool:
        """Whether the reader of ``request``, who waits for no token, is not about to fetch one."""
        return request.thread == wanted.thread or time.perf_counter() - request.served > PATIENCE

    def _drop(self) -> None:
        """Let closed requests leave."""
        for request in [*self._active, *self._waiting]:
            if request.closing and not request.done:
                request.done = True
                if request in self._waiting:
                    self._waiting.remove(request)
                elif request.run is None or not request.run.started:
                    self._leave(request)
        while any(request.closing for request in self._active):
            self._take()

    def _admit(self, wanted: Request | None) -> None:
        """Give free slots to waiting requests, in the order of their arrival: to those that are asked for, or, if ``wanted``
        is None, to all."""
        for request in [r for r in self._waiting if wanted is None or r.asking]:
            tokens = np.array(request.target or request.known, np.int32)
            slot = self._reader.free_slot(tokens)
            if slot is None or (self._active and not self._reader.has_room(slot, tokens)):
                return
            self._waiting.remove(request)
            slot.owner, request.slot = request, slot
            self._active.append(request)
            if request.begun:
                # Nothing is left to read if the sequence holds all but the certain token.
                tokens = np.array(request.known, np.int32)
            if request.scored:
                slot.clear()  # the logits of tokens that the cache holds are not kept
                self._reader.settled(slot)
            kept = 0 if request.scored else self._reader.rewind(slot, tokens)
            request.stops = slot.stops(tokens, kept)
            if kept in request.stops:
                slot.save(kept)
            if not request.begun:
                request.kept = kept
            elif kept == len(request.target):
                self._begin(request, np.empty((0, 0), np.float32))

    # --- prompts ---------------------------------------------------------------------------------------------------

    def _read(self, request: Request, wanted: Request | None) -> None:
        """Read a part of the tokens that a request needs."""
        slot, target = request.slot, request.target
        assert slot is not None
        if request.part is None and not slot.sequence.intact:
            self._preempt(request)  # an interrupted pass has overwritten what the next one needs
            return
        first, total = slot.sequence.length, len(target)
        try:
            if request.part is None:
                if first < total or not request.begun:
                    self._tell(request, first)
                if request.closing or request.error is not None:
                    return
            logits = np.empty((0, 0), np.float32)
            if first < total:
                part = request.part = request.part or self._part(request, first, total)
                if part.left:
                    self._advance(request, part)
                    # To wait for logits, let a step be started before, unless it uses the memory of this pass.
                    if part.left or (part.n_logits and self._beside and part.pieces > 1):
                        return
                request.part, logits = None, part.finish(self._beside)
                if request.scored:
                    self._score(request, first, logits)
                    logits = logits[-1:]
                first += len(part.tokens)
            if first < total:
                return
            self._tell(request, total)
            if not request.closing and request.error is None:
                self._begin(request, logits)
        except NoPages:
            self._make_room(request, wanted)

    def _part(self, request: Request, first: int, total: int) -> Part:
        """The tokens to read in the next pass: fewer if others wait for their next token meanwhile, unless the pass can be
        split."""
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = request.stops if self._reader.slot_bytes else set()
        left = min((stop for stop in borders if stop > first), default=total) - first
        if request.scored:
            left = min(left, MOST_LOGITS)
        rows = self._rows(left)
        n_logits = rows if request.scored else int(first + rows == total and not request.begun)
        assert request.slot is not None
        return self._reader.part(request.slot, request.target[first : first + rows], n_logits, request.stops)

    def _rows(self, left: int) -> int:
        """The number of tokens to read in the next pass, of the ``left`` ones of a prompt."""
        ops = self._model.ops
        if self._beside and not ops.splits:
            return self._pace.part(left, ops.max_rows, self._share)
        return ops.next_rows(left, self._beside)

    def _advance(self, request: Request, part: Part) -> None:
        """Start pieces of a part: all of them, or as many as those who wait for their next token should wait for."""
        rows, count, begun = len(part.tokens), part.pieces, time.perf_counter()
        if self._beside:
            count = self._pace.pieces(rows, count, self._share)
        try:
            started = part.advance(count)
        except BaseException:
            request.abandon()  # a piece may have been started or not
            raise
        if not self._beside:
            self._pace.started()  # nobody waits for a step
            return
        if not self._flights and not self._pace.reading:
            self._ended = begun
        self._pace.read(rows, started)

    @property
    def _reads_on(self) -> bool:
        """Whether more of prompts is to be read before the next step."""
        if not self._beside:
            return False
        reading = [r for r in self._active if r.reading and (r.part is None or r.part.left)]
        if not reading:
            return False
        request = min(reading, key=lambda r: r.number)
        assert request.slot is not None
        left = len(request.target) - request.slot.sequence.length
        rows = len(request.part.tokens) if request.part is not None else self._rows(left) if left else 0
        return self._pace.has_time(rows, self._share)

    @property
    def _beside(self) -> bool:
        """Whether answers run while a prompt is read."""
        return any(request.run is not None for request in self._active)

    def _score(self, request: Request, first: int, logits: np.ndarray) -> None:
        """Report the logits after tokens of a prompt."""
        assert request.on_logits is not None
        try:
            with self._reader.reserved("on_logits"):
                request.on_logits(first, logits)
        except Exception as error:
            self._fail(request, error)

    def _tell(self, request: Request, done: int) -> None:
        """Report how much of a prompt has been read."""
        if request.on_prefill is not None and not request.begun:
            try:
                with self._reader.reserved("on_prefill"):
                    request.on_prefill(done, request.n_prompt)
            except Exception as error:
                self._fail(request, error)

    def _begin(self, request: Request, logits: np.ndarray) -> None:
        """Choose the first token of an answer whose prompt has been read, and let steps compute the others."""
        slot = request.slot
        assert slot is not None
        if request.left < 1:
            self._finish(request)
            return
        if not request.begun:
            choices = logits[0]
            if request.allowed is not None:
                choices = np.full_like(choices, -np.inf)
                choices[request.allowed] = logits[0][request.allowed]
            try:
                with self._reader.reserved(PROCESSOR):
                    token = request.sampler.sample(choices, len(request.known), request.known)
            except Exception as error:
                self._fail(request, error)
                return
            request.known.append(token)
            request.left -= 1
            request.items.append((token, choices))
            if token in request.ends or request.left == 0:
                self._finish(request)
                return
        run = Run(slot.sequence, request.sampler, request.known, request.left, request.speculation)
        request.began(run, self._steps_of(request, run))
        request.steps.begin(run)

    # --- steps -----------------------------------------------------------------------------------------------------

    def _steps_of(self, request: Request, run: Run) -> Steps:
        """What computes the steps of an answer: the device, unless it cannot choose its tokens."""
        ops = self._model.ops
        # What drafts are drawn from takes a grammar into account, and the host draws them.
        on_host = request.with_logits or run.params.sequential or (request.masked and not adapts(request))
        if on_host or not ops.can_sample(run.sampler.params):
            return self._host
        if self._device is None:
            self._device = ops.steps(self._model)
        return self._device

    def _steps(self, wanted: Request | None) -> None:
        """Start the passes that can be started, and wait for the first one."""
        while self._start(wanted):
            pass
        if self._flights:
            self._take()

    def _start(self, wanted: Request | None) -> bool:
        """Start one pass; returns whether there was one to start."""
        begun = time.perf_counter()
        if len(self._flights) >= max(self._host.ahead, self._device.ahead if self._device is not None else 0):
            return False
        running = [r for r in self._active if r.run is not None and not r.done and self._moves(r, wanted)]
        together = next_group(running)
        if not together:
            return False
        for request in together:
            if request.run is not None and not request.run.started and not request.run.sequence.intact:
                self._preempt(request)  # an interrupted pass has overwritten what its next step needs
                return True
        steps = together[0].steps
        ahead = 1 if steps is self._host else steps.ahead
        if any(r.reading for r in self._active):
            ahead = min(ahead, self._most_flights)
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
                with self._reader.reserved(PROCESSOR):
                    following = run.following(steps, room)
            except Exception as error:
                # Of a logits processor, while a draft was chosen, so none of its steps is in flight.
                self._fail(request, error)
                continue
            if following is not None:
                rides.append(Ride(run, following[1]))
                requests.append(request)
                flights.append(following[0])
                rows += 1 + len(following[1])
        if not rides:
            return False
        try:
            with self._reader.reserved(PROCESSOR):
                steps.start(rides)
        except NoPages:
            self._make_room(max(requests, key=lambda request: request.number), wanted)
            return True
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
    def _share(self) -> float:
        """The time, in seconds, for which prompts should be read between two steps."""
        running = sum(request.run is not None for request in self._active)
        prompts = sum(request.reading for request in self._active)
        return self._pace.share(prompts, max(1, -(-running // STEP_ROWS)))

    @property
    def _most_flights(self) -> int:
        """The most steps in flight while a prompt is read: pieces of it come between steps, and a device that runs them
        must not wait for the host to start the next ones."""
        return 2 if self._model.ops.splits else 1

    def _take(self) -> None:
        """Wait for the first pass in flight and hand its tokens out."""
        flight = self._flights[0]
        steps = flight.steps.take()
        self._flights.popleft()
        begun, self._ended = self._ended, time.perf_counter()
        self._pace.stepped(self._ended - begun, flight.read)
        for request, step in zip(flight.requests, steps, strict=True):
            self._deliver(request, step, self._ended - begun)

    def _deliver(self, request: Request, step: Step, seconds: float) -> None:
        run = request.run
        assert run is not None
        if request.done:
            run.started.popleft()
        else:
            for i, token in enumerate(run.took(step, seconds)):
                request.items.append((token, step.row(i)))
                if token in request.ends:
                    del run.known[len(run.known) - (len(step.tokens) - 1 - i) :]
                    request.done = True
                    break
            if step.error is not None:
                request.error = step.error
            request.done = request.done or run.left == 0 or request.error is not None
        if request.done and not run.started:
            self._leave(request)

    def _drain(self) -> None:
        while self._flights:
            self._take()

    # --- leaving ---------------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        request.done = True
        self._leave(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        self._finish(request)

    def _leave(self, request: Request) -> None:
        """Free the slot of a request that is done; none of its steps is in flight."""
        self._active.remove(request)
        request.abandon()
        slot, run = request.slot, request.run
        assert slot is not None
        if run is not None:
            request.steps.end(run)
        if request.closing:
            request.items.clear()
        if run is not None:
            self._cut(slot, request)
        request.slot, slot.owner, slot.latest, request.on_prefill = None, None, request, None
        self._reader.settled(slot)

    def _cut(self, slot: Slot, request: Request) -> None:
        """Cut what a slot holds to what a request has computed, or, if nobody wants the rest, to what has been fetched.  The
        last token is never in it: it was chosen, not read."""
        known = request.run.known if request.run is not None else request.known
        length = request.n_prompt + request.fetched if request.closing else len(known)
        length = min(length - 1, slot.sequence.length)
        if slot.sequence.can_truncate(length):
            slot.sequence.truncate(length)

    def _preempt(self, request: Request) -> None:
        """Let a request give its slot back and wait again."""
        self._drain()
        if request not in self._active:
            return  # it was done with the steps in flight
        request.abandon()
        slot, run = request.slot, request.run
        assert slot is not None
        if run is not None:
            request.steps.end(run)
            request.stopped()
        self._active.remove(request)
        request.slot, slot.owner = None, None
        self._reader.settled(slot)
        self._waiting.appendleft(request)

    def _make_room(self, request: Request, wanted: Request | None) -> None:
        """Free pages for a request: of slots that nobody uses, else of a request whose reader is away, else of the youngest,
        which may be this one."""
        if self._reader.free_pages():
            return
        self._drain()
        if len(self._active) == 1:
            raise NoPages(
                "the pages of the cache do not suffice for a single answer; this is a defect of this program."
            )
        away = [r for r in self._active if r is not request and not self._moves(r, wanted)]
        victim = max(away or self._active, key=lambda r: r.number, default=None)
        if victim is None or victim.slot is None:
            return  # all were done with the steps in flight
        slot = victim.slot
        self._preempt(victim)
        slot.clear()
