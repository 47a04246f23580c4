"""Quantized keys and values in a tile of queries: the parts of ``engine/cuda/attention/tiled.py`` that read them.

Formula: scores = sum over blocks of (dq * dk) * I, values = scale * integer (``engine/cpu/quantized_cache.py``).
Shapes: keys and values by type (``engine/cache/types.py``); q words [rows, n_head, d_k / 4] of int8, already scaled, and
    float32 [rows, n_head, d_k / 32].  In shared memory a tile's queries are in the layout of a tensor core, words [d_k / 32,
    pairs / 16, 32 lanes, 4], followed by their scales [d_k / 32, pairs].
Who owns what: lane 4 g + t of a warp reads 8 dimensions of each block of the positions g, g + 8, ... g + 56 of a chunk.  A
    product of the tensor core takes 16 positions and 8 pairs, chosen so that the lane gets the scores of its positions with
    pairs 4 t .. 4 t + 3 and with the four that are 16 further.  Values: a thread unpacks 8 elements of one or more positions.
Reduction order: that of the mirror, one chain per score in rising blocks; integers are exact in any order.
Bytes moved: keys from memory by every warp that needs them (the L1 cache serves all but the first), 16 of shared memory for
    every 4 products.
"""

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CHUNK, CacheType
from engine.cuda.attention.tile import Tile, make_each, take4
from engine.cuda.attention.weighted_values import UNSIGNED, ZEROS, unpacked
from engine.cuda.intrinsics import (
    advance,
    fma,
    half_to_float,
    halves,
    keep4,
    load1,
    load2,
    mma32,
    vector4,
)
from engine.cuda.products.unpack import device, minus, nibbles
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

EIGHT = 8
"""Elements of a value that a thread unpacks at a time."""


# --- queries ---------------------------------------------------------------------------------------------------


