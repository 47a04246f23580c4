"""The requests that have slots."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from engine.decode.device import device_steps
from engine.decode.groups import adapts
from engine.decode.reader import Reader
from engine.decode.request import Request
from engine.decode.slot import Slot
from engine.speculative.run import Run
from engine.speculative.steps import HostSteps, Steps

PROCESSOR = "a logits processor"
"""What may run on the host while a token is chosen, as an error message calls it."""


class CannotGoOn(Exception):
    """The next pass of ``request`` cannot be started as things are."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class Displaced(CannotGoOn):
    """An interrupted pass has overwritten what the next pass of a request needs: it has to read its tokens again."""


class NoRoom(CannotGoOn):
    """There are no pages for the next tokens of a request."""


class Broken(Exception):
    """An unexpected error has ended a pass of some requests."""

    def __init__(self, requests: Sequence[Request], error: Exception) -> None:
        super().__init__(requests, error)
        self.requests, self.error = requests, error


class Company:
    """The requests that have slots: how their answers begin and end.  Its caller holds the lock of ``reader``."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.model = reader.model
        self.active: list[Request] = []
        self.host: Steps = HostSteps(self.model)
        self._device: Steps | None = None
        self._on_wait: Callable[[], None] | None = None

    @contextmanager
    def waiting(self, on_wait: Callable[[], None] | None) -> Iterator[None]:
        """Call ``on_wait`` meanwhile before the device is waited for."""
        self._on_wait = on_wait
        try:
            yield
        finally:
            self._on_wait = None

    def on_wait(self) -> None:
        """To be called before the device is waited for, when what it can do meanwhile has been started."""
        if self._on_wait is not None:
            self._on_wait()

    @property
    def n_running(self) -> int:
        """The number of answers that wait for their next token."""
        return sum(request.run is not None and not request.paused for request in self.active)

    @property
    def n_reading(self) -> int:
        """The number of answers whose prompts have not been read."""
        return sum(request.reading for request in self.active)

    @property
    def ahead(self) -> int:
        """The most passes in flight."""
        return max(self.host.ahead, self._device.ahead if self._device is not None else 0)

    def begin(self, request: Request, logits: np.ndarray) -> None:
        """Choose the first token of an answer whose prompt has been read, and let steps compute the others."""
        slot = request.slot
        assert slot is not None
        if request.left < 1:
            self.finish(request)
            return
        if not request.begun:
            choices = logits[0]
            if request.allowed is not None:
                choices = np.full_like(choices, -np.inf)
                choices[request.allowed] = logits[0][request.allowed]
            try:
                with self.reader.reserved(PROCESSOR):
                    token = request.sampler.sample(choices, len(request.known), request.known)
            except Exception as error:
                self.fail(request, error)
                return
            request.known.append(token)
            request.left -= 1
            request.items.append((token, choices))
            request.failures = 0
            if token in request.ends or request.left == 0:
                self.finish(request)
                return
        run = Run(slot.sequence, request.sampler, request.known, request.left, request.speculation)
        steps = self._steps_of(request, run)
        request.began(run, steps)
        steps.begin(run)

    def _steps_of(self, request: Request, run: Run) -> Steps:
        """What computes the steps of an answer: the device, unless it cannot choose its tokens."""
        # What drafts are drawn from takes a grammar into account, and the host draws them.
        on_host = request.with_logits or run.params.sequential or (request.masked and not adapts(request))
        steps = None if on_host else device_steps(self.model, run.sampler.params)
        if steps is None:
            return self.host
        self._device = steps
        return steps

    def finish(self, request: Request) -> None:
        """End an answer that has all of its tokens."""
        request.done = True
        self.leave(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End an answer with an error, which its reader gets after the tokens before it."""
        request.error = error
        self.finish(request)

    def leave(self, request: Request) -> None:
        """Free the slot of a request that is done; none of its steps is in flight."""
        self.active.remove(request)
        request.abandon()
        slot = request.slot
        assert slot is not None
        request.end_steps()
        if request.closing:
            request.items.clear()
        if request.run is not None:
            self.cut(slot, request)
        request.slot, slot.owner, slot.latest, request.on_prefill = None, None, request, None
        self.reader.slots.use(slot)

    def drop(self) -> None:
        """Drop the results of all passes in flight, when the device has ended them."""
        for steps in (self.host, self._device):
            if steps is not None:
                steps.drop()

    def cut(self, slot: Slot, request: Request) -> None:
        """Cut what a slot holds to what a request has computed, or, if nobody wants the rest, to what has been fetched.  The
        last token is never in it: it was chosen, not read."""
        known = request.run.known if request.run is not None else request.known
        length = request.n_prompt + request.fetched if request.closing else len(known)
        length = min(length - 1, slot.sequence.length)
        if slot.sequence.can_truncate(length):
            slot.sequence.truncate(length)
