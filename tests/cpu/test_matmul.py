"""Matrix products: the rounding steps that the contract allows, and no others, with every instruction set."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu import simd
from engine.cpu.glu import activate
from engine.cpu.products.dense import matmul_float, matmul_float_rows
from engine.cpu.products.law import Law
from engine.cpu.products.matmul import matmul_rows
from engine.cpu.products.panel import GROUP, SPAN
from engine.cpu.products.quantize import quantize_activated
from engine.cpu.products.repack import make_records
from engine.cpu.products.unpack import UNPACK
from engine.gguf.quants import ACTIVATION_MAX, CHAINS, Format
from engine.ops.weight import Weight
from tests.cpu.blocks import (
    FLOATS,
    KERNELS,
    QUANTIZED,
    decoded,
    finite_rows,
    product,
    quantized,
    reference,
    run,
    with_factors,
)
from tests.tiers import examples

F = np.float32

EACH = pytest.mark.parametrize("entry", QUANTIZED, ids=lambda f: f.name)
FLOAT = pytest.mark.parametrize("entry", FLOATS, ids=lambda f: f.name)


RARE = ("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ1_S", "IQ1_M", "TQ2_0", "TQ1_0", "Q1_0", "Q2_0")
"""Formats that compute as another one does."""


def cases() -> Iterator[Any]:
    """Every kernel.  The first tier has every format with two of the instruction sets, one with one and one with many rows,
    the rarer formats with one of these in turn, and the kernels for a few and for some rows of two formats."""
    for i, entry in enumerate(QUANTIZED):
        for j, instructions in enumerate(simd.INSTRUCTION_SETS):
            for kernel in KERNELS:
                first = (i + j) % 4 == ("step", "rows", "few", "some").index(kernel)
                if entry.name in RARE:
                    first = first and kernel == ("step", "rows")[i % 2]
                if kernel == "few":
                    first = entry.name in ("Q4_K", "Q8_0") and instructions in ("vnni", "avx2")
                if kernel == "some":
                    first = entry.name in ("Q4_K", "Q8_0") and instructions == "vnni512"
                marks = () if first else pytest.mark.thorough
                name = f"{entry.name}-{instructions}-{kernel}"
                yield pytest.param(entry, instructions, kernel, id=name, marks=marks)


def on_each_kernel(test: Any) -> Any:
    """Run a test with every kernel."""
    test = pytest.mark.parametrize(("entry", "instructions", "kernel"), list(cases()))(test)
    return pytest.mark.usefixtures("_there")(test)


@pytest.fixture
def _there(instructions: str) -> None:
    if instructions not in simd.available():
        pytest.skip(f"this CPU has no {instructions}")


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


def value_of(d: np.generic, dot: int, dm: np.generic, minimum: int, has_min: bool) -> Fraction:
    """A unit's value, with the roundings of the contract."""
    value = to_float32(exact(d) * to_float32(Fraction(dot)))
    return to_float32(exact(dm) * to_float32(Fraction(minimum)) + value) if has_min else value


