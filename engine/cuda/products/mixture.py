"""The launches of a mixture of experts.

Several rows take six launches: norm, int8 and router; route; gate and up; activation and int8; down; join.  A single row
takes three: norm, int8 and router; route, gate and up; activation, int8, down and join.  If the last does not fit into one
launch (no residual, or units of down that are not 256 wide or too many for the warps of a block), its parts are launched as
for several rows: five launches.  With units of 32 in all matrices a single row takes four: norm, int8 and router; route, gate
and up, activation and int8; down; join.  This holds for every law of the choice, activation, factor and bias, and for the
usual formats and sizes: the router is float32, gate and up have one unit, the shared network has the formats and the size of
the experts, and the router's input is a norm of the array that is normalized for the experts.  Other models take more
launches.  Where weights are those of inputs, a launch more multiplies gate and up by them, and their activation is not in the
launch that computes them.

Where the weights of experts are streamed (``stream_experts.serves``): norm, int8 and router, with more than ``NARROW_ROWS``
rows three launches; route; sorting pairs by expert; gate and up (two launches if their formats differ); activation and int8;
down; the shared network, as without experts; join.

The launches of another pass of more than ``NARROW_ROWS`` rows: the router's product and route; sorting pairs by expert; int8;
gate and up (two launches if their formats differ); activation and int8; down; the shared network, as without experts; join.
Products of warpgroups read activations that are quantized for each pair, with the activation.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from engine.cuda.products import (
    dense,
    join,
    matmul,
    quantize,
    router,
    row_experts,
    stream_experts,
    warpgroup_experts,
    wide_experts,
)
from engine.cuda.products import experts as kernels
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.kinds import Constant
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import Argument, DeviceWeight, Tensor
from engine.cuda.runtime.values import Deferred, Gated, Normalized, plain, quantized
from engine.gguf.quants import CHAINS
from engine.ops.experts import ChosenExperts, Experts, present

Activations: TypeAlias = Int8 | Tensor
"""The input of a product: int8, or float32 for matrices of a float format."""

End: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Factors [n_expert] and biases [n_expert, R] of the products of experts."""


def finish_of(ends: Sequence[End]) -> tuple[kernels.Finish, tuple[Tensor | int, ...]]:
    """The constant and the arguments of a product kernel for one or two matrices: two factors, two biases."""
    finish = kernels.Finish(ends[0][0] is not None, ends[0][1] is not None)
    return finish, tuple(ends[i][part] or 0 for part in range(2) for i in (0, -1))


