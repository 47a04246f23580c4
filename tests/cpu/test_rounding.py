"""ds4's rounding: floats of 8 and of 4 bits against tables made from their definition, blocks and transforms against
NumPy."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numba import njit

from engine.arrays import Batch
from engine.cache.compressed import CompressedCacheSpec
from engine.cache.types import F32
from engine.cpu.backend import Backend
from engine.cpu.rounding import EIGHT, FOUR
from engine.numerics import round_to_bits, scale_exponent
from tests.batches import one_sequence
from tests.pages import layer_of

f32 = np.float32


def table(n_exponent: int, n_mantissa: int, bias: int) -> np.ndarray:
    """Magnitudes of a small float by their code, of the Open Compute Project's definition (OCP MX 1.0, section 5.3), without
    the code that is a NaN in E4M3: float64."""
    codes = np.arange(1 << (n_exponent + n_mantissa))
    e, m = codes >> n_mantissa, (codes & ((1 << n_mantissa) - 1)) / (1 << n_mantissa)
    values = np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))
    return values[:-1] if n_exponent == 4 else values


E4M3, E2M1 = table(4, 3, 7), table(2, 1, 1)


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The nearest of the values, that of an even code where two are equally near: x float64, with its sign."""
    a = np.abs(x)
    middles = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middles, a, side="left")
    tied = np.isin(a, middles)
    code[tied] += code[tied] & 1
    return np.copysign(values[code], x)


def rounded(x: np.ndarray, block: int, values: np.ndarray, floor: float) -> np.ndarray:
    """A row rounded in blocks, in float64."""
    out = np.empty(x.size)
    for first in range(0, x.size, block):
        part = x[first : first + block].astype(np.float64)
        scale = 2.0 ** math.ceil(math.log2(max(np.abs(part).max(), floor) / values[-1]))
        out[first : first + block] = scale * nearest(part / scale, values)
    return out


@njit
def _all(x, exponent, kept, least):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = round_to_bits(x[i], exponent, kept, least)
    return y


@pytest.mark.parametrize(("law", "values"), [(EIGHT, E4M3), (FOUR, E2M1)], ids=["E4M3", "E2M1"])
def test_floats_of_few_bits(law: Any, values: np.ndarray) -> None:
    """Every float16 in range, and the float32 at, below and above each value and each middle between two, for several
    scales."""
    _, largest, _, kept, least = law
    assert values[-1] == largest and values.size == (127 if kept == 3 else 8)
    assert values[1 << kept] == 2.0**least
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(f32)
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(f32)
    edges = np.concatenate([edges, np.nextafter(edges, f32(0)), np.nextafter(edges, f32(np.inf))])
    x = np.concatenate([halves, edges])
    x = x[x <= largest]
    x = np.concatenate([x, -x])
    expected = nearest(x.astype(np.float64), values)
    for e in (-22, -1, 0, 3, 60):
        found = _all(x * f32(2.0**e), np.int32(127 + e), np.int32(kept), np.int32(least))
        assert np.array_equal(found, (expected * 2.0**e).astype(f32))
        assert np.array_equal(np.signbit(found), np.signbit(x))


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_scales_are_the_smallest_that_fit(largest: float) -> None:
    at = [f32(largest * 2.0**e) for e in (-120, -9, -1, 0, 1, 30)]
    drawn = np.exp(np.random.default_rng(0).uniform(-30, 30, 50)).astype(f32)
    near = [np.nextafter(x, f32(to)) for x in at for to in (0, np.inf)]
    for most in (*at, *near, *drawn):
        s = Fraction(2) ** (int(scale_exponent(most, f32(largest))) - 127)
        assert s / 2 < Fraction(float(most)) / Fraction(largest) <= s


def draw(*shape: int) -> np.ndarray:
    """Rows of large and of tiny numbers, and one of zeros."""
    x = np.random.default_rng(list(shape)).standard_normal(shape) * 10.0 ** np.linspace(-9, 4, shape[0])[:, None]
    x[1] = 0
    return x.astype(f32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """The transform of the last axis in float32, step by step."""
    n, stride = x.shape[-1], 1
    while stride < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * stride), 2, stride)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        stride *= 2
    return x * f32(1 / math.sqrt(n))


def test_a_transform() -> None:
    x = np.random.default_rng(0).standard_normal((3, 128))
    h = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]) / math.sqrt(128)
    assert np.abs(hadamard(x.astype(f32)) - x @ h.T).max() < 1e-6


@pytest.mark.parametrize(("d", "n_rot"), [(512, 64), (64, 16), (200, 8)])
def test_latents(d: int, n_rot: int) -> None:
    """Blocks of 64, the last one perhaps shorter; then everything to float16."""
    x = draw(9, d)
    found = Backend(1).round_latents(x, n_rot)
    for row, given in zip(found, x, strict=True):
        head = rounded(given[: d - n_rot], 64, E4M3, float(f32(1e-4)))
        expected = np.concatenate([head.astype(f32), given[d - n_rot :]]).astype(np.float16).astype(f32)
        assert np.array_equal(row, expected)
    assert Backend(1).round_latents(found, n_rot).tobytes() == found.tobytes()


@pytest.mark.parametrize("d", [128, 32])
def test_queries(d: int) -> None:
    x = draw(9, 3 * d)
    found = Backend(1).round_queries(x, 3).reshape(27, d)
    for row, given in zip(found, hadamard(x.reshape(27, d)), strict=True):
        assert np.array_equal(row, rounded(given, 32, E2M1, 6 * 2.0**-126).astype(f32))


@pytest.mark.parametrize("transposed", [False, True])
def test_only_the_rows_that_a_pass_completes(transposed: bool) -> None:
    """Of one sequence, and of two at once; a copy of the last row of a pass rounds nothing again."""
    ops, ratio, d, n_rot = Backend(1), 4, 64, 8
    layer = layer_of(CompressedCacheSpec(d, 32, ratio, 2, d, 8, 5), 400, 32, F32, np.zeros, None, 2)
    blocks = layer.keys if transposed else layer.compressed
    assert blocks is not None
    blocks.rows[:] = np.random.default_rng(1).standard_normal(blocks.rows.shape)

    def stored() -> np.ndarray:
        """The rows of one sequence, then those of the other."""
        pages = blocks.rows[blocks.table]
        return (pages.swapaxes(2, 3) if transposed else pages).reshape(-1, d).copy()

    rows, of_one = stored(), 64 * blocks.table.shape[1]
    whole = ops.round_queries(rows, 1) if transposed else ops.round_latents(rows, n_rot)
    for first, count, ended in ((0, 3, []), (3, 1, [0]), (254, 9, [63, 64]), (263, 1, [65]), (300, 32, range(75, 83))):
        positions = np.arange(first, first + count, dtype=np.int32)
        ops.round_rows(blocks, ratio, n_rot, one_sequence(positions), transposed)
        rows[list(ended)] = whole[list(ended)]
        assert stored().tobytes() == rows.tobytes()
    positions = np.array([203, *range(6, 16), 15, 15], np.int32)
    sequences = np.array([0] + [1] * 12, np.int32)
    ops.round_rows(blocks, ratio, n_rot, Batch(np.zeros(13, np.int32), positions, sequences, True), transposed)
    ended = [50, of_one + 1, of_one + 2, of_one + 3]
    rows[ended] = whole[ended]
    assert stored().tobytes() == rows.tobytes()
