"""A stage: a run of parts of a model that one device computes.

What crosses the border of two stages is the residual stream, float32 [rows, width], and the per-layer embeddings of the
tokens if the model has them, float32 [n_layer, rows, n_per_layer].  If layers share selected positions, their bits follow the
elements of the residual stream.  If a network that drafts reads the residual stream before some layers, these *taps*,
float32 [rows, n_embd] each, go to the last stage.  All are copied through host memory, or, if every stage is on a GPU of its
own, from one GPU to another (``engine/models/relay.py``).  A device may read a pass in slices, since the bits of a row do not
depend on the other rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from engine.arrays import Array, Batch, Role
from engine.cache.kv import KVCache
from engine.models.config import ModelConfig
from engine.models.needs import crossing_width, stream_width, told_width
from engine.models.placement import LayerPart
from engine.ops.operations import Ops

Taps: TypeAlias = dict[int, np.ndarray]
"""The residual stream of all rows of a pass before some layers, float32 [rows, n_embd] each, by layer."""

Note: TypeAlias = Callable[[int, float], None]
"""Takes the number of rows of a pass and the seconds of its stages."""


class DivisibleModel(Protocol):
    """What a stage uses of its model; ``engine.models.base.Model`` implements it."""

    config: ModelConfig
    cache: KVCache
    max_rows: int

    def embed(self, batch: Batch[Array]) -> Array:
        """The residual stream that begins with the embeddings of the tokens, float32 [rows, width]."""

    def placed(self, ops: Ops, batch: Batch[Array], observed: bool = False) -> Batch[Array]:
        """The batch with what attention needs if sequences may be thinned; observed: whether it adds masses."""

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the mixer of layer ``il``, or the whole layer if it is parallel: the residual stream after it from x before
        it, float32 [rows, width]."""

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the network of layer ``il``: the residual stream after it from x before it, float32 [rows, width]."""

    def finish(self, x: Array, batch: Batch[Array], n_logits: int, taps: Sequence[Array] = ()) -> Array | None:
        """The logits of the last ``n_logits`` rows of x, float32 [n_logits, n_vocab], or None for no logits; taps: the
        residual stream before the layers ``ModelConfig.taps``."""


class StageInputs:
    """What a stage begins with, in the memory of a device, all of whose stages share it.

    x: the residual stream, float32 [rows, width]; told: the per-layer embeddings, float32 [n], or None; taps: the residual
    stream before the layers that a network reads, float32 [rows, n_embd] each.
    """

    def __init__(self, config: ModelConfig, ops: Ops, max_rows: int, answers: int = 0) -> None:
        """max_rows: the maximum number of rows in a pass of the model; answers: the maximum number of answers in a decode
        batch, 0: ``Ops.decode_rows``."""
        self.ops = ops
        self.answers = max(ops.decode_rows, answers)
        #: The maximum number of rows of a prompt that the backend reads at a time.
        self.prompt_rows = max(ops.decode_rows, min(ops.max_rows, max_rows))
        #: The maximum number of rows of a pass.
        self.rows = max(self.prompt_rows, 1 << (self.answers - 1).bit_length())
        self.x = ops.zeros((self.rows, crossing_width(config)), np.float32)
        told = told_width(config)
        self.told = ops.zeros((self.rows * told,), np.float32) if told else None
        tapped = [il for il in config.taps if il < config.n_layer]
        self.taps = {il: ops.zeros((self.rows, config.n_embd), np.float32) for il in tapped}
        if tapped:
            self._numbers = ops.upload(np.arange(self.rows, dtype=np.int32))
            self._nowhere = ops.zeros((self.rows,), np.int32)

    def keep(self, il: int, x: Array, batch: Batch[Array]) -> None:
        """Store the residual stream x before layer ``il``, float32 [rows, n_embd], if a network reads it."""
        if il in self.taps:
            numbers, nowhere = self._numbers[slice(batch.rows)], self._nowhere[slice(batch.rows)]
            rows = replace(batch, positions=numbers, sequences=nowhere, mixed=False)
            self.ops.keep_rows(self.taps[il].reshape(1, *self.taps[il].shape), x, rows)

    def place(self, batch: Batch[np.ndarray], x: np.ndarray | None, told: np.ndarray | None) -> None:
        """Copy what a pass begins with to the device."""
        more = self.ops.padded_rows(batch.rows, batch.mixed) - batch.rows
        if x is not None:
            self.ops.store(self.x, 0, np.pad(x, ((0, more), (0, 0)), "edge") if more else x)
        if told is not None:
            assert self.told is not None
            self.ops.store(self.told, 0, np.pad(told, ((0, 0), (0, more), (0, 0)), "edge").reshape(-1))

    def give_taps(self, layers: Sequence[int], taps: Taps, rows: slice) -> None:
        """Copy the rows of a pass that have just been computed to the taps of all of its rows."""
        for il in layers:
            taps[il][rows] = self.ops.download(self.taps[il][slice(rows.stop - rows.start)])

    def take_taps(self, taps: Taps, rows: slice) -> None:
        """Copy the taps of the rows that are computed next to the device; those that it computes itself are overwritten."""
        for il, array in self.taps.items():
            if il in taps:
                self.ops.store(array, 0, taps[il][rows])


class RowSlice(NamedTuple):
    """Rows of a pass that a backend reads at a time, and the pass over them."""

    rows: slice
    batch: Batch[np.ndarray]


class Stage:
    """Parts of ``model`` on the backend of ``inputs``; is_first: whether it begins with the embedding; is_last: whether it
    ends with the output."""

    def __init__(
        self, model: DivisibleModel, inputs: StageInputs, parts: Sequence[LayerPart], is_first: bool, is_last: bool
    ) -> None:
        self.ops = inputs.ops
        self.parts = tuple(parts)
        self.is_last = is_last
        #: Seconds that its passes have taken.
        self.seconds = 0.0
        self._model = model
        self._inputs = inputs
        self._is_first = is_first
        #: The maximum number of rows of a prompt that the backend reads at a time.
        self.prompt_rows = inputs.prompt_rows
        self.decode_answers = inputs.answers
        self.drafted_rows = inputs.ops.decode_rows
        begun = (part.layer for part in self.parts if part.begins(model.config))
        #: The layers before which a network that drafts reads the residual stream.
        self.tapped = [il for il in begun if il in inputs.taps]

    def __str__(self) -> str:
        parts = [str(part) for part in (self.parts[:1] + self.parts[1:][-1:])]
        names = [*(["the embedding"] if self._is_first else []), *parts, *(["the output"] if self.is_last else [])]
        return f"{' to '.join(dict.fromkeys((names[0], names[-1])))} on {self.ops.label}"

    # --- what a backend asks of a model (``engine.ops.model.Recordable``) ----------------------------------------------

    @property
    def cache(self) -> KVCache:
        """The cache of the whole model."""
        return self._model.cache

    @property
    def reads_together(self) -> bool:
        """False: the passes of a divided model read one prompt."""
        return False

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of the stage.  Returns the residual stream of all rows, float32 [rows, width]; of the last stage,
        the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits."""
        return self.compute_from(None, batch, n_logits)

    def compute_observed(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of :meth:`compute`, and the masses of the chunks that the rows see.  Returns the same."""
        return self.compute_from(None, self._model.placed(self.ops, batch, True), n_logits)

    def compute_kinds(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of :meth:`compute`, of which a backend lists the kernels."""
        return self.compute(batch, n_logits)

    def compute_from(self, x: Array | None, batch: Batch[Array], n_logits: int) -> Array | None:
        """The result of :meth:`compute` for x, what has crossed the border before the stage, float32 [rows, width]; None:
        what :meth:`run` has copied to the device, or the embeddings."""
        model, c, inputs = self._model, self._model.config, self._inputs
        batch = model.placed(self.ops, batch)
        if inputs.told is not None:
            count = c.n_layer * c.n_per_layer * batch.rows
            told = inputs.told[slice(count)].reshape(c.n_layer, batch.rows, c.n_per_layer)
            batch = replace(batch, per_layer=told)
        if x is None and self._is_first:
            x = model.embed(batch)
        else:
            x = self._entered(inputs.x[slice(batch.rows)] if x is None else x, batch)
        for part in self.parts:
            if inputs.taps and part.begins(c):
                inputs.keep(part.layer, x, batch)
            compute = model.mix if part.mixer else model.feed
            x = compute(self.ops, part.layer, x, batch)
        if not self.is_last:
            return self._leaving(x, batch)
        taps = [inputs.taps[il][slice(batch.rows)] if il < c.n_layer else x for il in c.taps]
        return model.finish(x, batch, n_logits, taps)

    def _entered(self, x: Array, batch: Batch[Array]) -> Array:
        """The residual stream, float32 [rows, width], from what has crossed the border before the stage."""
        c, ops, choice = self._model.config, self.ops, batch.choice
        if not c.n_shared:
            return x
        assert choice is not None
        width = stream_width(c)
        choice.rows = ops.reinterpret(ops.columns(x, width, c.n_shared), np.int32)
        return ops.columns(x, 0, width)

    def _leaving(self, x: Array, batch: Batch[Array]) -> Array:
        """What crosses the border after the stage, from the residual stream x [rows, width]: float32 [rows, width + n]."""
        c, ops, choice = self._model.config, self.ops, batch.choice
        if not c.n_shared:
            return x
        assert choice is not None
        if choice.rows is None:  # something of this size, which nobody reads
            return ops.join_columns([x, ops.repeat(ops.columns(x, 0, 1), c.n_shared)])
        return ops.join_columns([x, ops.reinterpret(choice.rows, np.float32)])

    # --- passes ----------------------------------------------------------------------------------------------------

    def slices(self, batch: Batch[np.ndarray]) -> list[RowSlice]:
        """A pass as the backend reads it."""
        found, first = [], 0
        while first < batch.rows:
            left = batch.rows - first
            count = left if batch.rows <= self.ops.decode_rows else self.ops.next_rows(left, self.prompt_rows)
            rows = slice(first, first + count)
            part = batch if count == batch.rows else batch.part(rows)
            if not batch.mixed:
                part = replace(part, role=Role.DECODE if count <= self.ops.decode_rows else Role.PREFILL)
            found.append(RowSlice(rows, part))
            first += count
        return found

    def run(
        self,
        slices: Sequence[RowSlice],
        x: np.ndarray | None,
        told: np.ndarray | None,
        n_logits: int,
        out: np.ndarray,
        taps: Taps,
    ) -> np.ndarray | None:
        """The result of :meth:`compute` for the rows of a pass.

        slices: the pass, from :meth:`slices`; x: the residual stream, None for the first stage; told: the per-layer
        embeddings, None if there are none; out: where the residual stream after the stage is written to, float32 [rows,
        width], which may be x; taps: those of earlier stages, to which those of this one are added.
        """
        begun, found, end = time.perf_counter(), [], slices[-1].rows.stop - n_logits
        compute = self.compute_observed if slices[0].batch.observed else self.compute
        for rows, part in slices:
            self._inputs.place(part, None if x is None else x[rows], None if told is None else told[:, rows])
            if not self.is_last:
                self.ops.run(compute, part, part.rows, None, self.prompt_rows, out[rows])
                self._inputs.give_taps(self.tapped, taps, rows)
                continue
            self._inputs.take_taps(taps, rows)
            logits = self.ops.run(compute, part, min(part.rows, max(0, rows.stop - end)), None, self.prompt_rows)
            if logits is not None:
                found.append(logits)
        self.seconds += time.perf_counter() - begun
        if not self.is_last:
            return out
        return np.concatenate(found) if len(found) > 1 else (found[0] if found else None)


class StreamBuffers:
    """Arrays in host memory for the residual stream of passes, whose copies to and from a device are fast."""

    def __init__(self, ops: Ops, max_rows: int, width: int) -> None:
        """ops: the backend of the device; max_rows: the maximum number of rows in a pass; width: of the residual stream."""
        self._ops = ops
        self._max_rows, self._width = max_rows, width
        #: Arrays that no pass uses, by their number of rows.
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, rows: int) -> np.ndarray:
        """An array that no other pass uses, float32 [at least rows, width]."""
        few = self._ops.decode_rows
        size = few if rows <= few else self._max_rows
        free = self._free.get(size)
        return free.pop() if free else self._ops.host_array((size, self._width), np.float32)

    def give(self, array: np.ndarray) -> None:
        """Put an array back."""
        self._free.setdefault(len(array), []).append(array)


