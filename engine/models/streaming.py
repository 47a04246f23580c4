"""Prompts of a divided model: a GPU computes parts of layers whose weights are on the CPU.

A pass that reads many tokens of a prompt uses each weight many times, so it is faster to copy the weights to the GPU than to
compute on the CPU.  The weights of one part after another are copied while the GPU computes with those of the part before
(``engine.ops.memory.WeightStream``).  The keys, values and states that a mixer reads are copied to the GPU, too, and what it
stores is copied back (``engine/cache/mirror.py``).  The bits are the same on both devices, so this is only a question of
speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from engine.arrays import Array, Matrix
from engine.cache.mirror import LayerMirror, Mirrors
from engine.models.config import ModelConfig
from engine.models.placement import LayerPart, Placement
from engine.models.stage import DivisibleModel, Note, RowSlice, Stage, StageInputs, Taps
from engine.ops.memory import WeightStream
from engine.ops.operations import Ops

FEWEST_ROWS = 64
"""The fewest rows of a pass for which weights are copied, as long as the time of only one of both ways is known."""


class StreamedStage(Stage):
    """A part of a layer whose weights are copied to the device for each pass.

    number: that of the part of ``stream``; mirror: the memory of its mixer, None if it has none; stores: whether the mixer
    stores something in it.
    """

    def __init__(
        self,
        model: DivisibleModel,
        inputs: StageInputs,
        part: LayerPart,
        stream: WeightStream[Matrix],
        number: int,
        mirror: LayerMirror | None = None,
        stores: bool = True,
    ) -> None:
        super().__init__(model, inputs, [part], False, False)
        #: The formats of its matrices, which decide on kernels.
        self.formats = tuple(str(getattr(matrix, "format", "")) for matrix in stream.matrices[number])
        self._stream = stream
        self._number = number
        self._mirror, self._stores = mirror, stores

    def run(
        self,
        slices: Sequence[RowSlice],
        x: np.ndarray | None,
        told: np.ndarray | None,
        n_logits: int,
        out: np.ndarray,
        taps: Taps,
    ) -> np.ndarray | None:
        """The residual stream after the part for the rows of a pass of one sequence, as :meth:`Stage.run` returns it."""
        self._stream.begin(self._number)
        self._stream.begin(self._number + 1)
        self._stream.wait(self._number)
        if self._mirror is None:
            return super().run(slices, x, told, n_logits, out, taps)
        batch = slices[0].batch
        slot, first = int(batch.sequences[0]), int(batch.positions[0])
        end = first + slices[-1].rows.stop
        self._mirror.copy_in(slot, first, first if self._stores else end)
        result = super().run(slices, x, told, n_logits, out, taps)
        if self._stores:
            self._mirror.copy_out(slot, first, end)
        return result


class StreamedModel(DivisibleModel, Protocol):
    """What streaming uses of its model; ``engine.models.base.Model`` implements it."""

    layers: list[Any]

    def on_device(self, ops: Ops) -> Callable[[np.ndarray], Array]:
        """A function that returns, for an array that a layer on the CPU uses, the array that ``ops`` uses in its place."""


@dataclass
class Prices:
    """What passes over prompts have taken.

    per_row: the fewest seconds of a row if the weights stay where they are; streamed: the fewest seconds of a pass that
    copies weights.  None: unknown.
    """

    per_row: float | None = None
    streamed: float | None = None

    def is_faster(self, rows: int) -> bool:
        """Whether a pass of this number of rows should copy weights."""
        if self.per_row is None or self.streamed is None:
            return rows >= FEWEST_ROWS
        return rows * self.per_row > self.streamed

    def note(self, rows: int, seconds: float) -> None:
        """Record the time of a pass that copied no weights."""
        self.per_row = min(seconds / rows, self.per_row or seconds)

    def note_streamed(self, rows: int, seconds: float) -> None:
        """Record the time of a pass that copied weights."""
        self.streamed = min(seconds, self.streamed or seconds)


class Streaming:
    """The stages of a pass that copies weights to a GPU, and when to use them.

    ops: the backend of the GPU; stages: the stages; layers: for each part that moves, a copy of its layer with the weights
    of the part there, with which the model computes the part; mirrors: the memory of each mixer that moves, by layer; passes:
    the number of passes that have begun to copy weights.
    """

    def __init__(
        self, ops: Ops, stages: list[Stage], layers: dict[LayerPart, Any], mirrors: dict[int, LayerMirror]
    ) -> None:
        self.ops = ops
        self.stages = stages
        self.layers = layers
        self.mirrors = mirrors
        self.prices = Prices()
        self.passes = 0
        #: The number of other passes over prompts that have begun.
        self._others = 0

    def choose(self, stages: Sequence[Stage], rows: int) -> tuple[Sequence[Stage], Note | None]:
        """The stages that are likely to be faster for a pass over tokens of a prompt, and what to call with its time.

        stages: those without streaming.
        """
        # The first pass of each kind compiles and loads kernels.
        if not self.prices.is_faster(rows):
            self._others += 1
            return stages, self.prices.note if self._others > 1 else None
        self.passes += 1
        return self.stages, self.prices.note_streamed if self.passes > 1 else None

    def distinct(self, config: ModelConfig) -> list[Stage]:
        """One of the stages that stream for each kind of part, whose kernels are those of the others."""
        found: dict[Any, Stage] = {}
        for stage in self.stages:
            if isinstance(stage, StreamedStage):
                (part,) = stage.parts
                layer = config.layers[part.layer]
                kind = layer.mixer if part.mixer else None, layer.network if part.network else None
                found[kind, stage.formats] = stage
        return list(found.values())


def streaming(
    model: StreamedModel, placement: Placement, inputs: dict[Ops, StageInputs], mixers: bool
) -> Streaming | None:
    """How a divided model reads prompts; None if no part can be computed elsewhere than where it is.  Raises DeviceError if
    the memory of the GPU is too small.

    inputs: what the stages of each device begin with; mixers: whether mixers move, or networks only.
    """
    gpu, config = placement.accelerator, model.config
    hosted = (part for part, ops in placement.parts(config) if ops.device_memory() is None)
    moved = [part for part in hosted if mixers or not part.mixer]
    if gpu.device_memory() is None or gpu not in inputs or not moved:
        return None
    stream = gpu.weight_stream([_matrices(model.layers[part.layer], part) for part in moved])
    if stream is None:
        return None
    memories = Mirrors(model.cache, gpu)
    mirrors = {part.layer: memories.layer(config.memory(part.layer)) for part in moved if part.mixer}
    array, layers = model.on_device(gpu), {}
    for part, matrices in zip(moved, stream.matrices, strict=True):
        layers[part] = _copy(model.layers[part.layer], part, matrices, array)
    numbers = {part: number for number, part in enumerate(moved)}
    stages: list[Stage] = []
    runs = placement.stages(config, alone=numbers)
    for i, (ops, parts) in enumerate(runs):
        if parts and parts[0] in numbers:
            (part,) = parts
            mirror = mirrors[part.layer] if part.mixer else None
            given = stream, numbers[part], mirror, part.layer in config.owners
            stages.append(StreamedStage(model, inputs[gpu], part, *given))
        else:
            stages.append(Stage(model, inputs[ops], parts, i == 0, i == len(runs) - 1))
    return Streaming(gpu, stages, layers, mirrors)


def _matrices(layer: Any, part: LayerPart) -> list[Matrix]:
    """The matrices of a part of a layer."""
    found: list[Matrix] = []

    def note(matrix: Matrix) -> Matrix:
        found.append(matrix)
        return matrix

    _with_part(layer, part, note, lambda array: array)
    return found


def _copy(layer: Any, part: LayerPart, matrices: Sequence[Matrix], array: Callable[[np.ndarray], Array]) -> Any:
    """A copy of a layer whose part has these matrices, in the order of :func:`_matrices`, and arrays of the device."""
    rest = iter(matrices)
    return _with_part(layer, part, lambda _: next(rest), array)


def _with_part(
    layer: Any, part: LayerPart, matrix: Callable[[Matrix], Matrix], array: Callable[[np.ndarray], Array]
) -> Any:
    """A copy of a layer whose part has the results of ``matrix`` and ``array`` for its matrices and arrays.  In every class
    of layers, the fields of a part have its name in theirs."""
    words = ["mixer"] * part.mixer + ["network"] * part.network
    names = [field.name for field in fields(layer) if any(word in field.name for word in words)]
    return replace(layer, **{each: _copied(getattr(layer, each), matrix, array) for each in names})


def _copied(value: Any, matrix: Callable[[Matrix], Matrix], array: Callable[[np.ndarray], Array]) -> Any:
    if isinstance(value, np.ndarray):
        return array(value)
    if hasattr(value, "columns"):
        return matrix(cast(Matrix, value))
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_copied(each, matrix, array) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: _copied(getattr(value, field.name), matrix, array) for field in fields(value) if field.init
        }
        return replace(value, **given)
    return value
