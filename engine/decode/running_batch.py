"""The requests that have slots: those in their prefill, and those that run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np

from engine.decode.host_steps import HostSteps
from engine.decode.prefill import Prefilling
from engine.decode.request import Request, Waiting
from engine.decode.running import InFlightRequest, Running, Steps, allotted
from engine.decode.served_model import ServedModel
from engine.decode.slot import Slot
from engine.errors import DeviceError, DeviceMemoryError
from engine.sampling.row_digest import row_digest
from engine.speculative.proposal import Proposal

AHEAD_TOKENS = 16
"""Tokens of a request that are computed before somebody asks for them, if others are computed at the same time."""

AHEAD_MASKED = 3
"""Batches in flight if the next one has requests with a grammar.  Its masks need the tokens of the batch before it in its
group; they are computed while the device runs a batch of another group, and further batches would only wait for them."""

PROCESSOR = "a logits processor"
"""What may run on the host while a token is chosen, as an error message calls it."""


class RunningBatch:
    """The requests that have slots: how they begin to run, which of them share a step, and how they end.

    Its caller holds the lock of ``served``.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.model = served.model
        #: In the order in which they got their slots.
        self.active: list[Prefilling | Running] = []
        self.host: Steps = HostSteps(self.model)
        self._device: Steps | None = None
        self._on_wait: Callable[[], None] | None = None

    @property
    def decode_rows(self) -> int:
        """The most rows of an answer in a decode batch."""
        return self.model.ops.decode_rows

    @property
    def decode_answers(self) -> int:
        """The most answers of a decode batch."""
        return self.model.decode_answers

    def drafted_rows(self, group: Sequence[Running]) -> int:
        """The most rows of a decode batch of a group, if it has drafts."""
        most = self.model.drafted_rows
        blocks = any(running.speculation is not None and running.speculation.in_blocks for running in group)
        # Each must have room for a draft: the device makes drafts for all of a group.
        return self.decode_rows if blocks or 2 * len(group) > most else most

    def most_answers(self, n: int) -> int:
        """The most answers of a decode batch if there are n: few more than ``decode_rows`` may be faster in several batches
        than in one, whose kernels are those of prompts."""
        most = self.decode_answers
        return most if n >= self.model.many_answers else min(most, self.decode_rows)

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
    def requests(self) -> list[Request]:
        """The requests that have slots."""
        return [each.request for each in self.active]

    def state_of(self, request: Request) -> Prefilling | Running:
        """The state of a request that has a slot."""
        return next(each for each in self.active if each.request is request)

    @property
    def prefilling(self) -> list[Prefilling]:
        """The requests in their prefill."""
        return [each for each in self.active if isinstance(each, Prefilling)]

    @property
    def running(self) -> list[Running]:
        """The requests that run and are not done."""
        return [each for each in self.active if isinstance(each, Running) and not each.request.done]

    @property
    def n_running(self) -> int:
        """The number of requests that wait for their next token."""
        return sum(isinstance(each, Running) and not each.request.paused for each in self.active)

    @property
    def ahead(self) -> int:
        """The most passes in flight."""
        return max(self.host.ahead, self._device.ahead if self._device is not None else 0)

    @property
    def ahead_prefill(self) -> int:
        """The most passes in flight during a prefill: a device that runs pieces of it between steps must not wait for the
        host to start the next ones."""
        return 2 if self.model.splits else 1

    def ahead_of(self, group: Sequence[Running]) -> int:
        """The most passes in flight if the next one is a step of ``group``."""
        ahead = group[0].steps.ahead
        if self.prefilling:
            ahead = min(ahead, self.ahead_prefill)
        return min(ahead, AHEAD_MASKED) if any(running.request.masked for running in group) else ahead

    def reserved(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Refuse any use of the model by the logits processors of requests."""
        if any(request.has_processors for request in requests):
            return self.served.reserved(PROCESSOR)
        return nullcontext()

    # --- beginning ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request, slot: Slot) -> Prefilling:
        """Give a slot to a request."""
        slot.owner, request.slot = request, slot.sequence.slot
        request.state = prefilling = Prefilling(request, slot)
        self.active.append(prefilling)
        return prefilling

    def run(self, prefilling: Prefilling, logits: np.ndarray) -> None:
        """Choose the first token of a request whose prompt has been read, and let steps compute the others.  logits: float32
        [1, n_vocab], the row after the prompt; not used if the request has begun."""
        request = prefilling.request
        if request.left < 1:
            self.finish(prefilling)
            return
        if not request.begun:
            choices = logits[0]
            if request.allowed is not None:
                choices = np.full_like(choices, -np.inf)
                choices[request.allowed] = logits[0][request.allowed]
            try:
                with self.reserved([request]):
                    token = request.sampler.sample(choices, len(request.known), request.known)
            except Exception as error:
                self.finish(prefilling, error)
                return
            request.known.append(token)
            request.left -= 1
            if request.receipt:
                request.rows.append(row_digest(choices))
            request.items.append((token, choices))
            request.failures = 0
            if token in request.ends or request.left == 0:
                self.finish(prefilling)
                return
        request.begun = True
        request.on_prefill = None  # it may keep an abandoned answer
        request.state = running = Running(request, prefilling.sequence, self._steps_of(request))
        self.active[self.active.index(prefilling)] = running
        running.steps.begin(running)

    def _steps_of(self, request: Request) -> Steps:
        """The steps that compute a request: the device's, unless it cannot choose the tokens."""
        speculation = request.speculation
        sequential = speculation is not None and speculation.params.sequential
        adapts = speculation is None or speculation.adapts
        # What drafts are drawn from takes a grammar into account, and the host draws them.
        on_host = request.with_logits or sequential or (request.masked and not adapts)
        steps = None if on_host else self.served.device_steps(request.sampler.params)
        if steps is None:
            return self.host
        self._device = steps
        return steps

    # --- steps -------------------------------------------------------------------------------------------------------

    def moves(self, request: Request, wanted: Request | None) -> bool:
        """Whether a request that has a slot is computed while ``wanted``, or all, are waited for."""
        if request.paused or isinstance(request.state, Prefilling):
            return not request.paused
        return wanted is None or request is wanted or len(request.items) < AHEAD_TOKENS

    def next_group(self, ready: Sequence[Running]) -> Sequence[Running]:
        """The requests of the next step: of those with the fewest steps in flight, the ones whose turn was the longest time
        ago; empty if all must wait.

        Requests are divided into as few groups as possible, which take turns.  A group stays together: it waits until all of
        its requests have as many steps in flight, since a pass of few rows takes almost as long as one of many.
        """
        groups: list[Sequence[Running]] = []
        shared: dict[int, list[Running]] = {}
        for running in ready:
            if running.request.failures or not running.adapts:
                # The number of drafts must not depend on the others; and after a failed step, requests are run one by one
                # to find the one that fails.
                groups.append([running])
            else:
                shared.setdefault(id(running.steps), []).append(running)
        for each in shared.values():
            most = self.most_answers(len(each))
            groups += [each[first : first + most] for first in range(0, len(each), most)]
        together = [group for group in groups if len({len(running.in_flight) for running in group}) == 1]
        return min(together, key=lambda group: (len(group[0].in_flight), group[0].request.turn), default=[])

    def propose(self, group: Sequence[Running], failed: Callable[[Request, Exception], None]) -> list[InFlightRequest]:
        """The rows of a step: the last sampled tokens of a group and their drafts.  Requests that must wait for their results
        are left out; failed: called if drafting fails."""
        wanted: list[InFlightRequest] = []
        limit = self.drafted_rows(group)
        for running in sorted(group, key=lambda running: running.request.masked):
            room = max(0, limit - len(group))
            if running.request.masked and any(each.running.drafts_on_device(each.proposal) for each in wanted):
                room = 0  # drafts of the device replace those of the host, and masks cannot be made for them
            if (proposal := self._of(running, partial(running.wanted, room), failed)) is not None:
                wanted.append(InFlightRequest(running, proposal))
        batch: list[InFlightRequest] = []
        for running, chosen in allotted(wanted, limit):
            if (proposal := self._of(running, partial(running.propose, chosen), failed)) is not None:
                batch.append(InFlightRequest(running, proposal))
        return batch

    def _of(
        self, running: Running, propose: Callable[[], Proposal | None], failed: Callable[[Request, Exception], None]
    ) -> Proposal | None:
        """The drafts of a request; None if it must wait, or if drafting fails."""
        try:
            # Logits processors may run while a draft is chosen.
            with nullcontext() if running.speculation is None else self.reserved([running.request]):
                return propose()
        except Exception as error:
            if isinstance(error, DeviceError) and not isinstance(error, DeviceMemoryError):
                raise  # it ends all requests
            failed(running.request, error)
            return None

    def drop(self) -> None:
        """Drop the results of all passes in flight, when the device has ended them."""
        for steps in (self.host, self._device):
            if steps is not None:
                steps.drop()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def finish(self, state: Prefilling | Running, error: Exception | None = None) -> None:
        """End a request that has no step in flight; error: what its reader gets after the tokens before it."""
        state.request.done, state.request.error = True, state.request.error or error
        self.leave(state)

    def release(self, state: Prefilling | Running) -> Slot:
        """Take the slot of a request back."""
        self.active.remove(state)
        slot = self.served.slots[state.sequence.slot]
        state.request.state, slot.owner = Waiting(), None
        self.served.slots.use(slot)
        return slot

    def stop(self, state: Prefilling | Running) -> None:
        """Cancel the slice of a request, or wait for its steps in flight, whose results are dropped."""
        if isinstance(state, Running):
            state.steps.end(state)
        else:
            state.cancel()

    def leave(self, state: Prefilling | Running) -> None:
        """Free the slot of a request that is done; none of its steps is in flight."""
        request = state.request
        slot = self.release(state)
        self.stop(state)
        if request.closing:
            request.items.clear()
        if isinstance(state, Running):
            self.cut(slot, request)
            if request.speculation is not None and request.error is None:
                request.speculation.ended(request.known)
        if slot.store is not None:
            slot.store.keep(slot.sequence)
        slot.let_go()
        slot.latest, request.on_prefill = request, None

    def cut(self, slot: Slot, request: Request) -> None:
        """Truncate a slot's sequence to the tokens of a request, or, if nobody wants the rest, to those that were fetched.
        The last sampled token has not been read, so the sequence never holds it."""
        length = request.n_prompt + request.fetched if request.closing else len(request.known)
        del slot.gone[length - 1 :]
        length = min(length - 1, slot.sequence.length)
        if slot.sequence.can_truncate(length):
            slot.sequence.truncate(length)