class StagedPass:
    """A pass of a model with several stages, each of which is a piece (``engine.ops.executor.SplitPass``)."""

    def __init__(
        self,
        stages: Sequence[Stage],
        batch: Batch[np.ndarray],
        told: np.ndarray | None,
        n_logits: int,
        buffers: StreamBuffers,
        note: Note | None = None,
        taps: Taps | None = None,
    ) -> None:
        """told: the per-layer embeddings of the tokens, float32 [n_layer, rows, n_per_layer], or None; n_logits: the number
        of last rows whose logits are wanted; note: called at the end; taps: memory for them, None if there are none."""
        self.pieces = len(stages)
        self._left = list(stages)
        self._batch, self._told, self._n_logits, self._taps = batch, told, n_logits, taps or {}
        #: The pass as each device reads it.  The stages of a device get the same objects (``Executor.run``).
        self._slices: dict[Ops, list[RowSlice]] = {}
        self._buffers = buffers
        self._stream: np.ndarray | None = buffers.take(batch.rows)
        #: What the latest stage has returned.
        self.result: np.ndarray | None = None
        self._note, self._seconds = note, 0.0

    def advance(self, count: int) -> int:
        """Run the next ``count`` stages; returns how many are left."""
        begun = time.perf_counter()
        for stage in self._left[:count]:
            if stage.ops not in self._slices:
                self._slices[stage.ops] = stage.slices(self._batch)
            assert self._stream is not None
            slices, out = self._slices[stage.ops], self._stream[: self._batch.rows]
            self.result = stage.run(slices, self.result, self._told, self._n_logits, out, self._taps)
        del self._left[:count]
        self._seconds += time.perf_counter() - begun
        if not self._left:
            if self._note is not None:
                self._note(self._batch.rows, self._seconds)
                self._note = None
            self.cancel()
        return len(self._left)

    def is_running(self) -> bool:
        """False: the next pass does not depend on it."""
        return False

    def complete(self) -> np.ndarray | None:
        """Run all stages and return the logits of the last rows, float32 [n_logits, n_vocab]; None if none are wanted."""
        self.advance(self.pieces)
        return self.logits(wait=True)

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows, float32 [n_logits, n_vocab]; None if none are wanted.  wait: has no effect, since
        every stage has ended."""
        return self.result if self._n_logits else None

    def cancel(self) -> None:
        """Run no further stage."""
        self._left.clear()
        if self._stream is not None:
            self._buffers.give(self._stream)
            self._stream = None
