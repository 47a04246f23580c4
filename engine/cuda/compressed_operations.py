"""The operations of hyper-connections and of attention over compressed rows on a GPU.

Shapes are described in ``engine/ops/arithmetic.py``; the recording in ``engine/cuda/backend.py``.
"""

import numpy as np

from engine.arrays import Batch
from engine.cache.compressed import Blocks, CompressedCache, PagedRows
from engine.cache.types import CHUNK
from engine.cuda import compressed_attention, compressor, hyper, indexer, rope, rounding
from engine.cuda.products.grouped import Grouped, group_ids
from engine.cuda.rows import NARROW_ROWS, groups
from engine.cuda.runtime.memory import PersistentMemory
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.cuda.runtime.values import Deferred
from engine.limits import STREAMS
from engine.ops.arithmetic import Arithmetic
from engine.ops.compressor import Compressor


class CompressedOperations(Arithmetic[Tensor, Tensor | Deferred, DeviceWeight]):
    """What DeepSeek-V4 needs besides the operations of other models."""

    recorder: Recorder
    max_rows: int
    decode_answers: int
    _memory: PersistentMemory
    _groups: dict[int, Tensor]

    # --- products ----------------------------------------------------------------------------------------------

    def grouped_matmul(self, x: Tensor, weight: DeviceWeight, n_group: int) -> Tensor:
        if n_group not in self._groups:
            self._groups[n_group] = self._memory.upload(group_ids(max(self.max_rows, self.decode_answers), n_group))
        return Grouped(self.recorder, x, weight, self._groups[n_group][: x.shape[0]]).record()

    # --- hyper-connections -------------------------------------------------------------------------------------

    def repeat(self, x: Tensor, n: int) -> Tensor:
        rows, width = x.shape
        out = self.recorder.empty((rows, n * width))
        self.recorder.launch(hyper.repeat(), (-(-n * width // 256), rows), 256, (x, n, width, out), result=out)
        return out

    def stream_weights(self, m: Tensor, scale: Tensor, base: Tensor, epsilon: float, rounds: int) -> Tensor:
        out = self.recorder.empty(m.shape)
        arguments = (m, m.shape[1], scale, base, epsilon, rounds, out)
        self.recorder.launch(hyper.stream_weights(), (m.shape[0],), 32, arguments, result=out)
        return out

    def collapse(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, n = x.shape[0], x.shape[1] // STREAMS
        out = self.recorder.empty((rows, n))
        arguments = (x, weights, weights.shape[1], n, out)
        self.recorder.launch(hyper.collapse(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    def expand(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        (rows, n), out = y.shape, self.recorder.empty(x.shape)
        arguments = (x, y, weights, n, out)
        self.recorder.launch(hyper.expand(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    # --- latents and compressed rows ---------------------------------------------------------------------------

    def rotate_tail(
        self,
        x: Tensor,
        n_head: int,
        batch: Batch[Tensor],
        table: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        inverse: bool = False,
    ) -> Tensor:
        rows, d = x.shape[0], x.shape[1] // n_head
        out = self.recorder.empty(x.shape)
        arguments = (x, norm or 0, eps, batch.positions, table, 2 * table.shape[2], out)
        kernel = rope.rotate_tail(d, norm is not None, inverse)
        self.recorder.launch(kernel, (n_head, rows), 256, arguments, result=out)
        return out

    def keep_latents(self, x: Tensor, memory: CompressedCache[Tensor], batch: Batch[Tensor]) -> None:
        rows, d = x.shape
        of_rows = (batch.positions, batch.sequences)
        arguments = (x, d, *of_rows, memory.table, memory.table.shape[1], memory.latents)
        kernel = compressed_attention.append(memory.k_type.bits == 16, batch.mixed)
        self.recorder.launch(kernel, (-(-d // 256), rows), 256, arguments)

    def compress(
        self,
        law: Compressor[Tensor],
        values: Tensor,
        scores: Tensor,
        blocks: Blocks[Tensor],
        batch: Batch[Tensor],
        table: Tensor,
        transposed: bool = False,
    ) -> None:
        (rows, width), d, length = values.shape, law.norm.size, blocks.pending.shape[1]
        of_rows, places = (batch.positions, batch.sequences), (blocks.table, blocks.table.shape[1])
        given = (law.ape, law.norm, law.eps, law.ratio, law.overlap, *of_rows, table, 2 * table.shape[2])
        arguments = (values, scores, rows, *given, blocks.pending, length, *places, blocks.rows)
        kernel = compressor.compress(d, _is_half(blocks.rows), transposed, batch.mixed)
        self.recorder.launch(kernel, (compressor.items(rows, law.ratio, batch.mixed),), 256, arguments)
        kept = (values, scores, rows, width, *of_rows, length, blocks.pending)
        self.recorder.launch(compressor.keep(batch.mixed), (-(-width // 256), rows), 256, kept)

    def round_latents(self, x: Tensor, n_rot: int) -> Tensor:
        return self._rounded(x, 1, n_rot, False)

    def round_queries(self, q: Tensor, n_head: int) -> Tensor:
        return self._rounded(q, n_head, 0, True)

    def _rounded(self, x: Tensor, n_head: int, n_rot: int, four: bool) -> Tensor:
        rows, d, out = x.shape[0], x.shape[1] // n_head, self.recorder.empty(x.shape)
        kernel = rounding.round_heads(d, four)
        self.recorder.launch(kernel, (n_head, rows), rounding.THREADS, (x, n_rot, out), result=out)
        return out

    def round_rows(
        self, blocks: Blocks[Tensor], ratio: int, n_rot: int, batch: Batch[Tensor], transposed: bool = False
    ) -> None:
        d = blocks.rows.shape[1 if transposed else 2]
        of_rows, places = (batch.positions, batch.sequences), (blocks.table, blocks.table.shape[1])
        arguments = (*of_rows, batch.rows, ratio, n_rot, *places, blocks.rows)
        kernel = rounding.round_rows(d, transposed, batch.mixed)
        grid = (compressor.items(batch.rows, ratio, batch.mixed),)
        self.recorder.launch(kernel, grid, rounding.THREADS, arguments)

    def keep_keys(self, x: Tensor, keys: PagedRows[Tensor], batch: Batch[Tensor]) -> None:
        rows, d = x.shape
        of_rows = (batch.positions, batch.sequences)
        arguments = (x, d, *of_rows, keys.table, keys.table.shape[1], keys.rows)
        kernel = indexer.append_keys(_is_half(keys.rows), batch.mixed)
        self.recorder.launch(kernel, (-(-d // 128), rows), 128, arguments)

    def choose_rows(
        self,
        q: Tensor,
        weights: Tensor,
        factor: float,
        ratio: int,
        top_k: int,
        keys: PagedRows[Tensor],
        batch: Batch[Tensor],
    ) -> Tensor:
        (rows, n_head), stride = weights.shape, keys.table.shape[1]
        d, parts = q.shape[1] // n_head, min(indexer.PARTS, stride)
        scores, chosen = self.recorder.empty((rows, stride * CHUNK)), self.recorder.empty((rows, top_k), np.int32)
        positions = batch.positions
        places = (positions, batch.sequences, keys.table, stride)
        arguments = (q, weights, factor, keys.rows, *places, ratio, top_k, parts, scores)
        kernel = indexer.score(n_head, d, _is_half(keys.rows), batch.mixed)
        self.recorder.launch(kernel, (parts, rows), 32 * indexer.WARPS, arguments, scores=scores)
        given = (scores, stride * CHUNK, positions, ratio, top_k, chosen)
        self.recorder.launch(indexer.choose(indexer.THREADS), (rows,), indexer.THREADS, given, result=chosen)
        return chosen

    def attend_compressed(
        self,
        q: Tensor,
        memory: CompressedCache[Tensor],
        batch: Batch[Tensor],
        scale: float,
        sinks: Tensor,
        ratio: int,
        chosen: Tensor | None,
    ) -> Tensor:
        out, rows, mixed = self.recorder.empty(q.shape), batch.rows, batch.mixed
        # The kernel for many rows is for rows of one sequence.
        for part in groups(rows, NARROW_ROWS) if mixed and rows > NARROW_ROWS else [slice(0, rows)]:
            given = q[part], memory, batch.part(part), scale, sinks, ratio, None if chosen is None else chosen[part]
            self._attend_compressed(*given, out[part])
        return out

    def _attend_compressed(
        self,
        q: Tensor,
        memory: CompressedCache[Tensor],
        batch: Batch[Tensor],
        scale: float,
        sinks: Tensor,
        ratio: int,
        chosen: Tensor | None,
        out: Tensor,
    ) -> None:
        """Record attention of the rows of a batch, in one launch or two, which write ``out``."""
        rows, n_head, d = q.shape[0], sinks.size, memory.latents.shape[2]
        recorder, device = self.recorder, self.recorder.device
        top_k = chosen.shape[1] if chosen is not None else 0
        stride, blocks = memory.table.shape[1], memory.compressed
        listed = blocks.table.shape[1] if blocks is not None else 0
        compressed = (blocks.rows, blocks.table, listed) if blocks is not None else (0, 0, 0)
        listed = min(listed, -(-top_k // CHUNK)) if top_k else listed
        sizes = rows, n_head, d, memory.k_type.bits == 16, memory.window, listed
        of_device = device.multiprocessors, device.shared_memory
        shape = compressed_attention.geometry(*sizes, *of_device, rows <= NARROW_ROWS, batch.mixed)
        sources, numbers = (memory.latents, memory.table, stride, *compressed), (memory.window, ratio, top_k)
        of_rows = (chosen or 0, batch.positions, batch.sequences)
        given, threads = (q, *sources, *of_rows, n_head, *numbers, scale), compressed_attention.THREADS
        if not shape.partials:
            recorder.launch(shape.attend, (shape.parts, rows), threads, (*given, sinks, out), result=out)
            return
        weights, sums = (recorder.empty((rows, n_head, shape.partials, n)) for n in (2, d))
        places = (shape.partials, shape.listed)
        grid = (shape.parts, shape.partials, rows)
        recorder.launch(shape.attend, grid, threads, (*given, weights, sums, *places), mass=weights, values=sums)
        joined = (weights, sums, batch.positions, n_head, *numbers, *places, sinks, out)
        join = compressed_attention.join_compressed(d)
        recorder.launch(join, (n_head, rows), compressed_attention.JOIN_THREADS, joined, result=out)


def _is_half(rows: Tensor) -> bool:
    return np.dtype(rows.dtype).itemsize == 2
