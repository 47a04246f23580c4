"""Packed rows with known integers, and products of them by one kernel."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cpu.products.matmul import matmul_few, matmul_rows, matmul_step
from engine.cpu.products.quantize import quantize_rows
from engine.cpu.products.repack import make_records
from engine.gguf.quants import FORMATS, Format
from engine.models.weights import Weight

QUANTIZED = [f for f in FORMATS.values() if f.quantized]
FLOATS = [f for f in FORMATS.values() if not f.quantized]

FACTORS = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q6_K: (208,)}
"""Where a block has its float16 factors, if not at its beginning."""

KERNELS: dict[str, tuple[Any, int]] = {"step": (matmul_step, 1), "few": (matmul_few, 4), "rows": (matmul_rows, 40)}
"""The products, and the most activation rows to try."""


def run(kernel: Callable[..., Any], *arguments: Any, items: int) -> None:
    """Compute all items of a kernel."""
    kernel(*arguments, 0, items)


def factors_of(entry: Format) -> tuple[int, ...]:
    """The bytes of a block where a float16 begins: d, and the factor of the minimum."""
    return FACTORS.get(entry.type, (0, 2) if entry.min_max else (0,))


def with_factors(entry: Format, rows: np.ndarray, *factors: float) -> np.ndarray:
    """A copy of packed rows in which each block has these factors, d first."""
    blocks = rows.reshape(-1, entry.block_bytes).copy()
    if entry.type == T.MXFP4:
        blocks[:, 0] = 128 if factors[0] else 0
    else:
        for at, factor in zip(factors_of(entry), factors, strict=False):
            blocks[:, at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(rows.shape)


def finite_rows(entry: Format, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random packed rows whose scales are finite and of ordinary size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // entry.block, entry.block_bytes), dtype=np.uint8)
    if entry.type == T.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, len(blocks))
    else:
        for at in factors_of(entry):
            scale = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, entry.row_bytes(columns))


def decoded(entry: Format, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The integers and factors of packed rows: w int [rows, K], m int [rows, K] (the minimum of every weight), d and dm
    float32 [rows, units].

    ``gguf.quants`` decodes the integers: of blocks with d = 1 and no minimum, and with d = 0 and a factor of 1.
    """
    n = len(rows)
    # gguf multiplies d by (0.5 + s) / 4, the engine d / 8 by the integer 2 s + 1.
    eighth = 8 if entry.type == T.IQ2_XXS else 1
    w = gguf.quants.dequantize(with_factors(entry, rows, eighth, 0), entry.type)
    m = np.zeros_like(w)
    if entry.min_max:
        m = np.abs(gguf.quants.dequantize(with_factors(entry, rows, 0, 1), entry.type))
    blocks = rows.reshape(n, -1, entry.block_bytes)
    if entry.type == T.MXFP4:
        d = np.ldexp(np.float32(1), blocks[:, :, 0].astype(int) - 128).astype(np.float32)
        return w.astype(int), m.astype(int), d, np.zeros_like(d)
    d, *rest = (
        np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].astype(np.float32)
        for at in factors_of(entry)
    )
    sign = -1 if entry.unit == 256 else 1
    return w.astype(int), m.astype(int), d / np.float32(eighth), sign * rest[0] if rest else np.zeros_like(d)


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