@on_each_kernel
def test_the_dot_product_rounds_exactly_where_the_contract_says(entry: Format, instructions: str, kernel: str) -> None:
    """Replays rows in exact rational arithmetic with one float32 rounding per step of the documented order."""
    # Chains of NVFP4 begin and end within blocks.
    units = 9 if entry.unit > 64 else 21 if entry.parts == 1 else 20
    columns = units * entry.unit
    # Two groups of weight rows, and tiles of 8, 4, 2 and 1 activation rows.
    n_rows, n = 11, {"step": 2, "few": 6, "some": 11, "rows": 15}[kernel]
    data = finite_rows(entry, n_rows, columns, 1)
    rng = np.random.default_rng(2)
    activations = quantized(rng.standard_normal((n, columns)).astype(F), entry.unit)
    residual = rng.standard_normal((n, n_rows)).astype(F)
    actual = product(entry, instructions, kernel, data, activations)
    added = product(entry, instructions, kernel, data, activations, residual)
    w, m, d, dm = decoded(entry, data)
    q, da, _ = activations
    dots = (q.reshape(n, 1, units, -1).astype(int) * w.reshape(1, n_rows, units, -1)).sum(axis=3)
    minimums = (q.reshape(n, 1, units, -1).astype(int) * m.reshape(1, n_rows, units, -1)).sum(axis=3)
    length = -(-units // CHAINS)
    for t in range(n):
        for r in range(t % 3, n_rows, 3):
            total = Fraction(0)
            for first in range(0, units, length):
                chain = Fraction(0)
                for u in range(first, min(first + length, units)):
                    value = value_of(d[r, u], int(dots[t, r, u]), dm[r, u], int(minimums[t, r, u]), entry.min_max > 0)
                    chain = to_float32(exact(da[t, u]) * value + chain)
                total = to_float32(total + chain)
            assert exact(actual[t, r]) == total
            assert exact(added[t, r]) == to_float32(exact(residual[t, r]) + total)


@on_each_kernel
def test_the_dot_product_against_float64(entry: Format, instructions: str, kernel: str) -> None:
    """The product equals one in float64 of the same operands, with weights dequantized by ``gguf.quants``, up to those
    rounding steps."""
    columns = 4 * 256
    data = finite_rows(entry, 37, columns, 3)
    q, da, s = quantized(np.random.default_rng(4).standard_normal((5, columns)).astype(F), entry.unit)
    weights = reference(entry, data).astype(np.float64)
    activations = q.astype(np.float64) * np.repeat(da.astype(np.float64), entry.unit, axis=1)
    expected = activations @ weights.T
    magnitude = np.abs(activations) @ np.abs(weights).T
    # Each unit's value is rounded at most 5 times and added at most units / 8 + 8 times, half an ulp (2**-24) each.
    steps = 5 + columns // entry.unit / CHAINS + CHAINS
    # The dequantized weights of formats with a minimum are themselves rounded once.
    actual = product(entry, instructions, kernel, data, (q, da, s))
    assert np.all(np.abs(actual - expected) <= (steps + 1) * 2.0**-24 * magnitude)


def extremes(entry: Format) -> np.ndarray:
    """Blocks in which fields have their extremes, with factors of 1."""
    patterns = [np.full(entry.block_bytes, byte, np.uint8) for byte in (0x00, 0x0F, 0x7F, 0x80, 0x88, 0xF0, 0xFF)]
    rng = np.random.default_rng(5)
    patterns += [rng.choice(np.array([0, 0x7F, 0x80, 0xFF], np.uint8), entry.block_bytes) for _ in range(64)]
    return with_factors(entry, np.stack(patterns), 1 / entry.d_scale, 1)


@on_each_kernel
def test_the_worst_case_does_not_overflow(entry: Format, instructions: str, kernel: str) -> None:
    """Activations of +-127, with the signs of the weights and with one sign, times extreme blocks of scale 1: the float
    result is the rounded integer, so a sum that wraps or saturates would show."""
    data = extremes(entry)
    w, m, d, dm = decoded(entry, data)
    assert np.abs(w).max() <= entry.weight_max
    assert np.abs(m).max() <= entry.min_max
    signs = np.where(w >= 0, 1, -1)
    q = (127 * np.concatenate([signs, -signs, np.ones_like(signs[:1]), -np.ones_like(signs[:1])])).astype(np.int8)
    if kernel == "few":
        q = np.ascontiguousarray(q[::4])
    s = q.reshape(len(q), -1, 16).sum(axis=2).astype(np.int16)
    actual = product(entry, instructions, kernel, data, (q, np.ones((len(q), entry.parts), F), s))
    shape = len(q), len(data), entry.parts, entry.unit
    dots, minimums = ((q[:, None].astype(int) * x).reshape(shape).sum(axis=3) for x in (w, m))
    # float32 holds the sums of one rounding each; their sum is exact in float64.
    value = (d * dots.astype(F)).astype(F)
    if entry.min_max:
        value = (dm.astype(float) * minimums.astype(F) + value).astype(F)
    # The sums of several units are below 2**24.
    assert np.array_equal(actual, value.sum(axis=2))
    assert np.abs(dots).max() <= entry.dot_bound
    assert np.abs(minimums).max() <= entry.min_bound
    assert np.abs(dots).max() > entry.dot_bound // 8


@pytest.mark.parametrize("instructions", simd.INSTRUCTION_SETS)
@EACH
def test_no_sum_overflows(entry: Format, instructions: str) -> None:
    """The bounds in ``engine/cpu/products/law.py``."""
    law = Law(UNPACK[entry.name], instructions)
    fmt = law.fmt
    pair = 2 * fmt.largest * ACTIVATION_MAX
    assert law.limit >= 1
    assert law.limit * pair < 2**15
    scale = entry.weight_max // fmt.largest if fmt.offset == 0 else 128
    quant = 255 if instructions in ("vnni512", "vnni") else fmt.largest
    assert quant * ACTIVATION_MAX * entry.unit * max(scale, 1) < 2**31
    # Sums of 16 activations times minimums, or scales and the offset.
    assert entry.unit * ACTIVATION_MAX * 128 * max(law.offset, 1) < 2**31
    assert not fmt.signed or not fmt.offset


@on_each_kernel
@given(rows=st.integers(1, 19), n=st.integers(1, 14), units=st.integers(1, 18), data=st.data())
@examples(8, 3)
def test_rows_batches_and_ranges_do_not_show(
    entry: Format, instructions: str, kernel: str, rows: int, n: int, units: int, data: st.DataObject
) -> None:
    packed = finite_rows(entry, rows, units * entry.block, rows)
    x = np.random.default_rng(n).standard_normal((n, units * entry.block)).astype(F)
    together = product(entry, instructions, kernel, packed, quantized(x, entry.unit))
    assert not np.isnan(together).any()
    t, r = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, rows - 1))
    alone = product(entry, instructions, kernel, packed[r:], quantized(x[t:], entry.unit))
    assert alone.tobytes() == together[t:, r:].tobytes()


