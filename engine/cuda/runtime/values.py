"""Deferred values: results that are computed when they are used.

The result of a norm, of a gate, or of joining the chunks of attention is usually the input of a matrix product, which reads
its activations as int8.  These operations return a deferred value, and the operation that uses it requests float32 or int8.
A single kernel then computes and quantizes the value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.cuda import delta_net, gather, gather_heads, glu, layer_norm, rms_norm, wide_gather
from engine.cuda.attention import attend as attention
from engine.cuda.attention import join, wide_combine
from engine.cuda.products import quantize, wide_quantize
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import Argument, Tensor
from engine.ops.activation import Activation

Start = tuple[Specialization, tuple[Argument, ...]]
"""A kernel and its first arguments.  What follows: ``gather.PLACES``, ``gather.PACKETS``, and the arrays of the result."""

WideStart = tuple[Specialization, tuple[Argument, ...], int]
"""The same in passes of many rows, and the number of rows for each block of the grid.  The first that follows is the number
of blocks that take."""


class Deferred(ABC):
    """A value [rows, columns] that is computed when it is used.  It may be used only once."""

    inputs: tuple[str, ...]
    """The names of the fields that hold its inputs, in the order of the operation's arguments."""

    any_layout = True
    """Whether it can be quantized in any layout, and not only in that of the widest blocks."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @abstractmethod
    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that computes the value as float32."""

    @abstractmethod
    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8, with a scale for every ``unit`` values, in a layout of
        ``engine/cuda/products/quantize.py``."""

    def gathered(self, recorder: Recorder, unit: int, layout: int, n_peers: int) -> Start:
        """The launch that computes the value as the columns of one of ``n_peers + 1`` owners, and quantizes those of all."""
        return gathered(recorder, self.plain(recorder), unit, layout, n_peers)

    def given(self, recorder: Recorder, layout: int, n_peers: int) -> WideStart:
        """The same for many rows, in one of ``quantize.BLOCKS``, where no unit has columns of several owners."""
        return given(recorder, self.plain(recorder), layout, n_peers)

    def plain(self, recorder: Recorder) -> Tensor:
        """The value as float32."""
        out = recorder.empty(self.shape)
        self.write(recorder, out)
        return out

    @property
    def run_grid(self) -> tuple[int, int]:
        """The grid of a kernel that quantizes the value: (runs of a row, rows)."""
        return runs(self.shape)


@dataclass
class Normalized(Deferred):
    """rms_norm(x, weight, eps): x [rows, n], weight [n]."""

    inputs = ("x", "weight")

    x: Tensor
    weight: Tensor
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.x.shape

    def normalizes_as(self, other: "Normalized") -> bool:
        """Whether both normalize the same array; their weights may differ."""
        return (self.x.address, self.eps) == (other.x.address, other.eps)

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that computes the value as float32."""
        rows, columns = self.shape
        arguments = (self.x, self.weight, self.eps, columns, out)
        recorder.launch(rms_norm.rms_norm(), (-(-columns // rms_norm.LONG), rows), 256, arguments, result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8.  If the previous launch adds a residual to get x, the new launch replaces it and adds, too."""
        to, columns = recorder.int8(unit, *self.shape, layout=layout), self.shape[1]
        if not _add_and_quantize(recorder, self.x, (self.weight, self.eps), unit, layout, to):
            runs = rms_norm.runs_of(self.shape[0])
            kernel = rms_norm.rms_norm_quantize(unit, columns, layout, *((runs,) if runs > 1 else ()))
            grid = -(-columns // (quantize.RUN * runs)), self.shape[0]
            recorder.launch(kernel, grid, quantize.RUN, (self.x, self.weight, self.eps, *to), **to.outputs())
        return to


@dataclass
class Centered(Deferred):
    """layer_norm(x, weight, bias, eps): x [rows, n], weight [n] or [m * n], bias [n] or None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __post_init__(self) -> None:
        self.inputs = ("x", "weight") if self.bias is None else ("x", "weight", "bias")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.x.shape

    @property
    def _given(self) -> tuple[Argument, ...]:
        return self.x, self.weight, self.bias or 0, self.eps

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that computes the value as float32."""
        rows, columns = self.shape
        m = self.weight.size // columns
        kernel = layer_norm.layer_norm(columns, self.bias is not None, *((m,) if m > 1 else ()))
        recorder.launch(kernel, (rows,), 256, (*self._given, out), result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        assert self.weight.size == self.shape[1], "weights of each head are for queries and keys"
        to = recorder.int8(unit, *self.shape, layout=layout)
        kernel = layer_norm.layer_norm_quantize(unit, self.shape[1], self.bias is not None, layout)
        recorder.launch(kernel, self.run_grid, quantize.RUN, (*self._given, *to), **to.outputs())
        return to


@dataclass
class GatedNormalized(Deferred):
    """rms_norm of each run of d elements of x, times silu(gate), or sigmoid(gate) unless ``swish``: x, gate [rows, n], weight
    [d]."""

    inputs = ("x", "weight", "gate")

    x: Tensor
    weight: Tensor
    gate: Tensor
    eps: float
    swish: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.x.shape

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that computes the value as float32."""
        arguments = (self.x, self.weight, self.gate, self.eps, out.size, out)
        kernel = delta_net.gated_norm(self.weight.size, self.swish)
        recorder.launch(kernel, (-(-out.size // 256),), 256, arguments, result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        to = recorder.int8(unit, *self.shape, layout=layout)
        arguments = (self.x, self.weight, self.gate, self.eps, self.shape[1], *to)
        kernel = delta_net.gated_norm_quantize(unit, self.weight.size, layout, self.swish)
        recorder.launch(kernel, self.run_grid, quantize.RUN, arguments, **to.outputs())
        return to

    def gathered(self, recorder: Recorder, unit: int, layout: int, n_peers: int) -> Start:
        """The launch that computes the value as own columns."""
        kernel = gather_heads.gather_gated_norm_quantize(unit, n_peers, layout, self.weight.size, self.swish)
        return kernel, (self.x, self.weight, self.gate, self.eps)


@dataclass
class Gated(Deferred):
    """The activation function of gate and up, both [rows, n].  gate is None if the function has a single input."""

    gate: Tensor | None
    up: Tensor
    activation: Activation

    def __post_init__(self) -> None:
        self.inputs = ("up",) if self.gate is None else ("gate", "up")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.up.shape

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that computes the value as float32."""
        kernel, gate = glu.activate(self.activation.kind), self.up if self.gate is None else self.gate
        arguments = (gate, self.up, out.size, *self.activation.numbers, out)
        recorder.launch(kernel, (-(-out.size // 256),), 256, arguments, result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        to = recorder.int8(unit, *self.shape, layout=layout)
        kind, numbers = self.activation.kind, self.activation.numbers
        _record_quantize(recorder, kind, self.gate or self.up, self.up, numbers, unit, layout, to)
        return to

    def gathered(self, recorder: Recorder, unit: int, layout: int, n_peers: int) -> Start:
        """The launch that computes the value as own columns."""
        kernel = gather.gather_quantize(unit, self.activation.kind, n_peers, layout)
        return kernel, (self.gate or self.up, self.up, *self.activation.numbers)

    def given(self, recorder: Recorder, layout: int, n_peers: int) -> WideStart:
        """The launch that computes many rows of the value as own columns."""
        kernel = wide_gather.wide_gather_quantize(self.activation.kind, layout, n_peers)
        return kernel, (self.gate or self.up, self.up, self.shape[0], *self.activation.numbers), 8


@dataclass
class Attended(Deferred):
    """The result of attention [rows, columns] before its chunks are joined (``engine/cuda/attention/combine.py``).

    ``mass``: the largest score and the sum of weights of each chunk; ``values``: the weighted values of each chunk; ``gate``:
    the result is multiplied by sigmoid(gate), or None; ``sinks``: joined after the chunks, or None.
    """

    inputs = ("mass", "values", "positions", "gate", "sinks")

    mass: Tensor
    values: Tensor
    positions: Tensor
    gate: Tensor | None
    sinks: Tensor | None
    geometry: attention.Geometry
    partials: int
    window: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.positions.size, self.columns

    @property
    def _parts(self) -> tuple[Argument, ...]:
        return self.mass, self.values, self.positions, self.gate or 0, self.sinks or 0

    def _joined(self, recorder: Recorder) -> tuple[tuple[Argument, ...], int]:
        """What the kernels that quantize join, and the most of it that a row sees: the chunks, or, after a launch, groups."""
        parts, shape = self._parts, self.geometry
        if not shape.join:
            return parts, self.partials
        (rows, columns), d_v = self.shape, shape.d_v
        n_head, partials = columns // d_v, join.group_partials(self.partials, shape.together)
        mass, values = (recorder.empty((rows * n_head * partials * n,)) for n in (2, d_v))
        arguments = (*parts[:3], mass, values, self.partials, partials, self.window)
        grid = join.grid(self.partials, n_head, rows, shape.together)
        recorder.launch(shape.join, grid, d_v, arguments, mass=mass, values=values)
        return (mass, values, *parts[2:]), partials

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that joins the chunks."""
        shape, arguments = self.geometry, (*self._parts, out, self.partials, self.window)
        recorder.launch(shape.combine, shape.combine_grid, shape.combine_block, arguments, result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8.  Two kernels compute it if that is faster."""
        if not self.geometry.quantizes:
            return _quantized_array(recorder, self.plain(recorder), unit, layout)
        to = recorder.int8(unit, *self.shape, layout=layout)
        self.quantize(recorder, to, unit, layout)
        return to

    def quantize(self, recorder: Recorder, to: Int8, unit: int, layout: int, first: int = 0) -> None:
        """Record the launches that compute the value as int8, as the rows of ``to`` from ``first`` on."""
        parts, partials = self._joined(recorder)
        kernel, of_heads = self.geometry.quantized(unit, layout), (self.columns, partials, self.window, first)
        grid, given = self.run_grid, (*parts, *to, *of_heads)
        if layout in quantize.BLOCKS:
            grid, given = wide_combine.grid(*self.shape), (*parts, to.q, *of_heads, self.shape[0])
        recorder.launch(kernel, grid, quantize.RUN, given, **to.outputs())

    def gathered(self, recorder: Recorder, unit: int, layout: int, n_peers: int) -> Start:
        """The launch that computes the value as own columns, behind those that it needs."""
        if not self.geometry.quantizes:
            return super().gathered(recorder, unit, layout, n_peers)
        parts, partials = self._joined(recorder)
        return self.geometry.gathered(unit, layout, n_peers), (*parts, partials, self.window)

    def given(self, recorder: Recorder, layout: int, n_peers: int) -> WideStart:
        """The launch that computes many rows of the value as own columns, behind those that it needs."""
        if not self.geometry.quantizes:
            return super().given(recorder, layout, n_peers)
        parts, partials = self._joined(recorder)
        given = *parts, partials, self.window, self.shape[0]
        return self.geometry.given(layout, n_peers), given, wide_combine.ROWS


@dataclass
class AttendedParts(Deferred):
    """The result of attention [rows, columns] of the rows of several sequences, some of them at a time, because the chunks of
    all rows would need much memory.  Heads are those that ``combine_quantize`` takes.

    ``attend``: record attention of some rows; ``parts``: these, the last of which end with the last row.
    """

    inputs = ()

    attend: Callable[[slice], Attended]
    parts: Sequence[slice]
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.parts[-1].stop, self.columns

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record all of attention."""
        for part in self.parts:
            self.attend(part).write(recorder, out[part])

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8.  Records all of attention."""
        to = recorder.int8(unit, *self.shape, layout=layout)
        for part in self.parts:
            self.attend(part).quantize(recorder, to, unit, layout, part.start)
        return to

    def given(self, recorder: Recorder, layout: int, n_peers: int) -> WideStart:
        """The launch that joins chunks, quantizes and gives; if there are several parts, these are joined as float32 first.
        Records attention of all rows."""
        if len(self.parts) > 1:
            return super().given(recorder, layout, n_peers)
        return self.attend(self.parts[0]).given(recorder, layout, n_peers)


def plain(recorder: Recorder, x: Tensor | Deferred) -> Tensor:
    """x as float32."""
    return x if isinstance(x, Tensor) else x.plain(recorder)


def quantized(
    recorder: Recorder, x: Tensor | Deferred, unit: int, pass_rows: int = 0, layout: int | None = None
) -> Int8:
    """x as int8, with a scale for every ``unit`` values; pass_rows: the number of rows of the pass, if x has another one;
    layout: one of ``quantize.block_layouts``, or None if no kernel for warpgroups uses it."""
    if layout is None:
        layout = quantize.layout_of(unit, pass_rows or x.shape[0])
    return _quantized_array(recorder, x, unit, layout) if isinstance(x, Tensor) else x.quantized(recorder, unit, layout)


def gathered(recorder: Recorder, x: Tensor | Deferred, unit: int, layout: int, n_peers: int) -> Start:
    """The launch that computes x as the columns of one of ``n_peers + 1`` owners, and quantizes those of all."""
    if not isinstance(x, Tensor):
        return x.gathered(recorder, unit, layout, n_peers)
    return gather.gather_quantize(unit, "plain", n_peers, layout), (x, x, 0.0, 0.0, 0.0, 0.0)


def given(recorder: Recorder, x: Tensor | Deferred, layout: int, n_peers: int) -> WideStart:
    """The launch that computes many rows of x as the columns of one of ``n_peers + 1`` owners, and brings those of all
    together in a layout of ``quantize.BLOCKS``."""
    if not isinstance(x, Tensor):
        return x.given(recorder, layout, n_peers)
    return wide_gather.wide_gather_quantize("plain", layout, n_peers), (x, x, x.shape[0], 0.0, 0.0, 0.0, 0.0), 8


def runs(shape: tuple[int, ...]) -> tuple[int, int]:
    """The grid of a kernel that quantizes an array [rows, columns]: (runs of a row, rows)."""
    rows, columns = shape
    return -(-columns // quantize.RUN), rows


def _quantized_array(recorder: Recorder, x: Tensor, unit: int, layout: int) -> Int8:
    to = recorder.int8(unit, *x.shape, layout=layout)
    if not _add_and_quantize(recorder, x, (0, 0.0), unit, layout, to):
        _record_quantize(recorder, "plain", x, x, (0.0, 0.0, 0.0, 0.0), unit, layout, to)
    return to


def _record_quantize(
    recorder: Recorder,
    source: str,
    gate: Tensor,
    up: Tensor,
    numbers: Sequence[float],
    unit: int,
    layout: int,
    to: Int8,
) -> None:
    """Record the launch that computes ``source`` of gate and up as int8; numbers: the parameters of an activation."""
    rows, columns = up.shape
    given: tuple[Argument, ...]
    if layout in quantize.BLOCKS:
        kernel, grid = wide_quantize.wide_quantize(source, layout), wide_quantize.grid(rows, columns)
        given = (rows, *numbers, to.q)
    else:
        kernel, grid = quantize.quantize(unit, source, layout), runs(up.shape)[::-1]
        given = (columns, *numbers, *to)
    recorder.launch(kernel, grid, quantize.RUN, (gate, up, *given), **to.outputs())


def _add_and_quantize(
    recorder: Recorder, y: Tensor, norm: tuple[Tensor | int, float], unit: int, layout: int, to: Int8
) -> bool:
    """If the previous launch computes y, replace it by one launch that computes y and quantizes it to int8.  norm: weight and
    eps of a norm before quantization, or zeros.  Returns whether the launch was recorded."""
    added = recorder.take_added(y)
    if added is None:
        return False
    kernel = rms_norm.rms_norm_add_quantize(unit, y.shape[1], isinstance(norm[0], Tensor), layout)
    recorder.launch(kernel, runs(y.shape), quantize.RUN, (*added[:-1], *norm, y, *to), result=y, **to.outputs())
    return True
