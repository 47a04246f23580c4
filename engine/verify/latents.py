"""Latent attention on both devices: what the comparison looks at between the kernels of the operation."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.cache.types import CHUNK
from engine.limits import STEP_ROWS
from engine.verify.layout import chunk_parts

f32 = np.float32

Compared = tuple[str, np.ndarray, np.ndarray, np.ndarray | None]
"""What is compared, the CPU's and the GPU's array, and where they must agree (None: everywhere)."""


def rows_at(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The rows of some positions of a NumPy ring [chunks, 64, width]: [n, width]."""
    return rows[positions // CHUNK % rows.shape[0], positions % CHUNK]


def stored(gpu: Any, rows: np.ndarray, device_rows: Any, positions: np.ndarray) -> Compared:
    """The rows of a pass in both caches."""
    theirs = np.empty((positions.size, rows.shape[2]), rows.dtype)
    for chunk in np.unique(positions // CHUNK):
        here, place = positions // CHUNK == chunk, int(chunk) % int(device_rows.shape[0])
        theirs[here] = gpu.download(device_rows[place : place + 1])[0][positions[here] % CHUNK]
    mine = rows_at(rows, positions)
    if mine.dtype == np.uint16:
        mine, theirs = mine.view(np.float16), theirs.view(np.float16)
    return "stored row", mine, theirs, None


def compressed(
    gpu: Any, rows: np.ndarray, device_rows: Any, ratio: int, positions: np.ndarray, transposed: bool
) -> Iterator[Compared]:
    """The compressed rows that a pass over ``positions`` has completed, in both memories: [chunks, 64, d], or [chunks, d, 64]
    if they are ``transposed``."""
    for r in range(int(positions[0]) // ratio, (int(positions[-1]) + 1) // ratio):
        chunk, lane = divmod(r, CHUNK)
        theirs = gpu.download(device_rows[chunk : chunk + 1])[0]
        mine, theirs = (x[:, lane] if transposed else x[lane] for x in (rows[chunk], theirs))
        mine, theirs = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
        if mine.dtype == np.uint16:
            mine, theirs = mine.view(np.float16), theirs.view(np.float16)
        yield "compressed row", mine, theirs, None


def of_chunks(
    gpu: Any, q: np.ndarray, r: np.ndarray, cache: Any, positions: np.ndarray, scale: float, values: dict[str, Any]
) -> Iterator[Compared]:
    """The results of attention for each chunk, before the chunks are joined: ``values`` of the GPU's kernel.

    q, r: both parts of the queries on the CPU, float32 [rows, n_head, ..]; cache: with the CPU's ring in ``rows.cpu``.
    """
    (rows, n_head, rank), ring = q.shape, cache.rows.cpu
    if rows > STEP_ROWS:
        return  # the rows belong to several launches, each with its own results
    slots, bits = values["mass"].size // (2 * rows * n_head), cache.k_type.bits
    mass, sums = np.zeros((rows, n_head, slots, 2), f32), np.zeros((rows, n_head, slots, rank), f32)
    seen = np.zeros((rows, 1, slots, 1), np.bool_)
    both = (np.ascontiguousarray(x)[None] for x in (ring.swapaxes(1, 2), ring[..., :rank]))
    rings = (x.reshape(1, x.shape[1], -1).view(np.uint32) for x in both)
    query = np.concatenate([q, r], 2)
    empty = np.zeros((rows, n_head, 0), np.int8), np.zeros((rows, n_head, 0), f32)
    chunk_parts(bits, bits)(query, *empty, *rings, positions, f32(scale), 0, mass, sums, seen[:, 0, :, 0])
    # The sign of a largest score of 0 depends on the order of comparisons; no result depends on it.
    found = gpu.download(values["mass"]).reshape(mass.shape)
    yield "largest score and sum", mass + f32(0.0), found + f32(0.0), seen
    parts = gpu.download(values["values"]).reshape(rows, n_head, slots, -1)[..., :rank]
    yield "weighted values", sums, parts, seen
