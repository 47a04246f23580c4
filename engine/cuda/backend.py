"""The operations that forward passes are written against, on a GPU.

A forward pass is recorded once per number of rows: the operations below allocate their results and record the launches with
their arguments.  The recording becomes a CUDA graph, and every later pass with the same number of rows is one launch of it.
So tokens and positions are read from device memory, and nothing here may depend on their values.

Three kinds of results are deferred until they are used: a normalization, a gate, and the joining of attention's chunks.  They
usually feed a matrix product, which reads int8, so one kernel computes and quantizes them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch, Matrix, Role
from engine.cache.copies import Copies
from engine.cache.kv import AttentionCache
from engine.cache.latent import LatentCache
from engine.cache.mamba import MambaCache
from engine.cache.pages import PagedMemory
from engine.cache.recurrent import SEGMENT, RecurrentCache
from engine.cache.short_conv import ShortConvCache
from engine.compile.jobs import Job
from engine.cuda import (
    add,
    bandwidth,
    copy_rows,
    delta_inputs,
    delta_net,
    delta_steps,
    embed,
    glu,
    kda,
    mamba,
    mtp,
    observe,
    per_layer,
    rms_norm,
    sample,
    short_conv,
    softcap,
    taps,
    wide_delta_net,
)
from engine.cuda.altup_operations import AltUpOperations
from engine.cuda.attention import attend as attention
from engine.cuda.attention import latent_launches, launches
from engine.cuda.compressed_operations import CompressedOperations
from engine.cuda.exchange import PinnedExchange
from engine.cuda.gather import PEERS
from engine.cuda.products import dense, matmul, warpgroup_chain, warpgroup_matmul
from engine.cuda.products.mixture import MixtureLaunches
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.crossing import DeviceCrossing
from engine.cuda.runtime.device import Device, Graph, Mark, allocated_bytes
from engine.cuda.runtime.downloads import Downloads
from engine.cuda.runtime.gathering import PacketGathering
from engine.cuda.runtime.jobs import gpu_job
from engine.cuda.runtime.meeting import MeetingGraph
from engine.cuda.runtime.memory import PersistentMemory
from engine.cuda.runtime.occupant import Occupant
from engine.cuda.runtime.plans import Plans, decode_size, logits_of_prompts, padded, rows_of
from engine.cuda.runtime.recorder import Added, Recorder
from engine.cuda.runtime.split import RowCopies, SplitPlan
from engine.cuda.runtime.tensor import Argument, DeviceWeight, Launch, Plan, Tensor
from engine.cuda.runtime.values import Centered, Deferred, Gated, GatedNormalized, Normalized, plain
from engine.cuda.runtime.weight_stream import STAGING, DeviceWeightStream, can_be_streamed
from engine.cuda.runtime.wide_gathering import WideGathering
from engine.gguf.pages import give_back
from engine.limits import DECODE_ANSWERS, DECODE_ROWS, MOST_TOGETHER
from engine.ops.activation import Activation
from engine.ops.delta_net import DeltaNet
from engine.ops.device import DeviceMemory, DeviceOperations
from engine.ops.executor import Forward
from engine.ops.experts import ChosenExperts, Experts
from engine.ops.heads import Heads
from engine.ops.kda import KDA
from engine.ops.latent import Latent
from engine.ops.mamba import Mamba
from engine.ops.memory import Progress
from engine.ops.model import AnyModel, Recordable
from engine.ops.observation import Observation, Observer
from engine.ops.operations import Operations
from engine.ops.weight import Weight

BATCH_SIZE = 1024
"""The default number of rows of a pass that reads a prompt."""

WIDE = (8, 0)
"""The lowest compute capability for wide kernels, which compute and copy at the same time."""

MANY_ANSWERS = 96
"""The number of answers from which a pass of wide products takes less time than passes of narrow ones without warpgroups: a
block of such a product computes about 128 columns, whether they are used or not."""

DECODE_SIZES = (DECODE_ROWS, 8, 4, 2, 1)
"""Numbers of rows of decode passes that together use every kernel."""

WIDE_DECODE_SIZES = (DECODE_ANSWERS, 96, 64, 32)
"""Numbers of rows of decode passes of more answers than have drafts."""

FEW_ROWS = 128
"""Prompts of fewer tokens are read by narrow kernels: a block of a wide product computes about as many columns, whether they
are used or not."""


class Backend(CompressedOperations, AltUpOperations, Operations[Tensor, Tensor | Deferred, DeviceWeight]):
    """Operations on one GPU."""

    name = "cuda"
    splits = True
    decode_rows = DECODE_ROWS
    """The most rows of an answer in a decode batch: a constant of the kernels that accept drafts."""
    drafted_rows = DECODE_ANSWERS
    """The most rows of a decode batch with drafts."""
    decode_answers = DECODE_ANSWERS
    """The most answers of a decode batch: a constant of the kernels that lay rows out."""

    def __init__(self, index: int = 0, device: Device | None = None, max_rows: int = 0) -> None:
        """device: the device of another backend, to share its queue; max_rows: the most rows of a pass that reads a prompt,
        for which memory is reserved, 0: ``BATCH_SIZE``.  Below compute capability 8.0 it is at most that of the narrow
        kernels, 16.  Raises DeviceError if the GPU cannot be used."""
        self.device = device or Device(index)
        self.n_threads = 0
        self.max_rows = max_rows or BATCH_SIZE
        if self.device.compute_capability < WIDE:
            self.max_rows = min(self.max_rows, NARROW_ROWS)
            self.drafted_rows = self.decode_answers = NARROW_ROWS
        self.recorder = Recorder(self.device)
        self.plans = Plans(self.device, self.recorder)
        self._memory = PersistentMemory(self.device)
        self._downloads = Downloads(self.device)
        #: The tensors of files that are being loaded.
        self._mapped: list[np.ndarray] = []
        #: The groups of rows of products of groups, by their number.
        self._groups: dict[int, Tensor] = {}
        #: Who has started the latest decode pass outside of ``run`` and may still need what it left in memory.
        self._occupant: Occupant | None = None
        self._observer: Observer[Tensor] | None = None
        #: The kernels that ``jobs`` has found, for ``warm_up``.
        self._needed: dict[Recordable[Tensor], list[Specialization]] = {}
        #: The prefill pass that has begun last: its memory is in use until it has ended.
        self._split: SplitPlan | None = None
        self._copies = RowCopies(self.device)
        #: The pass whose rows were last written to inputs, by the address of their tokens.
        self._written: dict[int, Batch[np.ndarray]] = {}
        self._inputs, self._prefill_inputs = self.inputs(), self.inputs()
        self.tokens, self.positions, self.sequences = (
            self._inputs.tokens,
            self._inputs.positions,
            self._inputs.sequences,
        )

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def owners(self) -> tuple["Backend"]:
        return (self,)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The only device of its passes."""
        return (self.device,)

    @property
    def label(self) -> str:
        return f"cuda:{self.device.info.index} {self.device.info.name}"

    @property
    def gpu_name(self) -> str:
        return self.device.info.name

    def device_memory(self) -> DeviceMemory | None:
        return DeviceMemory(self.device.allocated, self._memory.weight_bytes, self.device.free_memory())

    def bandwidth(self) -> float:
        return bandwidth.device_bandwidth(self.device)

    def shares_memory_with(self, other: DeviceOperations) -> bool:
        """Whether the other backend uses the same device object, and so the same memory and queue."""
        return isinstance(other, Backend) and other.device is self.device

    def can_reach(self, other: DeviceOperations) -> bool:
        """Whether the other backend computes on a GPU."""
        return isinstance(other, Backend)

    def reach(self, other: DeviceOperations) -> None:
        assert isinstance(other, Backend)
        self.device.reach(other.device)

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        return self._memory.free(weights)

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        partials = attention.partials(n_ctx, 0)
        rows = attention.rows_at_once(self.decode_answers, n_head, d_v, partials, True)
        return 4 * sum(attention.scratch(rows, n_head, d_v, partials))

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        return self.scratch_bytes(n_head, rank, n_ctx)

    def product_bytes(self, rows: int, columns: int) -> int:
        device = self.device
        if rows <= NARROW_ROWS or not warpgroup_chain.serves(device.compute_capability, device.shared_memory):
            return 0
        return warpgroup_matmul.most_chain_bytes(rows, columns, device.multiprocessors)

    def upload(self, array: np.ndarray) -> Tensor:
        return self._memory.upload(array)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return self._memory.zeros(shape, dtype)

    def store(self, target: Tensor, first: int, rows: np.ndarray) -> None:
        self._memory.store(target, first, rows)

    def download(self, array: Tensor, out: np.ndarray | None = None) -> np.ndarray:
        return self._memory.download(array, out)

    def begin_download(self, pairs: Sequence[tuple[Tensor, np.ndarray]]) -> Sequence[Copies]:
        return [self._downloads.start(pairs)]

    def copy_in(self, target: Tensor, source: np.ndarray, axis: int, first: int, end: int) -> None:
        self._memory.copy_in(target, source, axis, first, end)

    def copy_out(self, source: Tensor, target: np.ndarray, axis: int, first: int, end: int) -> None:
        self._memory.copy_out(source, target, axis, first, end)

    def read_entries(self, source: Tensor, axis: int, first: int, end: int) -> np.ndarray:
        return self._memory.read_entries(source, axis, first, end)

    def write_entries(self, target: Tensor, axis: int, first: int, values: np.ndarray) -> None:
        self._memory.write_entries(target, axis, first, values)

    def host_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Pinned memory.  Raises DeviceError if the system cannot provide it."""
        return self.device.pinned(shape, dtype, "buffers for a divided model", zeroed=False)[0]

    def host_side(self) -> None:
        """None: it is a device."""

    def exchange(self, borders: int, rows: int, width: int, n_used: int = 0) -> PinnedExchange:
        return PinnedExchange(self.recorder, borders, rows, width, n_used)

    def crossing(self, source: DeviceOperations, n_bytes: int) -> DeviceCrossing:
        assert isinstance(source, Backend)
        return DeviceCrossing(source.device, self.device, n_bytes)

    def weight(self, weight: Weight, host: bool = False) -> DeviceWeight:
        """A weight matrix that the operations can read, copied to the device and arranged in records.  Raises DeviceError if
        memory runs out.

        host: keep it in host memory that the device reads, for a table of which a pass reads only a few rows.
        """
        return self._memory.weight(weight, host)

    def weight_bytes(self, weight: Weight) -> int:
        return self._memory.weight_bytes_of(weight)

    def array_bytes(self, n_bytes: int) -> int:
        return allocated_bytes(n_bytes)

    def weight_stream(self, parts: Sequence[Sequence[Matrix]]) -> DeviceWeightStream | None:
        """None below compute capability 8.0, which has no wide kernels, and for a format whose rows are not in whole
        records."""
        if self.device.compute_capability < WIDE or not all(
            can_be_streamed(matrix) for part in parts for matrix in part
        ):
            return None
        return DeviceWeightStream(self.device, parts)

    def stream_bytes(self, parts: Sequence[int]) -> int:
        if self.device.compute_capability < WIDE or not parts:
            return 0
        return 2 * max(parts) + min(STAGING, max(parts))

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        """Let ``weight`` return before its matrix is on the device, until ``loaded``; both call ``progress("load", done,
        total)``."""
        self._mapped += tensors
        self._memory.begin(sum(tensor.nbytes for tensor in tensors), progress)

    def load_jobs(self) -> list[Job]:
        """None: the kernels that weights need are compiled when they are first used."""
        return []

    def loaded(self) -> None:
        self._memory.loaded()
        for tensor in self._mapped:
            give_back(tensor)
        self._mapped.clear()

    def stop_loading(self) -> None:
        self._memory.stop()
        self._mapped.clear()

    def buffer_bytes(self) -> int:
        return self.recorder.n_bytes

    def rest(self, cache: PagedMemory) -> None:
        """Do nothing: what a GPU has in its memory is no memory of the system."""

    def resume(self, cache: PagedMemory) -> None:
        """Do nothing."""

    def inputs(self) -> Batch[Tensor]:
        """Memory for the tokens, positions and slots of passes that run between the steps of an answer, int32 [rows] each.
        The steps themselves use ``tokens`` and ``positions``."""
        rows = max(self.max_rows, self.decode_answers)
        tokens, positions, sequences = (self.zeros((rows,), np.int32) for _ in range(3))
        runs = self.zeros((2, MOST_TOGETHER + 1), np.int32)
        return Batch(tokens, positions, sequences, runs=runs, ends=self.zeros((MOST_TOGETHER,), np.int32))

    # --- passes ------------------------------------------------------------------------------------------------

    def run(
        self,
        forward: Forward[Tensor],
        batch: Batch[np.ndarray],
        n_logits: int,
        inputs: Batch[Tensor] | None = None,
        most: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Run ``forward(batch, n_logits)`` and return its result, float32 [n_logits, n_vocab], or None for no logits.  The
        first call with a number of rows records the pass.  A mixed decode pass, of which the logits of all rows are
        computed, is padded with copies of its last row.

        inputs: the memory for tokens, positions and slots; None: the backend's own.
        most: the number of rows of the model's largest prefill pass, 0: ``max_rows``.
        out: the array that the result is written to, None: a new one.
        """
        passing = self._prepared(forward, batch, n_logits, inputs, most, True)
        passing.advance(passing.pieces)
        return passing.logits(True, out)

    def split(
        self, forward: Forward[Tensor], batch: Batch[np.ndarray], n_logits: int, most: int = 0, at_once: bool = False
    ) -> SplitPlan:
        """The pass that ``run`` runs, to be started in pieces; only prefill passes have more than one.  at_once: whether to
        start a pass that has to be recorded meanwhile."""
        copies = self._copies if batch.role is Role.PREFILL else None
        return self._prepared(forward, batch, n_logits, None, most, at_once, copies)

    def mark(self) -> Mark:
        return self.device.mark()

    def _prepared(
        self,
        forward: Forward[Tensor],
        batch: Batch[np.ndarray],
        n_logits: int,
        inputs: Batch[Tensor] | None,
        most: int,
        at_once: bool,
        copies: RowCopies | None = None,
    ) -> SplitPlan:
        """A pass whose inputs are in place; at_once: see :meth:`split`; copies: see :class:`SplitPlan`."""
        prefill = batch.role is Role.PREFILL
        if not prefill and self._occupant is not None:
            self._occupant.leave(inputs is None)
        if prefill and self._split is not None:
            self._split.finish()
        rows, asked = batch.rows, n_logits
        if batch.mixed and prefill:
            asked = logits_of_prompts(n_logits)
        elif batch.mixed:
            rows = asked = decode_size(batch.rows)
        elif prefill:
            asked = max(1, n_logits)  # so that one recording serves all parts of a prompt
        place = self._place(batch.role, inputs)
        # A stage after another one finds the rows of the pass in place.
        if self._written.get(place.tokens.address) is not batch:
            pairs = [
                (place.tokens, batch.tokens),
                (place.positions, batch.positions),
                (place.sequences, batch.sequences),
            ]
            if batch.mixed and prefill:
                assert batch.runs is not None and batch.ends is not None
                assert place.runs is not None and place.ends is not None
                ends = np.pad(batch.ends, (0, MOST_TOGETHER - batch.ends.size), constant_values=1)
                self.device.write(place.runs.address, batch.runs)
                self.device.write(place.ends.address, ends)
            for target, numbers in pairs:
                more = rows - batch.rows
                self.device.write(target.address, np.pad(numbers, (0, more), "edge") if more else numbers)
            self._written[place.tokens.address] = batch
        most = most or self.max_rows
        plan, is_started = self.plans.prepare(forward, place, rows, asked, most, batch.mixed, batch.role, at_once)
        wanted: list[Tensor] = []
        if plan.result is not None and n_logits:
            if batch.ends is not None and not prefill:  # a decode pass returns the logits of all rows
                wanted = [plan.result[end - 1 : end] for end in batch.ends.tolist()]
            else:
                wanted = [plan.result[: batch.rows if batch.mixed and not prefill else n_logits]]
        passing = SplitPlan(plan, self, wanted, not prefill, is_started, copies)
        if prefill:
            self._split = passing
        return passing

    def _place(self, role: Role, inputs: Batch[Tensor] | None = None) -> Batch[Tensor]:
        """The memory of the inputs of a pass; None: the backend's own for its role, since decode passes may run between the
        launches of a prefill pass."""
        return inputs or (self._prefill_inputs if role is Role.PREFILL else self._inputs)

    def next_rows(self, left: int, most: int, beside: bool = False) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read.

        beside: whether steps of answers run between its pieces, which should not wait for a new recording.  Then wide
        passes have few sizes.  Odd tokens come first: the logits of a prompt are awaited while steps run, whose memory
        passes of few rows share.
        """
        rows = min(left, most)
        if rows < FEW_ROWS:
            return min(rows, NARROW_ROWS)
        if not beside:
            return rows
        odd = left % FEW_ROWS
        if odd:
            return min(odd, NARROW_ROWS)
        # Eighths of the largest pass in whole units, so that no odd tokens remain.
        unit = max(1, most // FEW_ROWS // 8) * FEW_ROWS
        return rows - rows % unit or rows

    def many_answers(self, weights: Mapping[str, int]) -> int:
        """More than have drafts where warpgroups multiply most of the weights, since their products have narrow blocks."""
        device = self.device.compute_capability, self.device.shared_memory
        taken = sum(n for name, n in weights.items() if warpgroup_chain.takes(name, *device))
        return NARROW_ROWS + 1 if 2 * taken > sum(weights.values()) else MANY_ANSWERS

    def together(self, others: Sequence["Backend"]) -> AbstractContextManager[None]:
        return self.recorder.together([other.recorder for other in others])

    def meet(self) -> None:
        self.recorder.meet()

    def gathering(self, owners: Sequence["Backend"]) -> WideGathering | None:
        """By packets, for as many owners as a kernel can give to."""
        recorders = [owner.recorder for owner in owners]
        return WideGathering(PacketGathering(recorders), recorders) if len(owners) <= PEERS + 1 else None

    def own_rows(self, batch: Batch[Tensor]) -> Batch[Tensor]:
        out = self.recorder.empty((3, batch.rows), np.int32)
        arguments = batch.tokens, batch.positions, batch.sequences, batch.rows, out
        self.recorder.launch(copy_rows.copy_rows(), (1,), 256, arguments, rows=out)
        # Attention reads them before it waits for the kernel before it.
        self.recorder.finish()
        tokens, positions, sequences = (out[i : i + 1].reshape(batch.rows) for i in range(3))
        return replace(batch, tokens=tokens, positions=positions, sequences=sequences)

    def padded_rows(self, rows: int, mixed: bool) -> int:
        """``decode_size`` if the pass is mixed, else ``rows``."""
        return decode_size(rows) if mixed else rows

    def plan(
        self,
        forward: Forward[Tensor],
        rows: int,
        n_logits: int,
        inputs: Batch[Tensor] | None = None,
        mixed: bool = False,
        role: Role = Role.DECODE,
        most: int = 0,
    ) -> Plan:
        """The recorded pass of ``rows`` tokens that returns the logits of the last ``n_logits``; inputs: the memory of its
        tokens, positions and slots, None: the backend's own; mixed, role: see :class:`engine.arrays.Batch`; most: the number
        of rows of the largest prefill pass, 0: ``max_rows``."""
        place = self._place(role, inputs)
        return self.plans.plan(forward, place, rows, n_logits, most or self.max_rows, mixed, role)

    def plan_maxima(self, forward: Forward[Tensor], rows: int, n_logits: int, mixed: bool = False) -> None:
        """None: the logits are where tokens are chosen."""

    def jobs(self, model: Recordable[Tensor]) -> list[Job]:
        return [gpu_job(kernel, self.device.compute_capability) for kernel in self._kernels(model)]

    def _kernels(self, model: Recordable[Tensor]) -> list[Specialization]:
        if model in self._needed:
            return self._needed[model]
        kernels: dict[Specialization, None] = {}
        most = min(model.prompt_rows, model.cache.n_ctx)
        # Attention may use another kernel for more rows: the least and the most rows cover both.
        prefill = [(rows, 1, Role.PREFILL) for rows in (most, FEW_ROWS) if most >= FEW_ROWS]
        several = prefill if model.cache.n_sequences > 1 and model.reads_together else []
        # A prompt needs the logits of the last row, a step with drafts those of all rows.
        decode = [(rows, n, Role.DECODE) for rows in DECODE_SIZES for n in {1, rows}]
        for rows, n_logits, role in (*prefill, *decode):  # the most memory first
            batch = self._place(role).part(slice(rows))
            plan = self.recorder.record(partial(model.compute_kinds, batch, n_logits), role)
            kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))
        for rows, n_logits in ((rows, logits_of_prompts(n)) for rows, _, _ in several for n in (MOST_TOGETHER, 1)):
            batch = rows_of(self._prefill_inputs, rows, n_logits, True, Role.PREFILL)
            plan = self.recorder.record(partial(model.compute_kinds, batch, n_logits), Role.PREFILL)
            kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))
        if model.cache.n_sequences > 1:
            wide = decode_size(max(min(model.cache.n_sequences, model.decode_answers), model.drafted_rows))
            for rows in (*(rows for rows in WIDE_DECODE_SIZES if rows <= wide), *DECODE_SIZES[:-1]):
                batch = replace(self._inputs.part(slice(rows)), mixed=True)
                plan = self.record(partial(model.compute_kinds, batch, rows))
                kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))
        return self._needed.setdefault(model, list(kernels))

    def warm_up(self, model: AnyModel[Tensor]) -> None:
        """Load every kernel that a model's passes use, and record the pass of one token; kernels that are not compiled yet
        are compiled."""
        for kernel in self._kernels(model):
            self.device.load(kernel)
        self.plan(model.compute, 1, 1)
        rows = most = model.prompt_rows
        if FEW_ROWS <= most <= model.cache.n_ctx:
            self.plan(model.compute, rows, 1, role=Role.PREFILL, most=most)  # what long prompts consist of
            if model.cache.n_sequences > 1 and model.reads_together:
                self.plan(model.compute, rows, logits_of_prompts(1), mixed=True, role=Role.PREFILL, most=most)
            while model.cache.n_sequences > 1 and (rows := padded(rows) // 2) >= FEW_ROWS:
                self.plan(model.compute, rows, 1, role=Role.PREFILL, most=most)  # and, beside answers, their ends

    def pass_jobs(self, forward: Forward[Tensor], most: int = 1) -> list[Job]:
        return [gpu_job(kernel, self.device.compute_capability) for kernel in self._kernels_of(forward, most)]

    def load_pass(self, forward: Forward[Tensor], most: int = 1) -> None:
        """Load the kernels; no pass is run."""
        for kernel in self._kernels_of(forward, most):
            self.device.load(kernel)

    def _kernels_of(self, forward: Forward[Tensor], most: int) -> list[Specialization]:
        sizes = [rows for rows in DECODE_SIZES if rows <= most]
        plans = [self.record(partial(forward, self._inputs.part(slice(rows)), 1)) for rows in sizes]
        return list(dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches))

    def record(self, forward: Callable[[], Tensor | None]) -> Plan:
        """Record the launches of a decode pass without starting any."""
        return self.recorder.record(forward)

    def capture(self, plan: Plan) -> None:
        """Compile the kernels of a plan and capture its graph."""
        self.plans.capture(plan)

    def occupy(self, occupant: Occupant) -> None:
        """Note who starts the next decode pass (``start``) and will need what it leaves in memory.  Whoever started the one
        before is told, because its results and rows will be overwritten."""
        if self._occupant is not None and self._occupant is not occupant:
            self._occupant.leave(True)
        self._occupant = occupant

    def include(self, plan: Plan, last: Callable[[], None] | None = None) -> None:
        """Launch the kernels of a plan in a graph that its device captures.  last: launches others on this device, which use
        the result; only what follows them waits for the other devices of the plan."""
        self.plans.include(plan, last)

    def whole(self, plan: Plan, graph: Graph) -> Graph | MeetingGraph:
        """A graph that includes a plan, as what one call launches on all devices of the plan."""
        return self.plans.whole(plan, graph)

    def start(self, plan: Plan) -> None:
        """Start the kernels of a plan one by one; with an observer, each waits for the one before it."""
        observer = self._observer

        def tell(launch: Launch) -> None:
            if observer is not None:
                kernel, values = launch.kernel, dict(zip(launch.names, launch.outputs, strict=True))
                observer(Observation(kernel.kernel.name, kernel.name, values))

        self.plans.start(plan, tell if observer is not None else None)

    def expect_drafts(self) -> None:
        """Do nothing: passes with drafts use the same kernels as others."""

    def observe(self, observer: Observer[Tensor] | None) -> None:
        self._observer = observer

    # --- operations --------------------------------------------------------------------------------------------

    def embed(self, table: DeviceWeight, tokens: Tensor, scale: float = 1.0) -> Tensor:
        rows = tokens.size
        out = self.recorder.empty((rows, table.columns))
        entry = table.format
        if entry.quantized:
            blocks = table.columns // entry.block
            arguments = (table, tokens, blocks, scale, out)
            grid = (-(-blocks // embed.WARPS), rows)
            self.recorder.launch(embed.embed_quantized(entry.name), grid, 32 * embed.WARPS, arguments, result=out)
        else:
            grid = (-(-table.columns // 256), rows)
            self.recorder.launch(
                embed.embed_float(entry.name), grid, 256, (table, tokens, table.columns, scale, out), result=out
            )
        return out

    def matmul(self, x: Tensor | Deferred, *weights: DeviceWeight) -> list[Tensor]:
        return dense.matmul(self.recorder, x, weights)

    def matmul_add(
        self, residual: Tensor, x: Tensor | Deferred, weight: DeviceWeight, bias: Tensor | None = None
    ) -> Tensor:
        if bias is None or dense.can_add_bias(weight, x.shape[0]):
            return dense.matmul(self.recorder, x, (weight,), residual, bias)[0]
        (y,) = self.matmul(x, weight)
        return self.add(residual, self.add(y, bias))

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        out = self.recorder.empty(x.shape)
        kernel, arguments = add.add(*((True,) if scale != 1.0 else ())), (x, y, x.size, y.size, scale, out)
        self.recorder.launch(kernel, (-(-x.size // 256),), 256, arguments, result=out)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        out = self.recorder.empty(x.shape)
        self.recorder.launch(add.scale(), (-(-x.size // 256),), 256, (x, factor, x.size, out), result=out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | Deferred:
        return Normalized(x, weight, eps)

    def grouped_norm(self, x: Tensor, weight: Tensor, n_group: int, eps: float) -> Tensor:
        (rows, n), out = x.shape, self.recorder.empty(x.shape)
        arguments: tuple[Argument, ...] = (x, weight, eps, n // n_group, out)
        self.recorder.launch(rms_norm.rms_norm_groups(), (n_group, rows), 256, arguments, result=out)
        return out

    def rms_norm_add(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        out = self.recorder.empty(x.shape)
        added = Added(residual, x, weight, eps, scale, out)
        self.recorder.add(rms_norm.rms_norm_add(), (1, x.shape[0]), 256, added)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor | Deferred:
        return Centered(x, weight, bias, eps)

    def attention(
        self,
        heads: Heads[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: AttentionCache[Tensor],
        batch: Batch[Tensor],
        table: Tensor | None,
    ) -> Tensor | Deferred:
        query, new = launches.rotate(self.recorder, heads, q, k, v, cache, batch, table)
        gate, places = q if heads.gated else None, cache.places(batch)
        if batch.rows > NARROW_ROWS:
            return launches.attend_wide(self.recorder, heads, query, cache, batch, places, cache.window, gate)
        return launches.attend(self.recorder, heads, query, new, cache, batch, places, cache.window, gate)

    def attend_past(
        self,
        heads: Heads[Tensor],
        q: Tensor,
        cache: AttentionCache[Tensor],
        batch: Batch[Tensor],
        last: Tensor,
        table: Tensor | None,
        window: int,
        spans: bool = False,
    ) -> Tensor | Deferred:
        query, _ = launches.rotate(self.recorder, heads, q, None, None, cache, batch, table)
        if batch.rows > NARROW_ROWS:
            return launches.attend_wide(self.recorder, heads, query, cache, batch, last, window, None, spans)
        return launches.attend(self.recorder, heads, query, None, cache, batch, last, window, None, spans)

    def remember(
        self,
        heads: Heads[Tensor],
        k: Tensor,
        v: Tensor,
        cache: AttentionCache[Tensor],
        batch: Batch[Tensor],
        table: Tensor | None,
    ) -> None:
        launches.rotate(self.recorder, heads, None, k, v, cache, batch, table)

    def places(self, positions: Tensor, batch: Batch[Tensor], dropped: Tensor) -> Tensor:
        rows, out = batch.rows, self.recorder.empty((batch.rows,), np.int32)
        arguments = positions, batch.sequences, dropped, int(batch.mixed), rows, out
        self.recorder.launch(observe.places(), (-(-rows // observe.THREADS),), observe.THREADS, arguments, result=out)
        # Attention reads them before it waits for the kernel before it.
        self.recorder.finish()
        return out

    def latent_attention(
        self,
        latent: Latent[Tensor, DeviceWeight],
        q: Tensor,
        q_rope: Tensor,
        c: Tensor,
        k_rope: Tensor,
        cache: LatentCache[Tensor],
        batch: Batch[Tensor],
        chosen: Tensor | None = None,
    ) -> Tensor:
        given = q, q_rope, c, k_rope, cache, batch, chosen
        return latent_launches.latent_attention(self.recorder, latent, *given)

    def remember_latent(
        self,
        latent: Latent[Tensor, DeviceWeight],
        c: Tensor,
        k_rope: Tensor,
        cache: LatentCache[Tensor],
        batch: Batch[Tensor],
    ) -> None:
        latent_launches.rotate(self.recorder, latent, None, c, k_rope, cache, batch)

    def delta_net(
        self,
        net: DeltaNet[Tensor],
        x: Tensor,
        gates: Sequence[Tensor],
        memory: RecurrentCache[Tensor],
        batch: Batch[Tensor],
    ) -> Tensor:
        rows, positions, d, stride = batch.rows, batch.positions, net.state_size, gates[0].shape[1]
        length, segments, sequences = memory.conv.shape[1], memory.states.shape[1], batch.sequences
        if rows > NARROW_ROWS and batch.runs is not None:
            sequences = batch.runs
        beta = gates[1] if len(gates) == 2 else gates[0].address + 4 * net.n_v
        out = self.recorder.empty((rows, net.n_v * d))
        vectors, numbers = (net.conv1d, net.a, net.dt), (net.eps, 1.0 / d**0.5, net.n_k)
        given = (x, gates[0], beta, stride, *vectors, positions, sequences, *numbers)
        grid: tuple[int, ...]
        if rows > NARROW_ROWS and not (batch.mixed and batch.role is Role.DECODE):
            several = batch.runs is not None
            padded, kinds = wide_delta_net.padded(rows, several), (True,) if several else ()
            y, shares = self.recorder.empty((padded, x.shape[1])), self.recorder.empty((net.n_v, padded, 2))
            records = self.recorder.empty((net.n_v, padded // SEGMENT, wide_delta_net.RECORD))
            given_lists = memory.keys, memory.decays
            arguments: tuple[Argument, ...]
            arguments = (*given, net.n_v, rows, padded, length, segments, memory.conv, *given_lists, y, shares)
            grid = wide_delta_net.convolve_grid(net.n_k, net.n_v, rows, several)
            kernel = wide_delta_net.convolve(d, net.n_conv, *kinds)
            self.recorder.launch(kernel, grid, 256, arguments, convolved=y, gates=shares)
            arguments = (y, shares, positions, sequences, net.n_k, net.n_v, rows, padded, segments)
            arguments = (*arguments, *given_lists, records)
            grid = wide_delta_net.couple_grid(net.n_k, padded)
            kernel = wide_delta_net.couple(d, net.grouped, *kinds)
            self.recorder.launch(kernel, grid, delta_net.THREADS, arguments, records=records)
            arguments = (y, records, positions, sequences, net.n_k, rows, padded, segments)
            arguments = (*arguments, memory.states, memory.deltas, out)
            kernel = wide_delta_net.delta_rule(d, net.grouped, *kinds)
            grid = delta_net.grid(d, net.n_v, MOST_TOGETHER if several else 1)
            threads = wide_delta_net.RULE_THREADS
            self.recorder.launch(kernel, grid, threads, arguments, result=out)
            last = slice(0 if several else max(0, rows - length), rows)
            self.keep_rows(memory.conv, x[last], batch if several else batch.part(last))
            return out
        lists = memory.keys, memory.deltas, memory.decays
        if batch.mixed:
            shapes = {"vectors": (net.n_k, 2 * d), "values": (net.n_v, d), "records": (net.n_v, delta_inputs.RECORD)}
            found = {name: self.recorder.empty((rows, *shape)) for name, shape in shapes.items()}
            kept = memory.conv, memory.keys, memory.decays
            arguments = (*given, net.n_v, rows, length, segments, *kept, *found.values())
            kernel = delta_inputs.delta_inputs(d, net.n_conv, net.n_v // net.n_k, net.grouped)
            grid = delta_inputs.grid(net.n_k, net.n_v, rows)
            self.recorder.launch(kernel, grid, delta_net.THREADS, arguments, **found)
            arguments = (*found.values(), positions, sequences, net.n_k, rows, segments)
            arguments = (*arguments, memory.states, *lists[:2], out)
            kernel, grid = delta_steps.delta_steps(d, net.grouped), delta_steps.grid(d, net.n_v, rows)
            self.recorder.launch(kernel, grid, delta_net.THREADS, arguments, result=out)
            return out
        arguments = (*given, rows, length, segments, memory.conv, memory.states, *lists, out)
        kernel = delta_net.delta_net(d, net.n_conv, matmul.compiled_rows(rows), net.grouped)
        self.recorder.launch(kernel, delta_net.grid(d, net.n_v), delta_net.THREADS, arguments, result=out)
        return out

    def short_conv(self, weight: Tensor, bcx: Tensor, memory: ShortConvCache[Tensor], batch: Batch[Tensor]) -> Tensor:
        (n, n_taps), length, rows, keeps = weight.shape, memory.inputs.shape[1], batch.rows, memory.has_room(batch.rows)
        y, grid, places = self.recorder.empty((rows, n)), (-(-n // 256), rows), (batch.positions, batch.sequences)
        arguments: tuple[Argument, ...] = (bcx, weight, n, *places, length, memory.inputs, y)
        self.recorder.launch(short_conv.short_conv(n_taps, batch.mixed, keeps), grid, 256, arguments, result=y)
        if not keeps:
            arguments = (bcx, rows, n, *places, length, memory.inputs)
            self.recorder.launch(short_conv.keep_inputs(batch.mixed), grid, 256, arguments)
        return y

    def mamba(
        self, net: Mamba[Tensor], u: Tensor, z: Tensor, memory: MambaCache[Tensor], batch: Batch[Tensor]
    ) -> Tensor:
        rows, width, mixed, keeps = batch.rows, net.width, batch.mixed, memory.has_room(batch.rows)
        y, out = self.recorder.empty((rows, width)), self.recorder.empty((rows, net.d_inner))
        places, sizes = (batch.positions, batch.sequences), (net.n_channels, net.n_head)
        lengths, rings = (memory.inputs.shape[1], memory.tokens.shape[1]), (memory.inputs, memory.tokens)
        grid, segments = (-(-width // 256), rows), memory.states.shape[1]
        arguments: tuple[Argument, ...] = (
            u,
            net.conv,
            net.conv_bias,
            net.dt,
            net.a,
            *sizes,
            *places,
            *lengths,
            *rings,
            y,
        )
        self.recorder.launch(mamba.mamba_conv(net.taps, mixed, keeps), grid, 256, arguments, convolved=y)
        arguments = (
            y,
            z,
            net.skip,
            *places,
            net.d,
            net.n_head,
            net.n_group,
            rows,
            segments,
            memory.tokens,
            memory.states,
            out,
        )
        blocks = mamba.grid(net.d, net.n_head, rows if mixed else 1)
        self.recorder.launch(mamba.mamba_scan(net.n, mixed), blocks, mamba.THREADS, arguments, result=out)
        if not keeps:
            arguments = (u, y, rows, *sizes, *places, *lengths, *rings)
            self.recorder.launch(mamba.keep_tokens(mixed), grid, 256, arguments)
        return out

    def kda(
        self,
        net: KDA[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        b: Tensor,
        memory: MambaCache[Tensor],
        batch: Batch[Tensor],
    ) -> Tensor:
        rows, mixed, keeps, d, inner = batch.rows, batch.mixed, memory.has_room(batch.rows), net.d, net.d_inner
        y, out = self.recorder.empty((rows, inner + net.width)), self.recorder.empty((rows, inner))
        places, segments = (batch.positions, batch.sequences), memory.states.shape[1]
        rings = memory.inputs.shape[1], memory.tokens.shape[1], memory.inputs, memory.tokens
        weights = net.conv, net.a, net.dt, net.eps, 1.0 / d**0.5, net.n_head
        arguments: tuple[Argument, ...] = (q, k, v, f, b, *weights, *places, *rings, y)
        grid: tuple[int, ...] = kda.conv_grid(net.n_head, rows)
        self.recorder.launch(kda.kda_conv(d, net.taps, mixed, keeps), grid, 32 * kda.WARPS, arguments, convolved=y)
        arguments = (y, *places, net.n_head, rows, segments, memory.tokens, memory.states, out)
        grid = kda.grid(d, net.n_head, rows if mixed else 1)
        self.recorder.launch(kda.kda_scan(d, mixed), grid, kda.THREADS, arguments, result=out)
        if not keeps:
            arguments = (q, k, v, y, rows, inner, net.n_head, *places, *rings)
            self.recorder.launch(kda.kda_keep(mixed), (-(-net.width // 256), rows), 256, arguments)
        return out

    def gated_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float, swish: bool = True) -> Tensor | Deferred:
        return GatedNormalized(x, weight, gate, eps, swish)

    def experts(
        self,
        experts: Experts[Tensor, DeviceWeight],
        residual: Tensor | None,
        x: Tensor | Deferred,
        router_x: Tensor | Deferred | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        return MixtureLaunches(self.recorder, experts, residual, x, router_x, tokens).record()

    def choose_experts(
        self, experts: Experts[Tensor, DeviceWeight], x: Tensor | Deferred, tokens: Tensor | None = None
    ) -> ChosenExperts[Tensor]:
        return MixtureLaunches(self.recorder, experts, None, x, None, tokens).choose()

    def sum_experts(
        self, experts: Experts[Tensor, DeviceWeight], x: Tensor | Deferred, ids: Tensor, weights: Tensor
    ) -> Tensor:
        return MixtureLaunches(self.recorder, replace(experts, given=None, shared=None), None, x).sum(ids, weights)

    def activate_experts(self, experts: Experts[Tensor, DeviceWeight], x: Tensor | Deferred, ids: Tensor) -> Tensor:
        return MixtureLaunches(self.recorder, replace(experts, given=None, shared=None), None, x).activate(ids)

    def join_experts(
        self, experts: Experts[Tensor, DeviceWeight], activations: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        rows = ids.shape[0]
        x = activations.reshape(rows, activations.size // rows)  # for its number of rows
        launches = MixtureLaunches(self.recorder, replace(experts, given=None, shared=None), None, x)
        return launches.join(activations, ids, weights)

    def add_gated(self, x: Tensor, y: Tensor, gates: Tensor) -> Tensor:
        (rows, n), out = x.shape, self.recorder.empty(x.shape)
        grid, arguments = (-(-n // 256), rows), (x, y, gates, gates.shape[1], n, out)
        self.recorder.launch(add.add_gated(), grid, 256, arguments, result=out)
        return out

    def per_layer_inputs(self, m: Tensor, e: Tensor, weight: Tensor, scale: float, eps: float) -> Tensor:
        (rows, columns), n = m.shape, weight.size
        out = self.recorder.empty((columns // n, rows, n))
        arguments = (m, e, weight, scale, eps, out)
        self.recorder.launch(per_layer.per_layer_inputs(n), (columns // n, rows), 256, arguments, result=out)
        return out

    def plain(self, x: Tensor | Deferred) -> Tensor:
        return plain(self.recorder, x)

    def keep_rows(self, ring: Tensor, x: Tensor | Deferred, batch: Batch[Tensor]) -> None:
        x, (rows, n) = plain(self.recorder, x), x.shape
        kind = 2 if batch.runs is not None else int(batch.mixed)
        arguments = (ring, x, ring.shape[1], batch.positions, batch.sequences, kind, rows, n)
        self.recorder.launch(mtp.keep_rows(), (-(-n // 256), rows), 256, arguments)

    def _places(self, batch: Batch[Tensor]) -> tuple[Tensor, Tensor, int]:
        """Where a kernel finds the rows of a pass in rings: positions, sequences, and whether each row has its own."""
        return batch.positions, batch.sequences, int(batch.mixed)

    def beside(self, e: Tensor, hiddens: Tensor, batch: Batch[Tensor]) -> Tensor:
        (rows, n), (_, length, m) = e.shape, hiddens.shape
        out = self.recorder.empty((rows, n + m))
        arguments = (e, hiddens, length, *self._places(batch), n, m, out)
        self.recorder.launch(mtp.beside(), (-(-(n + m) // 256), rows), 256, arguments, result=out)
        return out

    def rows_before(self, hiddens: Tensor, batch: Batch[Tensor]) -> Tensor:
        rows, (_, length, n) = batch.rows, hiddens.shape
        out = self.recorder.empty((rows, n))
        arguments = (hiddens, length, *self._places(batch), n, out)
        self.recorder.launch(taps.rows_before(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    def reinterpret(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        return replace(x, dtype=dtype)

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        rows, columns, begin = parts[0].shape[0], sum(part.shape[1] for part in parts), 0
        out = self.recorder.empty((rows, columns))
        for part in parts:
            n = part.shape[1]
            arguments = (part, n, begin, columns, out)
            self.recorder.launch(taps.place_columns(), (-(-n // 256), rows), 256, arguments, result=out)
            begin += n
        return out

    def spread_logits(self, logits: Tensor, index: Tensor) -> Tensor:
        (rows, n), n_vocab = logits.shape, index.size
        out = self.recorder.empty((rows, n_vocab))
        arguments = (logits, n, index, n_vocab, out)
        self.recorder.launch(taps.spread_logits(), (-(-n_vocab // 256), rows), 256, arguments, result=out)
        return out

    def maxima(self, logits: Tensor | Deferred, first: int, groups: int) -> Tensor:
        """The largest logits of ``groups`` groups of columns, as keys uint64 [rows, groups] (``engine/cuda/sample.py``);
        first: the token of the first column."""
        logits = plain(self.recorder, logits)
        rows, n = logits.shape
        out = self.recorder.empty((rows, groups), np.uint64)
        kernel, grid = sample.maxima(groups, sample.WARPS), (groups // sample.WARPS, rows)
        self.recorder.launch(kernel, grid, 32 * sample.WARPS, (logits, n, n, first, out), result=out)
        return out

    def mtp_input(
        self, e: Tensor, e_norm: Tensor, hiddens: Tensor, h_norm: Tensor, batch: Batch[Tensor], eps: float
    ) -> Tensor:
        (rows, n), (_, length, width) = e.shape, hiddens.shape
        streams = width // n
        out = self.recorder.empty((rows * streams, 2 * n))
        arguments = (e, e_norm, hiddens, length, h_norm, *self._places(batch), eps, n, out)
        kernel = mtp.mtp_input(*((streams,) if streams > 1 else ()))
        self.recorder.launch(kernel, (2, rows * streams), 256, arguments, result=out)
        return out

    def activate(self, activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor | Deferred:
        return Gated(gate, up, activation)

    def gate_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        out = self.recorder.empty(x.shape)
        arguments = x, gates, x.size, x.size // gates.size, out
        self.recorder.launch(glu.gate_heads(), (-(-x.size // 256),), 256, arguments, result=out)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        self.recorder.launch(softcap.softcap(), (-(-x.size // 256),), 256, (x, cap, x.size), result=x)
        return x
