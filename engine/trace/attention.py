"""The weights that attention gives to positions, computed on the host from a query and the keys in the cache.

The kernels of attention never hold all weights of a row at once, so they are computed here a second time, in float64::

    q' = rotate(norm(q + bias))        as the layer says
    s_j = scale q' . k_j               perhaps bounded, c tanh(s_j / c)
    w_j = exp(s_j) / (sum_i exp(s_i) + exp(sink))

for the positions j that the row sees.  Keys of a quantized cache are those that it holds, after rounding.  The kernels also
round the query of such a cache; that is not repeated here.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from engine.arrays import Array
from engine.cache.contents import stored
from engine.cache.kv import AttentionCache
from engine.cache.types import CHUNK, CacheType
from engine.cache.window import NOT_FIRST
from engine.ops.heads import Heads
from engine.ops.operations import Ops
from engine.trace.capture import AttentionArguments

f64 = np.float64


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one row.

    Attributes
    ----------
    first : int
        The first position that the row sees.
    weights : ndarray
        float64 [n_head, n], of the positions ``first`` to ``first + n - 1``, the row's own.
    sinks : ndarray
        float64 [n_head], the weight of each head's sink; 0 without sinks. A row of ``weights`` and its sink add up to 1.
    """

    first: int
    weights: np.ndarray
    sinks: np.ndarray


def attention_weights(
    ops: Ops, arguments: AttentionArguments, raw: np.ndarray, position: int, slot: int
) -> AttentionWeights:
    """The weights of the row at ``position`` of the sequence in ``slot``, which must be the latest one in the cache.

    raw: the query as the layer has computed it, float32 [n_head * d_k], with gates in between if it has any.
    """
    table = arguments.table
    angles = None if table is None else ops.download(table[slice(position, position + 1)])[0]
    heads = on_host(ops, arguments.heads, position)
    q = prepared(heads, raw, angles)
    first = first_visible(position, arguments.window)
    keys = cached_keys(ops, arguments.cache, slot, first, position + 1)
    return softmax(q, keys, heads.softcap, heads.sinks, first)


