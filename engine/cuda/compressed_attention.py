"""Attention over compressed rows and a window of latents, each of which is the key and the value of all heads.

Formula: ``engine/cpu/compressed_attention.py``.
Shapes: q, out float32 [rows, n_head, d]; latents, compressed float32 or float16 [chunks, 64, d]; chosen int32 [rows, top_k];
    sinks float32 [n_head].
Who owns what: a block of 256 threads owns a row and four heads, one chunk after another.  In 64 threads of a head, thread j
    owns the score of entry j of a chunk, and then every 64th element of the result.
Reduction order: that of ``engine/cpu/compressed_attention.py``: a thread runs the chain of a score over d, in tiles of 64
    elements that all four heads read from shared memory, and the chain of a result over the entries of a chunk.
Bytes moved: twice d * element size per latent and compressed row that a token sees, for every four heads.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.elements import getter, setter
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    exp,
    fma,
    let_next_begin,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

f32 = np.float32
I = np.int32  # noqa: E741

HEADS = 4
"""Heads of a block."""

TILE = 64
"""Elements of a row that are in shared memory at a time."""

PITCH = TILE + 1
"""The distance of rows in shared memory, so that threads that read a column do not wait for one another."""

THREADS = HEADS * CHUNK


@kernel(F32P, i32, I32P, i32, F32P, threads=256)
def append(half: bool) -> KernelCode:
    """Store latents x [rows, d] at their positions.  Grid: (ceil(d / 256), rows)."""
    put = setter(half)

    @cuda.jit
    def append(x, d, positions, chunks, latents):  # type: ignore[no-untyped-def]
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < d:
            p = I(positions[t])
            place = np.int64(I(p // CHUNK % chunks) * CHUNK + p % CHUNK) * d + i
            put(latents, place, x[np.int64(t) * d + i])

    return append


def make_chunk(d: int, half: bool) -> tuple[DeviceFunction, DeviceFunction]:
    """The device functions ``one_chunk``, which joins a chunk to the current group, and ``end_group``.

    Both change sums [4], maximum and sum of the groups so far and of the current group, and the thread's elements of their
    weighted values, out and inner [tiles].
    """
    tiles, get = -(-d // TILE), getter(half)

    @device
    def stage(source, places, a, b, first, tile):  # type: ignore[no-untyped-def]
        """Copy elements [first, first + 64) of rows [a, b) of a chunk to shared memory, as float32; places: their numbers."""
        thread = I(cuda.threadIdx.x)
        i = I(thread % TILE)
        cuda.syncthreads()
        j = I(a + thread // TILE)
        while j < b:
            if first + i < d:
                tile[j * PITCH + i] = get(source, np.int64(places[j]) * d + first + i)
            j = I(j + THREADS // TILE)
        cuda.syncthreads()

    @device
    def one_chunk(source, places, a, b, query, tile, p, sums, inner):  # type: ignore[no-untyped-def]
        """Rows ``places[a]`` .. ``places[b - 1]`` of source are the lanes [a, b) of the chunk."""
        thread = I(cuda.threadIdx.x)
        h, j = I(thread // CHUNK), I(thread % CHUNK)
        score = f32(0.0)
        for k in range(tiles):
            stage(source, places, a, b, I(k * TILE), tile)
            if j >= a and j < b:
                for i in range(min(TILE, d - k * TILE)):
                    score = fma(query[h * d + k * TILE + i], tile[j * PITCH + i], score)
        p[thread] = score if j >= a and j < b else f32(-np.inf)
        cuda.syncthreads()
        own = h * CHUNK
        m = f32(-np.inf)
        for lane in range(a, b):
            m = max(m, p[own + lane])
        weight = exp(p[thread] - m)
        cuda.syncthreads()
        p[thread] = weight
        cuda.syncthreads()
        lane = I(thread & 31)
        total = fold32(p[own + lane] + p[own + 32 + lane])
        joined = max(sums[2], m)
        before, here = exp(sums[2] - joined), exp(m - joined)
        sums[2] = joined
        sums[3] = fma(sums[3], before, here * total)
        for k in range(tiles):
            stage(source, places, a, b, I(k * TILE), tile)
            o = f32(0.0)
            if k * TILE + j < d:
                for lane in range(a, b):
                    o = fma(p[own + lane], tile[lane * PITCH + j], o)
            inner[k] = fma(inner[k], before, here * o)

    @device
    def end_group(sums, inner, out):  # type: ignore[no-untyped-def]
        """Join the current group to those before it, unless it is empty, and begin the next one."""
        if sums[3] != f32(0.0):
            joined = max(sums[0], sums[2])
            before, here = exp(sums[0] - joined), exp(sums[2] - joined)
            sums[0] = joined
            sums[1] = fma(sums[1], before, here * sums[3])
            for k in range(tiles):
                out[k] = fma(out[k], before, here * inner[k])
        sums[2], sums[3] = f32(-np.inf), f32(0.0)
        for k in range(tiles):
            inner[k] = f32(0.0)

    return one_chunk, end_group


@kernel(
    *(F32P, F32P, F32P, I32P, I32P, i32, i32, i32, i32, i32, f32_t, F32P, F32P),
    threads=THREADS,
)
def attend_compressed(d: int, half: bool, group: int = GROUP) -> KernelCode:
    """Attention of all rows; top_k 0: the list of a row has all compressed rows that it sees.  Grid: (ceil(n_head / 4),
    rows)."""
    one_chunk, end_group = make_chunk(d, half)
    tiles, n_query, n_tile = -(-d // TILE), HEADS * d, CHUNK * PITCH

    @cuda.jit
    def attend_compressed(  # type: ignore[no-untyped-def]
        q, latents, compressed, chosen, positions, n_head, chunks, window, ratio, top_k, scale, sinks, out
    ):
        let_next_begin()
        query = pointer(cuda.shared.array(n_query, np.float32))
        tile = pointer(cuda.shared.array(n_tile, np.float32))
        p = pointer(cuda.shared.array(THREADS, np.float32))
        places = pointer(cuda.shared.array(CHUNK, np.int32))
        sums = cuda.local.array(4, np.float32)
        inner = cuda.local.array(tiles, np.float32)
        result = cuda.local.array(tiles, np.float32)
        thread, t = I(cuda.threadIdx.x), I(cuda.blockIdx.y)
        head = I(I(cuda.blockIdx.x) * HEADS + thread // CHUNK)
        wait_for_inputs()
        # Heads that do not exist compute what the last one does, and store nothing.
        given = advance(q, (np.int64(t) * n_head + min(head, I(n_head - 1))) * d)
        i = I(thread % CHUNK)
        while i < d:
            query[I(thread // CHUNK) * d + i] = given[i] * scale
            i = I(i + CHUNK)
        sums[0] = f32(-np.inf)
        sums[1] = f32(0.0)
        sums[2] = f32(-np.inf)
        sums[3] = f32(0.0)
        for k in range(tiles):
            inner[k] = f32(0.0)
            result[k] = f32(0.0)
        position = I(positions[t])
        listed = I(I(position + 1) // ratio) if ratio > 0 else I(0)
        if top_k > 0:
            listed = min(listed, I(top_k))
        for c in range(I(I(listed + CHUNK - 1) // CHUNK)):
            count = min(I(CHUNK), I(listed - c * CHUNK))
            cuda.syncthreads()
            if thread < count:
                places[thread] = (
                    chosen[np.int64(t) * top_k + c * CHUNK + thread] if top_k > 0 else I(c * CHUNK + thread)
                )
            one_chunk(compressed, places, I(0), count, query, tile, p, sums, inner)
            if (c + 1) % group == 0:
                end_group(sums, inner, result)
        end_group(sums, inner, result)
        low = max(I(0), I(position - window + 1))
        for c in range(I(low // CHUNK), I(position // CHUNK + 1)):
            a, b = max(I(0), I(low - c * CHUNK)), min(I(CHUNK), I(position - c * CHUNK + 1))
            cuda.syncthreads()
            if thread < CHUNK:
                places[thread] = I(I(c % chunks) * CHUNK + thread)
            one_chunk(latents, places, a, b, query, tile, p, sums, inner)
            if (c + 1) % group == 0:
                end_group(sums, inner, result)
        end_group(sums, inner, result)
        sink = sinks[min(head, I(n_head - 1))]
        joined = max(sums[0], sink)
        before = exp(sums[0] - joined)
        total = fma(sums[1], before, exp(sink - joined))
        if head < n_head:
            for k in range(tiles):
                i = I(k * TILE + thread % CHUNK)
                if i < d:
                    out[(np.int64(t) * n_head + head) * d + i] = result[k] * before / total

    return attend_compressed