class MixtureLaunches:
    """One call of ``Backend.experts``: the mixture of x [rows, n_embd], added to the residual if there is one."""

    def __init__(
        self,
        recorder: Recorder,
        experts: Experts[Tensor, DeviceWeight],
        residual: Tensor | None,
        x: Tensor | Deferred,
        router_x: Tensor | Deferred | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        self._recorder, self._experts, self._residual, self._x = recorder, experts, residual, x
        self._router_x = x if router_x is None else router_x
        self._rows = x.shape[0]
        self._pairs = self._rows * experts.n_used
        self._activated: dict[int, Activations] = {}
        self._wide = self._rows > NARROW_ROWS
        #: The tiles of 8 pairs of an item of products that stream the weights; 0: others are used.
        self._streamed = self._stream_tiles()
        #: Whether the launches of the experts include the shared network.
        self._joins = (
            experts.shared is not None
            and experts.common == experts.activation
            and not self._wide
            and not self._streamed
            and all(
                own.format == other.format and own.format.quantized and own.rows * experts.n_expert == other.rows
                for own, other in zip(
                    present(*experts.shared), present(experts.gate, experts.up, experts.down), strict=True
                )
            )
        )
        #: What the choice reads besides logits: biases, and the table of experts with the tokens.
        self._choice: tuple[Argument, ...] = (
            *(experts.router_bias or 0, experts.selection_bias or 0),
            *((experts.given, tokens) if experts.given is not None and tokens is not None else (0, 0)),
        )
        assert experts.given is None or tokens is not None, "experts that a table gives need the tokens"
        self._ids = recorder.empty((self._rows, experts.n_used), np.int32)
        self._weights = recorder.empty((self._rows, experts.n_used))
        self._routed = False
        self._sorted: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def record(self) -> Tensor:
        """Record the launches and return the result, float32 [rows, n_embd]."""
        return self._record(self._logits())

    def _record(self, logits: Tensor) -> Tensor:
        """Record what follows the router, whose logits are not read if the experts are chosen and no shared network is
        gated."""
        recorder, experts = self._recorder, self._experts
        stacks, others = present(experts.gate, experts.up), present(*experts.shared or ())
        ends = [(experts.gate_scale, experts.gate_bias), (experts.up_scale, experts.up_bias)][-len(stacks) :]
        down = experts.down
        units, n_rows = down.columns // down.format.unit, down.rows // experts.n_expert
        together = self._joins == (experts.shared is not None)
        ready: Int8 | None = None
        weighs = experts.weighs_inputs
        if self._rows == 1 and together and not self._routed and not weighs and self._can_activate(down.columns):
            ready = self._gate_up(others, ends, logits)
        else:
            *gate, up = self._products(stacks, others[:-1], ends, self._activations, False, logits)
            if weighs:
                self._weigh(gate[0] if gate else None, up)
            act = Gated(gate[0] if gate else None, up, experts.activation)
            size = (down.format.name, units, n_rows, experts.n_used, self._joins)
            if self._rows == 1 and together and self._residual is not None and join.can_join(*size):
                return self._matmul_join(act, logits, units, n_rows)
        common: Tensor | int = 0
        if experts.shared and not self._joins:
            *g, u = dense.matmul(recorder, self._x, others[:-1])
            (common,) = dense.matmul(recorder, Gated(g[0] if g else None, u, experts.common), others[-1:])

        def activations(unit: int) -> Activations:
            if ready is not None:
                return ready
            return quantized(recorder, act, unit, self._rows) if unit else plain(recorder, act)

        ends = [(experts.down_scale, experts.down_bias)]
        (y,) = self._products([down], others[-1:], ends, activations, True, logits, act if ready is None else None)
        return self._sum(y, y[self._pairs :] if self._joins else common, logits)

    def _sum(self, y: Tensor, common: Tensor | int, logits: Tensor) -> Tensor:
        """Record the weighted sum of the outputs of experts y [pairs, n_embd], added to the residual if there is one, and to
        the outputs of the shared network, ``common``: float32 [rows, n_embd]."""
        recorder, experts, n_rows = self._recorder, self._experts, y.shape[1]
        out = recorder.empty((self._rows, n_rows))
        arguments: tuple[Argument, ...] = (
            *(self._residual or 0, y, self._weights, common),
            *(logits, experts.router.rows, n_rows, out),
        )
        ungated = (False,) if experts.shared and not experts.shared_gated else ()
        kernel = join.join(experts.n_used, experts.shared is not None, self._residual is not None, *ungated)
        recorder.launch(kernel, (-(-n_rows // 256), self._rows), 256, arguments, result=out)
        return out

    def choose(self) -> ChosenExperts[Tensor]:
        """Record the choice of experts alone."""
        logits = self._logits()
        self._route(logits)
        return ChosenExperts(self._ids, self._weights, logits)

    def sum(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Record the weighted sum of the outputs of given experts, float32 [rows, n_embd], of a mixture without a shared
        network: ids int32, weights float32 [rows, n_used]."""
        self._ids, self._weights, self._routed = ids, weights, True
        return self._record(weights)

    def activate(self, ids: Tensor) -> Tensor:
        """Record the activations of given experts, float32 [pairs, n_ff], of a mixture without a shared network whose weights
        are those of outputs: ids int32 [rows, n_used]."""
        experts, self._ids, self._routed = self._experts, ids, True
        stacks = present(experts.gate, experts.up)
        ends = [(experts.gate_scale, experts.gate_bias), (experts.up_scale, experts.up_bias)][-len(stacks) :]
        *gate, up = self._products(stacks, (), ends, self._activations, False, self._weights)
        return plain(self._recorder, Gated(gate[0] if gate else None, up, experts.activation))

    def join(self, activations: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Record the weighted sum of the outputs of given experts, float32 [rows, n_embd], from their activations, float32
        [pairs, n_ff]: ids int32, weights float32 [rows, n_used]."""
        recorder, experts = self._recorder, self._experts
        self._ids, self._weights, self._routed = ids, weights, True

        def inputs(unit: int) -> Activations:
            return quantized(recorder, activations, unit, self._rows) if unit else activations

        ends = [(experts.down_scale, experts.down_bias)]
        (y,) = self._products([experts.down], (), ends, inputs, True, weights)
        return self._sum(y, 0, weights)

    def _logits(self) -> Tensor:
        """The router's logits of all rows; the kernel also quantizes x to int8 where it can do both."""
        recorder, matrix, unit = self._recorder, self._experts.router, self._experts.up.format.unit
        if self._experts.gate is not None:
            unit = self._experts.gate.format.unit
        n, x, seen = matrix.columns, self._x, self._router_x
        # For many rows, products that read the router once per 16 rows save more than their launches cost.
        fits = matrix.format.name == "F32" and unit > 1 and n % 32 == 0 and n <= router.MOST_COLUMNS
        fits = fits and self._rows <= NARROW_ROWS
        if not (fits and isinstance(x, Normalized) and isinstance(seen, Normalized) and x.normalizes_as(seen)):
            if self._wide and not self._streamed and seen is x and dense.by_warpgroups(recorder, self._experts.up):
                seen = self._floats()  # which are quantized for each pair
            (logits,) = dense.matmul(recorder, seen, (matrix,))
            return logits
        logits = recorder.empty((self._rows, matrix.rows))
        parts = recorder.int8(unit, self._rows, n)
        grid = (-(-n // quantize.RUN) + -(-matrix.rows // quantize.WARPS), self._rows)
        norm = (x.x, x.weight, seen.weight, x.eps)
        arguments = (*norm, matrix, matrix.rows, *parts, logits)
        recorder.launch(
            router.rms_norm_router(unit, n), grid, quantize.RUN, arguments, **parts._asdict(), logits=logits
        )
        self._activated[unit] = parts
        return logits

    def _activations(self, unit: int) -> Activations:
        """x as int8 with a scale for every ``unit`` values; as float32 if ``unit`` is 0."""
        if unit not in self._activated:
            self._activated[unit] = quantized(self._recorder, self._x, unit) if unit else plain(self._recorder, self._x)
        return self._activated[unit]

    def _floats(self) -> Tensor:
        """x as float32."""
        x = self._activations(0)
        assert isinstance(x, Tensor)
        return x

    def _products(
        self,
        stacks: Sequence[DeviceWeight],
        others: Sequence[DeviceWeight],
        ends: Sequence[End],
        activations: Callable[[int], Activations],
        down: bool,
        logits: Tensor,
        act: Gated | None = None,
    ) -> list[Tensor]:
        """Each stack times the activations of all pairs, and its factors and biases: float32 [pairs, R], or [pairs + rows, R]
        including ``others``.  act: what ``activations`` gives, if it is not an array."""
        recorder, n_used = self._recorder, self._experts.n_used
        n_rows = stacks[0].rows // self._experts.n_expert
        outs = [recorder.empty((self._pairs + self._joins * self._rows, n_rows)) for _ in stacks]
        units = [w.format.unit if w.format.quantized else 0 for w in stacks]
        together = len(stacks) == 1 or (units[0] == units[1] and units[0] > 0)
        if (self._wide or self._streamed) and stacks[0].format != stacks[-1].format:
            together = False  # a launch contains the code of one format
        for members in [range(len(stacks))] if together else [range(1), range(1, 2)]:
            first = members[0]
            own_ends = [ends[i] for i in members]
            if self._streamed:
                x = activations(units[first])
                assert isinstance(x, Int8)
                self._route(logits)
                own_stacks, own_outs = [stacks[i] for i in members], [outs[i] for i in members]
                self._matmul_streamed(own_stacks, own_ends, x, down, n_rows, own_outs)
                continue
            if self._wide and dense.by_warpgroups(recorder, stacks[first]):
                self._route(logits)
                floats, own_outs = act or activations(0), [outs[i] for i in members]
                self._matmul_warpgroups([stacks[i] for i in members], own_ends, floats, down, n_rows, own_outs)
                continue
            x = activations(units[first])
            if self._wide and isinstance(x, Int8):
                self._route(logits)
                self._matmul_wide([stacks[i] for i in members], own_ends, x, down, n_rows, [outs[i] for i in members])
                continue
            if isinstance(x, Int8) and down and self._rows == 1 and row_experts.usable(stacks[0].format, n_rows):
                self._down(stacks[0], [others[0]] if self._joins else [], own_ends, x, n_rows, outs[0])
                continue
            if isinstance(x, Int8):
                chosen = [stacks[i] for i in members], [others[i] for i in members if self._joins]
                self._matmul_experts(*chosen, own_ends, x, down, logits, n_rows, [outs[i] for i in members])
                continue
            self._route(logits)
            finish, (factor, _, bias, _) = finish_of(own_ends)
            further = (finish,) if finish != kernels.NOTHING else ()
            kernel = kernels.matmul_experts_float(stacks[first].format.name, n_used, down, *further)
            arguments = (stacks[first], x, self._ids, factor, bias, stacks[first].columns, n_rows, outs[first])
            recorder.launch(kernel, (self._pairs, -(-n_rows // 8)), 256, arguments, result=outs[first])
        return outs

    def _weigh(self, gate: Tensor | None, up: Tensor) -> None:
        """Record the products with gate and up times the weights of their pairs; the outputs of experts then have none."""
        recorder, n = self._recorder, up.shape[1]
        ones = recorder.empty(self._weights.shape)
        written = {"gate": gate, "up": up, "ones": ones} if gate else {"up": up, "ones": ones}
        arguments = gate or 0, up, self._weights, ones, n
        kernel = kernels.weigh_products(gate is not None)
        recorder.launch(kernel, (self._pairs, -(-n // 256)), 256, arguments, **written)
        self._weights = ones

    def _can_activate(self, n_ff: int) -> bool:
        """Whether one launch computes gate, up and the activation of a single row, as int8 for down."""
        gate, up, down = self._experts.gate, self._experts.up.format, self._experts.down.format
        return (
            gate is not None and gate.format == up and row_experts.usable(up, n_ff) and row_experts.usable(down, n_ff)
        )

    def _gate_up(self, others: Sequence[DeviceWeight], ends: Sequence[End], logits: Tensor) -> Int8:
        experts, recorder = self._experts, self._recorder
        assert experts.gate is not None
        entry, columns, n_ff = experts.up.format, experts.up.columns, experts.down.columns
        x, outputs = self._activations(entry.unit), self._pairs + self._joins
        assert isinstance(x, Int8)
        out, (finish, added) = recorder.int8(entry.unit, outputs, n_ff), finish_of(ends)
        spare: Sequence[DeviceWeight | int] = others if self._joins else (0, 0)
        arguments: tuple[Argument, ...] = (
            *(experts.gate, experts.up, spare[0], spare[1]),
            *(self._ids, self._weights, logits, experts.scales or 0, *self._choice, *added),
            *(*experts.activation.numbers, n_ff, columns // entry.unit, *x, *out),
        )
        constants: tuple[Constant, ...] = (entry.name, experts.n_used, self._joins, experts.n_expert)
        constants += (experts.scales is not None, experts.activation.kind)
        if (experts.routing, finish) != (router.USUAL, kernels.NOTHING):
            constants += (experts.routing, finish)
        written = {"ids": self._ids, "weights": self._weights, **out._asdict()}
        grid = (n_ff // row_experts.UNIT, outputs)
        recorder.launch(row_experts.gate_up(*constants), grid, row_experts.THREADS, arguments, **written)
        self._routed = True
        return out

    def _down(
        self,
        matrix: DeviceWeight,
        others: Sequence[DeviceWeight],
        ends: Sequence[End],
        x: Int8,
        n_rows: int,
        out: Tensor,
    ) -> None:
        recorder, n_used, outputs = self._recorder, self._experts.n_used, out.shape[0]
        finish, (factors, _, biases, _) = finish_of(ends)
        parts = row_experts.parts_for(matrix.format.name, n_rows, outputs, recorder.device.multiprocessors)
        constants: tuple[Constant, ...] = (matrix.format.name, n_used, self._joins, parts)
        if finish != kernels.NOTHING:
            constants += (finish,)
        units = matrix.columns // matrix.format.unit
        arguments = (matrix, others[0] if others else 0, self._ids, factors, biases, n_rows, units, *x, out)
        grid = (n_rows // row_experts.rows_of(parts), outputs)
        recorder.launch(row_experts.down(*constants), grid, row_experts.THREADS, arguments, result=out)

    def _route(self, logits: Tensor) -> None:
        """Record the choice of experts for all rows, unless it is recorded already."""
        if not self._routed:
            scales, law = self._experts.scales, self._experts.routing
            further = (law,) if law != router.USUAL else ()
            kernel = router.route(self._experts.n_expert, self._experts.n_used, scales is not None, *further)
            arguments = (logits, self._experts.router.rows, *self._choice, scales or 0, self._ids, self._weights)
            self._recorder.launch(kernel, (self._rows,), 32, arguments, ids=self._ids, weights=self._weights)
            self._routed = True

    def _sort(self, columns: int, dense: bool = False) -> tuple[Tensor, Tensor]:
        """Record the sorting of pairs by expert.  Returns the sorted pairs, and the items of a product's blocks, of up to
        ``columns`` pairs; dense: without gaps."""
        if (columns, dense) not in self._sorted:
            recorder, n_expert = self._recorder, self._experts.n_expert
            listed = recorder.empty((self._pairs,), np.int32)
            items = recorder.empty((wide_experts.n_items(self._pairs, n_expert, columns), 4), np.int32)
            arguments = (self._ids, self._pairs, listed, items)
            constants = (columns, True) if dense else () if columns == wide_experts.COLUMNS else (columns,)
            kernel = wide_experts.sort_pairs(*constants)
            recorder.launch(kernel, (n_expert,), wide_experts.SORTERS, arguments, listed=listed, items=items)
            self._sorted[columns, dense] = listed, items
        return self._sorted[columns, dense]

    def _stream_tiles(self) -> int:
        """The tiles of 8 pairs of an item of products that stream the weights of experts; 0 if others are used."""
        experts, device = self._experts, self._recorder.device
        shared_memory, n_expert = device.shared_memory, experts.n_expert
        if self._rows == 1 or not stream_experts.serves(
            device.compute_capability, shared_memory, self._pairs, n_expert
        ):
            return 0
        matrices = present(experts.gate, experts.up, experts.down)
        # In units of 32, gate and up were slower than by other kernels: more is done for a unit, and it has fewer bytes.
        if not experts.down.format.quantized or any(w.format.unit != quantize.RUN for w in matrices[:-1]):
            return 0
        return min(stream_experts.tiles_for(w.format.name, w.columns // w.format.unit) for w in matrices)

    def _matmul_streamed(
        self, stacks: list[DeviceWeight], ends: Sequence[End], x: Int8, down: bool, n_rows: int, outs: list[Tensor]
    ) -> None:
        tiles, recorder = self._streamed, self._recorder
        (listed, items), (finish, added) = self._sort(8 * tiles, True), finish_of(ends)
        entry, n_tiles = stacks[0].format, kernels.tiles(n_rows)
        arguments = (
            *(stacks[0], stacks[-1], outs[0], outs[-1], items, listed, *added),
            *(n_tiles, len(stacks) * n_tiles, n_rows, *x),
        )
        constants = 1 if down else self._experts.n_used, tiles, stacks[0].columns // entry.unit, not self._wide
        kernel, blocks, threads = stream_experts.geometry(
            entry.name, *constants, recorder.device.multiprocessors, finish
        )
        recorder.launch(kernel, (blocks,), threads, arguments, **dense.results(outs))

    def _matmul_wide(
        self, stacks: list[DeviceWeight], ends: Sequence[End], x: Int8, down: bool, n_rows: int, outs: list[Tensor]
    ) -> None:
        (listed, items), (finish, added) = self._sort(wide_experts.COLUMNS), finish_of(ends)
        entry, n_tiles = stacks[0].format, kernels.tiles(n_rows)
        end = len(stacks) * n_tiles
        arguments = (
            *(stacks[0], stacks[-1], outs[0], outs[-1], items, listed, *added),
            *(n_tiles, end, n_rows, stacks[0].columns // entry.unit, *x),
        )
        sizes = 1 if down else self._experts.n_used, items.shape[0], end
        kernel, grid, threads = wide_experts.geometry(entry.name, *sizes, self._recorder.device.shared_memory, finish)
        self._recorder.launch(kernel, grid, threads, arguments, **dense.results(outs))

    def _matmul_warpgroups(
        self,
        stacks: list[DeviceWeight],
        ends: Sequence[End],
        x: Activations | Gated,
        down: bool,
        n_rows: int,
        outs: list[Tensor],
    ) -> None:
        recorder = self._recorder
        (listed, items), (finish, added) = self._sort(warpgroup_experts.COLUMNS), finish_of(ends)
        n_items, columns, n_tiles = items.shape[0], stacks[0].columns, kernels.tiles(n_rows)
        units, end = columns // stacks[0].format.unit, len(stacks) * n_tiles
        if isinstance(x, Gated):
            source, numbers, gate, up = x.activation.kind, x.activation.numbers, x.gate or x.up, x.up
        else:
            assert isinstance(x, Tensor)
            source, numbers, gate, up = "plain", (0.0, 0.0, 0.0, 0.0), x, x
        q = recorder.empty((warpgroup_experts.activation_words(n_items, units),), np.uint32)
        kernel = warpgroup_experts.quantize_pairs(source, 1 if down else self._experts.n_used)
        arguments: tuple[Argument, ...] = (gate, up, columns, *numbers, items, listed, q, q)
        recorder.launch(kernel, (n_items, units), warpgroup_experts.QUANTIZERS, arguments, q=q)
        arguments = (
            *(stacks[0], stacks[-1], outs[0], outs[-1], items, listed, *added),
            *(n_items, n_tiles, end, n_rows, units, q),
        )
        sizes = units, n_items, end, recorder.device.multiprocessors
        kernel, blocks, threads = warpgroup_experts.geometry(stacks[0].format.name, *sizes, finish)
        recorder.launch(kernel, (blocks,), threads, arguments, **dense.results(outs))

    def _matmul_experts(
        self,
        stacks: list[DeviceWeight],
        others: list[DeviceWeight],
        ends: Sequence[End],
        x: Int8,
        down: bool,
        logits: Tensor,
        n_rows: int,
        outs: list[Tensor],
    ) -> None:
        n_expert, n_used, scales = self._experts.n_expert, self._experts.n_used, self._experts.scales
        chooses = self._rows == 1 and not self._routed and self._experts.routing.gating not in router.EXPENSIVE
        if not chooses:
            self._route(logits)
        units, n_tiles = stacks[0].columns // stacks[0].format.unit, kernels.tiles(n_rows)
        formats = tuple(w.format.name for w in stacks)
        most, threads = matmul.compiled_rows(self._rows), 32 * matmul.warps(units, False)
        at_once = kernels.resident(formats, most) * self._recorder.device.multiprocessors * (32 * CHAINS // threads)
        run = 1 if most == 1 else kernels.run_of(n_tiles, self._pairs, len(stacks), at_once)
        n_runs = -(-n_tiles // run)
        spare: Sequence[DeviceWeight | int] = others or [0]
        finish, added = finish_of(ends)
        arguments = (
            *(stacks[0], stacks[-1], spare[0], spare[-1], outs[0], outs[-1]),
            *(self._ids, self._weights, logits, scales or 0, *self._choice, *added),
            *(self._rows, n_runs, run, n_rows, units, *x),
        )
        constants: tuple[Constant, ...] = (formats, most, n_used, self._joins, down)
        law = self._experts.routing if chooses else router.USUAL
        if chooses or finish != kernels.NOTHING:
            constants += (n_expert, scales is not None) if chooses else (0, False)
        if law != router.USUAL or finish != kernels.NOTHING:
            constants += (law, finish)
        kernel = kernels.matmul_experts(*constants)
        grid = (len(stacks) * n_runs, self._pairs + self._joins)
        written = dense.results(outs)
        if chooses:
            written |= {"ids": self._ids, "weights": self._weights}
        self._recorder.launch(kernel, grid, threads, arguments, **written)
        self._routed = True

    def _matmul_join(self, act: Gated, logits: Tensor, units: int, n_rows: int) -> Tensor:
        experts, recorder = self._experts, self._recorder
        assert self._residual is not None
        out = recorder.empty(self._residual.shape)
        common = experts.shared[2] if experts.shared else 0
        gated = bool(experts.shared) and experts.shared_gated
        finish, (factors, _, biases, _) = finish_of([(experts.down_scale, experts.down_bias)])
        arguments = (
            *(experts.down, common, act.up if act.gate is None else act.gate, act.up, *act.activation.numbers),
            *(self._ids, self._weights, logits.address + 4 * experts.n_expert if gated else 0, factors, biases),
            *(self._residual, n_rows, out),
        )
        constants: tuple[Constant, ...] = (experts.down.format.name, units, experts.n_used, self._joins)
        further = act.activation.kind, gated or not experts.shared, finish
        if further != ("swiglu", True, kernels.NOTHING):
            constants += further
        threads = join.join_threads(*constants)
        recorder.launch(join.matmul_join(*constants), (n_rows // 16,), threads, arguments, result=out)
        return out
