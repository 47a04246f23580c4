"""Attention over a cache of keys and values."""

from typing import Any

import numpy as np

from engine.arrays import Batch
from engine.cache.kv import AttentionCache
from engine.cache.types import BLOCK, GROUP, CacheType
from engine.cpu import attention, glu, integer_attention, integer_cache, observe, quantized_cache, rope
from engine.cpu.operations.rows import RowOperations
from engine.cpu.runtime.program import TILE_NS
from engine.ops.heads import Heads
from engine.ops.spans import SPANS

f32 = np.float32

_NO_WEIGHTS = np.zeros(0, f32)

_FIRST_SLOT = np.zeros(8192, np.int32)
"""The slots of rows that all belong to the sequence in slot 0; no pass has more rows."""


class AttentionOperations(RowOperations):
    """Keys and values are stored, and queries attend over them."""

    def attention(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        table: np.ndarray | None,
    ) -> np.ndarray:
        both = q.reshape(-1, 2, heads.d_k) if heads.gated else None
        if both is not None:
            q = self.empty((batch.rows, heads.n_head * heads.d_k))
            self.do(glu.ungated, both, q.reshape(-1, heads.d_k), items=both.shape[0], ns=0.1 * heads.d_k)
        queries, k, v = self._prepared(heads, [q, k, v], batch, table)
        slots = batch.sequences
        places, masses = cache.places(batch), cache.masses(batch, cache.window)
        self.append(cache, k, v, places, slots)
        out = self.attend(queries, cache, places, heads.scale, None, heads.sinks, slots, masses, heads.softcap)
        if both is not None:
            self.do(glu.sigmoid_gate, out.reshape(-1, heads.d_v), both, items=both.shape[0], ns=1.0 * heads.d_v)
        return out

    def attend_past(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        last: np.ndarray,
        table: np.ndarray | None,
        window: int,
        spans: bool = False,
    ) -> np.ndarray:
        (queries,) = self._prepared(heads, [q], batch, table)
        masses = cache.masses(batch, window)
        window += SPANS if spans else 0
        others = heads.sinks, batch.sequences, masses, heads.softcap
        return self.attend(queries, cache, last, heads.scale, window, *others)

    def remember(
        self,
        heads: Heads[np.ndarray],
        k: np.ndarray,
        v: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        table: np.ndarray | None,
    ) -> None:
        k, v = self._prepared(heads, [k, v], batch, table)
        self.append(cache, k, v, cache.places(batch), batch.sequences)

    def places(self, positions: np.ndarray, batch: Batch[np.ndarray], dropped: np.ndarray) -> np.ndarray:
        out = self.empty(positions.shape, np.int32)
        self.do(observe.places, positions, batch.sequences, dropped, out, items=positions.size, ns=1.0)
        return out

    def _prepared(
        self, heads: Heads[np.ndarray], given: list[np.ndarray], batch: Batch[np.ndarray], table: np.ndarray | None
    ) -> list[np.ndarray]:
        """Queries, keys or values with biases, normalized, and rotated by position unless they are values: [rows, heads, d]
        each; queries times the factors of their positions.  given: q; k and v; or all three.  What is done to one of them
        does not depend on the others, so each step is one stage."""
        here = {1: "q", 2: "kv", 3: "qkv"}[len(given)]
        if heads.biases is not None:
            biases = dict(zip("qkv", heads.biases, strict=True))
            given = [self._add(x, biases[name], i > 0) for i, (name, x) in enumerate(zip(here, given, strict=True))]
        n, d = {"q": heads.n_head}, {"v": heads.d_v}
        parts = {
            name: x.reshape(batch.rows, n.get(name, heads.n_head_kv), d.get(name, heads.d_k))
            for name, x in zip(here, given, strict=True)
        }
        if not heads.norm_after:
            self._normalize(heads, parts)
        if table is not None:
            for i, name in enumerate(here.replace("v", "")):
                parts[name] = self._rotate(parts[name], batch.positions, table, heads.neox, i > 0)
        if heads.norm_after:
            self._normalize(heads, parts)
        if heads.query_scales is not None and "q" in parts:
            q = parts["q"]
            parts["q"], items = self.empty(q.shape), q.shape[0] * q.shape[1]
            given_q = q, batch.positions, heads.query_scales, parts["q"]
            self.do(rope.scale_by_position, *given_q, items=items, ns=0.1 * q.shape[2])
        return list(parts.values())

    def _normalize(self, heads: Heads[np.ndarray], parts: dict[str, np.ndarray]) -> None:
        """Replace queries, keys or values [rows, heads, d] by normalized ones, each head by itself."""
        norms = {"q": heads.q_norm, "k": heads.k_norm, "v": _NO_WEIGHTS if heads.v_normed else None}
        used = [(name, norm) for name in parts if (norm := norms[name]) is not None]
        for i, (name, norm) in enumerate(used):
            parts[name] = self._norm(parts[name], norm, heads.eps, i > 0)

    def append(
        self,
        cache: AttentionCache[np.ndarray],
        k: np.ndarray,
        v: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray | None = None,
    ) -> None:
        """Store k, v [rows, n_head_kv, head_dim] at positions int32 [rows] of the sequences in slots int32 [rows]; None: all
        in slot 0."""
        sequences = _FIRST_SLOT[: positions.size] if sequences is None else sequences
        given = (cache.k_type, k, cache.keys, False), (cache.v_type, v, cache.values, True)
        for i, (kind, x, memory, by_position) in enumerate(given):
            items, ns = x.shape[0] * x.shape[1], 1.0 * x.shape[2]
            row = x, positions, sequences, cache.table
            if kind.whole:
                kinds = kind.bits, kind.block(x.shape[2])
                self.do(integer_cache.append, *row, *kinds, by_position, memory, items=items, ns=4 * ns, joined=i > 0)
            elif kind.quantized:
                kernel, bits = quantized_cache.append, kind.bits
                self.do(kernel, *row, bits, by_position, memory, items=items, ns=4 * ns, joined=i > 0)
            else:
                self.do(attention.append, *row, by_position, memory, items=items, ns=ns, joined=i > 0)

    def attend(
        self,
        q: np.ndarray,
        cache: AttentionCache[np.ndarray],
        positions: np.ndarray,
        scale: float,
        window: int | None = None,
        sinks: np.ndarray | None = None,
        sequences: np.ndarray | None = None,
        masses: np.ndarray | None = None,
        cap: float = 0.0,
    ) -> np.ndarray:
        """Attend q [rows, n_head, d_k] over the cache up to positions int32 [rows] of the sequences in slots int32 [rows],
        None: all in slot 0; as far back as ``window``, or as its own window if that is None, with ``sinks`` [n_head] or
        without: float32 [rows, n_head * d_v].  masses: int32 [slots * 64, chunks], to which those of the rows are added, or
        None; cap: of scores, 0 for none."""
        self._tell("query", q)
        rows, n_head, _ = q.shape
        sequences = _FIRST_SLOT[:rows] if sequences is None else sequences
        out = self.empty((rows, n_head, cache.d_v))
        window = cache.window if window is None else window
        k, v = cache.k_type, cache.v_type
        keys, values = (
            memory.reshape(cache.n_head_kv, cache.pages, -1).view(np.uint32) for memory in (cache.keys, cache.values)
        )
        items = rows * n_head
        # A tile with all items of a KV head unpacks its keys and values once; but each thread should get some tiles.
        per_tile = max(1, min(items // cache.n_head_kv, -(-items // (2 * self.n_threads)), 64))
        tiles: Any = {"items": items, "ns": TILE_NS / per_tile, "multiple": per_tile}
        d, sinks = cache.d_v, _NO_WEIGHTS if sinks is None else sinks
        parts = attention.NO_PARTS if masses is None else self.empty((rows, n_head, cache.table.shape[1], 2))
        if k.whole:
            query = self.integer_queries(q, scale, k)
            whole = *query, keys, values, positions, sequences, cache.table, window, sinks, parts, out
            self.do(integer_attention.attend(k.bits, GROUP, cap), *whole, **tiles)
            self._observe(parts, positions, sequences, sinks, masses)
            self.do(integer_cache.rotate_rows, out.reshape(-1, d), v.block(d), items=items, ns=1.0 * d)
            return out.reshape(rows, -1)
        given = q, *self.int8_queries(q, scale, k), keys, values, positions, sequences, cache.table
        self.do(attention.attend(k.bits, v.bits, GROUP, cap), *given, f32(scale), window, sinks, parts, out, **tiles)
        self._observe(parts, positions, sequences, sinks, masses)
        if v.quantized:
            self.do(quantized_cache.rotate_rows, out.reshape(-1, d), items=items, ns=1.0 * d)
        return out.reshape(rows, -1)

    def _observe(
        self,
        parts: np.ndarray,
        places: np.ndarray,
        sequences: np.ndarray,
        sinks: np.ndarray,
        masses: np.ndarray | None,
    ) -> None:
        if masses is not None:
            ns = 10.0 * parts.shape[1] * parts.shape[2]
            self.do(observe.observe, parts, places, sequences, sinks, masses, items=places.size, ns=ns)

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
