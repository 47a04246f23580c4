"""The memory of single layers, with pages in an arbitrary order."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec
from engine.cache.types import Types


def layer_of(
    shape: CacheSpec,
    n_ctx: int,
    rows: int,
    types: Types,
    zeros: Callable[..., Any],
    store: Callable[..., None] | None = None,
    n_sequences: int = 1,
    seed: int = 0,
) -> Any:
    """The memory of one layer for ``n_sequences`` sequences of ``n_ctx`` positions, stored at most ``rows`` at a time.

    Its pages are in a random order, the same for the same ``seed`` on every backend.  Where a sequence has fewer pages than
    chunks, because of a window, chunk c has the page of chunk c % n, n being the number of its pages.  zeros, store: of a
    backend; store None: arrays are NumPy arrays.
    """
    space = PagedMemory(n_ctx, rows, zeros, store, n_sequences)
    layer = shape.allocate(space, types)
    for pool in space.pools.values():
        order = np.random.default_rng(seed).permutation(pool.n_pages)
        own = pool.n_pages // n_sequences
        n_chunks = int(pool.table.shape[1])
        for slot in range(n_sequences):
            for chunk in range(n_chunks):
                pool.place(slot, chunk, int(order[slot * own + chunk % own]))
    space.publish()
    return layer


def chunks_of(memory: np.ndarray, layer: Any, slot: int = 0) -> np.ndarray:
    """The chunks of the sequence in a slot, in rising order, of keys or values [n_head_kv, pages, ...]: [n_head_kv, chunks,
    ...]."""
    return memory[:, layer.table[slot]]


def no_pages(paging: Paging) -> NoReturn:
    """The pages of a sequence for memory that has none."""
    raise AssertionError(paging)


def arrays_of(layer: Any) -> dict[str, Any]:
    """The arrays of the memory of a layer by name, without its numbers."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, np.ndarray)}
