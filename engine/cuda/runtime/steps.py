"""Steps on the device: a captured graph of a pass and of the choice of its tokens, launched repeatedly.

A graph reads its tokens and positions from device memory and writes the next ones there, so a plain step needs no data from
the host, which only launches steps ahead of time and reads tokens as they arrive.  A step with drafts is also one graph: its
first kernel copies drafts that the host has found; drafts of a model on the same device are computed by its first kernels,
passes of that model that pass their tokens to one another and to the target.
"""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Pass
from engine.cuda import accept, sample
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Device, Graph
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.decode.sampler import Sampler
from engine.errors import DeviceError
from engine.ops import AnyOperations, Decoder, Forward
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import DeviceDraft, Proposal
from engine.speculative.steps import ModelSteps, Step

AHEAD = 4
"""The number of plain steps that are launched before the token of the first one is read."""

AHEAD_DRAFTED = 2
"""The number of steps with drafts computed on the device that are launched before the first result is read."""

POLL_SECONDS = 5e-5
"""The time, in seconds, that the host sleeps while it waits for a token and further steps are in flight."""


class GraphOperations(Protocol):
    """The interface of a GPU's backend that steps use."""

    device: Device
    tokens: Tensor
    positions: Tensor

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """A zeroed array that outlives the pass."""

    def inputs(self) -> Pass[Tensor]:
        """Memory for the tokens and positions of passes, in addition to ``tokens`` and ``positions``."""

    def plan(self, forward: Forward[Tensor], rows: int, n_logits: int, inputs: Pass[Tensor] | None = None) -> Plan:
        """A recorded pass."""

    def start(self, plan: Plan) -> None:
        """Start its kernels one by one."""

    def shares_memory_with(self, other: AnyOperations) -> bool:
        """Whether the other backend uses the same device object, and so the same memory and queue."""


