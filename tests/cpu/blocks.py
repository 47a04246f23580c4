"""Packed rows with known integers, and products of them by one kernel."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cpu.products.matmul import matmul_few, matmul_rows, matmul_some, matmul_step
from engine.cpu.products.quantize import quantize_rows
from engine.cpu.products.repack import make_records
from engine.gguf.quants import FORMATS, Format
from engine.ops.weight import Weight

QUANTIZED = [f for f in FORMATS.values() if f.quantized]
FLOATS = [f for f in FORMATS.values() if not f.quantized]

KERNELS: dict[str, tuple[Any, int]] = {
    "step": (matmul_step, 1),
    "few": (matmul_few, 4),
    "some": (matmul_some, 16),
    "rows": (matmul_rows, 40),
}
"""The products, and the most activation rows to try."""


def run(kernel: Callable[..., Any], *arguments: Any, items: int) -> None:
    """Compute all items of a kernel."""
    kernel(*arguments, 0, items)


def factors_of(entry: Format) -> tuple[int, ...]:
    """The bytes of a block where a float16 begins: d, and the factor of the minimum."""
    at = entry.field("factors").start
    return (at, at + 2) if entry.min_max else (at,)


def reference(entry: Format, rows: np.ndarray) -> np.ndarray:
    """Packed rows uint8 [rows, bytes] dequantized by ``gguf.quants``, float32 [rows, K].  It lacks Q1_0 and Q2_0: these are
    ``dequantize_row_q1_0`` and ``dequantize_row_q2_0`` of ggml-quants.c (llama.cpp)."""
    if entry.name not in ("Q1_0", "Q2_0"):
        with np.errstate(all="ignore"):  # random scales may be NaN
            return gguf.quants.dequantize(rows, entry.type).astype(np.float32)
    blocks = rows.reshape(-1, entry.block_bytes)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    w = 2 * bits - 1 if entry.name == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    with np.errstate(all="ignore"):
        return (d * w).reshape(len(rows), -1)


def set_d(entry: Format, blocks: np.ndarray, d: np.ndarray) -> None:
    """Write the floats of blocks, float [n], in place."""
    bits = d.astype(np.float16).view(np.uint16)
    if entry.type == T.IQ1_M:  # in the high nibbles of four words
        words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
        nibbles = (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
        blocks[:, 48:] = (words & 0x0FFF | nibbles).astype(np.uint16).view(np.uint8)
    else:
        at = factors_of(entry)[0]
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)


def with_factors(entry: Format, rows: np.ndarray, *factors: float) -> np.ndarray:
    """A copy of packed rows in which each block has these factors, d first; d is 0 or 1 where it is a byte."""
    blocks = rows.reshape(-1, entry.block_bytes).copy()
    if entry.type == T.MXFP4:
        blocks[:, 0] = 128 if factors[0] else 0
    elif entry.type == T.NVFP4:
        blocks[:, :4] = 64 if factors[0] else 0
    else:
        set_d(entry, blocks, np.full(len(blocks), factors[0]))
        if entry.min_max:
            at = factors_of(entry)[1]
            blocks[:, at : at + 2] = np.array([factors[1]], np.float16).view(np.uint8)
    return blocks.reshape(rows.shape)


def finite_rows(entry: Format, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random packed rows whose scales are finite and of ordinary size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // entry.block, entry.block_bytes), dtype=np.uint8)
    if entry.type == T.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, len(blocks))
    elif entry.type == T.NVFP4:  # every code: 0 and 127 are zero, 1 to 7 are subnormal
        blocks[:, :4] &= 127
    else:
        set_d(entry, blocks, rng.standard_normal(len(blocks)) * 0.01)
        if entry.min_max:
            at = factors_of(entry)[1]
            scale = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, entry.row_bytes(columns))


def decoded(entry: Format, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The integers and factors of packed rows: w int [rows, K], m int [rows, K] (the minimum of every weight), d and dm
    float32 [rows, units].

    ``reference`` decodes the integers: of blocks with d = 1 and no minimum, and with d = 0 and a factor of 1.
    """
    n = len(rows)
    # gguf multiplies d of some formats by (0.5 + s) / 4, the engine d / 8 by the integer 2 s + 1.
    w = reference(entry, with_factors(entry, rows, 1 / entry.d_scale, 0))
    m = np.zeros_like(w)
    if entry.min_max:
        m = np.abs(reference(entry, with_factors(entry, rows, 0, 1)))
    blocks = rows.reshape(n, -1, entry.block_bytes)
    rest = []
    if entry.type == T.MXFP4:
        d = np.ldexp(np.float32(1), blocks[:, :, 0].astype(int) - 128).astype(np.float32)
    elif entry.type == T.NVFP4:
        d = gguf.quants.NVFP4.ue4m3_to_fp32(blocks[:, :, :4].reshape(n, -1)).astype(np.float32)
    elif entry.type == T.IQ1_M:
        nibbles = blocks[:, :, 49::2].astype(np.uint16) >> 4
        d = (
            (nibbles << np.arange(0, 16, 4, dtype=np.uint16))
            .sum(axis=2, dtype=np.uint16)
            .view(np.float16)
            .astype(np.float32)
        )
    else:
        d, *rest = (
            np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].astype(np.float32)
            for at in factors_of(entry)
        )
    sign = -1 if entry.unit == 256 else 1
    return w.astype(int), m.astype(int), d * np.float32(entry.d_scale), sign * rest[0] if rest else np.zeros_like(d)


def quantized(x: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations as the products take them: q, their scales, and sums of 16."""
    n, columns = x.shape
    q = np.empty((n, columns), np.int8)
    d = np.empty((n, columns // unit), np.float32)
    s = np.empty((n, columns // 16), np.int16)
    run(quantize_rows, x, unit, q, d, s, items=d.size)
    return q, d, s


def product(
    entry: Format,
    instructions: str,
    kernel: str,
    data: np.ndarray,
    activations: tuple[np.ndarray, np.ndarray, np.ndarray],
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Packed rows [R, bytes] times quantized activations [n, K], by one of ``KERNELS``: float32 [n, R]."""
    records = make_records(Weight("w", entry, activations[0].shape[1], data), 1, run)
    family, most = KERNELS[kernel]
    out = np.full((len(activations[0]), len(data)), np.nan, np.float32)
    before = np.empty((0, len(data)), np.float32) if residual is None else residual
    for t in range(0, len(out), most):
        rows = [x[t : t + most] for x in (*activations, before)]
        run(family(entry.name, instructions), records.data[0], *rows, out[t : t + most], items=records.data.shape[1])
    return out
