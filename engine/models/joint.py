"""The stages of a divided model in one recorded pass of the GPU, which the CPU joins in between.

To start a stage, to copy its rows to the GPU and back, and to wait for it takes longer than many a stage: a mixture whose
experts are on the CPU has a stage on the GPU for every layer.  So the GPU's parts of a decode pass are recorded as one pass.
Where rows go to the CPU or come from it, a kernel exchanges them with the host while the pass runs
(``engine/ops/exchange.py``)::

    GPU:  layer 0's mixer, send 0 .......... receive 1, layer 1's mixer, send 2 .......... receive 3, ...
    CPU:  ................ take 0, network 0, give 1 .................... take 2, network 1, give 3, ...

Of a mixture between two parts on the GPU, the CPU computes the experts only (``engine/models/routed.py``).
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from engine.arrays import Array, Batch
from engine.compile.jobs import Job
from engine.models.routed import ExpertsStage, MixtureHead
from engine.models.stage import DivisibleModel, RowSlice, Stage, StageInputs
from engine.ops.exchange import Exchange


class JointStage(Stage):
    """All stages of a model, some on the GPU whose inputs are ``inputs``, the others on the CPU, as one stage of the GPU for
    passes of at most ``Ops.decode_rows`` rows.

    ``seconds``: those of its passes without the stages on the CPU.
    """

    def __init__(
        self,
        model: DivisibleModel,
        inputs: StageInputs,
        stages: Sequence[Stage],
        exchange: Exchange[Array],
        heads: Mapping[int, MixtureHead],
        experts: Mapping[int, ExpertsStage],
    ) -> None:
        """heads, experts: for the number of each stage on the CPU that is a mixture which is cut, its two sides."""
        super().__init__(model, inputs, [part for stage in stages for part in stage.parts], True, True)
        #: Larger passes have separate stages.
        self.prompt_rows = self.ops.decode_rows
        self._stages = stages
        self._exchange = exchange
        self.heads, self.experts = heads, experts
        #: The stages that the host computes, and their numbers.
        self._hosted = [(i, stage) for i, stage in enumerate(stages) if stage.ops is not self.ops]
        #: Sums of experts' outputs that come from the host.
        self._sums = self.ops.zeros((self.ops.decode_rows, model.config.n_embd), np.float32) if heads else None

    def __str__(self) -> str:
        return f"all stages in one recording, on {self.ops.label} and the CPU"

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of the stages on the GPU, and the exchanges between them.  Returns the logits of the last
        ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits or if the CPU computes them."""
        x: Array | None = None
        for i, stage in enumerate(self._stages):
            if stage.ops is self.ops:
                if i and i - 1 not in self.heads:
                    self._exchange.receive(i - 1, self._inputs.x[slice(batch.rows)])
                    x = None
                x = stage.compute_from(x, batch, n_logits)
                if not stage.is_last and i + 1 not in self.heads:
                    assert x is not None
                    self._exchange.send(i, x)
            elif i in self.heads:
                assert x is not None
                x = self._routed(i, x, batch)
        return x if self._stages[-1].ops is self.ops else None

    def _routed(self, i: int, x: Array, batch: Batch[Array]) -> Array:
        """The residual stream after the mixture that is stage ``i``, from x before it, float32 [rows, n_embd]."""
        head, ops, exchange = self.heads[i], self.ops, self._exchange
        b, choice = head.begin(ops, x, batch)
        exchange.send(i - 1, b, (choice.ids, choice.weights))
        shared = head.shared(ops, b)
        assert self._sums is not None
        total = self._sums[slice(batch.rows)]
        exchange.receive(i, total)
        return head.end(ops, x, total, shared, choice.logits)

    def run(
        self, slices: Sequence[RowSlice], x: np.ndarray | None, told: np.ndarray | None, n_logits: int, out: np.ndarray
    ) -> np.ndarray | None:
        """The logits of the last ``n_logits`` rows of a pass, float32 [n_logits, n_vocab], or None.

        slices: the pass, from :meth:`slices`, which is one slice; told: the per-layer embeddings, None if there are none;
        x, out: not used.
        """
        begun, hosted = time.perf_counter(), sum(stage.seconds for _, stage in self._hosted)
        ((_, batch),) = slices
        ends_here = self._stages[-1].ops is self.ops
        rows, padded = batch.rows, self.ops.padded_rows(batch.rows, batch.mixed)
        stream, exchange, result = self._exchange.rows[:padded], self._exchange, None
        on_cpu = self._hosted[0][1].slices(batch)
        self._inputs.place(batch, None, told)
        passing = self.ops.split(self.compute, batch, n_logits if ends_here else 0, self.prompt_rows)
        with exchange.turns():
            passing.advance(passing.pieces)
            for i, stage in self._hosted:
                if i:
                    exchange.take(i - 1)
                if i in self.experts:
                    self.experts[i].answer(on_cpu, stream[:rows], padded)
                else:
                    result = stage.run(on_cpu, stream[:rows] if i else None, told, n_logits, stream[:rows])
                if not stage.is_last:
                    stream[rows:] = stream[rows - 1]
                    exchange.give(i)
            logits = passing.logits(wait=True)
        hosted = sum(stage.seconds for _, stage in self._hosted) - hosted
        self.seconds += time.perf_counter() - begun - hosted
        return logits if ends_here else result

    def jobs(self) -> list[Job]:
        """The compile jobs of the exchanges, and of what the GPU computes of mixtures that are cut.  The CPU's part has the
        kernels of whole mixtures."""
        return [*self._exchange.jobs(), *(self.ops.jobs(self) if self.heads else ())]