def test_a_range_writes_its_rows_only() -> None:
    entry = QUANTIZED[0]
    data, activations = finite_rows(entry, 29, 64, 0), quantized(np.ones((3, 64), F), entry.unit)
    whole = product(entry, "plain", "rows", data, activations)
    records = make_records(Weight("w", entry, 64, data), 1, run)
    out = np.full((3, 29), np.nan, F)
    matmul_rows(entry.name, "plain")(records.data[0], *activations, np.empty((0, 29), F), out, 1, 3)
    assert np.array_equal(out[:, 8:24], whole[:, 8:24])
    assert np.isnan(out[:, :8]).all() and np.isnan(out[:, 24:]).all()


# --- float formats ---------------------------------------------------------------------------------------------


def float_product(entry: Format, data: np.ndarray, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    out = np.empty((len(x), len(data)), F)
    before = np.empty((0, len(data)), F) if residual is None else residual
    run(matmul_float(entry.name), data, x, before, out, items=len(data))
    return out


@FLOAT
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 576])
def test_float_formats(entry: Format, columns: int) -> None:
    rng = np.random.default_rng(columns)
    values = rng.standard_normal((7, columns)).astype(F)
    data = gguf.quants.quantize(values, entry.type).view(np.uint8).reshape(7, -1)
    weights = gguf.quants.dequantize(data, entry.type).astype(np.float64)
    x, residual = rng.standard_normal((6, columns)).astype(F), rng.standard_normal((6, 7)).astype(F)
    actual = float_product(entry, data, x)
    bound = (columns / 32 + 7) * 2.0**-24 * (np.abs(x) @ np.abs(weights).T)
    assert np.all(np.abs(actual - x.astype(np.float64) @ weights.T) <= bound)
    assert float_product(entry, data, x, residual).tobytes() == (residual + actual).tobytes()
    for t in range(6):
        assert float_product(entry, data, x[t : t + 1]).tobytes() == actual[t].tobytes()


@FLOAT
def test_float_formats_round_in_the_order_of_the_contract(entry: Format) -> None:
    """Replays 32 chains and the halving tree in exact rational arithmetic."""
    columns = 75
    rng = np.random.default_rng(0)
    data = gguf.quants.quantize(rng.standard_normal((2, columns)).astype(F), entry.type).view(np.uint8).reshape(2, -1)
    weights = gguf.quants.dequantize(data, entry.type)
    x = rng.standard_normal((5, columns)).astype(F)
    actual = float_product(entry, data, x)
    for t in range(5):
        for r in range(2):
            chains = [Fraction(0)] * 32
            for k in range(columns):
                chains[k % 32] = to_float32(exact(weights[r, k]) * exact(x[t, k]) + chains[k % 32])
            while len(chains) > 1:
                half = len(chains) // 2
                chains = [to_float32(a + b) for a, b in zip(chains[:half], chains[half:], strict=True)]
            assert exact(actual[t, r]) == chains[0]


