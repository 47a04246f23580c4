"""The memory of the tokens a model has read: a ring per layer, addressed by absolute position.

Attention keeps keys and values in chunks of 64 positions.  Position j of a layer is stored in chunk (j // 64) % chunks, lane
j % 64.  A layer that attends to everything has room for the whole context; a sliding-window layer holds its window plus
one batch of rows, so that a batch can be stored before its first row has attended, and a few tokens can be rolled back.
``engine/cache/recurrent.py`` holds the memory of recurrent layers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from numpy.typing import DTypeLike

from engine.arrays import A
from engine.cache.types import CHUNK, CacheType, Types
from engine.limits import STEP_ROWS

SPARE = 64
"""The least number of positions beyond a window that its ring has: with three steps of 16 rows in flight, all but the first
of their tokens can still be rolled back."""


Zeros = Callable[[tuple[int, ...], DTypeLike], Any]
"""Allocates zeroed memory on a backend."""


@dataclass(frozen=True)
class Ring:
    """A ring: a pass that begins at position p needs what is stored at positions p - ``back`` .. p - 1; the ring holds
    ``capacity`` positions."""

    back: int
    capacity: int


def pass_rows(batch_size: int, n_ctx: int) -> int:
    """The most rows of any pass if prompts are read ``batch_size`` rows at a time."""
    return min(max(batch_size, STEP_ROWS), n_ctx)


class Shape(Protocol):
    """What one layer stores per position."""

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """Its memory in bytes, for a context of n_ctx read at most max_rows at a time."""

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """The parts of it that are overwritten as positions advance."""

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> Any:
        """Allocate the memory."""


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer stores per position: n_head_kv keys of d_k and values of d_v; window 0 = all positions."""

    n_head_kv: int
    d_k: int
    d_v: int
    window: int = 0

    def chunks(self, n_ctx: int, max_rows: int) -> int:
        """The length of the ring in chunks."""
        positions = n_ctx if self.window == 0 else min(n_ctx, self.window + max(max_rows, SPARE))
        return (positions + CHUNK - 1) // CHUNK

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """The memory of the ring in bytes."""
        position = types.k.row_bytes(self.d_k) + types.v.row_bytes(self.d_v)
        return self.chunks(n_ctx, max_rows) * CHUNK * self.n_head_kv * position

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """The window, if there is one and the ring is shorter than the context."""
        capacity = self.chunks(n_ctx, max_rows) * CHUNK
        return [Ring(self.window - 1, capacity)] if self.window > 0 and capacity < n_ctx else []

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> "LayerCache[Any]":
        """The rings."""
        heads, chunks, k, v = self.n_head_kv, self.chunks(n_ctx, max_rows), types.k, types.v
        keys = zeros(k.shape(heads, chunks, self.d_k, CHUNK), k.dtype)
        values = zeros(v.shape(heads, chunks, CHUNK, self.d_v), v.dtype)
        return LayerCache(keys, values, self.window, k, v, heads, chunks, self.d_k, self.d_v)


@dataclass
class LayerCache(Generic[A]):
    """The rings of one layer: keys [n_head_kv, chunks, d_k, 64], values [n_head_kv, chunks, 64, d_v], float32 or the bits of
    float16; quantized ones are words [n_head_kv, chunks, ...] (``engine/cache/types.py``)."""

    keys: A
    values: A
    window: int
    k_type: CacheType
    v_type: CacheType
    n_head_kv: int
    chunks: int
    d_k: int
    d_v: int


class KVCache:
    """The memory of all layers.  What it holds is known to ``engine/cache/sequence.py``."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        n_ctx: int,
        max_rows: int,
        types: Types,
        zeros: Zeros,
        others: Iterable[Ring] = (),
    ) -> None:
        """max_rows: the most rows of any pass (``pass_rows``); others: rings that a model has besides those of its layers."""
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.n_bytes = sum(s.n_bytes(n_ctx, max_rows, types) for s in shapes)
        self.layers: list[Any] = [s.layer(n_ctx, max_rows, types, zeros) for s in shapes]
        rings = [*others, *(ring for s in shapes for ring in s.rings(n_ctx, max_rows))]
        #: The kinds of rings that lose positions as others are stored.
        self.rings = frozenset(rings)

    @property
    def rewind(self) -> int:
        """The number of latest tokens that can be rolled back, whatever has been read before them."""
        return min((ring.capacity - ring.back for ring in self.rings), default=self.n_ctx)