def softmax(q: np.ndarray, keys: np.ndarray, cap: float, sinks: np.ndarray | None, first: int) -> AttentionWeights:
    """The weights for queries times the scale, float64 [n_head, d], and keys float64 [n, n_head_kv, d].

    cap: the bound of scores, 0 for none; sinks: float32 [n_head] or None; first: the position of the first key.
    """
    n_head, d = q.shape
    n, n_head_kv, _ = keys.shape
    # Consecutive query heads share a head of keys.
    scores = np.einsum("gid,jgd->gij", q.reshape(n_head_kv, n_head // n_head_kv, d), keys).reshape(n_head, n)
    if cap:
        scores = cap * np.tanh(scores / cap)
    own = np.full(n_head, -np.inf) if sinks is None else sinks.astype(f64)
    top = np.maximum(scores.max(1), own)
    weights, rest = np.exp(scores - top[:, None]), np.exp(own - top)
    total = weights.sum(1) + rest
    return AttentionWeights(first, weights / total[:, None], rest / total)


def first_visible(position: int, window: int) -> int:
    """The first position that the row at ``position`` sees; window: as in ``engine/cache/window.py``."""
    if window > 0:
        return max(0, position - window + 1)
    if window < NOT_FIRST:
        return position & window
    return min(position, -window)


# --- the query -------------------------------------------------------------------------------------------------


def on_host(ops: Ops, heads: Heads[Array], position: int) -> Heads[np.ndarray]:
    """The parameters of heads as NumPy arrays; of the factors by position only that of ``position``, float32 [1]."""

    def host(array: Array | None) -> np.ndarray | None:
        return None if array is None else ops.download(array)

    factors, biases = heads.query_scales, heads.biases
    given: dict[str, Any] = {
        "q_norm": host(heads.q_norm),
        "k_norm": None,
        "biases": None if biases is None else tuple(map(ops.download, biases)),
        "sinks": host(heads.sinks),
        "query_scales": None if factors is None else ops.download(factors[slice(position, position + 1)]),
    }
    return cast(Heads[np.ndarray], replace(heads, **given))


def prepared(heads: Heads[np.ndarray], raw: np.ndarray, angles: np.ndarray | None) -> np.ndarray:
    """The query as attention uses it, times the scale of attention: float64 [n_head, d_k].

    heads: from :func:`on_host`; angles: cosines and sines of the position, float32 [2, n_rot / 2], or None.
    """
    q = raw.astype(f64).reshape(heads.n_head, -1)[:, : heads.d_k]
    if heads.biases is not None:
        q = q + heads.biases[0].reshape(q.shape)
    if not heads.norm_after:
        q = _normed(heads, q)
    if angles is not None:
        q = rotated(q, angles[0].astype(f64), angles[1].astype(f64), heads.neox)
    if heads.norm_after:
        q = _normed(heads, q)
    if heads.query_scales is not None:
        q = q * float(heads.query_scales[0])
    return q * heads.scale


def _normed(heads: Heads[np.ndarray], q: np.ndarray) -> np.ndarray:
    """Queries [n_head, d_k] after the norm of each head, if there is one."""
    if heads.q_norm is None:
        return q
    normed = q / np.sqrt((q**2).mean(1, keepdims=True) + heads.eps)
    return normed * heads.q_norm if heads.q_norm.size else normed


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, neox: bool) -> np.ndarray:
    """x [n, d] with its first pairs rotated: (i, i + n_rot / 2) where ``neox``, else (2 i, 2 i + 1)."""
    half = cos.size
    one, other = (slice(half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b, y = x[:, one], x[:, other], x.copy()
    y[:, one], y[:, other] = a * cos - b * sin, a * sin + b * cos
    return y


# --- the keys --------------------------------------------------------------------------------------------------


def cached_keys(ops: Ops, cache: AttentionCache[Array], slot: int, first: int, end: int) -> np.ndarray:
    """The keys of the positions [first, end) of the sequence in a slot: float64 [end - first, n_head_kv, d_k]."""
    begin = first // CHUNK
    pages = ops.download(cache.table[slice(slot, slot + 1)])[0, begin : -(-end // CHUNK)].tolist()
    heads, n_pages = cache.keys.shape[:2]
    every = cache.keys.reshape(heads * n_pages, *cache.keys.shape[2:])
    at = [head * n_pages + page for head in range(heads) for page in pages]
    # Only these pages are copied from the device.
    held = np.concatenate([ops.download(every[slice(i, i + 1)]) for i in at])
    lanes = np.arange(first, end) - begin * CHUNK
    keys = held.reshape(heads, len(pages), *held.shape[1:])
    return decoded(stored(keys, cache.k_type, cache.d_k, False, lanes // CHUNK, lanes % CHUNK), cache.k_type, cache.d_k)


def decoded(rows: np.ndarray, kind: CacheType, d: int) -> np.ndarray:
    """Rows of d elements in the form of :func:`engine.cache.contents.stored` as numbers: float64 [..., d]."""
    if not kind.quantized:
        return (np.ascontiguousarray(rows).view(np.float16) if kind.bits == 16 else rows).astype(f64)
    block = kind.block(d)
    scales = np.ascontiguousarray(rows[..., -(d // block) :].astype(np.uint16)).view(np.float16).astype(f64)
    values = _whole(rows, kind.bits, d) if kind.whole else _words(rows, kind.bits, d)
    blocks = values.reshape(*values.shape[:-1], d // block, block) * scales[..., None]
    # The cache holds each block rotated by a matrix that is its own inverse.
    return (blocks @ (hadamard(block) / np.sqrt(block))).reshape(values.shape)


def _whole(rows: np.ndarray, bits: int, d: int) -> np.ndarray:
    """The integers of i8 and i12, float64 [..., d]."""
    high = np.ascontiguousarray(rows[..., :d].astype(np.uint8)).view(np.int8).astype(f64)
    if bits == 8:
        return high
    low = rows[..., d : d + d // 2].reshape(*rows.shape[:-1], d // 8, 4)
    return 16 * high + np.stack([low & 15, low >> 4], -2).reshape(high.shape)


def _words(rows: np.ndarray, bits: int, d: int) -> np.ndarray:
    """The integers of q8_0 and q4_0, float64 [..., d]."""
    data = np.ascontiguousarray(rows[..., : d * bits // 32]).view(np.uint8)
    if bits == 8:
        return data.view(np.int8).astype(f64)
    data = data.reshape(*rows.shape[:-1], d // 8, 4)
    return np.stack([data & 15, data >> 4], -2).reshape(*rows.shape[:-1], d).astype(f64) - 8


def hadamard(n: int) -> np.ndarray:
    """The Hadamard matrix of Sylvester, float64 [n, n]; n: a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
