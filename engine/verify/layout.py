"""Conversions of a GPU's data to the layout of the CPU: activations, chunks of attention, rings, weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from engine.cache.recurrent import SEGMENT
from engine.cache.types import BLOCK, CHUNK
from engine.compile.family import family
from engine.cpu.attention import bound, first_visible, last_visible, readers, visible, weigh
from engine.cpu.delta_net import all_dots, couple
from engine.cpu.fold import fold
from engine.cpu.integer_attention import of_chunk, read_scales
from engine.cpu.integer_attention import weigh as weigh_integers
from engine.cpu.integer_cache import LOG2_E
from engine.cpu.lanes import ROWS
from engine.cpu.products.repack import ROWS as ROWS_OF_RECORD
from engine.cpu.products.repack import Records, fields_of
from engine.cuda.products.quantize import NARROW, block_parts, layout_of
from engine.cuda.products.repack import TILE, repack_rows
from engine.cuda.wide_delta_net import RECORD
from engine.numerics import decay_of, sigmoid

i64 = np.int64


def activations(
    unit: int, rows: int, columns: int, q: np.ndarray, d: np.ndarray | None = None, sums: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The results of the kernels of ``engine/cuda/products/quantize.py`` by row: q int8 [rows, columns], scales float32
    [rows, units], and sums [rows, n].  Sums are int32, one per unit of 32 positions; for a unit of 256 they are int16, 16
    sums of 16 and 8 of 32 positions per unit, or in a wide pass float16, 16 sums of 16 positions per unit; other units have
    none.  Without d and sums, q has a layout of ``BLOCKS``, which contains them."""
    if d is None or sums is None:
        return _blocks(rows, columns // unit, q)
    tiles, units = -(-rows // 8), columns // unit
    scales = d.reshape(tiles, units, 8).transpose(0, 2, 1)
    q = q.view(np.int8)
    totals: np.ndarray
    if unit == 256:
        # tile, unit, v, column, i, h, k, byte: position 64 v + 32 h + 16 k + 4 i + byte
        q = q.reshape(tiles, units, 4, 8, 4, 2, 2, 4).transpose(0, 3, 1, 2, 5, 6, 4, 7)
        totals = sums.view(np.int16).reshape(tiles, units, 8, 24).transpose(0, 2, 1, 3)
        if layout_of(unit, rows) != NARROW:
            totals = np.ascontiguousarray(totals[..., :16]).view(np.float16)
    else:
        # tile, run of 32 or 16 positions, column, i, k, byte: position 16 k + 4 i + byte
        width = min(unit, 32)
        q = q.reshape(tiles, columns // width, 8, 4, width // 16, 4).transpose(0, 2, 1, 4, 3, 5)
        n = 1 if unit == 32 else 0
        totals = sums.view(np.int32).reshape(tiles, units, 8, n).transpose(0, 2, 1, 3)

    def by_row(array: np.ndarray) -> np.ndarray:
        return array.reshape(tiles * 8, array.size // (tiles * 8))[:rows]

    return by_row(q), by_row(scales), by_row(totals)


def _blocks(rows: int, units: int, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    block_words = words.shape[-1]
    tiles = block_words // block_parts(1)[2]
    scales_at, sums_at, _ = block_parts(tiles)
    words = words.view(np.uint32).reshape(-1, units, block_words)
    parts = np.split(words, (scales_at, sums_at), axis=2)
    q, scales, sums = (
        np.ascontiguousarray(part).view(of) for part, of in zip(parts, (np.int8, np.float32, np.float16), strict=True)
    )
    # block, unit, tile, 16 positions, column, position
    q = q.reshape(-1, units, tiles, 16, 8, 16).transpose(0, 2, 4, 1, 3, 5)
    scales = scales.reshape(-1, units, tiles, 8).transpose(0, 2, 3, 1)
    # block, unit, tile, half, column, sum
    sums = sums.reshape(-1, units, tiles, 2, 8, 8).transpose(0, 2, 4, 1, 3, 5)
    n = words.shape[0] * 8 * tiles
    return q.reshape(n, -1)[:rows], scales.reshape(n, -1)[:rows], sums.reshape(n, -1)[:rows]


@family
def chunk_parts(k_bits: int, v_bits: int, cap: float = 0.0) -> Callable[..., None]:
    """``engine/cpu/attention.py`` for keys and values of these sizes in bits and this cap, without joining the chunks.

    For each chunk that a row sees, counted from the first, it writes the maximum and the sum to mass [rows, n_head,
    partials, 2], the weighted values to sums [rows, n_head, partials, d_v], and whether it was seen to seen [rows,
    partials].  The other arguments are those of ``attend``, but all rows belong to one sequence, whose chunk c is in page
    pages[c], int32 [chunks].
    """
    query, read_keys, scores, read_values, weighted = readers(k_bits, v_bits)
    capped, most_score = cap > 0.0, np.float32(cap)

    @njit(error_model="numpy")
    def parts(q, integers, scales, keys, values, positions, pages, scale, window, mass, sums, seen):
        rows, n_head, d_k = q.shape
        group, d_v = n_head // keys.shape[0], sums.shape[3]
        queries, dq = np.zeros((ROWS, d_k), np.float32), np.zeros((ROWS, scales.shape[2]), np.float32)
        k_scratch, v_scratch = np.empty((d_k, CHUNK), np.float32), np.empty((CHUNK, d_v), np.float32)
        dk, dots = np.empty((d_k // BLOCK, CHUNK), np.float32), np.empty((ROWS, CHUNK), np.float32)
        p, o = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, d_v), np.float32)
        lanes = np.empty((ROWS, 2), np.int64)
        for t in range(rows):
            first_chunk = first_visible(positions[t], window) // CHUNK
            for chunk in range(first_chunk, last_visible(positions[t], window) // CHUNK + 1):
                partial = chunk - first_chunk
                seen[t, partial] = True
                lanes[0, 0], lanes[0, 1] = visible(chunk, positions[t], window)
                for h in range(n_head):
                    own_keys, key = read_keys(keys, h // group, pages[chunk], k_scratch, dk)
                    own_values, value = read_values(values, h // group, pages[chunk], v_scratch)
                    query(q, integers, scales, scale, t, h, queries, dq, 0)
                    scores(queries, dq, 0, 1, own_keys, key, dk, dots, p)
                    if capped:
                        bound(p, 1, most_score)
                    mass[t, h, partial, 0] = weigh(p[0], lanes[0, 0], lanes[0, 1])
                    weighted(p, 1, lanes, own_values, value, d_v, o)
                    sums[t, h, partial] = o[0]
                    mass[t, h, partial, 1] = fold(p[0], CHUNK)

    return parts


@family
def integer_chunk_parts(bits: int, cap: float = 0.0) -> Callable[..., None]:
    """``engine/cpu/integer_attention.py`` for integers of this size in bits and this cap, without joining the chunks:
    ``parts(integers, scales, keys, values, positions, pages, window, mass, sums, seen)``, which writes what ``chunk_parts``
    does."""
    scores, weighted = of_chunk(bits)
    capped, most_score = cap > 0.0, np.float32(cap * LOG2_E)

    @njit(error_model="numpy")
    def parts(integers, scales, keys, values, positions, pages, window, mass, sums, seen):
        rows, n_head, d_k = integers.shape
        (heads, n_pages, k_words), v_words, d_v = keys.shape, values.shape[2], sums.shape[3]
        k_blocks, v_blocks = scales.shape[2], (v_words - CHUNK * d_v * bits // 32) // (CHUNK // 2)
        flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
        queries, dq = np.zeros((ROWS, d_k), np.int16), np.zeros((ROWS, k_blocks), np.float32)
        dk, dv = np.empty((k_blocks, CHUNK), np.float32), np.empty((v_blocks, CHUNK), np.float32)
        p, o = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, d_v), np.float32)
        w, weights, factors = np.empty(CHUNK, np.float32), np.zeros((ROWS, CHUNK), np.int16), np.zeros(ROWS, np.float32)
        lanes = np.empty((ROWS, 2), np.int64)
        for t in range(rows):
            first_chunk = first_visible(positions[t], window) // CHUNK
            for chunk in range(first_chunk, last_visible(positions[t], window) // CHUNK + 1):
                partial = chunk - first_chunk
                seen[t, partial] = True
                lanes[0, 0], lanes[0, 1] = visible(chunk, positions[t], window)
                for h in range(n_head):
                    place = h // (n_head // heads) * n_pages + pages[chunk]
                    key, value = place * k_words, place * v_words
                    read_scales(flat_keys, key + k_words, dk)
                    read_scales(flat_values, value + v_words, dv)
                    queries[0], dq[0] = integers[t, h], scales[t, h]
                    scores(queries, dq, i64(0), i64(1), flat_keys, i64(key), i64(0), dk, p)
                    if capped:
                        bound(p, 1, most_score)
                    mass[t, h, partial, 0] = weigh_integers(p[0], lanes[0, 0], lanes[0, 1])
                    weighted(p, 1, flat_values, i64(value), i64(0), dv, w, weights, factors, o)
                    sums[t, h, partial] = o[0]
                    mass[t, h, partial, 1] = fold(p[0], CHUNK)

    return parts


@njit(cache=True, error_model="numpy")
def delta_gates(alpha, beta, a, dt):
    """The decay of the state and the learning rate at each token (``engine/cpu/delta_net.py``): [n_v, rows, 2]."""
    rows, n_v = alpha.shape
    out = np.empty((n_v, rows, 2), np.float32)
    for t in range(rows):
        for h in range(n_v):
            out[h, t, 0] = decay_of(a[h], alpha[t, h] + dt[h])
            out[h, t, 1] = sigmoid(beta[t, h])
    return out


def delta_records(y: np.ndarray, gates: np.ndarray, n_k: int, grouped: bool) -> np.ndarray:
    """The records of ``engine/cuda/wide_delta_net.py`` for tokens from the beginning of a segment on: float32 [n_v, segments,
    560].  y [rows, C]: queries, keys and values; gates [n_v, rows, 2]: decay and rate.  Tokens of the last segment that do
    not exist have keys of 0 and decays of 1; weights of a token for those before it are 0."""
    n_v, rows, _ = gates.shape
    segments = -(-rows // SEGMENT)
    d = y.shape[1] // (2 * n_k + n_v)
    heads, opened = (
        np.zeros((segments * SEGMENT, 2 * n_k, d), np.float32),
        np.zeros((n_v, segments * SEGMENT, 2), np.float32),
    )
    heads[:rows], opened[:, :rows], opened[:, rows:, 0] = y[:, : 2 * n_k * d].reshape(rows, -1, d), gates, 1
    out = np.empty((n_v, segments, RECORD), np.float32)
    products, sums = np.empty((SEGMENT, 2 * SEGMENT), np.float32), np.empty((8, 2 * SEGMENT), np.float32)
    weights, numbers = np.zeros((2, SEGMENT, SEGMENT), np.float32), np.empty((2, SEGMENT), np.float32)
    for h in range(n_v):
        g = h // (n_v // n_k) if grouped else h % n_k
        for n in range(segments):
            tokens = slice(SEGMENT * n, SEGMENT * (n + 1))
            keys, queries = (np.ascontiguousarray(heads[tokens, at]) for at in (n_k + g, g))
            all_dots(keys, np.ascontiguousarray(np.concatenate([keys, queries]).T), products, sums)
            couple(np.ascontiguousarray(opened[h, tokens, 0]), products, 0, SEGMENT, weights, *numbers)
            # Of each token i, for the lanes: the weights of tokens l and l + 8 for keys, then for queries.
            lanes = weights.reshape(2, SEGMENT, 2, SEGMENT // 2).transpose(1, 3, 0, 2)
            out[h, n] = np.concatenate([lanes.ravel(), numbers.ravel(), opened[h, tokens, 1]])
    return out


def page_of(gpu: Any, memory: Any, page: int) -> np.ndarray:
    """A page of every head of keys or values in device memory: [n_head_kv, ...]."""
    n_head_kv, pages, *inside = memory.shape
    flat = memory.reshape(n_head_kv * pages, *inside)
    at = [h * pages + page for h in range(n_head_kv)]
    return np.concatenate([gpu.download(flat[i : i + 1]) for i in at])


def kept_rows(gpu: Any, cpu: np.ndarray, device: Any, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries [first, first + count) of two rings, as far as both still hold them."""
    end, lengths = first + count, (cpu.shape[0], int(device.shape[0]))
    kept = range(max(0, end - min(count, *lengths)), end)
    rows = [gpu.download(device[p % lengths[1] : p % lengths[1] + 1])[0] for p in kept]
    return cpu[[p % lengths[0] for p in kept]], np.array(rows, cpu.dtype).reshape(-1, *cpu.shape[1:])


def rows_of(records: Records, first: int, last: int) -> np.ndarray:
    """The rows [first, last) of all stacked matrices as the file has them, uint8 [rows, row bytes]: the reverse of
    ``repack``."""
    entry, groups = records.format, records.data.shape[1]
    at = np.arange(first, min(last, records.count * records.rows))
    place = at // records.rows * groups + at % records.rows // ROWS_OF_RECORD
    data = records.data.reshape(records.count * groups, -1)[place[0] : place[-1] + 1]
    units = data.shape[1] // (ROWS_OF_RECORD * entry.block_bytes)
    data = data.reshape(len(data), units, -1)
    blocks = np.empty((len(data), ROWS_OF_RECORD, units, entry.block_bytes), np.uint8)
    begin = 0
    for source, pieces, size, turned in fields_of(entry):
        end = begin + ROWS_OF_RECORD * pieces * size
        part = data[:, :, begin:end].reshape(len(data), units, pieces, ROWS_OF_RECORD, size)
        if turned:
            # Bit q of byte c was bit 4 q + c.
            bits = np.unpackbits(part, axis=-1, bitorder="little").reshape(*part.shape[:4], 4, 8)
            part = np.packbits(bits.swapaxes(4, 5).reshape(*part.shape[:4], 32), axis=-1, bitorder="little")
        rows = part.transpose(0, 3, 1, 2, 4).reshape(len(data), ROWS_OF_RECORD, units, pieces * size)
        blocks[..., source : source + pieces * size] = rows
        begin = end
    return blocks[place - place[0], at % records.rows % ROWS_OF_RECORD].reshape(len(at), -1)


def same_weights(gpu: Any, pair: Any) -> bool:
    """Whether a matrix in device memory (``pair.gpu``) has the same bytes as the CPU's (``pair.cpu``)."""
    weight, memory, entry = pair.cpu, pair.gpu.memory, pair.cpu.format
    packed = isinstance(weight, Records)
    n_rows, row_bytes = weight.rows * (weight.count if packed else 1), entry.row_bytes(weight.columns)
    step = TILE * max(1, (16 << 20) // (TILE * row_bytes))
    for row in range(0, n_rows, step):
        part = rows_of(weight, row, row + step) if packed else weight.part(row, row + step)
        law = repack_rows(entry, part) if entry.quantized else part
        if not np.array_equal(gpu.device.read(memory.address + row * row_bytes, law.shape, np.uint8), law):
            return False
    return True
