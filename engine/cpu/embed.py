"""Dequantization and the embedding lookup.

Formula: out[t, i] = scale * weight[token[t], i], weight[i] = fma(d, w[i], dm * m[i // 16]).
Shapes: packed rows uint8 [vocab, row bytes] to float32 [tokens, n_embd].
Who owns what: one call, one thread; a row at a time.
Reduction order: none.
Bytes moved: one packed row in and 4 n_embd bytes out per token.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import njit

from engine.cpu.unpack import IQ4_XS, Q3_K, Q6_K, load16, load32, load_half, unpack_row
from engine.gguf.quants import format_of
from engine.numerics import bits_float, fma

f32 = np.float32
i32 = np.int32

F32, F16, BF16 = int(T.F32), int(T.F16), int(T.BF16)


@njit(cache=True)
def load_float(fmt, src, o):  # type: ignore[no-untyped-def]
    """The weight at byte o of a float format, converted exactly to float32."""
    if fmt == F32:
        return bits_float(i32(load32(src, o)))
    if fmt == F16:
        return load_half(src, o)
    return bits_float(i32(i32(load16(src, o)) << i32(16)))


@njit(cache=True)
def dequantize_row(fmt, block, block_bytes, src, out, scale):  # type: ignore[no-untyped-def]
    """Dequantize one packed row into out float32 [columns], multiplied by scale."""
    if block == 1:
        for i in range(out.size):
            out[i] = load_float(fmt, src, i * block_bytes) * scale
        return
    units = out.size // block
    w = np.empty(out.size, np.int16)
    m = np.zeros((out.size + 15) // 16, np.int16)
    d = np.empty(units, np.float32)
    dm = np.empty(units, np.float32)
    unpack_row(fmt, src, w, 0, m, d, dm, 0, 1, units, False)
    for i in range(out.size):
        u = i // block
        if fmt == Q3_K or fmt == Q6_K or fmt == IQ4_XS:
            value = d[u] * f32(m[i // 16]) * f32(w[i])
        elif dm[u] == f32(0.0):
            value = d[u] * f32(w[i])
        else:
            value = fma(d[u], f32(w[i]), dm[u] * f32(m[i // 16]))
        out[i] = value * scale


@njit(cache=True)
def embed_rows(fmt, block, block_bytes, table, tokens, scale, out):  # type: ignore[no-untyped-def]
    """Dequantize the rows ``tokens`` int32 [n] of ``table`` uint8 [vocab, row bytes] into out float32 [n, n_embd]."""
    for t in range(tokens.size):
        dequantize_row(fmt, block, block_bytes, table[tokens[t]], out[t], scale)


def dequantize(type_: T, data: np.ndarray) -> np.ndarray:
    """The float32 weights of packed blocks: uint8 [n_bytes] to float32 [n_bytes / block_bytes * block].

    ``fma(d, w, dm * m)``: for every format here the products are exact or rounded once, as in ``gguf.quants``,
    so the result is byte for byte that of ``gguf.quants``.
    """
    entry = format_of(type_)
    if data.dtype != np.uint8 or data.ndim != 1 or data.size % entry.block_bytes:
        raise ValueError(f"{entry.name} data must be uint8 [multiple of {entry.block_bytes}], not {data.shape}")
    out = np.empty(data.size // entry.block_bytes * entry.block, np.float32)
    dequantize_row(int(type_), entry.block, entry.block_bytes, data, out, f32(1.0))
    return out
