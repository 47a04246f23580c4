"""Matrix products: the rounding steps that the contract allows, and no others."""

from fractions import Fraction

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu import matmul
from engine.cpu.backend import Backend
from engine.cpu.unpack import unpack_row
from engine.gguf.quants import CHAINS, FORMATS, Format
from engine.models.weights import Weight
from tests.tiers import examples

QUANTIZED = [f for f in FORMATS.values() if f.quantized]
EACH = pytest.mark.parametrize("entry", QUANTIZED, ids=lambda f: f.name)
FLOATS = [f for f in FORMATS.values() if not f.quantized]


def finite_rows(entry: Format, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random packed rows whose scales are finite and of ordinary size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // entry.block, entry.block_bytes), dtype=np.uint8)
    if entry.type == T.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, len(blocks))
    else:
        places = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q6_K: (208,), T.Q4_K: (0, 2), T.Q5_K: (0, 2)}
        for at in places.get(entry.type, (0, 2) if entry.min_max else (0,)):
            scale = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, entry.row_bytes(columns))


def quantized(x: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, columns = x.shape
    q = np.empty((n, columns), np.int8)
    d = np.empty((n, columns // unit), np.float32)
    s = np.empty((n, columns // 16), np.int16)
    matmul.quantize_rows(x, unit, q, d, s)
    return q, d, s


def product(entry: Format, data: np.ndarray, x: np.ndarray, shares: int = 2) -> np.ndarray:
    out = np.empty((len(x), len(data)), np.float32)
    q, d, s = quantized(x, entry.unit)
    matmul.matmul_quantized(int(entry.type), entry.unit, entry.min_max > 0, data, q, d, s, shares, out)
    return out


def to_float32(x: Fraction) -> Fraction:
    """Round an exact rational to the nearest float32, ties to even, in integers."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / quantum) * quantum


def exact(value: np.generic | float) -> Fraction:
    return Fraction(float(value))


@EACH
def test_the_dot_product_rounds_exactly_where_the_contract_says(entry: Format) -> None:
    """Replays a row in exact rational arithmetic with one float32 rounding per step of the documented order."""
    units = 9 if entry.unit == 256 else 21
    columns = units * entry.unit
    data = finite_rows(entry, 3, columns, 1)
    x = np.random.default_rng(2).standard_normal((2, columns)).astype(np.float32)
    q, da, _ = quantized(x, entry.unit)
    actual = product(entry, data, x)
    w, m = np.zeros(columns, np.int16), np.zeros(columns // 16, np.int16)
    d, dm = np.zeros(units, np.float32), np.zeros(units, np.float32)
    length = -(-units // CHAINS)
    for r in range(3):
        unpack_row(int(entry.type), data[r], w, 0, m, d, dm, 0, 1, units, True)
        for t in range(2):
            total = Fraction(0)
            for first in range(0, units, length):
                chain = Fraction(0)
                for u in range(first, min(first + length, units)):
                    span = slice(u * entry.unit, (u + 1) * entry.unit)
                    a = q[t, span].astype(int)
                    dot = int((w[span].astype(int) * a).sum())
                    value = to_float32(exact(d[u]) * to_float32(Fraction(dot)))
                    if entry.min_max:
                        groups = (
                            m[span.start // 16 : span.stop // 16].astype(int) if entry.unit == 256 else np.ones(2, int)
                        )
                        minimum = int((np.repeat(groups, 16) * a).sum())
                        value = to_float32(exact(dm[u]) * to_float32(Fraction(minimum)) + value)
                    chain = to_float32(exact(da[t, u]) * value + chain)
                total = to_float32(total + chain)
            assert exact(actual[t, r]) == total


@EACH
def test_the_dot_product_against_float64(entry: Format) -> None:
    """The product equals one in float64 of the same operands, with weights dequantized by ``gguf.quants``, up to those
    rounding steps."""
    columns = 4 * 256
    data = finite_rows(entry, 37, columns, 3)
    x = np.random.default_rng(4).standard_normal((5, columns)).astype(np.float32)
    q, da, _ = quantized(x, entry.unit)
    weights = gguf.quants.dequantize(data, entry.type).astype(np.float64)
    activations = q.astype(np.float64) * np.repeat(da.astype(np.float64), entry.unit, axis=1)
    expected = activations @ weights.T
    magnitude = np.abs(activations) @ np.abs(weights).T
    # Each unit's value is rounded at most 5 times and added at most units / 8 + 8 times, half an ulp (2**-24) each.
    steps = 5 + columns // entry.unit / CHAINS + CHAINS
    # The dequantized weights of formats with a minimum are themselves rounded once.
    assert np.all(np.abs(product(entry, data, x) - expected) <= (steps + 1) * 2.0**-24 * magnitude)


@EACH
def test_the_worst_case_does_not_overflow(entry: Format) -> None:
    """All activations at +-127 against the block bytes that give the largest |I| among the extremes of every field."""
    best = 0
    w, m = np.zeros(entry.unit, np.int16), np.zeros(16, np.int16)
    d, dm = np.zeros(1, np.float32), np.zeros(1, np.float32)
    patterns = [np.full(entry.block_bytes, byte, np.uint8) for byte in (0x00, 0x0F, 0x7F, 0x80, 0x88, 0xF0, 0xFF)]
    rng = np.random.default_rng(5)
    patterns += [rng.choice(np.array([0, 0x7F, 0x80, 0xFF], np.uint8), entry.block_bytes) for _ in range(64)]
    for block in patterns:
        unpack_row(int(entry.type), block, w, 0, m, d, dm, 0, 1, 1, True)
        assert np.abs(w.astype(int)).max() <= entry.weight_max
        assert not entry.min_max or np.abs(m.astype(int)).max() <= entry.min_max
        for sign in (1, -1):
            q = np.where(w.astype(int) * sign >= 0, 127, -127).astype(np.int8)
            dot = int((w.astype(np.int64) * q).sum())
            assert abs(dot) <= entry.dot_bound
            best = max(best, abs(dot))
            s = q.reshape(-1, 16).sum(axis=1).astype(np.int16)
            out = np.empty((1, 1), np.float32)
            # A block of scale 1: the float result is the rounded integer, so a wrapped sum would show.
            scaled = _with_unit_scale(entry, block)
            unpack_row(int(entry.type), scaled, w, 0, m, d, dm, 0, 1, 1, True)
            dot = int((w.astype(np.int64) * q).sum())
            groups = np.ones(2, np.int64) if entry.unit == 32 else m.astype(np.int64)
            minimum = int((np.repeat(groups, 16) * q).sum()) if entry.min_max else 0
            matmul.matmul_quantized(
                int(entry.type), entry.unit, entry.min_max > 0, scaled.reshape(1, -1), q.reshape(1, -1),
                np.ones((1, 1), np.float32), s.reshape(1, -1), 1, out,
            )  # fmt: skip
            value = to_float32(exact(d[0]) * to_float32(Fraction(dot)))
            if entry.min_max:
                value = to_float32(exact(dm[0]) * to_float32(Fraction(minimum)) + value)
            assert exact(out[0, 0]) == value
    assert best > entry.dot_bound // 8


def _with_unit_scale(entry: Format, block: np.ndarray) -> np.ndarray:
    block = block.copy()
    if entry.type == T.MXFP4:
        block[0] = 128
        return block
    places = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q6_K: (208,), T.Q4_K: (0, 2), T.Q5_K: (0, 2)}
    for at in places.get(entry.type, (0, 2) if entry.min_max else (0,)):
        block[at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    return block


@EACH
@given(
    rows=st.integers(1, 11),
    n=st.integers(1, 6),
    units=st.integers(1, 18),
    shares=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@examples(8, 3)
def test_rows_batches_and_threads_do_not_show(
    entry: Format, rows: int, n: int, units: int, shares: int, seed: int
) -> None:
    data = finite_rows(entry, rows, units * entry.unit, seed)
    x = np.random.default_rng(seed + 1).standard_normal((n, units * entry.unit)).astype(np.float32)
    together = product(entry, data, x, shares)
    for t in range(n):
        for r in range(rows):
            assert product(entry, data[r : r + 1], x[t : t + 1], 1)[0, 0] == together[t, r]


@pytest.mark.parametrize("entry", FLOATS, ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 576])
def test_float_formats(entry: Format, columns: int) -> None:
    rng = np.random.default_rng(columns)
    values = rng.standard_normal((7, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, entry.type).view(np.uint8).reshape(7, -1)
    weights = gguf.quants.dequantize(data, entry.type).astype(np.float64)
    x = rng.standard_normal((3, columns)).astype(np.float32)
    (actual,) = Backend().matmul(x, Weight("w", entry, columns, data))
    bound = (columns / 32 + 7) * 2.0**-24 * (np.abs(x) @ np.abs(weights).T)
    assert np.all(np.abs(actual - x.astype(np.float64) @ weights.T) <= bound)
    for t in range(3):
        (one,) = Backend().matmul(x[t : t + 1], Weight("w", entry, columns, data))
        assert one.tobytes() == actual[t].tobytes()


@given(st.lists(st.floats(-1024, 1024, width=32), min_size=32, max_size=32), st.integers(-140, 100))
@settings(deadline=None)
def test_activations_are_rounded_to_the_nearest_step(values: list[float], exponent: int) -> None:
    x = np.ldexp(np.array([values], np.float32), exponent)
    q, d, s = quantized(x, 32)
    amax = np.abs(x).max()
    assert s.tolist() == [[int(q[0, :16].astype(int).sum()), int(q[0, 16:].astype(int).sum())]]
    if amax < 2.0**-100:
        assert not q.any()
        assert d[0, 0] == 0
        return
    assert d[0, 0] == np.float32(amax) / np.float32(127)
    assert np.abs(q.astype(int)).max() == 127
    # One float32 rounding of 127 / amax moves a quotient by at most 127 * 2**-24.
    assert np.all(np.abs(q - x.astype(np.float64) / amax * 127) <= 0.5 + 127 * 2.0**-23)