def make_query(tile: Tile, of: CacheType, group: int) -> DeviceFunction:
    """The device function ``place(q, q_scales, task0, last, head0, n_head, thread, to)``: copy the queries of the pairs from
    task0, of 0 .. last, to shared memory, for keys of a type: lane 4 g + t has words t and t + 4 of a block, or 2 t and 2
    t + 1 if a word of the key has eight dimensions."""
    pairs, threads, of_head, blocks = tile.pairs, tile.threads, tile.d_k // 4, tile.d_k // BLOCK
    each, apart = (1, 4) if of.bits == 8 else (2, 1)
    n_vectors, n_scales, sets = pairs * of_head // 4, pairs * blocks, pairs // 16

    @device
    def head_of(task, head0, n_head):
        row = I(U(task) // U(group))
        return np.int64(I(I(row * n_head) + I(head0 + I(task - row * group))))

    @device
    def place(q, q_scales, task0, last, head0, n_head, thread, to):
        i = thread
        while i < n_vectors:
            lane, b = I(i & 31), I((i >> 5) // sets)
            pair = I(I((i >> 5) % sets * 16) + I((lane >> 3) * 4 + ((lane >> 2) & 1)))
            word = I(b * (BLOCK // 4) + each * (lane & 3))
            first, second = min(last, I(task0 + pair)), min(last, I(task0 + I(pair + 2)))
            x = advance(q, head_of(first, head0, n_head) * of_head + word)
            y = advance(q, head_of(second, head0, n_head) * of_head + word)
            keep4(to, I(4 * i), x[0], x[apart], y[0], y[apart])
            i = I(i + threads)
        i = thread
        while i < n_scales:
            task = min(last, I(task0 + i % pairs))
            to[I(4 * n_vectors + i)] = q_scales[head_of(task, head0, n_head) * blocks + i // pairs]
            i = I(i + threads)

    return place


# --- scores ----------------------------------------------------------------------------------------------------


def _make_load(bits: int) -> DeviceFunction:
    """The device function ``load(m, key, scale, words, scales)``: a lane's part of positions 2 m and 2 m + 1 of a block."""

    @device
    def load(m, key, scale, words, scales):
        for k in range(2):
            e = 2 * m + k
            if bits == 8:
                words[2 * e], words[2 * e + 1] = load1(key, 32 * e), load1(key, 32 * e + 4 * CHUNK)
            else:
                words[e] = load1(key, 32 * e)
            scales[e] = scale[8 * e]

    return load


@device
def _product(n, m, a, query, d, x, y, s):
    """Add a block to the scores of positions 2 m and 2 m + 1, whose scales are x and y, with pairs 2 n and 2 n + 1."""
    sums = mma32(a[0], a[1], a[2], a[3], query[2 * n], query[2 * n + 1])
    s[16 * n + 2 * m] = fma(d[2 * n] * x, F(sums[0]), s[16 * n + 2 * m])
    s[16 * n + 8 + 2 * m] = fma(d[2 * n + 1] * x, F(sums[1]), s[16 * n + 8 + 2 * m])
    s[16 * n + 2 * m + 1] = fma(d[2 * n] * y, F(sums[2]), s[16 * n + 2 * m + 1])
    s[16 * n + 8 + 2 * m + 1] = fma(d[2 * n + 1] * y, F(sums[3]), s[16 * n + 8 + 2 * m + 1])


def make_scores(tile: Tile, of: CacheType) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(words, fetch, score) for keys of a type.

    ``fetch(keys, lane, words, scales)``: start loading a lane's part of the first block of the chunk at keys into registers,
    words [``words``] and scales uint16 [8].
    ``score(keys, lane, words, scales, query, d, s)``: all scores s [own, 8] of the lane, which were 0; query, d: the lane's
    part of the warp's first 16 pairs, and the scales of its first pair.
    """
    bits, own = of.bits, tile.own
    blocks, integers = tile.d_k // BLOCK, of.integer_words(tile.d_k)
    apart, query_apart, d_apart = bits * CHUNK, tile.pairs * BLOCK // 4, tile.pairs
    load_two = _make_load(bits)
    load, products = make_each(4, load_two), make_each(own // 2, _product)

    @device
    def step(m, key, scale, more, words, scales, query, d, s):
        x, y = half_to_float(scales[2 * m]), half_to_float(scales[2 * m + 1])
        if bits == 8:
            a = words[4 * m], words[4 * m + 2], words[4 * m + 1], words[4 * m + 3]
        else:
            low, high = words[2 * m], words[2 * m + 1]
            a = (
                minus(nibbles(low, 0), 0x08080808),
                minus(nibbles(high, 0), 0x08080808),
                minus(nibbles(low, 4), 0x08080808),
                minus(nibbles(high, 4), 0x08080808),
            )
        products(0, m, a, query, d, x, y, s)
        if more:
            load_two(m, key, scale, words, scales)

    steps = make_each(4, step)

    @device
    def own_part(keys, lane):
        """A lane's words of the first block, and the first of its scales."""
        return advance(keys, lane), advance(halves(advance(keys, integers)), lane >> 2)

    @device
    def fetch(keys, lane, words, scales):
        key, scale = own_part(keys, lane)
        load(0, key, scale, words, scales)

    @device
    def score(keys, lane, words, scales, query, d, s):
        b = cuda.local.array(own, np.uint32)
        factor = cuda.local.array(own, np.float32)
        key, scale = own_part(keys, lane)
        left = I(blocks)
        while left > 0:
            left = I(left - 1)
            key, scale = advance(key, apart), advance(scale, CHUNK)
            for k in range(own // 4):
                vector = vector4(query, 128 * k)
                for e in range(4):
                    b[4 * k + e] = vector[e]
                take4(d, 16 * k, factor, 4 * k)
            # The registers of a block that has been used are free for the next one.
            steps(0, key, scale, left > 0, words, scales, b, factor, s)
            query, d = advance(query, query_apart), advance(d, d_apart)

    return 16 if bits == 8 else 8, fetch, score


# --- values ----------------------------------------------------------------------------------------------------


def make_values(tile: Tile, of: CacheType) -> tuple[int, int, DeviceFunction, DeviceFunction]:
    """(words, scales, fetch, store): registers of a thread, and two device functions for values of a type.

    ``fetch(values, step, thread, words, scales)``: start loading slice ``step`` of the chunk at values into registers.
    ``store(to, thread, words, scales)``: move it from there, as float32, to shared memory: [positions, pitch].
    """
    bits, d_v, threads, pitch = of.bits, tile.d_v, tile.threads, tile.pitch
    n_words, per_position, integers = bits // 4, d_v // EIGHT, of.integer_words(d_v)
    units = tile.positions * per_position
    rounds, whole = -(-units // threads), units % threads == 0
    zero = F(-ZEROS[bits])

    @device
    def keep(to, at, word, scale):
        """Four elements."""
        offset = scale * zero
        a, b = unpacked(word, 0, scale, offset), unpacked(word, 1, scale, offset)
        keep4(to, at, a, b, unpacked(word, 2, scale, offset), unpacked(word, 3, scale, offset))

    @device
    def fetch(values, step, thread, words, scales):
        first = advance(halves(advance(values, integers)), I(step * (units * EIGHT // BLOCK)))
        values = advance(values, I(step * (units * n_words)))
        for k in range(rounds):
            i = I(thread + k * threads)
            if whole or i < units:
                if bits == 8:
                    two = load2(values, I(2 * i))
                    words[2 * k], words[2 * k + 1] = two[0], two[1]
                else:
                    words[k] = load1(values, i)
                scales[k] = first[i >> 2]

    @device
    def store(to, thread, words, scales):
        for k in range(rounds):
            i = I(thread + k * threads)
            if whole or i < units:
                at, scale = I(I(i // per_position * pitch) + i % per_position * EIGHT), half_to_float(scales[k])
                if bits == 8:
                    keep(to, at, U(words[2 * k] ^ UNSIGNED), scale)
                    keep(to, I(at + 4), U(words[2 * k + 1] ^ UNSIGNED), scale)
                else:
                    keep(to, at, nibbles(words[k], 0), scale)
                    keep(to, I(at + 4), nibbles(words[k], 4), scale)

    return n_words * rounds, rounds, fetch, store
