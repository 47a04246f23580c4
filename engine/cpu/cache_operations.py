"""The operations on a key-value cache of the CPU: storing keys and values, and attention over them.

Shapes and times are described in ``engine/cpu/operations.py``.
"""

import numpy as np

from engine.cache.kv import LayerCache
from engine.cache.types import BLOCK, CacheType
from engine.cpu import attention, integer_attention, integer_cache, quantized_cache
from engine.cpu.runtime.program import TILE_NS
from engine.cpu.runtime.recorder import Recorder
from engine.ops import Observation, Observer

f32 = np.float32

_NO_WEIGHTS = np.zeros(0, f32)


class CacheOperations(Recorder):
    """Attention, and what it reads."""

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._observer: Observer[np.ndarray] | None = None

    def _tell(self, name: str, value: np.ndarray) -> None:
        if self._observer is not None:
            self.flush()
            self._observer(Observation("", "", {name: value}))

    def append(self, cache: LayerCache[np.ndarray], k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        """Store k, v [rows, n_head_kv, head_dim] at their positions."""
        given = (cache.k_type, k, cache.keys, False), (cache.v_type, v, cache.values, True)
        for i, (kind, x, ring, by_position) in enumerate(given):
            items, ns = x.shape[0] * x.shape[1], 1.0 * x.shape[2]
            if kind.whole:
                given_x = x, positions, kind.bits, kind.block(x.shape[2])
                self.do(integer_cache.append, *given_x, by_position, ring, items=items, ns=4 * ns, joined=i > 0)
            elif kind.quantized:
                kernel, bits = quantized_cache.append, kind.bits
                self.do(kernel, x, positions, bits, by_position, ring, items=items, ns=4 * ns, joined=i > 0)
            else:
                self.do(attention.append, x, positions, by_position, ring, items=items, ns=ns, joined=i > 0)

    def int8_queries(self, q: np.ndarray, scale: float, k_type: CacheType) -> tuple[np.ndarray, np.ndarray]:
        """Queries [rows, n_head, d_k] quantized for quantized keys: int8, and scales float32 [rows, n_head, d_k / 32]; empty
        arrays for other types of keys."""
        d = q.shape[2] if k_type.quantized else 0
        integers = self.empty((*q.shape[:2], d), np.int8)
        scales = self.empty((*q.shape[:2], d // BLOCK))
        if d:
            rows = q.shape[0] * q.shape[1]
            given = q.reshape(rows, d), f32(scale), integers.reshape(rows, d), scales.reshape(rows, d // BLOCK)
            self.do(quantized_cache.quantize_queries, *given, items=rows, ns=1.0 * d)
        return integers, scales

    def integer_queries(self, q: np.ndarray, scale: float, k_type: CacheType) -> tuple[np.ndarray, np.ndarray]:
        """Queries [rows, n_head, d_k] times scale * log2(e), quantized for integer keys: int16, and scales float32 [rows,
        n_head, blocks]."""
        items, d = q.shape[0] * q.shape[1], q.shape[2]
        block = k_type.block(d)
        integers, scales = self.empty(q.shape, np.int16), self.empty((*q.shape[:2], d // block))
        given = f32(scale * integer_cache.LOG2_E), block, integers.reshape(items, d), scales.reshape(items, d // block)
        self.do(integer_cache.quantize_queries, q.reshape(items, d), *given, items=items, ns=1.0 * d)
        return integers, scales

    def attend(
        self,
        q: np.ndarray,
        cache: LayerCache[np.ndarray],
        positions: np.ndarray,
        scale: float,
        window: int | None = None,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        """Attend q [rows, n_head, d_k] over the cache, as far back as ``window``, or as its own window if that is None, with
        ``sinks`` [n_head] or without: float32 [rows, n_head * d_v]."""
        self._tell("query", q)
        rows, n_head, _ = q.shape
        out = self.empty((rows, n_head, cache.d_v))
        window = cache.window if window is None else window
        k, v = cache.k_type, cache.v_type
        keys, values = (
            ring.reshape(cache.n_head_kv, cache.chunks, -1).view(np.uint32) for ring in (cache.keys, cache.values)
        )
        items = rows * n_head
        # A tile with all items of a KV head unpacks its keys and values once; but each thread should get some tiles.
        per_tile = max(1, min(items // cache.n_head_kv, -(-items // (2 * self.n_threads)), 64))
        ns, d, sinks = TILE_NS / per_tile, cache.d_v, _NO_WEIGHTS if sinks is None else sinks
        if k.whole:
            whole = *self.integer_queries(q, scale, k), keys, values, positions, window, sinks, out
            self.do(integer_attention.attend(k.bits), *whole, items=items, ns=ns)
            self.do(integer_cache.rotate_rows, out.reshape(-1, d), v.block(d), items=items, ns=1.0 * d)
            return out.reshape(rows, -1)
        query = (q, *self.int8_queries(q, scale, k))
        given = *query, keys, values, positions, f32(scale), window, sinks, out
        self.do(attention.attend(k.bits, v.bits), *given, items=items, ns=ns)
        if v.quantized:
            self.do(quantized_cache.rotate_rows, out.reshape(-1, d), items=items, ns=1.0 * d)
        return out.reshape(rows, -1)
