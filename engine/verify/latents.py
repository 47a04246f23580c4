"""Latent attention on both devices: what the comparison looks at between the kernels of the operation."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.cache.contents import Paged, rows_at
from engine.cache.types import CHUNK
from engine.cpu.latent_attention import attend_groups
from engine.cuda.rows import NARROW_ROWS

f32 = np.float32

Compared = tuple[str, np.ndarray, np.ndarray, np.ndarray | None]
"""What is compared, the CPU's and the GPU's array, and where they must agree (None: everywhere)."""


def stored(gpu: Any, paged: Paged, on_device: Paged, positions: np.ndarray) -> Compared:
    """The rows of a pass in both caches."""
    mine = rows_at(paged, positions)
    theirs, (pages, table) = np.empty_like(mine), on_device
    own = gpu.download(table[:1])[0]
    for chunk in np.unique(positions // CHUNK):
        here, page = positions // CHUNK == chunk, int(own[chunk])
        theirs[here] = gpu.download(pages[page : page + 1])[0][positions[here] % CHUNK]
    if mine.dtype == np.uint16:
        mine, theirs = mine.view(np.float16), theirs.view(np.float16)
    return "stored row", mine, theirs, None


def compressed(
    gpu: Any, paged: Paged, on_device: Paged, ratio: int, positions: np.ndarray, transposed: bool
) -> Iterator[Compared]:
    """The compressed rows that a pass over ``positions`` has completed, in both memories, whose pages are [d, 64] if they are
    ``transposed``."""
    own = gpu.download(on_device[1][:1])[0]
    for r in range(int(positions[0]) // ratio, (int(positions[-1]) + 1) // ratio):
        chunk, lane = divmod(r, CHUNK)
        page = int(own[chunk])
        pages = paged[0][paged[1][0, chunk]], gpu.download(on_device[0][page : page + 1])[0]
        mine, theirs = (x[:, lane] if transposed else x[lane] for x in pages)
        mine, theirs = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
        if mine.dtype == np.uint16:
            mine, theirs = mine.view(np.float16), theirs.view(np.float16)
        yield "compressed row", mine, theirs, None


def of_chunks(
    gpu: Any,
    q: np.ndarray,
    r: np.ndarray,
    cache: Any,
    positions: np.ndarray,
    chosen: np.ndarray | None,
    scale: float,
    values: dict[str, Any],
) -> Iterator[Compared]:
    """The results of attention for each chunk, before the chunks are joined: ``values`` of the GPU's kernel.

    q, r: both parts of the queries on the CPU, float32 [rows, n_head, ..]; cache: with the CPU's pages in ``rows.cpu`` and
    their table in ``table.cpu``; chosen: int32 [rows, top_k], the positions that rows attend to, or None.
    """
    rows, n_head, rank = q.shape
    if rows > NARROW_ROWS:
        return  # the rows belong to several launches, each with its own results
    partials = values["mass"].size // (2 * rows * n_head)
    # Groups of one chunk each.
    mass, sums = np.zeros((rows, partials, n_head, 2), f32), np.zeros((rows, partials, n_head, rank), f32)
    if chosen is None:
        chosen = np.zeros((rows, 0), np.int32)
    else:
        positions = np.minimum(positions, np.int32(chosen.shape[1] - 1))
    where = positions, np.zeros(rows, np.int32), cache.table.cpu, chosen
    attend_groups(1)(q, r, cache.rows.cpu, *where, f32(scale), mass, sums, 0, rows * partials)
    seen = (np.arange(partials) <= positions[:, None] // CHUNK)[:, None, :, None]
    # The sign of a largest score of 0 depends on the order of comparisons; no result depends on it.  That of a sum of 0 is
    # lost where the mirror joins the chunk to its empty group.
    found = gpu.download(values["mass"]).reshape(rows, n_head, partials, 2)
    yield "largest score and sum", mass.swapaxes(1, 2) + f32(0.0), found + f32(0.0), seen
    parts = gpu.download(values["values"]).reshape(rows, n_head, partials, -1)[..., :rank]
    yield "weighted values", sums.swapaxes(1, 2) + f32(0.0), parts + f32(0.0), seen
