"""Preemption: taking slots and pages from requests."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

from engine.cache.pages import NoPages
from engine.decode.request import Request, Waiting
from engine.decode.running_batch import RunningBatch
from engine.decode.waiting_queue import WaitingQueue
from engine.errors import DeviceError

PATIENCE = 0.5
"""Seconds without a fetched token after which a request can lose its slot to one that waits."""


class CannotGoOn(Exception):
    """The next pass of ``request`` cannot be started now."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class Displaced(CannotGoOn):
    """An interrupted pass has overwritten data that the next pass of a request needs, so its tokens must be read again."""


class NoRoom(CannotGoOn):
    """There are no pages for the next tokens of a request."""


class FailedStep(Exception):
    """An unexpected error has ended a step of some requests."""

    def __init__(self, requests: Sequence[Request], error: Exception) -> None:
        super().__init__(requests, error)
        self.requests, self.error = requests, error


@contextmanager
def as_failed_step(requests: Iterable[Request]) -> Iterator[None]:
    """Raise FailedStep in place of an unexpected error in a step of these requests."""
    try:
        yield
    except (CannotGoOn, DeviceError):
        raise
    except Exception as error:
        raise FailedStep(list(requests), error) from error


class Preemption:
    """Takes slots and pages back."""

    def __init__(
        self,
        batch: RunningBatch,
        waiting: WaitingQueue,
        in_flight: Sized,
        drain: Callable[[], None],
        end: Callable[[Request, Exception | None], None],
    ) -> None:
        """in_flight: the batches in flight; drain: waits for all of them; end: ends a request, with an error if there is
        one."""
        self._batch = batch
        self._waiting = waiting
        self._in_flight = in_flight
        self._drain = drain
        self._end = end

    def blocked(self, wanted: Request) -> bool:
        """Whether nothing is computed for ``wanted``: all requests that have slots wait for their readers."""
        return not self._in_flight and not any(self._batch.moves(request, wanted) for request in self._batch.requests)

    def free_slot(self, wanted: Request | None) -> bool:
        """Preempt the latest request whose reader is away, for one that waits for a slot; returns whether there was one."""
        away = self._away(wanted)
        if away:
            self.preempt(max(away, key=lambda request: request.number))
        return bool(away)

    def _away(self, wanted: Request | None) -> list[Request]:
        """The requests that have slots and whose readers are away."""
        requests = self._batch.requests
        if wanted is None:
            return [request for request in requests if request.paused]
        if wanted not in self._waiting.requests or not self.blocked(wanted):
            return []
        # Their readers may be waiting for this one.
        now, idle = time.perf_counter(), [request for request in requests if not request.asking]
        return [r for r in idle if r.thread == wanted.thread or now - r.served > PATIENCE]

    def preempt(self, request: Request) -> None:
        """Take the slot of a request, if it has one; it waits again."""
        self._drain()
        if not isinstance(request.state, Waiting):  # it may be done with the steps in flight
            self.withdraw(request)

    def withdraw(self, request: Request) -> None:
        """Take the slot of a request without steps in flight; it waits again, unless it is done."""
        state = self._batch.state_of(request)
        self._batch.release(state)
        if not request.done:
            self._waiting.come_back(request)
        self._batch.stop(state)
        self._batch.served.slots[state.sequence.slot].let_go()

    def make_way(self, error: CannotGoOn, wanted: Request | None) -> None:
        """Take slots or pages back so that the pass that could not be started can be tried again."""
        if isinstance(error, NoRoom):
            self._free_pages(error.request, wanted)
        else:
            self.preempt(error.request)

    def _free_pages(self, request: Request, wanted: Request | None) -> None:
        """Free pages for a request: of a slot without an owner, otherwise of a request whose reader is away, otherwise of the
        latest request, which may be this one."""
        slots = self._batch.served.slots
        if slots.free_pages():
            return
        self._drain()
        active = self._batch.requests
        if request not in active:
            return  # it was done with the steps in flight
        if len(active) == 1:
            problem = "the pages of the cache do not suffice for a single answer; this is a defect of this program."
            self._end(request, NoPages(problem))
            return
        others = [each for each in active if each is not request and not self._batch.moves(each, wanted)]
        victim = max(others or active, key=lambda each: each.number)
        slot = slots[self._batch.state_of(victim).sequence.slot]
        self.preempt(victim)
        slot.clear()

    @contextmanager
    def alone(self, request: Request) -> Iterator[None]:
        """Let an unexpected error end a request, and no other."""
        try:
            yield
        except (CannotGoOn, DeviceError):
            raise
        except Exception as error:
            self._end(request, error)

    def clear(self) -> None:
        """Take all slots back after an unexpected error, so that the tokens of their requests are read again.  Raises
        DeviceError behind the last one, if the device has failed again."""
        failed: DeviceError | None = None
        for state in list(self._batch.active):
            slot = self._batch.served.slots[state.sequence.slot]
            try:
                self.withdraw(state.request)
                slot.clear()
            except DeviceError as error:
                failed = failed or error
            except Exception as another:
                self._end(state.request, another)
        if failed is not None:
            raise failed
