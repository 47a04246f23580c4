"""Dequantization and the embedding lookup.

Formula: out[t, i] = scale * weight[token[t], i], weight[i] = fma(d, w[i], dm * m[i // 16]).
Shapes: tokens int32 [n] and a matrix [vocab, n_embd] to float32 [n, n_embd].
Who owns what: an item is a token.
Reduction order: none.
Bytes moved: a record, or a packed row, in and 4 n_embd bytes out per token.
"""

import functools
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import njit, types
from numba.extending import intrinsic

from engine.compile.family import family
from engine.cpu.products.dense import SIZES, load_floats
from engine.cpu.products.repack import ROWS, fields_of, make_records, repack
from engine.cpu.products.unpack import UNPACK
from engine.cpu.simd import Code, data_of, host
from engine.gguf.quants import FORMATS, format_of
from engine.numerics import fma
from engine.ops.weight import Weight

f32 = np.float32
i32 = np.int32
i64 = np.int64


@functools.cache
def unpack_unit(fmt: str) -> Any:
    """The intrinsic ``unpack(data, at, quants, tables, factors)``: the integers and factors of the record at byte ``at``.

    quants uint8 [unit / 4][8 rows][4]; tables int8 [2][16 groups][8 rows], scales, then minimums; factors float32 [2][8], d,
    then dm.
    """
    unpack = UNPACK[fmt]

    @intrinsic
    def unpack_unit(typingctx, data, at, quants, tables, factors):
        def codegen(context, builder, sig, args):
            code = Code(builder, host())
            data, quants, tables, factors = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 2, 3, 4))
            record = code.at(data, args[1])
            for j in range(-(-unpack.unit // 32)):
                for i, x in enumerate(unpack.quants(code, record, j)):
                    code.store(x, quants, 256 * j + 32 * i)
            if unpack.group:
                minimums = unpack.minimums(code, record) if unpack.has_minimum else []
                for table, vectors in enumerate((unpack.scales(code, record), minimums)):
                    for k, x in enumerate(vectors):
                        code.store(x, tables, 16 * ROWS * table + 32 * k)
            code.store(unpack.d(code, record), factors)
            if unpack.has_minimum:
                code.store(unpack.dm(code, record), factors, 4 * ROWS)
            return context.get_dummy_value()

        return types.void(data, types.int64, quants, tables, factors), codegen

    return unpack_unit


@functools.cache
def _dequantize_row(fmt: str) -> Any:
    """A function ``(data, at, lane, scale, out)`` for kernels: row ``lane`` of the records from byte ``at`` on."""
    unpack = UNPACK[fmt]
    unpacked = unpack_unit(fmt)
    unit, record_bytes, offset, has_minimum = unpack.unit, unpack.record_bytes, unpack.offset, unpack.has_minimum
    group = unpack.group or unit
    signed = unpack.signed
    # Formats with signed scales and no minimum: a product of three has the sign of zero that GGUF specifies.
    three = fmt in ("Q3_K", "Q6_K", "IQ4_XS")

    @njit(error_model="numpy")
    def dequantize_row(data, at, lane, scale, out):
        quants = np.empty(ROWS * unit, np.uint8)
        # Formats without scales leave the ones.
        tables = np.ones(2 * 16 * ROWS, np.int8)
        factors = np.zeros(2 * ROWS, np.float32)
        for u in range(out.size // unit):
            unpacked(data, at + u * record_bytes, quants, tables, factors)
            d, dm = factors[lane], factors[ROWS + lane]
            for i in range(unit):
                quant = i32(quants[4 * ROWS * (i // 4) + 4 * lane + i % 4])
                if signed and quant > 127:
                    quant = i32(quant - 256)
                quant = i32(quant - offset)
                g = ROWS * (i // group) + lane
                s = i32(tables[g])
                if three:
                    value = d * f32(s) * f32(quant)
                elif not has_minimum or dm == f32(0.0):
                    value = d * f32(i32(s * quant))
                else:
                    value = fma(d, f32(i32(s * quant)), dm * f32(tables[16 * ROWS + g]))
                out[u * unit + i] = value * scale

    return dequantize_row


@family
def embed_records(fmt: str) -> Any:
    """The kernel for a matrix in records of eight rows, of a quantized format (its name)."""
    dequantize_row = _dequantize_row(fmt)

    @njit(cache=True, error_model="numpy")
    def embed_records(data, tokens, scale, out, first, last):
        """data uint8 [groups, bytes]; an item is a token."""
        for t in range(first, last):
            dequantize_row(data, tokens[t] // ROWS * data.shape[1], tokens[t] % ROWS, scale, out[t])

    return embed_records


@family
def embed_rows(fmt: str) -> Any:
    """The kernel for the rows of a file, of any format (its name)."""
    if fmt in SIZES:
        return _embed_floats(fmt)
    dequantize_row = _dequantize_row(fmt)
    entry = next(entry for entry in FORMATS.values() if entry.name == fmt)
    fields, block_bytes = fields_of(entry), entry.block_bytes

    @njit(cache=True, error_model="numpy")
    def embed_rows(data, tokens, scale, out, first, last):
        """data uint8 [vocab, row bytes]; an item is a token."""
        record = np.empty((1, 1, ROWS * data.shape[1]), np.uint8)
        for t in range(first, last):
            # A record in which the other seven rows are missing.
            repack(data, fields, block_bytes, i64(tokens[t]), 1, 1, record, 0, 1)
            dequantize_row(record, 0, 0, scale, out[t])

    return embed_rows


def _embed_floats(fmt: str) -> Any:
    size = SIZES[fmt]

    @intrinsic
    def load(typingctx, data, at):
        def codegen(context, builder, sig, args):
            pointer = data_of(context, builder, sig.args[0], args[0])
            return load_floats(Code(builder, host()), fmt, pointer, args[1], 1).extract(0)

        return types.float32(data, types.int64), codegen

    @njit(cache=True, error_model="numpy")
    def embed_floats(data, tokens, scale, out, first, last):
        """data uint8 [vocab, row bytes]; an item is a token."""
        for t in range(first, last):
            for i in range(out.shape[1]):
                out[t, i] = load(data, tokens[t] * data.shape[1] + i * size) * scale

    return embed_floats


def dequantize(type_: GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    """The float32 weights of packed blocks: uint8 [n_bytes] to float32 [n_bytes / block_bytes * block].

    ``fma(d, w, dm * m)``: for every format here the products are exact or rounded once, as in ``gguf.quants``,
    so the result is byte for byte that of ``gguf.quants``.
    """
    entry = format_of(type_)
    if data.dtype != np.uint8 or data.ndim != 1 or data.size % entry.block_bytes:
        raise ValueError(f"{entry.name} data must be uint8 [multiple of {entry.block_bytes}], not {data.shape}")
    blocks = data.reshape(-1, entry.block_bytes)
    n = len(blocks)
    out = np.empty((n, entry.block), np.float32)
    tokens = np.arange(n, dtype=np.int32)
    if not entry.quantized:
        embed_rows(entry.name)(blocks, tokens, f32(1.0), out, 0, n)
        return out.reshape(-1)
    # Blocks as rows of one unit.
    records = make_records(
        Weight("", entry, entry.block, blocks), 1, lambda kernel, *args, items: kernel(*args, 0, items)
    )
    embed_records(entry.name)(records.data[0], tokens, f32(1.0), out, 0, n)
    return out.reshape(-1)
