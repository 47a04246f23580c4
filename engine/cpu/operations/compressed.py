"""The operations of hyper-connections and of attention over compressed rows on the CPU."""

import numpy as np

from engine.arrays import Batch
from engine.cache.compressed import Blocks, CompressedCache, PagedRows
from engine.cache.types import CHUNK
from engine.cpu import compressed_attention, compressor, hyper, indexer, rope, rounding
from engine.cpu.operations.shared import SharedOperations
from engine.ops.compressor import Compressor

f32 = np.float32

_NO_WEIGHTS = np.zeros(0, f32)
_NO_ROWS = {np.dtype(kind): np.zeros((0, CHUNK, 0), kind) for kind in (np.float32, np.uint16)}


class CompressedOperations(SharedOperations):
    """What DeepSeek-V4 needs besides the operations of other models."""

    # --- hyper-connections -------------------------------------------------------------------------------------

    def repeat(self, x: np.ndarray, n: int) -> np.ndarray:
        out = self.empty((x.shape[0], n * x.shape[1]))
        self.do(hyper.repeat, x, n, out, items=x.shape[0], ns=0.1 * out.shape[1])
        return out

    def stream_weights(
        self, m: np.ndarray, scale: np.ndarray, base: np.ndarray, epsilon: float, rounds: int
    ) -> np.ndarray:
        out = self.empty(m.shape)
        given = m, scale, base, f32(epsilon), rounds, out
        self.do(hyper.stream_weights, *given, items=m.shape[0], ns=100.0 + 50.0 * rounds)
        return out

    def collapse(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        n = x.shape[1] // hyper.STREAMS
        out = self.empty((x.shape[0], n))
        self.do(hyper.collapse, x, weights, out, items=x.shape[0], ns=0.5 * n)
        return out

    def expand(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        out = self.empty(x.shape)
        self.do(hyper.expand, x, y, weights, out, items=x.shape[0], ns=0.5 * x.shape[1])
        return out

    # --- latents and compressed rows ---------------------------------------------------------------------------

    def rotate_tail(
        self,
        x: np.ndarray,
        n_head: int,
        batch: Batch[np.ndarray],
        table: np.ndarray,
        norm: np.ndarray | None = None,
        eps: float = 0.0,
        inverse: bool = False,
    ) -> np.ndarray:
        rows, d = x.shape[0], x.shape[1] // n_head
        out = self.empty(x.shape)
        heads = x.reshape(rows, n_head, d), out.reshape(rows, n_head, d)
        given = _NO_WEIGHTS if norm is None else norm, f32(eps), batch.positions, table, inverse
        self.do(rope.rotate_tail, heads[0], *given, heads[1], items=rows * n_head, ns=20.0 + 0.5 * d)
        return out

    def keep_latents(self, x: np.ndarray, memory: CompressedCache[np.ndarray], batch: Batch[np.ndarray]) -> None:
        given = x, batch.positions, batch.sequences, memory.table, memory.latents
        self.do(compressed_attention.append, *given, items=x.shape[0], ns=1.0 * x.shape[1])

    def compress(
        self,
        law: Compressor[np.ndarray],
        values: np.ndarray,
        scores: np.ndarray,
        blocks: Blocks[np.ndarray],
        batch: Batch[np.ndarray],
        table: np.ndarray,
        transposed: bool = False,
    ) -> None:
        rows, width = values.shape
        of_rows = batch.positions, batch.sequences
        given = values, scores, law.ape, law.norm, f32(law.eps), *of_rows, table, blocks.pending
        # One row in ``ratio`` computes something, which is as much for each token of a block.
        self.do(compressor.compress, *given, transposed, blocks.table, blocks.rows, items=rows, ns=10.0 * width)
        kept = values, scores, *of_rows, blocks.pending
        self.do(compressor.keep, *kept, items=rows, ns=0.2 * width)

    def round_latents(self, x: np.ndarray, n_rot: int) -> np.ndarray:
        return self._rounded(x, 1, n_rot, False)

    def round_queries(self, q: np.ndarray, n_head: int) -> np.ndarray:
        return self._rounded(q, n_head, 0, True)

    def _rounded(self, x: np.ndarray, n_head: int, n_rot: int, four: bool) -> np.ndarray:
        rows, d, out = x.shape[0], x.shape[1] // n_head, self.empty(x.shape)
        heads = x.reshape(rows, n_head, d), out.reshape(rows, n_head, d)
        self.do(rounding.round_heads, heads[0], n_rot, four, heads[1], items=rows * n_head, ns=5.0 * d)
        return out

    def round_rows(
        self, blocks: Blocks[np.ndarray], ratio: int, n_rot: int, batch: Batch[np.ndarray], transposed: bool = False
    ) -> None:
        d = blocks.rows.shape[1 if transposed else 2]
        given = batch.positions, batch.sequences, ratio, n_rot, transposed, blocks.table, blocks.rows
        self.do(rounding.round_rows, *given, items=batch.rows, ns=5.0 * d / ratio)

    def keep_keys(self, x: np.ndarray, keys: PagedRows[np.ndarray], batch: Batch[np.ndarray]) -> None:
        given = x, batch.positions, batch.sequences, keys.table, keys.rows
        self.do(indexer.append_keys, *given, items=x.shape[0], ns=1.0 * x.shape[1])

    def choose_rows(
        self,
        q: np.ndarray,
        weights: np.ndarray,
        factor: float,
        ratio: int,
        top_k: int,
        keys: PagedRows[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> np.ndarray:
        rows, n_head = weights.shape
        chunks, d = keys.table.shape[1], q.shape[1] // n_head
        scores, chosen = self.empty((rows, chunks * CHUNK)), self.empty((rows, top_k), np.int32)
        words = keys.rows.reshape(keys.rows.shape[0], -1).view(np.uint32)
        of_rows = batch.positions, batch.sequences, keys.table
        given = q.reshape(rows, n_head, d), weights, f32(factor), words, *of_rows, ratio, top_k, scores
        ns = 0.1 * n_head * d * CHUNK * -(-chunks // indexer.PARTS)
        half = keys.rows.dtype.itemsize == 2
        self.do(indexer.score(half), *given, items=rows * indexer.PARTS, ns=ns)
        self.do(indexer.choose, scores, batch.positions, ratio, chosen, items=rows, ns=2.0 * CHUNK * chunks)
        return chosen

    def attend_compressed(
        self,
        q: np.ndarray,
        memory: CompressedCache[np.ndarray],
        batch: Batch[np.ndarray],
        scale: float,
        sinks: np.ndarray,
        ratio: int,
        chosen: np.ndarray | None,
    ) -> np.ndarray:
        rows, d, n_head = q.shape[0], memory.latents.shape[2], sinks.size
        heads = q.reshape(rows, n_head, d)
        self._tell("query", heads)
        out = self.empty((rows, n_head, d))
        # Without compressed rows nothing is read of them or of their table.
        listed, listed_table = _NO_ROWS[memory.latents.dtype], memory.table
        if memory.compressed is not None:
            listed, listed_table = memory.compressed.rows, memory.compressed.table
        ids = self.empty((rows, 0), np.int32) if chosen is None else chosen
        sources = memory.latents, memory.table, listed, listed_table, ids
        of_rows = batch.positions, batch.sequences
        given = heads, *sources, *of_rows, memory.window, ratio, f32(scale), sinks, out
        ns = 0.1 * d * min(n_head, compressed_attention.HEADS) * memory.window
        items = rows * -(-n_head // compressed_attention.HEADS)
        self.do(compressed_attention.attend(), *given, items=items, ns=ns)
        return out.reshape(rows, -1)
