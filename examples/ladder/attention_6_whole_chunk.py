# mypy: allow-untyped-defs
"""Attention 6. A whole chunk in flight.

    python examples/ladder/attention_6_whole_chunk.py

Against step 5, the first kernel: there, a thread loads a word of a key, adds it, and loads the next one.  A block has a few
kilobytes in flight.  Here its threads first ask for the whole chunk, 32 KB of keys and values in vectors of 16 bytes.  They
store the keys in shared memory, where all heads read them, and keep the values in registers until the scores are done.

Bytes: a word of the cache is read once, and not once for each head.
Instructions: a quarter of the loads from memory.
Latency: one wait for the keys of a chunk instead of one for every few words.  The values arrive in the meantime.

``engine/cuda/attention`` continues from here.  Its kernels take up to 32 rows of several sequences, find their pages in a
table, and begin to load a chunk before the query is ready.
"""

import numpy as np
from attention_5_factors_first import JOIN
from ladder import HEADS, attention
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import exp, fma, keep4, pointer, stream4
from engine.cuda.products.lanes import high_half, low_half
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


@kernel(F32P, U32P, U32P, F32P, i32, i32, threads=lambda d, share: 64 * share)
def whole_chunk(d: int, share: int):
    """The state of each chunk of each head.  A block has a chunk of a KV head: 64 threads for each of its ``share`` heads."""
    threads, half, n_words, n_queries = 64 * share, d // 2, 32 * d, d * share
    n_vectors = n_words // 4 // threads  # of keys, for each thread, and as many of values
    n_held = 4 * n_vectors

    @cuda.jit
    def whole_chunk(queries, pairs, values, states, n, chunks):
        tile = pointer(cuda.shared.array(n_words, np.uint32))
        query = cuda.shared.array(n_queries, np.float32)
        scores, weights = cuda.shared.array(threads, np.float32), cuda.shared.array(threads, np.float32)
        keys, later = cuda.local.array(n_held, np.uint32), cuda.local.array(n_held, np.uint32)
        thread, lane = I(cuda.threadIdx.x), I(cuda.threadIdx.x & 63)
        kv, chunk = I(cuda.blockIdx.x // chunks), I(cuda.blockIdx.x % chunks)
        first = I(64 * chunk)
        of_keys, of_values = np.int64(cuda.blockIdx.x) * n_words, (np.int64(kv) * n + first) * half
        for k in range(n_vectors):
            at = I(4 * (thread + threads * k))
            keys[4 * k], keys[4 * k + 1], keys[4 * k + 2], keys[4 * k + 3] = stream4(pairs, of_keys + at)
        for k in range(n_vectors):
            at = I(4 * (thread + threads * k))
            vector = (u32(0), u32(0), u32(0), u32(0))
            if first + at // half < n:
                vector = stream4(values, of_values + at)
            later[4 * k], later[4 * k + 1], later[4 * k + 2], later[4 * k + 3] = vector
        for i in range(thread, n_queries, threads):
            query[i] = queries[kv * n_queries + i]
        for k in range(n_vectors):
            at = I(4 * (thread + threads * k))
            keep4(tile, at, keys[4 * k], keys[4 * k + 1], keys[4 * k + 2], keys[4 * k + 3])
        cuda.syncthreads()
        mine, head = I(thread - lane), I(thread >> 6)
        score = f32(0)
        for i in range(half):
            word = tile[64 * i + lane]
            score = fma(query[head * d + 2 * i], low_half(word), score)
            score = fma(query[head * d + 2 * i + 1], high_half(word), score)
        if first + lane >= n:
            score = f32(-np.inf)
        scores[thread] = score
        cuda.syncthreads()
        for k in range(n_vectors):  # nobody reads the keys any more
            at = I(4 * (thread + threads * k))
            keep4(tile, at, later[4 * k], later[4 * k + 1], later[4 * k + 2], later[4 * k + 3])
        top = f32(-np.inf)
        for j in range(64):
            top = max(top, scores[mine + j])
        weights[thread] = exp(score - top)
        cuda.syncthreads()
        state = np.int64(I((kv * share + head) * chunks + chunk)) * (d + 2)
        if lane < 32:
            total = fold32(weights[thread] + weights[thread + 32])
            if lane == 0:
                states[state + d] = top
                states[state + d + 1] = total
        if lane < half:
            low, high = f32(0), f32(0)
            for j in range(min(64, n - first)):
                word = tile[half * j + lane]
                low = fma(weights[mine + j], low_half(word), low)
                high = fma(weights[mine + j], high_half(word), high)
            states[state + 2 * lane] = low
            states[state + 2 * lane + 1] = high

    return whole_chunk


if __name__ == "__main__":
    heads, kv, d, n = HEADS
    arguments = ("queries", "pairs", "values", "states", "n", "chunks")
    attention(__doc__, (whole_chunk(d, heads // kv), (kv * -(-n // 64), 64 * heads // kv), arguments), JOIN)
