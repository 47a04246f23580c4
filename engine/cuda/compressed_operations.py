"""The operations of hyper-connections and of attention over compressed rows on a GPU.

Shapes are described in ``engine/ops.py``; the recording in ``engine/cuda/backend.py``.
"""

import numpy as np

from engine.arrays import Pass
from engine.cache.compressed import Blocks, CompressedLayer
from engine.cache.types import CHUNK
from engine.cuda import compressed_attention, compressor, hyper, indexer, rope
from engine.cuda.products.grouped import Grouped, group_ids
from engine.cuda.runtime.memory import Memory
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.limits import STEP_ROWS, STREAMS
from engine.models.compressor import Compressor


class CompressedOperations:
    """What DeepSeek-V4 needs besides the operations of other models."""

    recorder: Recorder
    max_rows: int
    _memory: Memory
    _groups: dict[int, Tensor]

    # --- products ----------------------------------------------------------------------------------------------

    def grouped_matmul(self, x: Tensor, weight: DeviceWeight, n_group: int) -> Tensor:
        """The parts of each row of x [rows, n_group * K] times the matrices of their groups, stacked as [n_group * R, K]:
        float32 [rows, n_group * R]."""
        if n_group not in self._groups:
            self._groups[n_group] = self._memory.upload(group_ids(max(self.max_rows, STEP_ROWS), n_group))
        return Grouped(self.recorder, x, weight, self._groups[n_group][: x.shape[0]]).record()

    # --- hyper-connections -------------------------------------------------------------------------------------

    def repeat(self, x: Tensor, n: int) -> Tensor:
        """Each row of x [rows, width], n times: float32 [rows, n * width]."""
        rows, width = x.shape
        out = self.recorder.empty((rows, n * width))
        self.recorder.launch(hyper.repeat(), (-(-n * width // 256), rows), 256, (x, n, width, out), result=out)
        return out

    def stream_weights(self, m: Tensor, scale: Tensor, base: Tensor, epsilon: float, rounds: int) -> Tensor:
        """The weights of hyper-connections: m float32 [rows, 24], base [24], scale [3]; or [rows, 4], [4], [1] for the
        weights of ``collapse`` only; float32 like m."""
        out = self.recorder.empty(m.shape)
        arguments = (m, m.shape[1], scale, base, epsilon, rounds, out)
        self.recorder.launch(hyper.stream_weights(), (m.shape[0],), 32, arguments, result=out)
        return out

    def collapse(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of streams: x [rows, 4 n], weights [rows, 4 or more]; float32 [rows, n]."""
        rows, n = x.shape[0], x.shape[1] // STREAMS
        out = self.recorder.empty((rows, n))
        arguments = (x, weights, weights.shape[1], n, out)
        self.recorder.launch(hyper.collapse(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    def expand(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The streams after a sub-layer: x [rows, 4 n] before it, y [rows, n] its output, weights [rows, 24]; float32 [rows,
        4 n]."""
        (rows, n), out = y.shape, self.recorder.empty(x.shape)
        arguments = (x, y, weights, n, out)
        self.recorder.launch(hyper.expand(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    # --- latents and compressed rows ---------------------------------------------------------------------------

    def rotate_tail(
        self,
        x: Tensor,
        n_head: int,
        batch: Pass[Tensor],
        table: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        inverse: bool = False,
    ) -> Tensor:
        """The heads of x [rows, n_head * d], normalized if there are weights ``norm`` [d], their last elements rotated by
        position in pairs of neighbours, or back if ``inverse``: float32 [rows, n_head * d]."""
        rows, d = x.shape[0], x.shape[1] // n_head
        out = self.recorder.empty(x.shape)
        arguments = (x, norm or 0, eps, batch.positions, table, 2 * table.shape[2], out)
        kernel = rope.rotate_tail(d, norm is not None, inverse)
        self.recorder.launch(kernel, (n_head, rows), 256, arguments, result=out)
        return out

    def keep_latents(self, x: Tensor, memory: CompressedLayer[Tensor], batch: Pass[Tensor]) -> None:
        """Store latents x [rows, d] at the rows' positions."""
        rows, d = x.shape
        arguments = (x, d, batch.positions, memory.latents.shape[0], memory.latents)
        kernel = compressed_attention.append(memory.k_type.bits == 16)
        self.recorder.launch(kernel, (-(-d // 256), rows), 256, arguments)

    def compress(
        self,
        law: Compressor[Tensor],
        values: Tensor,
        scores: Tensor,
        blocks: Blocks[Tensor],
        batch: Pass[Tensor],
        table: Tensor,
        transposed: bool = False,
    ) -> None:
        """Store the compressed rows of all blocks that end in the pass, and what later rows are made of: values, scores
        [rows, overlap * d].  ``transposed``: the rows are keys of an indexer."""
        (rows, width), d, length = values.shape, law.norm.size, blocks.pending.shape[0]
        given = (law.ape, law.norm, law.eps, law.ratio, law.overlap, batch.positions, table, 2 * table.shape[2])
        arguments = (values, scores, rows, *given, blocks.pending, length, blocks.rows)
        kernel = compressor.compress(d, _is_half(blocks.rows), transposed)
        self.recorder.launch(kernel, (-(-rows // law.ratio),), 256, arguments)
        kept = (values, scores, rows, width, batch.positions, length, blocks.pending)
        self.recorder.launch(compressor.keep(), (-(-width // 256), rows), 256, kept)

    def choose_rows(
        self,
        q: Tensor,
        weights: Tensor,
        factor: float,
        ratio: int,
        top_k: int,
        keys: Blocks[Tensor],
        batch: Pass[Tensor],
    ) -> Tensor:
        """The ``top_k`` compressed rows of each row with the largest sums of weights * factor * relu(q . key) over heads: q
        [rows, n_head * d], rotated, weights [rows, n_head]; int32 [rows, top_k], in rising order, -1 where a row sees
        fewer."""
        (rows, n_head), chunks = weights.shape, keys.rows.shape[0]
        d, stride, parts = q.shape[1] // n_head, chunks * CHUNK, min(indexer.PARTS, chunks)
        scores, chosen = self.recorder.empty((rows, stride)), self.recorder.empty((rows, top_k), np.int32)
        positions = batch.positions
        arguments = (q, weights, factor, keys.rows, positions, ratio, top_k, parts, stride, scores)
        kernel = indexer.score(n_head, d, _is_half(keys.rows))
        self.recorder.launch(kernel, (parts, rows), CHUNK, arguments, scores=scores)
        given = (scores, stride, positions, ratio, top_k, chosen)
        self.recorder.launch(indexer.choose(), (rows,), indexer.THREADS, given, result=chosen)
        return chosen

    def attend_compressed(
        self,
        q: Tensor,
        memory: CompressedLayer[Tensor],
        batch: Pass[Tensor],
        scale: float,
        sinks: Tensor,
        ratio: int,
        chosen: Tensor | None,
    ) -> Tensor:
        """Attend q [rows, n_head * d] over the latents of the window and the compressed rows of blocks that end before or at
        the row's position, or of these the ``chosen`` ones: float32 [rows, n_head * d].  Each latent and row is the key and
        the value of all heads; ``sinks`` [n_head] are further scores; ratio 0: there are no compressed rows."""
        n_head, (chunks, _, d) = sinks.size, memory.latents.shape
        out = self.recorder.empty(q.shape)
        compressed = memory.compressed.rows if memory.compressed is not None else 0
        top_k = chosen.shape[1] if chosen is not None else 0
        numbers = (n_head, chunks, memory.window, ratio, top_k, scale)
        arguments = (q, memory.latents, compressed, chosen or 0, batch.positions, *numbers, sinks, out)
        kernel = compressed_attention.attend_compressed(d, memory.k_type.bits == 16)
        grid = (-(-n_head // compressed_attention.HEADS), q.shape[0])
        self.recorder.launch(kernel, grid, compressed_attention.THREADS, arguments, result=out)
        return out


def _is_half(rows: Tensor) -> bool:
    return np.dtype(rows.dtype).itemsize == 2