def odd_rows(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random float32 [rows, columns] with zeros of both signs, an infinity, and numbers whose products underflow."""
    x = rng.standard_normal((rows, columns)).astype(F)
    odd = rng.choice(np.array([0.0, -0.0, 1e-30, -1e-30], F), x.shape)
    x = np.where(rng.random(x.shape) < 0.2, odd, x)
    x[rows // 2] = odd[rows // 2]
    x[-1, columns // 2] = np.inf
    return x


@pytest.mark.parametrize("instructions", ["vnni512", "avx2", "plain"])
@FLOAT
@pytest.mark.covering(1)
def test_many_rows_have_the_bits_of_one(entry: Format, instructions: str) -> None:
    """Panels of eight weight rows, of which the last is not full; tiles, groups and spans that are not full; columns that are
    no multiple of 32; a row whose chains are all -0."""
    if instructions not in simd.available():
        pytest.skip(f"this CPU has no {instructions}")
    rng, kernel = np.random.default_rng(0), matmul_float_rows(entry.name, instructions)
    for columns in (1, 31, 32, 33, 352, 32 * SPAN + 75):
        weights = odd_rows(rng, 19, columns)
        weights[10] = -1e-30
        data = gguf.quants.quantize(weights, entry.type).view(np.uint8).reshape(len(weights), -1)
        x = odd_rows(rng, GROUP + 5, columns)
        x[1] = 1e-30
        before = rng.standard_normal((len(x), len(data))).astype(F)
        expected = float_product(entry, data, x, before)
        for n in (1, 2, 3, 6, len(x)):
            for residual in (before[:n], before[:0]):
                out = np.full((n, len(data)), np.nan, F)
                kernel(data, x[:n], residual, out, 3, 17)
                plain = expected if len(residual) else float_product(entry, data, x[:n])
                assert out[:, 3:17].tobytes() == plain[:n, 3:17].tobytes()
                assert np.isnan(out[:, :3]).all() and np.isnan(out[:, 17:]).all()


# --- activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [16, 32, 64, 128, 256])
@given(data=st.data(), exponent=st.integers(-140, 100))
@settings(deadline=None)
def test_activations_are_rounded_to_the_nearest_step(unit: int, data: st.DataObject, exponent: int) -> None:
    first = data.draw(st.lists(st.floats(-1024, 1024, width=32), min_size=32, max_size=32))
    x = np.ldexp(np.resize(np.array(first[:unit], F), (1, unit)), exponent)
    q, d, s = quantized(x, unit)
    amax = np.abs(x).max()
    assert s.tolist() == q.reshape(-1, 16).sum(axis=1, dtype=int).reshape(1, -1).tolist()
    if amax < 2.0**-100:
        assert not q.any()
        assert d[0, 0] == 0
        return
    assert d[0, 0] == F(amax) / F(127)
    assert np.abs(q.astype(int)).max() == 127
    # One float32 rounding of 127 / amax moves a quotient by at most 127 * 2**-24.
    assert np.all(np.abs(q - x.astype(np.float64) / amax * 127) <= 0.5 + 127 * 2.0**-23)


@pytest.mark.parametrize("unit", [16, 32, 64, 128, 256])
def test_units_are_quantized_alone(unit: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4 * unit)).astype(F)
    q, d, s = quantized(x, unit)
    for t in range(3):
        for u in range(4):
            own = quantized(np.ascontiguousarray(x[t : t + 1, u * unit : (u + 1) * unit]), unit)
            assert own[0].tobytes() == q[t, u * unit : (u + 1) * unit].tobytes()
            assert own[1][0, 0] == d[t, u]
            assert own[2].tobytes() == s[t, u * unit // 16 : (u + 1) * unit // 16].tobytes()


@pytest.mark.parametrize("unit", [32, 256])
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_an_activation_and_its_integers_are_those_of_two_operations(kind: str, unit: int) -> None:
    """Also where only the second of three units is computed."""
    gate, up = np.random.default_rng(0).standard_normal((2, 3, unit)).astype(F)
    y = np.empty_like(up)
    run(activate(kind), gate.reshape(-1), up.reshape(-1), *[F(0)] * 4, y.reshape(-1), items=y.size)
    expected = y, *quantized(y, unit)
    found = [np.full_like(part, 7) for part in expected]
    own, q, d, s = found
    arguments = gate.reshape(-1), up.reshape(-1), *[F(0)] * 4, own.reshape(-1), unit, q, d, s
    quantize_activated(kind)(*arguments, 1, 2)
    for part, whole in zip(found, expected, strict=True):
        assert part[1].tobytes() == whole[1].tobytes()
        assert (part[[0, 2]] == 7).all()
    run(quantize_activated(kind), *arguments, items=3)
    assert [part.tobytes() for part in found] == [whole.tobytes() for whole in expected]
