"""A stage: a run of parts of a model that one device computes.

What crosses the border of two stages is the residual stream, float32 [rows, width], and the per-layer embeddings of the
tokens if the model has them, float32 [n_layer, rows, n_per_layer].  Both are copied through host memory.  A device may read a
pass in slices, since the bits of a row do not depend on the other rows.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from engine.arrays import Array, Batch, Role
from engine.cache.kv import KVCache
from engine.models.config import ModelConfig
from engine.models.needs import stream_width
from engine.models.placement import LayerPart
from engine.ops.operations import Ops


class DivisibleModel(Protocol):
    """What a stage uses of its model; ``engine.models.base.Model`` implements it."""

    config: ModelConfig
    cache: KVCache
    max_rows: int

    def embed(self, batch: Batch[Array]) -> Array:
        """The residual stream that begins with the embeddings of the tokens, float32 [rows, width]."""

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the mixer of layer ``il``: the residual stream after it from x before it, float32 [rows, width]."""

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the network of layer ``il``: the residual stream after it from x before it, float32 [rows, width]."""

    def finish(self, x: Array, batch: Batch[Array], n_logits: int) -> Array | None:
        """The logits of the last ``n_logits`` rows of x, float32 [n_logits, n_vocab], or None for no logits."""


class Stage:
    """Parts of ``model`` on the backend ``ops``; is_first: whether it begins with the embedding; is_last: whether it ends
    with the output."""

    def __init__(
        self, model: DivisibleModel, ops: Ops, parts: Sequence[LayerPart], is_first: bool, is_last: bool
    ) -> None:
        self.ops = ops
        self.parts = tuple(parts)
        self.is_last = is_last
        #: Seconds that its passes have taken.
        self.seconds = 0.0
        self._model = model
        c = model.config
        #: The maximum number of rows that the backend reads at a time.
        self.prompt_rows = max(ops.decode_rows, min(ops.max_rows, model.max_rows))
        #: The residual stream and the per-layer embeddings that a pass begins with.
        self._x = None if is_first else ops.zeros((self.prompt_rows, stream_width(c)), np.float32)
        told = c.n_layer * c.n_per_layer
        self._told = ops.zeros((self.prompt_rows * told,), np.float32) if told else None

    # --- what a backend asks of a model (``engine.ops.model.Recordable``) ----------------------------------------------

    @property
    def cache(self) -> KVCache:
        """The cache of the whole model."""
        return self._model.cache

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of the stage.  Returns the residual stream of all rows, float32 [rows, width]; of the last stage,
        the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits."""
        model, c = self._model, self._model.config
        if self._told is not None:
            count = c.n_layer * c.n_per_layer * batch.rows
            told = self._told[slice(count)].reshape(c.n_layer, batch.rows, c.n_per_layer)
            batch = replace(batch, per_layer=told)
        x = model.embed(batch) if self._x is None else self._x[slice(batch.rows)]
        for part in self.parts:
            compute = model.feed if part.network else model.mix
            x = compute(self.ops, part.layer, x, batch)
        return model.finish(x, batch, n_logits) if self.is_last else x

    # --- passes ----------------------------------------------------------------------------------------------------

    def run(
        self, batch: Batch[np.ndarray], x: np.ndarray | None, told: np.ndarray | None, n_logits: int
    ) -> np.ndarray | None:
        """The result of :meth:`compute` for the rows of a batch.  x: the residual stream, None for the first stage; told: the
        per-layer embeddings, None if there are none."""
        begun, found, end = time.perf_counter(), [], batch.rows - n_logits
        for rows in self._slices(batch):
            part = batch.part(rows)
            if not batch.mixed:
                part = replace(part, role=Role.DECODE if part.rows <= self.ops.decode_rows else Role.PREFILL)
            self._place(part, None if x is None else x[rows], None if told is None else told[:, rows])
            wanted = min(part.rows, max(0, rows.stop - end)) if self.is_last else part.rows
            out = self.ops.run(self.compute, part, wanted, None, self.prompt_rows)
            if out is not None:
                found.append(out)
        self.seconds += time.perf_counter() - begun
        if not found:
            return None
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _slices(self, batch: Batch[np.ndarray]) -> Iterator[slice]:
        """The rows that the backend reads at a time."""
        first = 0
        while first < batch.rows:
            left = batch.rows - first
            count = left if batch.rows <= self.ops.decode_rows else self.ops.next_rows(left, self.prompt_rows)
            yield slice(first, first + count)
            first += count

    def _place(self, batch: Batch[np.ndarray], x: np.ndarray | None, told: np.ndarray | None) -> None:
        """Copy what a pass begins with to the device."""
        more = self.ops.padded_rows(batch.rows, batch.mixed) - batch.rows
        if x is not None:
            assert self._x is not None
            self.ops.store(self._x, 0, np.pad(x, ((0, more), (0, 0)), "edge") if more else x)
        if told is not None:
            assert self._told is not None
            self.ops.store(self._told, 0, np.pad(told, ((0, 0), (0, more), (0, 0)), "edge").reshape(-1))


class StagedPass:
    """A pass of a model with several stages, each of which is a piece (``engine.ops.executor.SplitPass``)."""

    def __init__(
        self, stages: Sequence[Stage], batch: Batch[np.ndarray], told: np.ndarray | None, n_logits: int
    ) -> None:
        """told: the per-layer embeddings of the tokens, float32 [n_layer, rows, n_per_layer], or None; n_logits: the number
        of last rows whose logits are wanted."""
        self.pieces = len(stages)
        self._left = list(stages)
        self._batch, self._told, self._n_logits = batch, told, n_logits
        self._result: np.ndarray | None = None

    def advance(self, count: int) -> int:
        """Run the next ``count`` stages; returns how many are left."""
        for stage in self._left[:count]:
            self._result = stage.run(self._batch, self._result, self._told, self._n_logits)
        del self._left[:count]
        return len(self._left)

    def complete(self) -> np.ndarray | None:
        """Run all stages and return the logits of the last rows, float32 [n_logits, n_vocab]; None if none are wanted."""
        self.advance(self.pieces)
        return self.logits(wait=True)

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows, float32 [n_logits, n_vocab]; None if none are wanted.  wait: has no effect, since
        every stage has ended."""
        return self._result if self._n_logits else None

    def cancel(self) -> None:
        """Run no further stage."""
        self._left.clear()