class DeviceSteps(ModelSteps):
    """Steps of one model on one GPU.  Call ``begin``, then ``start`` and ``take`` in turn.  Several steps may be started
    before the first is taken, unless one of them has drafts from the host."""

    ahead = AHEAD
    ahead_drafted = AHEAD_DRAFTED

    _model: Decoder[Tensor]

    def __init__(self, ops: GraphOperations, model: Decoder[Tensor]) -> None:
        self._ops = ops
        self._device = ops.device
        self._model = model
        self._chooser = sample.DeviceSampler(ops.device, model.config.n_vocab, model.cache.n_ctx)
        self._history = ops.zeros((model.cache.n_ctx,), np.int32)
        self._host_drafts, self._host_drafts_address = ops.device.pinned((accept.MOST_ROWS,), np.int32)
        self._graphs: dict[tuple[Hashable, ...], Graph] = {}
        self._drafting: DeviceDrafts | None = None
        self._known: list[int] = []
        self._started: deque[Proposal] = deque()
        self._turn = object()

    def prepare(self, sampler: Sampler, params: SpeculationParams) -> "DeviceSteps":
        """Choose further tokens by the rules of ``sampler``, and accept drafts by ``params``."""
        self._sampler = sampler
        self._params = params
        return self

    @property
    def _kind(self) -> tuple[bool, bool, str]:
        """What a graph depends on besides its rows: whether it is greedy, whether logits are changed, and how drafts are
        accepted."""
        p = self._sampler.params
        return p.greedy, sample.edits(p), "exact" if p.greedy else self._params.accept

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source computes its drafts as part of a step."""
        return self._ops.shares_memory_with(draft.ops)

    def begin(self, known: Sequence[int]) -> object:
        """Set the tokens so far; the cache holds all but the last.  Returns an object that identifies this answer to
        ``end``."""
        self._known = list(known)
        self._started.clear()
        self._turn = object()
        first, write = len(known) - 1, self._device.write
        write(self._ops.tokens.address, np.array([known[-1]], np.int32))
        write(self._ops.positions.address, np.arange(first, first + accept.MOST_ROWS, dtype=np.int32))
        write(self._history.address, np.asarray(known, np.int32))
        self._chooser.begin(self._sampler, self._params.accept, self._params.accept_p_min)
        if self._drafting is not None:
            self._drafting.begin(self._sampler)
        return self._turn

    def start(self, proposal: Proposal) -> None:
        """Launch a step that reads the last known token and the drafts."""
        # Its start depends on the results of the steps in flight; this is the latest possible end.
        end = len(self._known) + self._under_way() + len(proposal)
        self._model.reserve(end)
        if proposal.device_draft is not None:
            graph = self._draft_graph(proposal.device_draft, proposal.count, end)
        elif proposal.tokens:
            self._host_drafts[: len(proposal)] = proposal.tokens
            graph = self._graph(1 + len(proposal))
        else:
            graph = self._graph(1)
        self._started.append(proposal)
        graph.launch()

    def _under_way(self) -> int:
        """The most tokens that the steps in flight can generate."""
        return sum(1 + len(proposal) for proposal in self._started)

    def take(self) -> Step:
        """Wait for the first step whose result has not been taken, and return the result."""
        proposal = self._started.popleft()
        # Without further steps in flight the device would be idle while the host sleeps.
        pause = POLL_SECONDS if self._started else 0
        while not self._chooser.ready():
            # is_idle raises DeviceError if a kernel has failed.
            if self._device.is_idle() and not self._chooser.ready():
                raise DeviceError(
                    f"{self._device.info.name} ended its work and left no token; this is a defect of this program"
                )
            time.sleep(pause)
        tokens = self._chooser.take()
        first = len(self._known) - 1
        self._model.sequence.claim(first, 1 + len(proposal))
        if proposal.device_draft is not None and self._drafting is not None:
            self._drafting.draft.keep(self._known, proposal.count, tokens)
        self._known += tokens
        self._model.sequence.commit(self._known[first:-1])
        return Step(tokens)

    def end(self, turn: object = None) -> None:
        """End the answer: wait for the steps in flight; no further step follows.  Does nothing if another answer has begun
        since."""
        if turn is not None and turn is not self._turn:
            return
        self._device.synchronize()
        end = len(self._known) - 1 + self._under_way()
        drafts = self._drafting.draft.sequence if self._drafting is not None else None
        for sequence in (self._model.sequence, drafts):
            # Unless something else has begun to use it meanwhile.
            if sequence is not None and sequence.length in (len(self._known) - 1, len(self._known) - 2):
                sequence.overwrite(end)
        self._started.clear()

    # --- graphs ------------------------------------------------------------------------------------------------

    def _graph(self, rows: int) -> Graph:
        """The graph of a step with ``rows`` - 1 drafts from the host."""
        key = (rows, self._kind)
        if key not in self._graphs:
            device, ops = self._device, self._ops
            ops.plan(self._model.compute, rows, rows)
            place = accept.place()
            self._load([place] if rows > 1 else [])
            with device.capture() as graph:
                if rows > 1:
                    n_ctx, state = self._model.cache.n_ctx, (ops.tokens, ops.positions, self._history)
                    drafts = (self._host_drafts_address, rows - 1, n_ctx)
                    device.launch(place, 1, 32, [*drafts, *(array.address for array in state)])
                self._verify(rows, None)
            self._graphs[key] = graph
        return self._graphs[key]

    def _draft_graph(self, draft: DeviceDraft, count: int, end: int) -> Graph:
        """The graph of a step that ends before position ``end`` and begins with the computation of ``count`` drafts."""
        if self._drafting is None or self._drafting.draft is not draft:
            self._drafting = DeviceDrafts(draft, self._ops.tokens, self._ops.positions, self._history)
            self._drafting.begin(self._sampler)
            self._graphs = {key: graph for key, graph in self._graphs.items() if len(key) == 2}
        drafting = self._drafting
        if not self._started:
            drafting.catch_up(self._known)
        draft.reserve(end)
        key = (count, self._kind, drafting.scripted)
        if key not in self._graphs:
            self._ops.plan(self._model.compute, count + 1, count + 1)
            kind = self._kind
            self._load(drafting.kernels(count, *kind))
            with self._device.capture() as graph:
                drafting.launch(count, *kind)
                self._verify(count + 1, drafting.lists(kind[2]))
            self._graphs[key] = graph
        return self._graphs[key]

    def _load(self, kernels: Sequence[Specialization]) -> None:
        """Compile the kernels before a capture begins."""
        for kernel in [*kernels, *self._chooser.kernels(*self._kind)]:
            self._device.load(kernel)

    def _verify(self, rows: int, draft_lists: sample.Candidates | None) -> None:
        """Launch a pass and the choice of its tokens, inside a capture."""
        ops = self._ops
        plan = ops.plan(self._model.compute, rows, rows)
        assert plan.result is not None
        ops.start(plan)
        logits, stride = plan.result.address, plan.result.shape[-1]
        state = (ops.tokens.address, ops.positions.address, self._history.address)
        self._chooser.launch(logits, stride, rows, *state, *self._kind, draft_lists=draft_lists)


class DeviceDrafts:
    """Passes of a draft model, or of the target's own layer, whose tokens become the drafts of the target's step without
    passing through the host."""

    def __init__(self, draft: DeviceDraft, target_tokens: Tensor, target_positions: Tensor, history: Tensor) -> None:
        self.draft = draft
        self._ops: GraphOperations = draft.ops
        self._device = self._ops.device
        self._target_tokens = target_tokens
        self._target_positions = target_positions
        self._history = history
        self._n_ctx = draft.n_ctx
        self._inputs = self._ops.inputs()
        self._tokens, self._positions = self._inputs.tokens, self._inputs.positions
        self._chooser = sample.DeviceSampler(self._device, draft.n_vocab, self._n_ctx)
        self._script = self._ops.zeros((self._n_ctx,), np.int32)

    @property
    def scripted(self) -> bool:
        """Whether proposals come from a script."""
        return self.draft.script is not None

    @property
    def _anchored(self) -> bool:
        return self.draft.anchor is not None

    def begin(self, sampler: Sampler) -> None:
        """Draw the drafts of a new answer by the rules of ``sampler``."""
        self._owner = object()
        self._chooser.begin(self.draft.sampler(sampler), "ratio")
        if self.draft.script is not None:
            self._device.write(self._script.address, self.draft.script)

    def catch_up(self, known: Sequence[int]) -> None:
        """Let the draft source read what it needs in order to continue after ``known``."""
        self.draft.catch_up(known, self._owner)

    def _plan(self, rows: int) -> Plan:
        return self._ops.plan(self.draft.compute, rows, 1, self._inputs)

    def lists(self, mode: str) -> sample.Candidates | None:
        """The distributions that the drafts were drawn from, if acceptance uses them."""
        return self._chooser.lists if mode == "ratio" else None

    def kernels(self, count: int, greedy: bool, with_edit: bool, mode: str) -> list[Specialization]:
        """Record the passes of ``launch``, and return the other kernels that it needs."""
        for rows in {self.draft.reads, 1} if count > 1 else {self.draft.reads}:
            self._plan(rows)
        choice = self._chooser.kernels(greedy, with_edit, mode, accept=False)
        return [accept.begin_draft(self.draft.reads, self._anchored), accept.propose(self.scripted), *choice]

    def launch(self, count: int, greedy: bool, with_edit: bool, mode: str) -> None:
        """Launch the computation of ``count`` drafts, inside a capture."""
        device, ops, n_ctx = self._device, self._ops, self._n_ctx
        tokens, positions, history = self._tokens.address, self._positions.address, self._history.address
        anchor = self.draft.anchor.address if self._anchored else 0
        start = [self._target_positions.address, history, tokens, positions, anchor]
        device.launch(accept.begin_draft(self.draft.reads, self._anchored), 1, 32, start)
        for i in range(count):
            rows = self.draft.reads if i == 0 else 1
            plan = self._plan(rows)
            assert plan.result is not None
            # Kernels of a pass may read positions before the previous kernel ends, but here it has just written them.
            device.finish()
            ops.start(plan)
            row = (plan.result.address, plan.result.shape[-1], 1, tokens, positions + 4 * (rows - 1), history)
            self._chooser.launch(*row, greedy, with_edit, mode, accept=False, slot=i)
            script, out = self._script.address, self._target_tokens.address + 4 * (1 + i)
            found = self._chooser.found.address
            arguments = [found, rows - 1, n_ctx, tokens, positions, history, script, out]
            device.launch(accept.propose(self.scripted), 1, 32, arguments)


def drafting_kernels() -> list[Specialization]:
    """The kernels that steps with drafts launch, besides passes and the choice of tokens."""
    first = (accept.begin_draft(*of) for of in ((1, False), (1, True), (2, False)))
    return [accept.place(), *first, accept.propose(False)]
