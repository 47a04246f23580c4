"""Prompts of a divided model: a GPU computes networks of layers whose weights are on the CPU.

A pass that reads many tokens of a prompt uses each weight many times, so it is faster to copy the weights to the GPU than to
compute on the CPU.  The weights of one network after another are copied while the GPU computes with those of the one before
(``engine.ops.memory.WeightStream``).  The bits are the same on both devices, so this is only a question of speed.  Mixers
stay where their keys, values and states are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np

from engine.arrays import Array, Batch, Matrix
from engine.models.config import ModelConfig
from engine.models.placement import LayerPart, Placement
from engine.models.stage import DivisibleModel, RowSlice, Stage, StagedPass, StageInputs, StreamBuffers
from engine.ops.memory import WeightStream
from engine.ops.operations import Ops

FEWEST_ROWS = 64
"""The fewest rows of a pass for which weights are copied, as long as the time of only one of both ways is known."""


class StreamedStage(Stage):
    """A network whose weights are copied to the device for each pass.  number: that of the part of ``stream``."""

    def __init__(
        self,
        model: DivisibleModel,
        inputs: StageInputs,
        part: LayerPart,
        stream: WeightStream[Matrix],
        number: int,
    ) -> None:
        super().__init__(model, inputs, [part], False, False)
        #: The formats of its matrices, which decide on kernels.
        self.formats = tuple(str(getattr(matrix, "format", "")) for matrix in stream.matrices[number])
        self._stream = stream
        self._number = number

    def run(
        self, slices: Sequence[RowSlice], x: np.ndarray | None, told: np.ndarray | None, n_logits: int, out: np.ndarray
    ) -> np.ndarray | None:
        """The residual stream after the network for the rows of a pass, as :meth:`Stage.run` returns it."""
        self._stream.begin(self._number)
        self._stream.begin(self._number + 1)
        self._stream.wait(self._number)
        return super().run(slices, x, told, n_logits, out)


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
    """The stages of a pass that copies the weights of networks to a GPU, and when to use them.

    stages: the stages; layers: the layers whose networks have their weights there, by index, with which ``Model.feed``
    computes; passes: the number of passes that have begun to copy weights.
    """

    def __init__(self, stages: list[Stage], layers: dict[int, Any]) -> None:
        self.stages = stages
        self.layers = layers
        self.prices = Prices()
        self.passes = 0

    def begin(
        self,
        stages: Sequence[Stage],
        batch: Batch[np.ndarray],
        told: np.ndarray | None,
        n_logits: int,
        buffers: StreamBuffers,
    ) -> StagedPass:
        """A pass over tokens of a prompt, through the stages that are likely to be faster.  stages: those without streaming;
        the other arguments: see :class:`StagedPass`."""
        prices = self.prices
        if not prices.is_faster(batch.rows):
            return StagedPass(stages, batch, told, n_logits, buffers, prices.note)
        self.passes += 1
        # The first pass compiles and loads kernels.
        note = prices.note_streamed if self.passes > 1 else None
        return StagedPass(self.stages, batch, told, n_logits, buffers, note)

    def distinct(self, config: ModelConfig) -> list[Stage]:
        """One of the stages that stream for each kind of network, whose kernels are those of the others."""
        streamed = [stage for stage in self.stages if isinstance(stage, StreamedStage)]
        return list(
            {(config.layers[stage.parts[0].layer].network, stage.formats): stage for stage in streamed}.values()
        )


def streaming(
    model: DivisibleModel, placement: Placement, layers: Sequence[Any], inputs: dict[Ops, StageInputs]
) -> Streaming | None:
    """How a divided model reads prompts; None if no network can be computed elsewhere than where it is.  Raises DeviceError
    if the memory of the GPU is too small.

    layers: the layers of the model; inputs: what the stages of each device begin with.
    """
    gpu = placement.accelerator
    moved = [il for il, ops in enumerate(placement.networks) if ops.device_memory() is None and ops is not gpu]
    if gpu.device_memory() is None or gpu not in inputs or not moved:
        return None
    stream = gpu.weight_stream([_matrices(layers[il]) for il in moved])
    if stream is None:
        return None
    copies = {il: _copy(layers[il], own, gpu.upload) for il, own in zip(moved, stream.matrices, strict=True)}
    stages = list(_stages(model, placement, inputs, stream, moved))
    return Streaming(stages, copies)


def _stages(
    model: DivisibleModel,
    placement: Placement,
    inputs: dict[Ops, StageInputs],
    stream: WeightStream[Matrix],
    moved: list[int],
) -> Iterator[Stage]:
    """The stages of a placement, with a stage of its own for each network that moves."""
    runs: list[tuple[Ops, list[LayerPart]]] = [(placement.first, [])]
    for part, ops in placement.parts():
        is_moved = part.network and part.layer in moved
        if is_moved or runs[-1][0] is not ops or _is_moved(runs[-1][1], moved):
            runs.append((placement.accelerator if is_moved else ops, []))
        runs[-1][1].append(part)
    if runs[-1][0] is not placement.last or _is_moved(runs[-1][1], moved):
        runs.append((placement.last, []))
    for i, (ops, parts) in enumerate(runs):
        if _is_moved(parts, moved):
            yield StreamedStage(model, inputs[ops], parts[0], stream, moved.index(parts[0].layer))
        else:
            yield Stage(model, inputs[ops], parts, i == 0, i == len(runs) - 1)


def _is_moved(parts: Sequence[LayerPart], moved: list[int]) -> bool:
    """Whether a run of parts is a network that moves."""
    return len(parts) == 1 and parts[0].network and parts[0].layer in moved


def _matrices(layer: Any) -> list[Matrix]:
    """The matrices of the network of a layer."""
    found: list[Matrix] = []

    def note(matrix: Matrix) -> Matrix:
        found.append(matrix)
        return matrix

    _with_network(layer, note, lambda array: array)
    return found


def _copy(layer: Any, matrices: Sequence[Matrix], upload: Callable[[np.ndarray], Array]) -> Any:
    """A copy of a layer whose network has these matrices, in the order of :func:`_matrices`, and uploaded arrays."""
    rest = iter(matrices)
    return _with_network(layer, lambda _: next(rest), upload)


def _with_network(layer: Any, matrix: Callable[[Matrix], Matrix], array: Callable[[np.ndarray], Array]) -> Any:
    """A copy of a layer whose network has the results of ``matrix`` and ``array`` for its matrices and arrays.  The fields of
    the network, in every class of layers, are those with "network" in their names."""
    names = [field.name for field in fields(layer) if "network" in field.name]
    return replace(layer, **{name: _copied(getattr(layer, name), matrix, array) for name in names})


def _copied(value: Any, matrix: Callable[[Matrix], Matrix], array: Callable[[np.ndarray], Array]) -> Any:
    if isinstance(value, np.ndarray):
        return array(value)
    if hasattr(value, "columns"):
        return matrix(cast(Matrix, value))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_copied(each, matrix, array) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: _copied(getattr(value, field.name), matrix, array) for field in fields(value) if field.init
        }
        return replace(value, **given)
    return value
