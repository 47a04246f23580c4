"""The key-value cache: one ring per layer, in chunks of 64 absolute positions.

Position j of a layer lives in chunk (j // 64) % chunks, lane j % 64.  A layer that attends to everything has room for
the whole context; a sliding-window layer holds its window and one batch of rows more, so that a batch can be stored
before its first row has attended, and a few tokens can be taken back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ContextError

CHUNK = 64

SPARE = 64
"""Positions beyond a window that its ring has at least: when three steps of 16 rows are under way, all but the first of their
tokens can still be taken back."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per position: n_head_kv keys of d_k and values of d_v; window 0 = all positions."""

    n_head_kv: int
    d_k: int
    d_v: int
    window: int = 0

    def chunks(self, n_ctx: int, max_rows: int) -> int:
        """Ring length in chunks."""
        positions = n_ctx if self.window == 0 else min(n_ctx, self.window + max(max_rows, SPARE))
        return (positions + CHUNK - 1) // CHUNK

    def n_bytes(self, n_ctx: int, max_rows: int, element: int) -> int:
        """Memory of the ring."""
        return self.chunks(n_ctx, max_rows) * CHUNK * self.n_head_kv * (self.d_k + self.d_v) * element


@dataclass
class LayerCache:
    """The rings of one layer: keys [n_head_kv, chunks, d_k, 64], values [n_head_kv, chunks, 64, d_v]; ``half``: they
    hold float16 bits as uint16, else float32."""

    keys: Any
    values: Any
    window: int
    half: bool


class KVCache:
    """Rings of all layers, with one length: the number of positions stored."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        n_ctx: int,
        max_rows: int,
        half: bool,
        zeros: Callable[[tuple[int, ...], type], Any],
    ) -> None:
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.length = 0
        self.n_bytes = sum(s.n_bytes(n_ctx, max_rows, 2 if half else 4) for s in shapes)
        dtype = np.uint16 if half else np.float32
        self.layers = [
            LayerCache(
                zeros((s.n_head_kv, s.chunks(n_ctx, max_rows), s.d_k, CHUNK), dtype),
                zeros((s.n_head_kv, s.chunks(n_ctx, max_rows), CHUNK, s.d_v), dtype),
                s.window,
                half,
            )
            for s in shapes
        ]
        windows = [(s.window, s.chunks(n_ctx, max_rows) * CHUNK) for s in shapes if s.window > 0]
        # (window, capacity) of each kind of sliding layer, and the oldest position that its ring still holds.
        self._oldest = dict.fromkeys(windows, 0)

    def advance(self, first: int, count: int) -> None:
        """Claim positions [first, first + count) for a batch that is about to be stored; first must be ``length``."""
        if first != self.length:
            raise ContextError(f"positions must continue at {self.length}, not at {first}.")
        if count > self.max_rows:
            raise ContextError(f"a batch holds at most {self.max_rows} rows, not {count}.")
        if first + count > self.n_ctx:
            raise ContextError(f"position {first + count - 1} is outside the context of {self.n_ctx}.")
        self.length = first + count
        self.overwrite(self.length)

    def overwrite(self, end: int) -> None:
        """Positions before ``end`` have been or will be written, whatever becomes of them: rings lose what lay there."""
        for window, capacity in self._oldest:
            self._oldest[window, capacity] = max(self._oldest[window, capacity], end - capacity)

    def can_truncate(self, length: int) -> bool:
        """Whether the cache can be rewound to ``length``: sliding rings must still hold the window before it."""
        if length == 0:
            return True
        return length <= self.length and all(
            length - window + 1 >= oldest or oldest == 0 for (window, _), oldest in self._oldest.items()
        )

    def truncate(self, length: int) -> None:
        """Forget positions >= length.  ContextError if a sliding ring no longer holds what precedes it."""
        if not 0 <= length <= self.length:
            raise ContextError(f"a cache of {self.length} positions cannot be cut to {length}.")
        if not self.can_truncate(length):
            raise ContextError(f"the sliding window before position {length} is gone; start again from 0.")
        self.length = length
        if length == 0:
            self._oldest = dict.fromkeys(self._oldest, 0)
