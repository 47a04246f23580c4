"""The stages of a divided model in two recorded passes that run at the same time: one of the GPU, one of the CPU.

To start a stage, to copy its rows to the GPU and back, and to wait for it takes longer than many a stage: a mixture whose
experts are on the CPU has a stage on the GPU for every layer.  So the GPU's parts of a decode pass are recorded as one pass,
and the CPU's as another one.  Where rows go from one to the other, each waits for the other while it runs
(``engine/ops/exchange.py``)::

    GPU:  layer 0's mixer, send 0 .......... receive 1, layer 1's mixer, send 2 .......... receive 3, ...
    CPU:  ................ take 0, network 0, give 1 .................... take 2, network 1, give 3, ...

Of a mixture between two parts on the GPU, the CPU computes the experts only (``engine/models/routed.py``).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from engine.arrays import Array, Batch, Matrix
from engine.cache.kv import KVCache
from engine.compile.jobs import Job
from engine.models.routed import MixtureHead
from engine.models.stage import DivisibleModel, RowSlice, Stage, StageInputs, Taps
from engine.ops.exchange import Exchange
from engine.ops.experts import Experts


class HostSide:
    """The stages on the CPU as one pass (``engine.ops.model.Recordable``)."""

    def __init__(
        self,
        model: DivisibleModel,
        inputs: StageInputs,
        stages: Sequence[Stage],
        exchange: Exchange[Array],
        experts: Mapping[int, Experts[Array, Matrix]],
        padded_rows: Callable[[int, bool], int],
    ) -> None:
        """inputs: what the stages on the CPU begin with; stages: all stages of the model; experts: the mixture of each stage
        of which the CPU computes the experts only; padded_rows: the number of rows of the GPU's pass, from that of the pass
        and whether it is mixed."""
        self.ops = inputs.ops
        self.inputs = inputs
        self.prompt_rows = self.decode_answers = self.drafted_rows = self.ops.decode_rows
        self.reads_together = False
        self.cache: KVCache = model.cache
        self._model = model
        self._stages = stages
        self._exchange = exchange
        self._experts = experts
        self._padded_rows = padded_rows
        host = self.ops.host_side()
        assert host is not None
        #: How its passes wait for the GPU.
        self.host = host

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of the stages on the CPU, and the exchanges between them.  Returns the logits of the last
        ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits or if the GPU computes them."""
        exchange, padded = self._exchange, self._padded_rows(batch.rows, batch.mixed)
        batch = self._model.placed(self.ops, batch)
        rows = slice(batch.rows)
        for i, stage in enumerate(self._stages):
            if stage.ops is not self.ops:
                continue
            if i:
                exchange.take(self.host, i - 1)
            x = cast(Array, exchange.rows[rows]) if i else None
            if i in self._experts:
                experts = self._experts[i]
                ids, weights = exchange.chosen(padded, experts.n_used)
                assert x is not None
                y = self.ops.sum_experts(experts, x, cast(Array, ids[rows]), cast(Array, weights[rows]))
            else:
                result = stage.compute_from(x, batch, n_logits)
                if stage.is_last:
                    return result
                assert result is not None
                y = result
            exchange.give(self.host, i, cast(np.ndarray, y), padded)
        return None

    def compute_kinds(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of :meth:`compute`, of which a backend lists the kernels."""
        return self.compute(batch, n_logits)


class JointStage(Stage):
    """All stages of a model, some on the GPU whose inputs are ``inputs``, the others on the CPU, as one stage of the GPU for
    passes of at most ``Ops.decode_rows`` rows.

    seconds: those of its passes without the work of the CPU; host_seconds: those of the work of the CPU; exchange:
    where rows go from one device to the other; heads: for the number of each stage on the CPU that is a mixture which is cut,
    what the GPU computes of it.
    """

    def __init__(
        self,
        model: DivisibleModel,
        inputs: StageInputs,
        host_inputs: StageInputs,
        stages: Sequence[Stage],
        exchange: Exchange[Array],
        heads: Mapping[int, MixtureHead],
        experts: Mapping[int, Experts[Array, Matrix]],
    ) -> None:
        """host_inputs: what the stages on the CPU begin with; experts: what the CPU computes of the mixtures of ``heads``."""
        super().__init__(model, inputs, [part for stage in stages for part in stage.parts], True, True)
        #: Larger passes have separate stages.
        self.prompt_rows = self.ops.decode_rows
        self.host_seconds = 0.0
        self.heads = heads
        self._stages = stages
        self.exchange = exchange
        self.host = HostSide(model, host_inputs, stages, exchange, experts, self.ops.padded_rows)
        #: Sums of experts' outputs that come from the host.
        self._sums = self.ops.zeros((self.ops.decode_rows, model.config.n_embd), np.float32) if heads else None

    def __str__(self) -> str:
        return f"all stages in one recording, on {self.ops.label} and the CPU"

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of the stages on the GPU, and the exchanges between them.  Returns the logits of the last
        ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits or if the CPU computes them."""
        x: Array | None = None
        batch = self._model.placed(self.ops, batch)
        for i, stage in enumerate(self._stages):
            if stage.ops is self.ops:
                if i and i - 1 not in self.heads:
                    self.exchange.receive(i - 1, self._inputs.x[slice(batch.rows)])
                    x = None
                x = stage.compute_from(x, batch, n_logits)
                if not stage.is_last and i + 1 not in self.heads:
                    assert x is not None
                    self.exchange.send(i, x)
            elif i in self.heads:
                assert x is not None
                x = self._routed(i, x, batch)
        return x if self._stages[-1].ops is self.ops else None

    def _routed(self, i: int, x: Array, batch: Batch[Array]) -> Array:
        """The residual stream after the mixture that is stage ``i``, from x before it, float32 [rows, n_embd]."""
        head, ops, exchange = self.heads[i], self.ops, self.exchange
        b, choice = head.begin(ops, x, batch)
        exchange.send(i - 1, b, (choice.ids, choice.weights))
        shared = head.shared(ops, b)
        assert self._sums is not None
        total = self._sums[slice(batch.rows)]
        exchange.receive(i, total)
        return head.end(ops, x, total, shared, choice.logits)

    def run(
        self,
        slices: Sequence[RowSlice],
        x: np.ndarray | None,
        told: np.ndarray | None,
        n_logits: int,
        out: np.ndarray,
        taps: Taps,
    ) -> np.ndarray | None:
        """The logits of the last ``n_logits`` rows of a pass, float32 [n_logits, n_vocab], or None.

        slices: the pass, from :meth:`slices`, which is one slice; told: the per-layer embeddings, None if there are none;
        x, out, taps: not used, since the GPU has all taps.
        """
        begun = time.perf_counter()
        ((_, batch),) = slices
        ends_here = self._stages[-1].ops is self.ops
        self._inputs.place(batch, None, told)
        self.host.inputs.place(batch, None, told)
        passing = self.ops.split(self.compute, batch, n_logits if ends_here else 0, self.prompt_rows)
        with self.exchange.turns():
            passing.advance(passing.pieces)
            started = time.perf_counter()
            wanted = 0 if ends_here else n_logits
            result = self.host.ops.run(self.host.compute, batch, wanted, None, self.prompt_rows)
            hosted = time.perf_counter() - started - self.host.host.waited_seconds
            logits = passing.logits(wait=True)
        self.host_seconds += hosted
        self.seconds += time.perf_counter() - begun - hosted
        return logits if ends_here else result

    def jobs(self) -> list[Job]:
        """The compile jobs of the exchanges, and of what the GPU computes of mixtures that are cut."""
        own = self.ops.jobs(self) if self.heads else []
        return [*self.exchange.jobs(), *own, *self.host.ops.jobs(self.host)]
