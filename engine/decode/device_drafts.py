"""The drafts of a model on the target's own device, as a part of the target's step."""

from typing import cast

import numpy as np

from engine.cuda import accept
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.decode.device_sampler import Candidates, DeviceSampler, Rows
from engine.decode.group_operations import graph_operations
from engine.decode.step_kind import Kind
from engine.models.drafter import BlockPass, pass_of
from engine.ops.executor import Forward
from engine.sampling.sampler import Sampler
from engine.speculative.proposal import DeviceDraft, script_of


class DeviceDrafts:
    """Passes of a draft model or of the target's MTP layer.  Their tokens become the drafts of the target's step without
    passing through the host."""

    def __init__(self, draft: DeviceDraft, n_slots: int) -> None:
        self.draft = draft
        ops = graph_operations(draft.ops)
        assert ops is not None, "the device of these steps makes its drafts"
        self._ops = ops
        self._device = self._ops.device
        self._n_ctx = draft.n_ctx
        self._inputs = self._ops.inputs()
        self._block_inputs = self._ops.inputs() if draft.block is not None else None
        self._chooser = DeviceSampler(self._device, draft.n_vocab, self._n_ctx, n_slots=n_slots)
        self._script = self._ops.zeros((n_slots, self._n_ctx), np.int32)
        #: Whether drafts are sampled with the parameters of the request in a slot.
        self.began = [False] * n_slots

    @property
    def scripted(self) -> bool:
        """Whether proposals come from a script."""
        return self.draft.script is not None

    @property
    def _anchor(self) -> Tensor | None:
        return cast("Tensor | None", self.draft.anchor)

    @property
    def _block(self) -> BlockPass | None:
        return self.draft.block

    def begin(self, sampler: Sampler, slot: int) -> None:
        """Sample the drafts of a new request with the parameters of ``sampler``."""
        self._chooser.begin(self.draft.sampler(sampler), "ratio", 0.0, slot)
        script = script_of(self.draft, slot)
        if script is not None:
            self._device.write(self._script[slot : slot + 1].address, script)
        self.began[slot] = True

    def _plan(self, number: int, n_entries: int) -> Plan:
        """The pass of draft ``number`` of each of ``n_entries`` requests."""
        reads = self._reads(number)
        rows = reads * n_entries
        n_logits = rows if n_entries > 1 else 1
        compute = cast(Forward[Tensor], pass_of(self.draft.passes, number))
        return self._ops.plan(compute, rows, n_logits, self._inputs, n_entries > 1)

    def _block_plan(self, rows: int, n_entries: int) -> Plan | None:
        """The pass of a block of ``rows`` rows, those of the step that verifies it; None if the source has none."""
        if self._block is None:
            return None
        compute = cast(Forward[Tensor], self._block.compute)
        return self._ops.plan(compute, rows, 0, self._block_inputs, n_entries > 1)

    def _reads(self, number: int) -> int:
        """The tokens of a request that the pass of draft ``number`` reads."""
        return self.draft.reads if number == 0 else 1

    def lists(self, mode: str) -> Candidates | None:
        """The distributions from which the drafts were sampled, if acceptance uses them."""
        return self._chooser.lists if mode == "ratio" else None

    def kernels(self, count: int, n_entries: int, rows: int, kind: Kind) -> list[Specialization]:
        """Record the passes of ``launch``, and return the other kernels that it needs."""
        self._block_plan(rows, n_entries)
        for number in range(count):
            self._plan(number, n_entries)
        choice = self._chooser.kernels(*kind, accept=False)
        block = [] if self._block is None else [accept.begin_block()]
        begin = accept.begin_draft(self.draft.reads, self._anchor is not None)
        return [*block, begin, accept.propose(self.scripted), *choice]

    def launch(self, count: int, n_entries: int, target: Rows, rows: int, kind: Kind) -> None:
        """Launch the computation of ``count`` drafts for each entry of the step of the ``rows`` rows ``target``, inside a
        capture."""
        device, ops, n_ctx, inputs, history = self._device, self._ops, self._n_ctx, self._inputs, target.history
        mine = [array.address for array in (inputs.tokens, inputs.positions, inputs.sequences)]
        anchor = self._anchor
        place = anchor.address if anchor is not None else 0
        start = [target.starts, target.positions, target.sequences, n_ctx, history, *mine, place]
        self._launch_block(n_entries, target, rows)
        device.launch(accept.begin_draft(self.draft.reads, anchor is not None), n_entries, 32, start)
        for i in range(count):
            reads, plan = self._reads(i), self._plan(i, n_entries)
            assert plan.result is not None
            # Kernels of a pass may read positions before the previous kernel has ended, but here that kernel writes them.
            device.finish()
            ops.include(plan)
            tokens, positions, sequences = (address + 4 * (reads - 1) for address in mine)
            sampled = Rows(tokens, positions, sequences, target.starts, history)
            n_vocab, every = plan.result.shape[-1], reads if n_entries > 1 else 1
            logits = plan.result.address + 4 * n_vocab * (every - 1)
            self._chooser.launch_draft(
                logits, every * n_vocab, sampled, *kind, draft=i, n_entries=n_entries, every=reads
            )
            arguments = [n_entries, reads, i, n_ctx, target.starts, *mine, history, self._script.address, target.tokens]
            given = [self._chooser.found.address, *arguments, rows]
            device.launch(accept.propose(self.scripted), 1, accept.PROPOSE_THREADS, given)

    def _launch_block(self, n_entries: int, target: Rows, rows: int) -> None:
        block, inputs, plan = self._block, self._block_inputs, self._block_plan(rows, n_entries)
        if block is None or inputs is None or plan is None:
            return
        arrays = inputs.tokens, inputs.positions, inputs.sequences, block.last, block.places
        given = [target.starts, target.positions, target.sequences, self._n_ctx, target.history]
        numbers = [rows, block.mask, block.shift, int(block.causal)]
        mine = [cast(Tensor, array).address for array in arrays]
        self._device.launch(accept.begin_block(), 1, 32, [*given, *numbers, *mine])
        # Kernels of a pass may read positions before the previous kernel has ended, but here that kernel writes them.
        self._device.finish()
        self._ops.include(plan)


def drafting_kernels() -> list[Specialization]:
    """The kernels that drafts add to steps, besides those of passes and of sampling."""
    return [*(accept.begin_draft(*of) for of in ((1, False), (1, True), (2, False))), accept.propose(False)]
