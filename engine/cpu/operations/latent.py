"""The operations of latent attention on the CPU."""

import functools
import math

import numpy as np

from engine.arrays import Batch
from engine.cache.latent import LatentCache
from engine.cache.types import CHUNK, GROUP
from engine.cpu import indexer, latent_attention, rope
from engine.cpu.operations.products import Pairs, ProductOperations
from engine.cpu.products.repack import Matrix
from engine.cpu.runtime.pool import aligned
from engine.ops.latent import Latent

f32 = np.float32

PART_BYTES = 64 << 20
"""The most memory for the results of groups of chunks, unless those of a single row take more."""


def parts(n_head: int, rank: int, chunks: int, rows: int) -> tuple[int, int]:
    """Of passes of up to ``rows`` rows: the number of rows whose groups of chunks are computed at a time, and the number of
    groups."""
    groups = -(-chunks // GROUP)
    return max(1, min(rows, PART_BYTES // (4 * groups * n_head * (rank + 2)))), groups


@functools.cache
def pairs_of_heads(rows: int, n_head: int) -> Pairs:
    """Every head of every row, by head: head h is the expert of pair row * n_head + h."""
    order = np.arange(rows * n_head, dtype=np.int32).reshape(rows, n_head).T.ravel()
    heads = np.arange(n_head + 1, dtype=np.int32)
    return Pairs(np.ascontiguousarray(order), heads[:-1].copy(), heads * np.int32(rows), heads[-1:].copy())


class LatentOperations(ProductOperations):
    """Attention over latents, with the products of its heads."""

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        # All passes use the same memory: each in a stage of its own, and passes run one after another.
        self._part_memory: dict[tuple[int, ...], np.ndarray] = {}

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """Bytes for the results of groups of chunks."""
        at_once, groups = parts(n_head, rank, -(-n_ctx // CHUNK), rows)
        return 4 * at_once * groups * n_head * (rank + 2)

    def latent_attention(
        self,
        latent: Latent[np.ndarray, Matrix],
        q: np.ndarray,
        q_rope: np.ndarray,
        c: np.ndarray,
        k_rope: np.ndarray,
        cache: LatentCache[np.ndarray],
        batch: Batch[np.ndarray],
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        self.remember_latent(latent, c, k_rope, cache, batch)
        rows, n_head = batch.rows, latent.n_head
        queries = self.latent_queries(latent, q, q_rope, batch)
        self._tell("query", queries[0])
        self._tell("rotated query", queries[1])
        o = self._attend_latents(*queries, cache, batch, latent.scale, chosen)
        pairs = pairs_of_heads(rows, n_head)
        (out,) = self._expert_products(o.reshape(rows * n_head, -1), pairs, latent.v_b)
        return out.reshape(rows, -1)

    def remember_latent(
        self,
        latent: Latent[np.ndarray, Matrix],
        c: np.ndarray,
        k_rope: np.ndarray,
        cache: LatentCache[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> None:
        k = self._turned(latent, k_rope.reshape(batch.rows, 1, -1), batch)
        rows = self._norm(c, latent.norm, latent.eps, latent.table is not None), k.reshape(batch.rows, -1)
        given = *rows, batch.positions, batch.sequences, cache.table, cache.rows
        self.do(latent_attention.append_rows, *given, items=batch.rows, ns=1.0 * cache.width)

    def latent_queries(
        self, latent: Latent[np.ndarray, Matrix], q: np.ndarray, q_rope: np.ndarray, batch: Batch[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both parts of the queries as they are multiplied by what is stored: float32 [rows, n_head, rank] and [rows, n_head,
        n_rope]."""
        rows, n_head = batch.rows, latent.n_head
        pairs = pairs_of_heads(rows, n_head)
        (product,) = self._expert_products(q.reshape(rows * n_head, -1), pairs, latent.k_b)
        parts = [product.reshape(rows, n_head, -1)]
        parts.append(self._turned(latent, q_rope.reshape(rows, n_head, -1), batch))
        if latent.query_scales is not None:
            for i, part in enumerate(parts):
                parts[i] = self.empty(part.shape)
                given = part, batch.positions, latent.query_scales, parts[i]
                self.do(rope.scale_by_position, *given, items=rows * n_head, ns=0.1 * part.shape[2], joined=i > 0)
        return parts[0], parts[1]

    def _turned(self, latent: Latent[np.ndarray, Matrix], x: np.ndarray, batch: Batch[np.ndarray]) -> np.ndarray:
        """x [rows, heads, n_rope], rotated if there is a rotation."""
        return x if latent.table is None else self._rotate(x, batch.positions, latent.table, False, False)

    def _attend_latents(
        self,
        q: np.ndarray,
        r: np.ndarray,
        cache: LatentCache[np.ndarray],
        batch: Batch[np.ndarray],
        scale: float,
        chosen: np.ndarray | None,
    ) -> np.ndarray:
        """Attend both parts of the queries over the cache: float32 [rows, n_head, rank]."""
        rows, n_head, rank = q.shape
        chunks, positions = cache.table.shape[1], batch.positions
        if chosen is None:
            chosen = self.empty((rows, 0), np.int32)
        else:
            chunks, positions = min(chunks, -(-chosen.shape[1] // CHUNK)), self.empty((rows,), np.int32)
            self.do(indexer.ends, batch.positions, chosen.shape[1], positions, items=rows, ns=2.0)
        at_once, groups = parts(n_head, rank, chunks, cache.max_rows)
        out, sequences = self.empty(q.shape), batch.sequences
        most = self._parts((at_once, groups, n_head, 2)), self._parts((at_once, groups, n_head, rank))
        for first in range(0, rows, at_once):
            part = slice(first, min(first + at_once, rows))
            count, here = part.stop - first, positions[part]
            tops, sums = (array[:count] for array in most)
            places = here, sequences[part], cache.table, chosen[part]
            given = q[part], r[part], cache.rows, *places, f32(scale), tops, sums
            ns = n_head * GROUP * CHUNK * (cache.width + rank) / 32.0
            self.do(latent_attention.attend_groups(), *given, items=count * groups, ns=ns)
            ended = tops, sums, here, out[part]
            self.do(latent_attention.join_parts(), *ended, items=count * n_head, ns=1.0 * rank)
        return out

    def _parts(self, shape: tuple[int, ...]) -> np.ndarray:
        if shape not in self._part_memory:
            self._part_memory[shape] = aligned(4 * math.prod(shape)).view(f32).reshape(shape)
        return self._part_memory[shape]
