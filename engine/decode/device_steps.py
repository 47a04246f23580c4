"""Steps on the device: a captured graph of a pass and of the sampling of its tokens, launched repeatedly.

A graph reads its rows (token, position, slot) from device memory and writes the rows of the next step there.  A plain step
therefore needs no data from the host, which launches steps ahead of time and reads tokens as they arrive.  If the rows change
because the batch has other requests, or because the host has found drafts, a small kernel lays them out before the graph
starts.  If a model on the same device computes drafts, its passes are the first kernels of the graph.  Each of them writes
its draft to device memory, where the next one and the target read it.

A pass of one request has separate kernels for each number of rows.  Passes of several requests are *mixed*
(``engine/arrays.py``) and padded to a few numbers of rows, up to 128.

A request with a grammar needs a mask for each token, which the host computes from the tokens before it.  A step with such a
request is therefore two graphs: a pass, and the sampling of its tokens.  The pass is launched before the token of the
previous step is known, as in any other step.  The host computes the masks while the pass runs, and then launches the
sampling.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import cast

import numpy as np

from engine.cuda import accept, digest, permit, sample
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.tensor import Tensor
from engine.decode.device_drafts import DeviceDrafts, drafting_kernels
from engine.decode.device_sampler import DeviceSampler
from engine.decode.graph_operations import GraphOperations
from engine.decode.host_steps import ModelSteps
from engine.decode.running import InFlightRequest, Running, Step
from engine.decode.step_graphs import Choice, StepGraphs
from engine.decode.step_kind import masked
from engine.decode.step_rows import StepRows
from engine.errors import DeviceError, EngineError, NoToken
from engine.grammar.masks import Asked, masks_of
from engine.limits import DECODE_ANSWERS, DECODE_ROWS, IN_FLIGHT
from engine.ops.model import AnyModel
from engine.speculative.passes import PassTimes
from engine.speculative.proposal import DeviceDraft

AHEAD = 4
"""The number of plain steps in flight: they are launched before the token of the first one is read."""

AHEAD_DRAFTED = IN_FLIGHT - 1
"""The number of steps in flight if the device computes drafts.  Caches can roll back these and the next one."""

POLL_SECONDS = 5e-5
"""The time, in seconds, that the host sleeps while it waits for a token and further steps are in flight."""


@dataclass
class LaunchedBatch:
    """A pass in flight: launched, and its results not taken.  slots, rows: the slot of each request, and its number of rows;
    masks: the number of rows with a mask, by slot; no token is needed from the other rows of these slots, so every token is
    masked there."""

    requests: list[InFlightRequest]
    slots: list[int]
    rows: list[int]
    masks: dict[int, int] = field(default_factory=dict)


class DeviceSteps(ModelSteps):
    """Steps of one model whose tokens a GPU chooses.  Several passes may be in flight, unless one of them has drafts from the
    host."""

    ahead = AHEAD
    ahead_drafted = AHEAD_DRAFTED

    _model: AnyModel[Tensor]

    def __init__(self, ops: GraphOperations, model: AnyModel[Tensor]) -> None:
        self._ops = ops
        self._device = ops.device
        #: All devices that compute the steps.
        relayed = () if model.relay is None else model.relay.stages
        self._devices = [cast(GraphOperations, stage.ops).device for stage in relayed] or list(ops.devices)
        self._model = model
        self.passes = PassTimes(ops.padded_rows)
        n, self._n_ctx = model.cache.n_sequences, model.cache.n_ctx
        self._chooser = DeviceSampler(ops.device, model.config.n_vocab, self._n_ctx, n_slots=n)
        self._rows = StepRows(ops, n, self._n_ctx)
        self._graphs = StepGraphs(ops, model, self._chooser, self._rows)
        self._drafting: DeviceDrafts | None = None
        self._in_flight: deque[LaunchedBatch] = deque()
        self._masks: permit.Masks | None = None
        #: The number of passes in flight of the request in each slot, and of their rows.
        self._passes, self._rows_under_way = [0] * n, [0] * n
        #: The slots of requests that continue at another position than the device assumes.
        self._stray: set[int] = set()
        #: The sampling of the latest pass, until its masks are known.
        self._left: Choice | None = None

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source can compute its drafts as part of a step."""
        return self._ops.shares_memory_with(draft.ops)

    def leave(self, rows: bool) -> None:
        """Launch the sampling of the latest pass, whose logits another pass is about to overwrite; rows: whether the rows
        are overwritten too."""
        self.choose()
        if rows:
            self._rows.displace()

    def begin(self, running: Running) -> None:
        """Add a request.  Its sequence contains all known tokens except the last."""
        slot = running.sequence.slot
        self._rows.begin(slot, running.known)
        self._chooser.begin(running.sampler, running.params.accept, running.params.accept_p_min, slot)
        self._stray.discard(slot)
        if self._drafting is not None:
            self._drafting.begin(running.sampler, slot)

    def start(self, requests: Sequence[InFlightRequest]) -> None:
        """Launch a pass over the last known token and the drafts of each request."""
        self._ops.occupy(self)
        self.choose()
        for running, _ in requests if self._stray else ():
            if running.sequence.slot in self._stray:
                self.begin(running)
        draft = next((r.proposal.device_draft for r in requests if r.proposal.device_draft is not None), None)
        if draft is not None:
            self._follow(draft, requests)
        batch = LaunchedBatch(
            list(requests),
            [running.sequence.slot for running, _ in requests],
            [1 + len(proposal) for _, proposal in requests],
        )
        most, last = 1 + max(proposal.count for _, proposal in requests), 0
        for (running, _), slot, rows in zip(requests, batch.slots, batch.rows, strict=True):
            # The first position depends on the results of the steps in flight, so this is the largest possible end.  The
            # device computes the same number of drafts for each request.
            end = min(len(running.known) - 1 + self._rows_under_way[slot] + max(most, rows), self._n_ctx)
            running.sequence.reserve(end)
            own = draft.sequence(running.sequence.slot) if draft is not None else None
            if own is not None:
                own.reserve(end)
            last = max(last, end)
        self._model.reserve(last)
        self._model.cache.publish()
        if draft is not None:
            draft.reserve(last)
            if draft.cache is not None:
                draft.cache.publish()
        # The host does not know drafts of the device, so it cannot compute masks for them.
        assert draft is None or not any(masked(request) and request.proposal for request in requests)
        graph, choice = self._graphs.of(requests, batch.rows, self._drafting if draft is not None else None)
        self._rows.place(requests, batch.slots, batch.rows)
        self._in_flight.append(batch)
        self._count(batch, 1)
        graph.launch()
        self._left = choice

    def choose(self) -> None:
        """Launch the sampling of the latest pass, if it waits for masks.  First waits for the earlier steps, whose tokens
        determine the masks."""
        if self._left is None:
            return
        batch, asked, places, row = self._in_flight[-1], [], [], 0
        for request in batch.requests:
            tokens = self._before_last_step(request.running) if masked(request) else None
            if tokens is not None:
                assert request.running.sampler.matcher is not None
                asked.append(Asked(request.running.sampler.matcher, tokens, request.proposal.tokens))
                places.append((row, request.running.sequence.slot))
            row += 1 + len(request.proposal)
        masks = []
        for (row, slot), (_, _, drafts), found in zip(places, asked, masks_of(asked), strict=True):
            batch.masks[slot] = len(found)
            nothing = np.zeros((1 + len(drafts) - len(found), found.shape[1]), np.int32)
            masks += [(row + i, mask) for i, mask in enumerate([*found, *nothing])]
        (graph, logits, stride), self._left = self._left, None
        if self._masks is None:
            rows = min(DECODE_ROWS * self._model.cache.n_sequences, DECODE_ANSWERS)
            self._masks = permit.Masks(self._device, self._model.config.n_vocab, rows)
        self._masks.apply(logits, stride, masks)
        graph.launch()

    def _before_last_step(self, running: Running) -> list[int] | None:
        """Tokens before the newest step, after waiting for older ones; None if sampling failed."""
        slot, tokens = running.sequence.slot, running.known
        for later in range(self._passes[slot] - 1):
            self._wait(slot, later)
            words = self._chooser.words(slot, later)
            if min(words) < 0:
                return None
            tokens = tokens + words
        return tokens

    def _under_way(self, running: Running) -> int:
        """The most tokens that a request can get from the steps in flight."""
        return self._rows_under_way[running.sequence.slot]

    def _count(self, batch: LaunchedBatch, passes: int) -> None:
        """Note that the rows of a batch are in flight, or, if ``passes`` is -1, no longer."""
        for slot, rows in zip(batch.slots, batch.rows, strict=True):
            self._passes[slot] += passes
            self._rows_under_way[slot] += passes * rows

    def take(self) -> list[Step]:
        """Wait for the oldest pass in flight and return its results."""
        if self._left is not None:
            *before, last = self._in_flight
            unsettled = {id(request.running) for batch in before for request in batch.requests}
            if not any(masked(request) and id(request.running) in unsettled for request in last.requests):
                self.choose()  # without waiting
        batch = self._in_flight[0]
        self._wait(batch.slots[-1])
        if len(batch.slots) > 1 and not self._chooser.all_ready(batch.slots):
            for slot in batch.slots:
                self._wait(slot)
        words = self._chooser.take_all(batch.slots)
        steps = list(map(self._taken, batch.requests, batch.rows, words, repeat(batch.masks)))
        self._count(self._in_flight.popleft(), -1)
        return steps

    def _wait(self, slot: int, later: int = 0) -> None:
        """Wait for the result of the next step of a slot, or of the step ``later`` steps after that."""
        # Without further steps in flight, the device would be idle until the host wakes up.
        pause = POLL_SECONDS if len(self._in_flight) > 1 else 0
        while not self._chooser.ready(slot, later):
            # is_idle raises DeviceError if a kernel has failed, so every device is asked.
            idle = [device.is_idle() for device in self._devices]
            if all(idle) and not self._chooser.ready(slot, later):
                raise DeviceError(
                    f"{self._device.info.name} ended its work and left no token; this is a defect of this program"
                )
            time.sleep(pause)
        for device in self._devices:
            device.check_alarms()

    def _taken(self, request: InFlightRequest, rows: int, words: list[int], masks: Mapping[int, int]) -> Step:
        """The result of a request with ``rows`` rows; words: its tokens, of which one that could not be chosen is negative;
        masks: those of the batch."""
        running, proposal = request
        sequence, slot = running.sequence, running.sequence.slot
        step = Step([*takewhile(lambda word: word >= 0, words)] if min(words) < 0 else words)
        if running.request.receipt:
            step.rows = [*self._chooser.digests(slot, len(step.tokens))]
        if len(step.tokens) < len(words):
            try:
                self._chooser.check(slot, words[len(step.tokens)])
            except EngineError as error:
                step.error = error if not masked(request) else self._refused(running, step, masks.get(slot, 0), error)
        # The pages have been reserved before the launch.
        sequence.overwrite(sequence.length + rows)
        if proposal.device_draft is not None and step.tokens:
            proposal.device_draft.keep(running.known, proposal.count, step.tokens, slot)
        if step.tokens:
            sequence.commit([running.known[-1], *step.tokens[:-1]])
            sequence.settle()
        return step

    def _refused(self, running: Running, step: Step, n_masks: int, error: Exception) -> Exception | None:
        """Why no token could be sampled after those of a step; None if only a mask was missing.  In this case the next step
        continues after them.  error: what the sampling said."""
        matcher = running.sampler.matcher
        if matcher is None or len(step.tokens) < n_masks:
            return error
        try:
            matcher.mask(running.known + step.tokens)
        except NoToken as no_token:
            return no_token
        self._stray.add(running.sequence.slot)
        return None if step.tokens else error

    def end(self, running: Running) -> None:
        """End a request: wait for its steps in flight and drop their results."""
        if not self._under_way(running):
            return
        self.choose()
        self._synchronize()
        self._forget(running)

    def drop(self) -> None:
        """End all requests, also after an error in ``start`` or ``take``: wait for the steps in flight and drop their
        results, also if the device has failed."""
        self._left = None  # it may be what failed
        try:
            self._synchronize()
        finally:
            while self._in_flight:
                for running, _ in self._in_flight[0].requests:
                    self._forget(running)
            self._rows.displace()

    def _synchronize(self) -> None:
        """Wait for all devices, in the order of a step: the later ones wait for the earlier ones, which may have failed."""
        for device in self._devices:
            device.synchronize()

    def _forget(self, running: Running) -> None:
        """Drop the results of the steps in flight of a request, which the device has completed."""
        under_way = self._under_way(running)
        drafts = self._drafting.draft.sequence(running.sequence.slot) if self._drafting is not None else None
        for sequence in (running.sequence, drafts):
            if sequence is not None:
                sequence.overwrite(len(running.known) - 1 + under_way)
        self._passes[running.sequence.slot] = self._rows_under_way[running.sequence.slot] = 0
        for batch in self._in_flight:
            left = [i for i, request in enumerate(batch.requests) if request.running is not running]
            batch.requests = [batch.requests[i] for i in left]
            batch.slots, batch.rows = ([each[i] for i in left] for each in (batch.slots, batch.rows))
        self._in_flight = deque(batch for batch in self._in_flight if batch.requests)

    def _follow(self, draft: DeviceDraft, requests: Sequence[InFlightRequest]) -> None:
        """Use a source on this device to draft for these requests."""
        if self._drafting is None or self._drafting.draft is not draft:
            self._drafting = DeviceDrafts(draft, self._model.cache.n_sequences)
            for request in requests:
                self._drafting.begin(request.running.sampler, request.running.sequence.slot)
            self._graphs.forget_drafts()
        for request in requests:
            if not self._drafting.began[request.running.sequence.slot]:
                self._drafting.begin(request.running.sampler, request.running.sequence.slot)
            if not self._under_way(request.running):
                draft.catch_up(request.running.known, request.running.sequence)


def step_kernels(n_owners: int = 1) -> list[Specialization]:
    """The kernels of the steps of any model, with and without drafts and masks, besides those of passes; n_owners: the number
    of GPUs that share its layers."""
    choices = dict.fromkeys(kernel for greedy in (True, False) for kernel in DeviceSampler.kernels(greedy, True))
    others = permit.permit(permit.THREADS), *digest.kernels(), accept.lay_out()
    groups = sample.owned_groups(n_owners)
    owned = [sample.maxima(groups, sample.WARPS), sample.argmax(n_owners * groups)] if n_owners > 1 else []
    return [*choices, *owned, *others, *drafting_kernels()]
