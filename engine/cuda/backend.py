"""The operations a forward pass is written against, on a GPU.

A forward pass is recorded once per number of rows: the operations below allocate their results and note which kernels
would run, with which arguments; the notes become a CUDA graph, and every later pass of as many rows is one launch of it.  So
tokens and positions are read from device memory, and nothing here may depend on their values.

Three values are not computed where a pass asks for them but where they are used: a normalization, a gate, and the joining of
attention's chunks usually feed a matrix product, which wants them as int8, so one kernel does both.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Pass
from engine.cache.kv import CHUNK, LayerCache
from engine.cache.recurrent import RecurrentLayer
from engine.compile.jobs import Job, gpu_job
from engine.cuda import (
    add,
    bandwidth,
    delta_net,
    embed,
    glu,
    mtp,
    per_layer,
    rms_norm,
    rope,
    sample,
    softcap,
    wide_delta_net,
)
from engine.cuda.attention import attend as attention
from engine.cuda.attention import direct as direct_attention
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.products import matmul, quantize, repack, wide_matmul
from engine.cuda.products.mixture import Mixture
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Device
from engine.cuda.runtime.pool import Pool
from engine.cuda.runtime.steps import DeviceSteps, drafting_kernels
from engine.cuda.runtime.tensor import Attended, Deferred, DeviceWeight, Launch, Plan, Tensor
from engine.decode.sampler import Sampler, SamplingParams
from engine.gguf.quants import Format
from engine.limits import STEP_ROWS
from engine.models.delta_net import DeltaNet
from engine.models.experts import Experts, check_activation
from engine.models.heads import Heads
from engine.models.weights import Weight
from engine.ops import Decoder, DeviceMemory, Forward, Operations
from engine.speculative.params import SpeculationParams
from engine.speculative.steps import Steps

f32 = np.float32

STAGING = 64 << 20
"""Bytes of packed rows that are copied to the device at a time."""

RESERVED = 512 << 20
"""Bytes of device memory that a context leaves for intermediate results."""

DEEP_TILES = 2
"""Tiles per multiprocessor up to which a warp of a matrix product keeps two records under way."""

BATCH_SIZE = 1024
"""Rows of a pass that reads a prompt, unless something else is asked for."""

WIDE = (8, 0)
"""The least compute capability for passes of more rows than a step, whose kernels compute while they copy on."""

WIDE_FLOATS = 4
"""Weight rows of float formats that a warp multiplies at a time with 16 rows of such a pass."""

FEW_ROWS = 128
"""Up to so many tokens of a prompt are read in passes of as many rows as a step: the blocks of a wide product have room for
about as many columns, and multiply them whether they are there or not."""

WIDE_PLANS = 4
"""Passes of more rows than a step that are kept: the latest, since no two prompts need be of one length."""


class Backend:
    """Operations on one GPU."""

    name = "cuda"
    ahead_drafted = DeviceSteps.ahead_drafted

    def __init__(self, index: int = 0, device: Device | None = None, max_rows: int = 0) -> None:
        """device: that of another backend, to queue work together with it; max_rows: of a pass that reads a prompt, 0:
        ``BATCH_SIZE``.  Below compute capability 8.0 it has at most as many as a step, 16."""
        self.device = device or Device(index)
        self.n_threads = 0
        self.weight_bytes = 0
        self._pool = Pool(self.device)
        self.max_rows = max_rows or BATCH_SIZE
        if self.device.compute_capability < WIDE:
            self.max_rows = min(self.max_rows, STEP_ROWS)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._wide_plans: dict[tuple[Any, ...], Plan] = {}
        self._launches: list[Launch] | None = None
        self._added: tuple[Any, ...] | None = None
        self._staging: Buffer | None = None
        self._orders: dict[Any, Buffer] = {}
        self._steps: DeviceSteps | None = None
        #: What ``jobs`` has found, for ``warm_up``.
        self._needed: dict[Decoder[Tensor], list[Specialization]] = {}
        self._inputs = self.inputs()
        self.tokens, self.positions = self._inputs.tokens, self._inputs.positions

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The device as reports name it, such as "cuda:0 NVIDIA H200"."""
        return f"cuda:{self.device.info.index} {self.device.info.name}"

    @property
    def gpu_name(self) -> str:
        """The name of the GPU."""
        return self.device.info.name

    def device_memory(self) -> DeviceMemory | None:
        """The state of the GPU's memory."""
        return DeviceMemory(self.device.allocated, self.weight_bytes, self.device.free_memory())

    def bandwidth(self) -> float:
        """Bytes per second that a plain read of the GPU's memory reaches; measured once, in a few milliseconds."""
        return bandwidth.device_bandwidth(self.device)

    def shares_memory_with(self, other: Operations[Any, Any, Any]) -> bool:
        """Whether the other one has its arrays and its work on the same GPU, opened once for both."""
        return isinstance(other, Backend) and other.device is self.device

    def can_reach(self, other: Operations[Any, Any, Any]) -> bool:
        """Whether the other one is a GPU."""
        return isinstance(other, Backend)

    def reach(self, other: Operations[Any, Any, Any]) -> None:
        """Have kernels of this GPU read and write the memory of another; DeviceError where the two are not connected."""
        assert isinstance(other, Backend)
        self.device.reach(other.device)

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache once ``weights`` bytes of weights and what a pass needs are there."""
        return max(1, self.device.free_memory() - int(weights * 1.01) - RESERVED)

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention over ``n_ctx`` positions needs beside the cache."""
        slots = attention.slots(n_ctx, 0)
        return 4 * sum(attention.scratch(STEP_ROWS, n_head, d_v, slots))

    def upload(self, array: np.ndarray) -> Tensor:
        """An array the operations can read."""
        buffer = self.device.allocate(array.nbytes, "the model's vectors")
        self.device.write(buffer.address, array)
        return Tensor(buffer.address, array.shape, array.dtype, buffer)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """Zeroed memory that stays."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self.device.allocate(n_bytes, "the key-value cache")
        self.device.clear(buffer.address, buffer.n_bytes)
        return Tensor(buffer.address, shape, np.dtype(dtype), buffer)

    def store(self, target: Tensor, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""
        self.device.write(target[first : first + rows.shape[0]].address, rows)

    def weight(self, weight: Weight, host: bool = False) -> DeviceWeight:
        """A weight matrix the operations can read: copied to the device and laid out in records.

        host: it lies in memory of the host that the device reads, as befits a table of which a pass reads few rows.
        """
        entry, row_bytes, what = weight.format, weight.data.shape[1], f"the weights ({weight.name})"
        n_bytes = weight.rows * row_bytes
        if entry.quantized:
            n_bytes = repack.repacked_bytes(entry, weight.rows, weight.columns)
        buffer = self.device.allocate_host(n_bytes, what) if host else self.device.allocate(n_bytes, what)
        self.weight_bytes += 0 if host else buffer.n_bytes
        step = max(1, STAGING // (row_bytes * repack.TILE)) * repack.TILE
        for row in range(0, weight.rows, step):
            part = weight.part(row, row + step)
            if entry.quantized:
                self._repack(entry, part, buffer.address, weight.columns // entry.block, row)
            else:
                self.device.write(buffer.address + row * row_bytes, part)
        return DeviceWeight(weight.name, entry, weight.rows, weight.columns, buffer)

    def _repack(self, entry: Format, part: np.ndarray, records: int, blocks: int, row: int) -> None:
        """Rows ``row`` .. of a matrix, from a whole tile on, as records."""
        if self._staging is None or part.nbytes > self._staging.n_bytes:
            self._staging = self.device.allocate(max(STAGING, part.nbytes), "the loading of weights")
        if entry.type not in self._orders:
            order = repack.record(entry.type)
            self._orders[entry.type] = self.device.allocate(order.nbytes, "the loading of weights")
            self.device.write(self._orders[entry.type].address, order)
        self.device.write(self._staging.address, part)
        addresses = (self._staging.address, self._orders[entry.type].address, records)
        arguments = (*addresses, part.shape[0], blocks, row // repack.TILE)
        grid = (blocks, -(-part.shape[0] // repack.TILE))
        self.device.launch(repack.repack(entry.block_bytes), grid, 256, arguments)

    def loaded(self) -> None:
        """All weights are there: what only loading needed is given back."""
        self.device.synchronize("the loading of weights")
        self._staging = None
        self._orders = {}

    def download(self, array: Tensor) -> np.ndarray:
        """The values as a NumPy array."""
        return self.device.read(array.address, array.shape, array.dtype)

    # --- passes ------------------------------------------------------------------------------------------------

    def run(
        self,
        forward: Forward[Tensor],
        batch: Pass[np.ndarray],
        n_logits: int,
        inputs: Pass[Tensor] | None = None,
    ) -> np.ndarray | None:
        """The result of ``forward(batch, n_logits)``, as a NumPy array; recorded on the first call with as many rows.

        inputs: where tokens and positions go, if not to ``tokens`` and ``positions``.
        """
        plan = self.plan(forward, batch.rows, n_logits, inputs)
        place = inputs or self._inputs
        self.device.write(place.tokens.address, batch.tokens)
        self.device.write(place.positions.address, batch.positions)
        if plan.graph:
            plan.graph.launch()
        else:
            self.start(plan)
        return None if plan.result is None else self.download(plan.result)

    def next_rows(self, left: int) -> int:
        """How many of the ``left`` tokens of a prompt the next pass should read."""
        rows = min(left, self.max_rows)
        return rows if rows > FEW_ROWS else min(rows, STEP_ROWS)

    def inputs(self) -> Pass[Tensor]:
        """Memory for the tokens and positions of passes between the steps of an answer, which have theirs in ``tokens`` and
        ``positions`` all along."""
        rows = max(self.max_rows, STEP_ROWS)
        return Pass(self.zeros((rows,), np.int32), self.zeros((rows,), np.int32))

    def plan(
        self,
        forward: Forward[Tensor],
        rows: int,
        n_logits: int,
        inputs: Pass[Tensor] | None = None,
    ) -> Plan:
        """The recorded pass of ``rows`` tokens that gives the logits of the last ``n_logits``; inputs: where its tokens and
        positions lie, if not in ``tokens`` and ``positions``.

        One of as many rows as a step may have, or of the most, is captured, and stays.  Of the others only the latest are
        kept, and captured when they come again: a prompt of a new length starts its kernels one by one, and the first of them
        run while the others are started.
        """
        place = inputs or self._inputs
        key, passing = (forward, rows, n_logits, place.tokens.address), STEP_ROWS < rows < self.max_rows
        plan = self._wide_plans.pop(key, None) if passing else self._plans.get(key)
        if plan is None:
            plan = self.record(lambda: forward(place.part(slice(rows)), n_logits))
            if not passing:
                self.capture(plan)
        elif plan.graph is None:
            self.capture(plan)
        if passing and len(self._wide_plans) >= WIDE_PLANS:
            self.device.synchronize()  # it may be under way
            del self._wide_plans[next(iter(self._wide_plans))]
        (self._wide_plans if passing else self._plans)[key] = plan
        return plan

    def jobs(self, model: Decoder[Tensor]) -> list[Job]:
        """What has to be compiled before a model can run: every kernel that its passes and the choice of tokens use."""
        drafts = model.mtp.ops if model.mtp is not None else self
        jobs: list[Job] = [gpu_job(kernel, self.device.compute_capability) for kernel in self._kernels(model)]
        return jobs + [gpu_job(kernel, drafts.device.compute_capability) for kernel in drafts.drafting(model)]

    def _kernels(self, model: Decoder[Tensor]) -> list[Specialization]:
        if model in self._needed:
            return self._needed[model]
        kernels: dict[Specialization, None] = {}
        most = min(self.max_rows, model.cache.n_ctx)
        # Where attention takes another kernel for more rows, the least and the most have both.
        wide = (most, FEW_ROWS + 1) if most > FEW_ROWS else ()
        for rows in (*wide, STEP_ROWS, 8, 4, 2, 1):  # the most memory first
            # A prompt asks for the last row's logits, a step with drafts for those of all.
            for n_logits in {1, rows if rows <= STEP_ROWS else 1}:
                plan = self.record(partial(model.compute, self._inputs.part(slice(rows)), n_logits))
                kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))
        for greedy in (True, False):
            kernels.update(dict.fromkeys(sample.DeviceSampler.kernels(greedy, True)))
        kernels.update(dict.fromkeys(drafting_kernels()))
        return self._needed.setdefault(model, list(kernels))

    def drafting(self, model: Decoder[Tensor]) -> list[Specialization]:
        """The kernels of what drafts from a model's outputs, which may be on another GPU than the model is."""
        if model.mtp is None:
            return []
        plan = self.record(partial(model.mtp.compute, self._inputs.part(slice(1)), 1))
        return list(dict.fromkeys(launch.kernel for launch in plan.launches))

    def warm_up(self, model: Decoder[Tensor]) -> None:
        """Load every kernel that a model's passes use, and record the pass of one token; one that is not there yet is
        compiled."""
        for kernel in self._kernels(model):
            self.device.load(kernel)
        if model.mtp is not None:
            for kernel in model.mtp.ops.drafting(model):
                model.mtp.ops.device.load(kernel)
        self.plan(model.compute, 1, 1)
        most = min(self.max_rows, model.cache.n_ctx)
        if most == self.max_rows > FEW_ROWS:
            # What long prompts consist of.
            self.plan(model.compute, most, 0)
            self.plan(model.compute, most, 1)

    def record(self, forward: Callable[[], Tensor | None]) -> Plan:
        """Note the launches of a pass without starting any."""
        self._launches, self._added = [], None
        try:
            result = forward()
            return Plan(self._launches, result)
        finally:
            self._launches = self._added = None

    def capture(self, plan: Plan) -> None:
        """Compile what a plan needs and make its graph."""
        for launch in plan.launches:
            self.device.load(launch.kernel)
        with self.device.capture() as graph:
            self.start(plan)
        plan.graph = graph

    def start(self, plan: Plan) -> None:
        """Start the kernels of a plan one by one."""
        for launch in plan.launches:
            self.device.launch(launch.kernel, launch.grid, launch.block, launch.arguments)

    # --- sampling ----------------------------------------------------------------------------------------------

    def can_sample(self, params: SamplingParams) -> bool:
        """Whether ``steps`` can choose tokens in this way."""
        return sample.supported(params)

    def steps(self, model: Decoder[Tensor], sampler: Sampler, params: SpeculationParams) -> Steps:
        """Steps of ``model`` whose tokens are chosen on the device."""
        if self._steps is None:
            self._steps = DeviceSteps(self, model)
        return self._steps.prepare(sampler, params)

    def _launch(
        self, kernel: Specialization, grid: tuple[int, ...], block: int, arguments: Sequence[Any], *outputs: Tensor
    ) -> None:
        """Note a launch; tensors among the arguments stand for their addresses."""
        plain = tuple(a.address if isinstance(a, (Tensor, DeviceWeight)) else a for a in arguments)
        assert self._launches is not None, "operations belong into a pass: Backend.run or Backend.record"
        self._added = None
        # Where results lie, not the results: what comes later may use their memory again.
        written = tuple(Tensor(o.address, o.shape, o.dtype, None) for o in outputs)
        self._launches.append(Launch(kernel, grid, block, plain, written))

    def _empty(self, shape: tuple[int, ...], dtype: Any = f32) -> Tensor:
        loan = self._pool.take(math.prod(shape) * np.dtype(dtype).itemsize)
        return Tensor(loan.address, shape, np.dtype(dtype), loan)

    def _int8(self, unit: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for activations as int8: q, scales, sums."""
        q, d, sums = quantize.activation_words(unit, rows, columns)
        return self._empty((q,), np.uint32), self._empty((d,)), self._empty((sums,), np.uint32)

    # --- operations --------------------------------------------------------------------------------------------

    def embed(self, table: DeviceWeight, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """Rows ``tokens`` int32 [rows] of the embedding, times scale: float32 [rows, n_embd]."""
        rows = tokens.size
        out = self._empty((rows, table.columns))
        entry = table.format
        if entry.quantized:
            units = table.columns // entry.unit
            arguments = (table, tokens, units, scale, out)
            grid = (-(-units // embed.WARPS), rows)
            self._launch(embed.embed_quantized(entry.name), grid, 32 * embed.WARPS, arguments, out)
        else:
            grid = (-(-table.columns // 256), rows)
            self._launch(embed.embed_float(entry.name), grid, 256, (table, tokens, table.columns, scale, out), out)
        return out

    def matmul(self, x: Tensor | Deferred, *weights: DeviceWeight) -> list[Tensor]:
        """x float32 [rows, K] times each weight [R, K]: a float32 [rows, R] for each."""
        return self._matmul(x, weights, None)

    def matmul_add(self, residual: Tensor, x: Tensor | Deferred, weight: DeviceWeight) -> Tensor:
        """residual + x times the weight."""
        return self._matmul(x, (weight,), residual)[0]

    def _matmul(self, x: Tensor | Deferred, weights: Sequence[DeviceWeight], residual: Tensor | None) -> list[Tensor]:
        rows = x.shape[0]
        outputs = [self._empty((rows, weight.rows)) for weight in weights]
        by_unit: dict[int, list[int]] = defaultdict(list)
        for i, weight in enumerate(weights):
            by_unit[weight.format.unit if weight.format.quantized else 0].append(i)
        plain = self._plain(x) if 0 in by_unit else None
        for unit, members in by_unit.items():
            if unit == 0:
                for i in members:
                    assert plain is not None
                    self._matmul_float(plain, weights[i], residual, outputs[i])
                continue
            quantized = self._quantize(x, unit)
            # Matrices of one format side by side: a launch then holds the code of each format once.
            members.sort(key=lambda i: weights[i].format.name)
            runs, multiply = [members], self._matmul_quantized
            if rows > STEP_ROWS:
                # A launch holds the code of one format.
                runs = [list(run) for _, run in groupby(members, key=lambda i: weights[i].format.name)]
                multiply = self._matmul_wide
            for group in (run[first : first + 3] for run in runs for first in range(0, len(run), 3)):
                chosen, outs = [weights[i] for i in group], [outputs[i] for i in group]
                multiply(quantized, rows, chosen, residual, outs)
        return outputs

    def _matmul_quantized(
        self,
        x: Sequence[Tensor],
        rows: int,
        weights: list[DeviceWeight],
        residual: Tensor | None,
        outputs: list[Tensor],
    ) -> None:
        entry, columns = weights[0].format, weights[0].columns
        units = columns // entry.unit
        tiles = np.cumsum([weight.tiles for weight in weights]).tolist()
        formats = tuple(weight.format.name for weight in weights)
        spare = 3 - len(weights)
        arguments = (
            *(weights + weights[:1] * spare),
            *(outputs + outputs[:1] * spare),
            residual or 0,
            *(tiles + [tiles[-1]] * spare)[:2],
            *([weight.rows for weight in weights] + [0] * spare),
            units,
            *x,
            rows,
        )
        most = matmul.compiled_rows(rows)
        multiprocessors = self.device.multiprocessors
        at_once = tiles[-1] <= matmul.SINGLE_WARPS // units * multiprocessors
        single = units if rows <= 8 and entry.unit == 256 and at_once else 0
        deep = not single and rows <= 8 and tiles[-1] <= DEEP_TILES * multiprocessors
        kernel = matmul.matmul_quantized(formats, most, residual is not None, deep, single)
        self._launch(kernel, (tiles[-1],), 32 * matmul.warps(units, single > 0), arguments, *outputs)

    def _matmul_wide(
        self,
        x: Sequence[Tensor],
        rows: int,
        weights: list[DeviceWeight],
        residual: Tensor | None,
        outputs: list[Tensor],
    ) -> None:
        entry = weights[0].format
        tiles = np.cumsum([weight.tiles for weight in weights]).tolist()
        spare = 3 - len(weights)
        arguments = (
            *(weights + weights[:1] * spare),
            *(outputs + outputs[:1] * spare),
            *(residual or 0, residual is not None),
            *(tiles + [tiles[-1]] * spare),
            *([weight.rows for weight in weights] + [0] * spare),
            weights[0].columns // entry.unit,
            *x,
            rows,
        )
        kernel, grid, threads = wide_matmul.geometry(entry.name, rows, tiles[-1], self.device.shared_memory)
        self._launch(kernel, grid, threads, arguments, *outputs)

    def _matmul_float(self, x: Tensor, weight: DeviceWeight, residual: Tensor | None, out: Tensor) -> None:
        rows, most, each = x.shape[0], 1 if x.shape[0] == 1 else STEP_ROWS, 1
        grid: tuple[int, ...] = (-(-weight.rows // 8),)
        if rows > STEP_ROWS:
            each = WIDE_FLOATS
            grid = matmul.wide_grid(rows, weight.rows, most, each)
        kernel = matmul.matmul_float(weight.format.name, most, residual is not None, each)
        arguments = (weight, x, rows, weight.columns, weight.rows, residual or 0, out)
        self._launch(kernel, grid, 256, arguments, out)

    def _quantize(self, x: Tensor | Deferred, unit: int, pass_rows: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x as int8 for the tensor cores: q, scales, sums; pass_rows: of the pass, if x has others."""
        rows, columns = x.shape
        wide = quantize.is_wide(unit, pass_rows or rows)
        if isinstance(x, Attended) and (wide or not x.geometry.quantizes):
            x = self._plain(x)
        q, d, sums = self._int8(unit, rows, columns)
        grid = (-(-columns // quantize.RUN), rows)
        added, normed = self._added, isinstance(x, Deferred) and x.kind == "rms_norm"
        y = x.first if isinstance(x, Deferred) and normed else x
        if added and isinstance(y, Tensor) and (y.address, y.shape) == (added[-1].address, added[-1].shape):
            # The launch before this has just made y: one kernel does both.
            assert self._launches
            self._launches.pop()
            second = (x.second, x.eps) if isinstance(x, Deferred) else (0, 0.0)
            kernel = rms_norm.rms_norm_add_quantize(unit, columns, normed, wide)
            self._launch(kernel, grid, quantize.RUN, (*added[:-1], *second, y, q, d, sums), y, q, d, sums)
        elif isinstance(x, Attended):
            joined = (x.first, x.second, x.positions, x.gate or 0, q, d, sums, columns, x.slots, x.window)
            self._launch(x.geometry.quantized(unit), grid, quantize.RUN, joined, q, d, sums)
        elif isinstance(x, Deferred) and x.kind == "rms_norm":
            arguments: tuple[Any, ...] = (x.first, x.second, x.eps, q, d, sums)
            kernel = rms_norm.rms_norm_quantize(unit, columns, wide)
            self._launch(kernel, grid, quantize.RUN, arguments, q, d, sums)
        elif isinstance(x, Deferred) and x.kind == "gated_norm":
            arguments = (x.first, x.second, x.gate, x.eps, columns, q, d, sums)
            kernel = delta_net.gated_norm_quantize(unit, x.second.size, wide)
            self._launch(kernel, grid, quantize.RUN, arguments, q, d, sums)
        else:
            source, gate, up = (x.kind, x.first, x.second) if isinstance(x, Deferred) else ("plain", x, x)
            kernel = quantize.quantize(unit, source, wide)
            self._launch(kernel, grid[::-1], quantize.RUN, (gate, up, columns, q, d, sums), q, d, sums)
        return q, d, sums

    def _plain(self, x: Tensor | Deferred) -> Tensor:
        """x as float32."""
        if isinstance(x, Tensor):
            return x
        out = self._empty(x.shape)
        rows, columns = x.shape
        if isinstance(x, Attended):
            self._join(x, out)
        elif x.kind == "rms_norm":
            arguments = (x.first, x.second, x.eps, columns, out)
            self._launch(rms_norm.rms_norm(), (1, rows), 256, arguments, out)
        elif x.kind == "gated_norm":
            given = (x.first, x.second, x.gate, x.eps, out.size, out)
            self._launch(delta_net.gated_norm(x.second.size), (-(-out.size // 256),), 256, given, out)
        else:
            kernel = glu.swiglu() if x.kind == "swiglu" else glu.geglu()
            self._launch(kernel, (-(-out.size // 256),), 256, (x.first, x.second, out.size, out), out)
        return out

    def _join(self, x: Attended, out: Tensor) -> None:
        shape, joined = x.geometry, (x.first, x.second, x.positions, x.gate or 0, out, x.slots, x.window)
        self._launch(shape.combine, shape.combine_grid, shape.combine_block, joined, out)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y; y may be a bias [n] for every row."""
        out = self._empty(x.shape)
        self._launch(add.add(), (-(-x.size // 256),), 256, (x, y, x.size, y.size, out), out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Deferred:
        """Normalize the rows of x [rows, n]; weight [n]."""
        return Deferred("rms_norm", x, weight, eps)

    def rms_norm_add(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """(residual + normalized x) * scale."""
        out = self._empty(x.shape)
        rows, n = x.shape
        self._launch(rms_norm.rms_norm_add(), (1, rows), 256, (residual, x, weight, eps, scale, n, out), out)
        # What it reads stays until the next launch, which may do its work as well (``_quantize``).
        self._added = (residual, x, weight, eps, scale, out)
        return out

    def attention(
        self,
        heads: Heads[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache[Tensor],
        batch: Pass[Tensor],
        table: Tensor,
    ) -> Tensor | Attended:
        """Store k and v [rows, heads * width] at their positions and attend q over the cache: float32 [rows, n_head * d_v].

        Before that: biases, normalization of each head of q, k and v where the layer has it, and rotation by ``table``; v may
        be k.  Where heads are gated, q is [rows, n_head * 2 * d_k] and the result is multiplied by the logistic function of
        the gates.
        """
        positions = batch.positions
        query, new = self._rope(heads, q, k, v, cache, positions, table)
        gate = q if heads.gated else None
        if positions.size > STEP_ROWS:
            return self._attend_wide(heads, query, cache, positions, cache.window, gate)
        return self._attend(heads, query, new, cache, positions, cache.window, gate)

    def attend_past(
        self,
        heads: Heads[Tensor],
        q: Tensor,
        cache: LayerCache[Tensor],
        batch: Pass[Tensor],
        last: Tensor,
        table: Tensor,
        window: int,
    ) -> Tensor | Attended:
        """Attention of queries q [rows, n_head * d_k] at the rows' positions over what lies in the cache up to position
        ``last`` int32 [rows] of each, as far back as ``window`` (0: all): float32 [rows, n_head * d_v].  Nothing is stored.
        """
        query, _ = self._rope(heads, q, None, None, cache, batch.positions, table)
        if batch.rows > STEP_ROWS:
            return self._attend_wide(heads, query, cache, last, window, None)
        return self._attend(heads, query, None, cache, last, window)

    def _attend(
        self,
        heads: Heads[Tensor],
        query: tuple[Tensor, ...],
        new: Tensor | None,
        cache: LayerCache[Tensor],
        positions: Tensor,
        window: int,
        gate: Tensor | None = None,
    ) -> Attended:
        """Attention of what ``_rope`` has made of queries, over the cache up to ``positions``."""
        rows, chunks, k, v = positions.size, cache.keys.shape[1], cache.k_type, cache.v_type
        slots = attention.slots(chunks * CHUNK, window)
        sizes = rows, heads.n_head, heads.n_head_kv, cache.d_k, cache.d_v
        options: dict[str, Any] = {"early": True, "gated": heads.gated}
        multiprocessors = self.device.multiprocessors
        if attention.takes(k, v, cache.d_k, cache.d_v):
            options["past"] = new is None
            shape = attention.geometry(*sizes, k.bits == 16, slots, multiprocessors, **options)
            given: tuple[Any, ...] = (query[0], new or 0)
        else:
            shape = direct_attention.geometry(*sizes, k.name, v.name, slots, multiprocessors, **options)
            given = query if k.quantized else (query[0], 0)
        weights, sums = (self._empty((n,)) for n in attention.scratch(rows, heads.n_head, cache.d_v, slots))
        read = (*given, cache.keys, cache.values, positions)
        seen = (*read, weights, sums, rows, chunks, slots, window, heads.scale)
        self._launch(shape.attend, shape.attend_grid, shape.attend_block, seen, weights, sums)
        return Attended(
            "combine",
            weights,
            sums,
            gate=gate,
            positions=positions,
            geometry=shape,
            slots=slots,
            window=window,
            columns=heads.n_head * cache.d_v,
        )

    def _attend_wide(
        self,
        heads: Heads[Tensor],
        query: tuple[Tensor, ...],
        cache: LayerCache[Tensor],
        positions: Tensor,
        window: int,
        gate: Tensor | None,
    ) -> Tensor:
        """The same for more rows than a step has, all of which are in the cache; finished."""
        rows, k, v = positions.size, cache.k_type, cache.v_type
        sizes = rows, heads.n_head, heads.n_head_kv, cache.d_k, cache.d_v, k.name
        out = self._empty((rows, heads.n_head * cache.d_v))
        tiled, shared = tiled_attention.takes(k, v, cache.d_k, cache.d_v), self.device.shared_memory
        if tiled and tiled_attention.fills(*sizes, self.device.multiprocessors, shared):
            kernel, grid, block = tiled_attention.geometry(*sizes, v.name, heads.gated, shared)
            given: tuple[Any, ...] = query if k.quantized else (query[0], 0)
            places = *given, cache.keys, cache.values, positions, gate or 0, out
            self._launch(kernel, grid, block, (*places, rows, cache.keys.shape[1], window, heads.scale), out)
            return out
        # As many as a step at a time.  The last begin where they fit, so that one kernel is for all.
        for first in (*range(0, rows - STEP_ROWS, STEP_ROWS), rows - STEP_ROWS):
            part = slice(first, first + STEP_ROWS)
            of_part = tuple(x[part] for x in query), None, cache, positions[part], window, gate[part] if gate else None
            self._join(self._attend(heads, *of_part), out[part])
        return out

    def remember(
        self,
        heads: Heads[Tensor],
        k: Tensor,
        v: Tensor,
        cache: LayerCache[Tensor],
        batch: Pass[Tensor],
        table: Tensor,
    ) -> None:
        """What ``attention`` does with k and v: bias, normalization, rotation, and into the cache at their positions."""
        self._rope(heads, None, k, v, cache, batch.positions, table)

    def _rope(
        self,
        heads: Heads[Tensor],
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache[Tensor],
        positions: Tensor,
        table: Tensor,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Keys and values, if there are any, to the cache; the queries as attention takes them, and what has been stored."""
        rows, d_k, d_v, kinds = positions.size, cache.d_k, cache.d_v, (cache.k_type, cache.v_type)
        n_head, n_head_kv = heads.n_head if q else 0, heads.n_head_kv if k else 0
        query: tuple[Tensor, ...]
        if kinds[0].quantized:
            query = self._empty((rows, n_head, d_k // 4), np.uint32), self._empty((rows, n_head, d_k // 32))
        else:
            query = (self._empty((rows, n_head, d_k)),)
        noted = rope.notes(*kinds) and n_head_kv > 0 and rows <= STEP_ROWS
        new = self._empty((rows, n_head_kv, d_k + d_v), np.uint32) if noted else None
        biased, normed = heads.biases is not None, heads.q_norm is not None
        how = heads.neox, normed, biased, True, heads.gated, heads.v_normed, rows <= STEP_ROWS
        kernel = rope.rope(*(kind.name for kind in kinds), d_k, d_v, 2 * table.shape[2], *how)
        given = (
            *(q or 0, k or 0, v or 0),
            *(heads.n_head * d_k * (2 if heads.gated else 1), heads.n_head_kv * d_k, heads.n_head_kv * d_v),
            *(positions, table, heads.q_norm or 0, heads.k_norm or 0, *(heads.biases or (0, 0, 0))),
            *(heads.eps, heads.scale, n_head, cache.keys.shape[1]),
            *(query[0], query[-1], new or 0, cache.keys, cache.values),
        )
        written = [*(query if n_head else ()), *([new] if new else [])]
        self._launch(kernel, rope.grid(rows, n_head, n_head_kv), rope.BLOCK, given, *written)
        return query, new

    def delta_net(
        self,
        net: DeltaNet[Tensor],
        x: Tensor,
        gates: Sequence[Tensor],
        memory: RecurrentLayer[Tensor],
        batch: Pass[Tensor],
    ) -> Tensor:
        """The gated delta rule over x [rows, n_channels]: float32 [rows, n_v * state_size].

        gates: alpha and beta, each [rows, n_v], or both as one [rows, 2 n_v].
        """
        rows, positions, d, stride = batch.rows, batch.positions, net.state_size, gates[0].shape[1]
        length, slots = memory.conv.shape[0], memory.states.shape[0]
        beta = gates[1] if len(gates) == 2 else gates[0].address + 4 * net.n_v
        out = self._empty((rows, net.n_v * d))
        given = (x, gates[0], beta, stride, net.conv1d, net.a, net.dt, positions, net.eps, 1.0 / d**0.5, net.n_k)
        if rows > STEP_ROWS:
            padded = wide_delta_net.padded(rows)
            y, shares = self._empty(x.shape), self._empty((net.n_v, padded, 2))
            arguments: tuple[Any, ...] = (*given, net.n_v, rows, padded, length, memory.conv, y, shares)
            grid = wide_delta_net.convolve_grid(net.n_k, net.n_v, rows)
            self._launch(wide_delta_net.convolve(d, net.n_conv), grid, 256, arguments, y, shares)
            arguments = (y, shares, positions, net.n_k, rows, padded, slots, memory.states, out)
            kernel = wide_delta_net.delta_rule(d)
            self._launch(kernel, delta_net.grid(d, net.n_v), delta_net.THREADS, arguments, out)
            last = slice(max(0, rows - length), rows)
            self.keep_rows(memory.conv, x[last], batch.part(last))
            return out
        arguments = (*given, rows, length, slots, memory.conv, memory.states, out)
        kernel = delta_net.delta_net(d, net.n_conv, matmul.compiled_rows(rows))
        self._launch(kernel, delta_net.grid(d, net.n_v), delta_net.THREADS, arguments, out)
        return out

    def gated_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Deferred:
        """x [rows, n], each run of weight.size normalized, times silu(gate)."""
        return Deferred("gated_norm", x, weight, eps, gate)

    def experts(
        self,
        experts: Experts[Tensor, DeviceWeight],
        residual: Tensor | None,
        x: Tensor | Deferred,
        router_x: Tensor | Deferred | None = None,
    ) -> Tensor:
        """The mixture of experts of x [rows, n_embd], added to the residual if there is one; router_x: what the router sees,
        if not x."""
        check_activation(experts.activation)
        return Mixture(self, experts, residual, x, router_x).record()

    def per_layer_inputs(self, m: Tensor, e: Tensor, weight: Tensor, scale: float, eps: float) -> Tensor:
        """What each layer is told of the token itself: m, e [rows, layers * n], weight [n] to [layers, rows, n]
        (``engine/cuda/per_layer.py``)."""
        (rows, columns), n = m.shape, weight.size
        out = self._empty((columns // n, rows, n))
        arguments = (m, e, weight, scale, eps, out)
        self._launch(per_layer.per_layer_inputs(n), (columns // n, rows), 256, arguments, out)
        return out

    def plain(self, x: Tensor | Deferred) -> Tensor:
        """x as an array that may be used more than once."""
        return self._plain(x)

    def keep_rows(self, ring: Tensor, x: Tensor | Deferred, batch: Pass[Tensor]) -> None:
        """ring[positions % length] = x: ring [length, n], x [rows, n]."""
        x, (rows, n) = self._plain(x), x.shape
        arguments = (ring, x, ring.shape[0], batch.positions, rows, n)
        self._launch(mtp.keep_rows(), (-(-n // 256), rows), 256, arguments)

    def beside(self, e: Tensor, hiddens: Tensor, batch: Pass[Tensor]) -> Tensor:
        """e [rows, n] beside the row of the ring ``hiddens`` [length, m] for the position before: float32 [rows, n + m]."""
        (rows, n), (length, m) = e.shape, hiddens.shape
        out = self._empty((rows, n + m))
        arguments = (e, hiddens, length, batch.positions, n, m, out)
        self._launch(mtp.beside(), (-(-(n + m) // 256), rows), 256, arguments, out)
        return out

    def mtp_input(
        self, e: Tensor, e_norm: Tensor, hiddens: Tensor, h_norm: Tensor, batch: Pass[Tensor], eps: float
    ) -> Tensor:
        """Normalized e [rows, n] beside the normalized row of the ring ``hiddens`` for the position before, or zeros where
        there is none: float32 [rows, 2 n]."""
        rows, n = e.shape
        out = self._empty((rows, 2 * n))
        arguments = (e, e_norm, hiddens, hiddens.shape[0], h_norm, batch.positions, eps, n, out)
        self._launch(mtp.mtp_input(), (2, rows), 256, arguments, out)
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Deferred:
        """silu(gate) * up."""
        return Deferred("swiglu", gate, up)

    def geglu(self, gate: Tensor, up: Tensor) -> Deferred:
        """gelu(gate) * up."""
        return Deferred("geglu", gate, up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in place; returns x."""
        self._launch(softcap.softcap(), (-(-x.size // 256),), 256, (x, cap, x.size), x)
        return x
