"""The operations that forward passes are written against, on the CPU.

Arrays are NumPy arrays.  Every method returns a new array unless documented as "in place"; shapes are [rows, ...].
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.arrays import Matrix as AnyMatrix
from engine.cache.copies import Copies
from engine.cache.pages import PagedMemory
from engine.checks import described
from engine.compile.jobs import Job
from engine.cpu import bandwidth, mapping
from engine.cpu.operations.altup import AltUpOperations
from engine.cpu.operations.attention import AttentionOperations
from engine.cpu.operations.compressed import CompressedOperations
from engine.cpu.operations.delta_net import DeltaNetOperations
from engine.cpu.operations.experts import ExpertOperations
from engine.cpu.operations.kda import KDAOperations
from engine.cpu.operations.latent import LatentOperations
from engine.cpu.operations.mamba import MambaOperations
from engine.cpu.operations.short_conv import ShortConvOperations
from engine.cpu.products.matmul import FEW, SOME
from engine.cpu.products.repack import ROWS, Matrix, Records, arguments_of, empty_records, pieces_of, repack
from engine.cpu.runtime.crossing import HostCrossing
from engine.cpu.runtime.entry import entry_of
from engine.cpu.runtime.plans import Plan, Plans
from engine.cpu.runtime.pool import Slabs, aligned
from engine.cpu.runtime.split import NoMark, WholePass
from engine.cpu.runtime.team import MOST_THREADS, team_jobs
from engine.errors import UsageError
from engine.gguf.pages import give_back
from engine.gguf.reader import HostBuffers, Reader
from engine.limits import DECODE_ANSWERS, DECODE_ROWS
from engine.machine.cores import available_cores
from engine.machine.memory import available_memory
from engine.ops.device import DeviceMemory, DeviceOperations
from engine.ops.exchange import Host
from engine.ops.executor import Forward
from engine.ops.memory import Progress
from engine.ops.model import AnyModel, Recordable
from engine.ops.observation import Observer
from engine.ops.operations import Operations
from engine.ops.weight import Weight

BATCH_SIZE = 128
"""The default number of rows of a pass that reads a prompt; more rows are not faster."""

LISTED_ROWS = 1, FEW, FEW + 1, SOME + 1
"""Numbers of rows whose passes together use every kernel."""


class Backend(
    AttentionOperations,
    LatentOperations,
    DeltaNetOperations,
    ShortConvOperations,
    MambaOperations,
    KDAOperations,
    CompressedOperations,
    AltUpOperations,
    ExpertOperations,
    Operations[np.ndarray, np.ndarray, Matrix],
):
    """Operations on ``n_threads`` threads (0: one per available core).  The bits do not depend on the number of threads."""

    name = "cpu"
    splits = False
    decode_rows = DECODE_ROWS
    """The most rows of an answer in a decode batch."""
    drafted_rows = DECODE_ROWS
    """The most rows of a decode batch with drafts: where a pass is bound by computation, further drafts gain little."""
    decode_answers = DECODE_ANSWERS
    """The most answers of a decode batch."""

    def __init__(self, n_threads: int = 0, max_rows: int = 0) -> None:
        """max_rows: the most rows of a pass that reads a prompt, 0: 128; longer prompts take several passes.  The bits do not
        depend on it.  Raises UsageError for a number of threads that is negative or above 256."""
        if not 0 <= n_threads <= MOST_THREADS:
            raise UsageError(
                f"the number of threads (n_threads=...) must be 1 to {MOST_THREADS}, or 0 for every core, "
                f"not {described(n_threads)}."
            )
        super().__init__(n_threads or available_cores())
        self.max_rows = max_rows or BATCH_SIZE
        self._plans = Plans(self)
        self._loading = False
        self._progress: Progress | None = None
        #: Matrices whose records are still to be filled.
        self._empty: list[tuple[Weight, Records]] = []
        #: Memory for records.
        self._slabs = Slabs()
        #: Parts of mapped files that nothing reads any more.
        self._copied: list[np.ndarray] = []

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def owners(self) -> tuple["Backend"]:
        return (self,)

    @property
    def label(self) -> str:
        return "cpu"

    @property
    def gpu_name(self) -> str:
        """An empty string: there is no GPU."""
        return ""

    def device_memory(self) -> DeviceMemory | None:
        return None

    def bandwidth(self) -> float:
        """Bytes per second of a plain read of memory with ``n_threads`` threads; measured once per process."""
        return bandwidth.machine_bandwidth(self.n_threads)

    def shares_memory_with(self, other: DeviceOperations) -> bool:
        """Whether the other backend also computes on the CPU."""
        return isinstance(other, Backend)

    def can_reach(self, other: DeviceOperations) -> bool:
        """Whether the other backend also computes on the CPU."""
        return isinstance(other, Backend)

    def reach(self, other: DeviceOperations) -> None:
        """Do nothing: all backends for which ``can_reach`` is true share host memory."""

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache beside ``weights`` bytes of weights; at least 1."""
        return max(1, available_memory() - weights)

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """0: attention needs almost no memory besides the cache."""
        return 0

    def product_bytes(self, rows: int, columns: int) -> int:
        """0: a product needs no memory besides its activations and its result."""
        return 0

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        """Let ``weight`` only reserve memory until ``loaded`` reads all tensors, which calls ``progress("load", done,
        total)``."""
        self._loading, self._progress = True, progress

    def load_jobs(self) -> list[Job]:
        return [*dict.fromkeys(entry_of(repack, arguments_of(*pair)) for pair in self._empty), *team_jobs()]

    def loaded(self) -> None:
        """Read the tensors."""
        self._loading = False
        self._fill(self._progress)
        self._progress = None

    def stop_loading(self) -> None:
        self._loading, self._progress = False, None
        self._empty.clear()

    def upload(self, array: np.ndarray) -> np.ndarray:
        """The array itself, which the operations can read."""
        return array

    def weight(self, weight: Weight, host: bool = False) -> Matrix:
        """The matrix as records of eight rows (``engine/cpu/products/repack.py``); the mapped rows themselves if its format
        is not quantized or if ``host`` is true: then a pass reads only a few of them."""
        if host or not weight.format.quantized:
            return weight
        records = empty_records(weight, weight.stack, self._slabs.take)
        self._empty.append((weight, records))
        if not self._loading:
            self._fill()
        return records

    def weight_bytes(self, weight: Weight) -> int:
        if not weight.format.quantized:
            return 0
        rows = weight.rows // weight.stack
        return weight.stack * -(-rows // ROWS) * ROWS * weight.format.row_bytes(weight.columns)

    def array_bytes(self, n_bytes: int) -> int:
        return n_bytes

    def weight_stream(self, parts: Sequence[Sequence[AnyMatrix]]) -> None:
        """None: weights are in the memory that the operations read."""

    def stream_bytes(self, parts: Sequence[int]) -> int:
        return 0

    def _fill(self, progress: Progress | None = None) -> None:
        """Copy the rows of all matrices that are still empty."""
        filled, self._empty = self._empty, []
        reader = Reader(self.n_threads, HostBuffers())
        if progress is not None:
            progress("load", 0, sum(weight.rows * weight.data.shape[1] for weight, _ in filled))
        try:
            for pair in filled:
                reader.add(pieces_of(*pair))
            reader.finish(None if progress is None else partial(progress, "load"))
        finally:
            reader.stop()
        if progress is not None:
            progress("load", reader.done, reader.added)
        for weight, _ in filled:
            give_back(weight.data)
            self._copied.append(weight.data)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """A zeroed array at a multiple of 64 bytes.  So are then the chunks of keys and values, whose vectors of 64 bytes do
        not cross lines of the CPU's caches.  The system allocates its pages when they are first written."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return aligned(n_bytes, zeroed=True).view(dtype).reshape(shape)

    def buffer_bytes(self) -> int:
        return self._pool.n_bytes

    def rest(self, cache: PagedMemory) -> None:
        """Give the memory of free pages and of intermediate results back to the system, and what is mapped of weights that
        were copied: reading the tensors beside them maps it again."""
        free = {pool: pool.free_runs for pool in cache.pools.values()}
        for paged in cache.paged:
            array, axis, n_pages = paged.array, paged.axis, paged.pool.n_pages
            stacks, page = math.prod(array.shape[:axis]), array.nbytes // math.prod(array.shape[: axis + 1])
            starts = range(0, stacks * n_pages, n_pages)
            runs = ((page * (at + first), page * (at + end)) for at in starts for first, end in free[paged.pool])
            mapping.give_back(array, mapping.merged(runs))
        for data in self._copied:
            give_back(data)
        self._pool.rest()

    def resume(self, cache: PagedMemory) -> None:
        """Let the system use huge pages for them again."""
        for paged in cache.paged:
            mapping.resume(paged.array)
        self._pool.resume()

    def store(self, target: np.ndarray, first: int, rows: np.ndarray) -> None:
        target[first : first + rows.shape[0]] = rows

    def download(self, array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The array itself, which is a NumPy array, or ``out`` with its values."""
        if out is None:
            return array
        out[...] = array
        return out

    def begin_download(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Sequence[Copies]:
        """Copies them at once."""
        for array, out in pairs:
            out[...] = array
        return ()

    def copy_in(self, target: np.ndarray, source: np.ndarray, axis: int, first: int, end: int) -> None:
        part = (slice(None),) * axis + (slice(first, end),)
        target[part] = source[part]

    def copy_out(self, source: np.ndarray, target: np.ndarray, axis: int, first: int, end: int) -> None:
        self.copy_in(target, source, axis, first, end)

    def read_entries(self, source: np.ndarray, axis: int, first: int, end: int) -> np.ndarray:
        found: np.ndarray = source[(slice(None),) * axis + (slice(first, end),)].copy()
        return found

    def write_entries(self, target: np.ndarray, axis: int, first: int, values: np.ndarray) -> None:
        target[(slice(None),) * axis + (slice(first, first + values.shape[axis]),)] = values

    def host_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def host_side(self) -> Host:
        return self

    def exchange(self, borders: int, rows: int, width: int, n_used: int = 0) -> None:
        """None: the host computes the passes itself."""

    def crossing(self, source: DeviceOperations, n_bytes: int) -> HostCrossing:
        return HostCrossing()

    def gathering(self, owners: "Sequence[Backend]") -> None:
        """None: owners are in the memory of one machine."""

    def own_rows(self, batch: Batch[np.ndarray]) -> Batch[np.ndarray]:
        """The same ones."""
        return batch

    def inputs(self) -> None:
        """None: passes take their inputs as arguments."""

    def run(
        self,
        forward: Forward[np.ndarray],
        batch: Batch[np.ndarray],
        n_logits: int,
        inputs: Batch[np.ndarray] | None = None,
        most: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Run ``forward(batch, n_logits)`` and return its result, float32 [n_logits, n_vocab], or None for no logits.  The
        first call with a number of rows records the pass, once for rows of one sequence and once for those of several."""
        if self._observer is None:
            most = most or self.max_rows
            ends = batch.ends is not None
            plan = self._plans.plan(forward, batch.positions.size, n_logits, most, batch.mixed, batch.role, ends)
            plan.fill(batch)
        else:
            plan = Plan(batch, self.record(lambda: forward(batch, n_logits)))
            plan.program.finish()
        self.run_program(plan.program)
        result = plan.program.result
        if result is None:
            return None
        return np.array(result) if out is None else self.download(result, out)

    def split(
        self,
        forward: Forward[np.ndarray],
        batch: Batch[np.ndarray],
        n_logits: int,
        most: int = 0,
        at_once: bool = False,
    ) -> WholePass:
        """The pass that ``run`` runs, which begins with ``advance`` and has a single piece.  at_once: has no effect."""
        return WholePass(partial(self.run, forward, batch, n_logits, None, most))

    def mark(self) -> NoMark:
        """One for which nobody waits: passes end before they return."""
        return NoMark()

    def next_rows(self, left: int, most: int, beside: bool = False) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read.  beside: has no effect,
        since passes are not split."""
        return min(left, most)

    def padded_rows(self, rows: int, mixed: bool) -> int:
        """``rows``: no pass is padded."""
        return rows

    def many_answers(self, weights: Mapping[str, int]) -> int:
        """More than have drafts, whatever the weights: a pass of many rows takes less time for each."""
        return DECODE_ROWS + 1

    def jobs(self, model: Recordable[np.ndarray]) -> list[Job]:
        most = max(model.prompt_rows, model.decode_answers)
        listed = dict.fromkeys(min(n, most) for n in LISTED_ROWS)
        programs = [self._plans.record(model.compute, n, n).program for n in listed]
        if model.cache.n_sequences > 1 and model.reads_together:
            programs.append(self._plans.record(model.compute, 1, 1, True, True).program)
        entries = dict.fromkeys(entry for program in programs for entry in program.entries())
        return [*entries, *team_jobs()]

    def warm_up(self, model: AnyModel[np.ndarray]) -> None:
        """Load every kernel of a model by running one token; kernels that are not compiled yet are compiled."""
        model.step([(model.sequence, [0])])

    def pass_jobs(self, forward: Forward[np.ndarray], most: int = 1) -> list[Job]:
        sizes = [rows for rows in LISTED_ROWS if rows <= most]
        programs = [self._plans.record(forward, rows, 1).program for rows in sizes]
        return list(dict.fromkeys(entry for program in programs for entry in program.entries()))

    def load_pass(self, forward: Forward[np.ndarray], most: int = 1) -> None:
        """Run the pass for token 0 at position 0."""
        tokens, positions, slots = (np.zeros(1, np.int32) for _ in range(3))
        self.run(forward, Batch(tokens, positions, slots), 1)

    def expect_drafts(self) -> None:
        """Use other kernels for passes of 2 to 16 rows from now on, those of drafts and of several answers: they take time to
        compile, and few other passes have so few rows."""
        if not self._drafts:
            self._drafts = True
            self._plans.forget(range(2, SOME + 1))

    def observe(self, observer: Observer[np.ndarray] | None) -> None:
        self._observer = observer
