"""The launches of latent attention: products of the queries, rotation and storing, chunks, products of the results."""

import numpy as np

from engine.arrays import Batch
from engine.cache.latent import LatentCache
from engine.cache.types import CHUNK
from engine.cuda import indexer
from engine.cuda import latent as rows_of_positions
from engine.cuda.attention import attend as attention
from engine.cuda.attention import latent as chunks_of_latents
from engine.cuda.attention import tiled
from engine.cuda.products.heads import HeadProducts
from engine.cuda.rows import NARROW_ROWS, groups
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.cuda.runtime.values import Attended
from engine.ops.latent import Latent


def rotate(
    recorder: Recorder,
    latent: Latent[Tensor, DeviceWeight],
    queries: tuple[Tensor, Tensor] | None,
    c: Tensor,
    k_rope: Tensor,
    cache: LatentCache[Tensor],
    batch: Batch[Tensor],
) -> Tensor | None:
    """Record the rotation of the second part of the queries, if there are any, and the storing of the rows.  Returns both
    parts of the queries, float32 [rows, n_head, width], times the factors of their positions."""
    rows, scaled = batch.rows, queries is not None and latent.query_scales is not None
    n_head = latent.n_head if queries is not None else 0
    out = recorder.empty((rows, n_head, cache.width)) if n_head else None
    half = cache.k_type.bits == 16
    early, turned = rows <= NARROW_ROWS, latent.table is not None
    kernel = rows_of_positions.latent_rope(half, latent.rank, latent.n_rope, scaled, early, turned)
    q, r = queries or (0, 0)
    arguments = (
        *(q, r, c, k_rope, batch.positions, batch.sequences, cache.table),
        *(latent.table or 0, latent.norm, latent.query_scales or 0, latent.eps, n_head),
        *(cache.table.shape[1], int(batch.mixed), out or 0, cache.rows),
    )
    written = {"query": out} if out is not None else {}
    recorder.launch(kernel, (n_head + 1, rows), rows_of_positions.BLOCK, arguments, **written)
    return out


def attend(
    recorder: Recorder,
    latent: Latent[Tensor, DeviceWeight],
    query: Tensor,
    cache: LatentCache[Tensor],
    positions: Tensor,
    sequences: Tensor,
    mixed: bool,
    chosen: Tensor | None,
) -> Attended:
    """Record attention of queries over the cache up to ``positions``, of at most ``NARROW_ROWS`` rows unless they are
    ``mixed``; if not, all belong to sequence sequences[0].  If positions are ``chosen``, each row attends to those of its own
    up to number ``positions``.  The chunks of the result [rows, n_head * rank] are joined when it is used."""
    rows, stride, device, listed = positions.size, cache.table.shape[1], recorder.device, chosen is not None
    top_k = chosen.shape[1] if chosen is not None else 0
    partials = min(stride, -(-top_k // CHUNK)) if listed else stride
    sizes = rows, latent.n_head, latent.rank, latent.n_rope, cache.k_type.bits == 16, partials
    of_device = device.multiprocessors, device.shared_memory
    shape = chunks_of_latents.geometry(*sizes, *of_device, not listed, mixed, listed=listed)
    mass, values = (recorder.empty((n,)) for n in attention.scratch(rows, latent.n_head, latent.rank, partials))
    own_rows = 1 if mixed or listed else rows
    places, lists = (positions, sequences, cache.table), (chosen or 0, top_k, int(mixed))
    given = (query, cache.rows, *places, mass, values, own_rows, stride, partials, latent.scale, *lists)
    recorder.launch(shape.attend, shape.attend_grid, shape.attend_block, given, mass=mass, values=values)
    return Attended(mass, values, positions, None, None, shape, partials, 0, latent.n_head * latent.rank)


def attend_wide(
    recorder: Recorder,
    latent: Latent[Tensor, DeviceWeight],
    query: Tensor,
    cache: LatentCache[Tensor],
    positions: Tensor,
    batch: Batch[Tensor],
    chosen: Tensor | None,
) -> Tensor:
    """Record :func:`attend` of more rows than narrow kernels take: float32 [rows, n_head * rank].  Rows of several sequences
    are left to narrow kernels, unless the batch has runs."""
    rows, n_head, kind, device = positions.size, latent.n_head, cache.k_type.name, recorder.device
    out, width, rank = recorder.empty((rows, n_head * latent.rank)), cache.width, latent.rank
    shared = device.shared_memory
    several = batch.runs is not None
    sequences = batch.sequences if batch.runs is None else batch.runs
    fits = chosen is None and (several or not batch.mixed) and tiled.takes_latents(width, rank)
    if fits and tiled.fills(rows, n_head, 1, width, rank, kind, device.multiprocessors, shared):
        sizes = rows, n_head, 1, width, rank, kind, kind
        kernel, grid, block = tiled.geometry(*sizes, False, shared, latent=True, several=several)
        places = query, 0, cache.rows, cache.rows, positions, sequences, cache.table, 0, 0, out
        sizes_of = rows, cache.pages, cache.table.shape[1]
        recorder.launch(kernel, grid, block, (*places, *sizes_of, 0, latent.scale), result=out)
        return out
    # Narrow kernels, some rows at a time.
    for part in groups(rows, attention.rows_at_once(rows, n_head, rank, cache.table.shape[1], batch.mixed)):
        # Without a name, which would keep the memory of its chunks while the next group takes as much again.
        sequences = batch.sequences[part] if batch.mixed else batch.sequences
        given = query[part], cache, positions[part], sequences, batch.mixed, None if chosen is None else chosen[part]
        attend(recorder, latent, *given).write(recorder, out[part])
    return out


def latent_attention(
    recorder: Recorder,
    latent: Latent[Tensor, DeviceWeight],
    q: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    cache: LatentCache[Tensor],
    batch: Batch[Tensor],
    chosen: Tensor | None,
) -> Tensor:
    """Record latent attention and the products of its heads: float32 [rows, n_head * d_v]."""
    rows, positions = batch.rows, batch.positions
    if chosen is not None:
        positions = recorder.empty((rows,), np.int32)
        arguments = batch.positions, chosen.shape[1], rows, positions
        recorder.launch(indexer.ends(), (-(-rows // indexer.ENDS),), indexer.ENDS, arguments, result=positions)
    products = HeadProducts(recorder, rows, latent.n_head)
    query = rotate(recorder, latent, (products.multiply(q, latent.k_b), q_rope), c, k_rope, cache, batch)
    assert query is not None
    given = recorder, latent, query, cache, positions
    attended: Attended | Tensor
    if rows <= NARROW_ROWS:
        attended = attend(*given, batch.sequences, batch.mixed, chosen)
    else:
        attended = attend_wide(*given, batch, chosen)
    return products.multiply(attended, latent.v_b).reshape(rows, latent.n_head * latent.d_v)
