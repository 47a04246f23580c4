"""The element-wise and normalizing operations of a backend against float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba import njit

from engine.cpu.layer_norm import inverse_deviation, mean_of
from engine.cpu.rms_norm import NORM_CHAINS, norm_width, squares
from engine.models.rope_config import RopeConfig
from engine.models.rotary import Rotary, frequencies
from engine.numerics import fma
from engine.ops.activation import GEGLU, SWIGLU
from tests.activations import EVERY_ACTIVATION
from tests.mirror import Mirror as Backend

ops: Any = Backend()
ULP = 2.0**-23


@pytest.mark.parametrize("n", [1, 7, 64, 128, 255, 256, 257, 576, 4096])
def test_rms_norm(n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32) * 5
    weight = rng.standard_normal(n).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    assert np.allclose(ops.rms_norm(x, weight, 1e-6), expected, rtol=12 * ULP, atol=0)
    residual = rng.standard_normal((3, n)).astype(np.float32)
    added = ops.rms_norm_add(residual, x, weight, 1e-6)
    assert np.allclose(added, residual + expected, rtol=12 * ULP, atol=12 * ULP * np.abs(expected).max())


@pytest.mark.parametrize(("n_group", "n"), [(1, 64), (3, 96), (8, 256), (2, 600)])
def test_a_norm_of_groups_is_one_of_each(n_group: int, n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = (
        rng.standard_normal((5, n_group, n)).astype(np.float32),
        rng.uniform(0.5, 2, (n_group, n)).astype(np.float32),
    )
    whole = ops.grouped_norm(x.reshape(5, -1), weight.reshape(-1), n_group, 1e-6).reshape(x.shape)
    for group in range(n_group):
        own = ops.rms_norm(np.ascontiguousarray(x[:, group]), weight[group], 1e-6)
        assert whole[:, group].tobytes() == own.tobytes()


@pytest.mark.parametrize("n", [1, 7, 64, 128, 255, 256, 257, 576, 4096])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_layer_norm(n: int, offset: float) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32) * 5 + np.float32(offset)
    weight, bias = rng.standard_normal((2, n)).astype(np.float32)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5)
    # The mean is rounded to float32, and an element near the mean loses its leading bits.
    error = 12 * ULP * np.abs(weight) * (np.abs(centered) + np.abs(wide).max(axis=1, keepdims=True)) * factor
    assert np.all(np.abs(ops.layer_norm(x, weight, None, 1e-5) - centered * factor * weight) <= error)
    biased = ops.layer_norm(x, weight, bias, 1e-5)
    assert np.all(np.abs(biased - (centered * factor * weight + bias)) <= error + ULP * np.abs(bias))


@njit
def fused(x, y, z):
    return fma(x, y, z)


fuse = np.vectorize(fused, otypes=[np.float32])


@pytest.mark.parametrize("n", [1, 24, 64, 96, 128, 256, 300, 576])
def test_a_sum_of_squares_has_the_documented_order(n: int) -> None:
    width = int(norm_width(n))
    for x in np.random.default_rng(n).standard_normal((20, n)).astype(np.float32):
        chains = np.zeros(width, np.float32)
        for i in range(n):
            chains[i % width] = fused(x[i], x[i], chains[i % width])
        while chains.size > 1:
            chains = chains[: chains.size // 2] + chains[chains.size // 2 :]
        assert squares(x, np.empty(NORM_CHAINS, np.float32)) == chains[0]


@pytest.mark.parametrize("n", [1, 24, 96, 128, 300, 576])
def test_a_layer_norm_has_the_documented_order(n: int) -> None:
    width, scratch, one = int(norm_width(n)), np.empty(NORM_CHAINS, np.float32), np.float32(1)

    def total(terms: np.ndarray, add: Callable[[Any, Any], Any]) -> Any:
        chains = np.zeros(width, np.float32)
        for i in range(n):
            chains[i % width] = add(terms[i], chains[i % width])
        while chains.size > 1:
            chains = chains[: chains.size // 2] + chains[chains.size // 2 :]
        return chains[0]

    for x in np.random.default_rng(n).standard_normal((20, n)).astype(np.float32):
        mean = mean_of(x, scratch)
        assert mean == total(x, lambda term, chain: chain + term) / np.float32(n)
        squared = total(x - mean, lambda term, chain: fused(term, term, chain))
        r = one / np.sqrt(squared / np.float32(n) + np.float32(1e-5))
        assert inverse_deviation(x, mean, np.float32(1e-5), scratch) == r
        weight, bias = np.full(n, 0.7, np.float32), np.full(n, -0.3, np.float32)
        (y,) = ops.layer_norm(x[None], weight, bias, 1e-5)
        assert y.tobytes() == fuse((x - mean) * r, weight, bias).tobytes()
        (y,) = ops.layer_norm(x[None], weight, None, 1e-5)
        assert y.tobytes() == ((x - mean) * r * weight).tobytes()


def test_a_layer_norm_of_heads_with_weights_of_their_own() -> None:
    x, weights = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((6, 40), (3, 40)))
    found = ops.layer_norm(x, weights.reshape(-1), None, 1e-5)
    for t in range(6):
        assert found[t].tobytes() == ops.layer_norm(x[t : t + 1], weights[t % 3], None, 1e-5).tobytes()


def test_rms_norm_of_heads_is_that_of_rows() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    weight = np.ones(64, np.float32)
    heads = ops.rms_norm(x, weight, 1e-6)
    assert heads.shape == x.shape
    assert heads[1, 2].tobytes() == ops.rms_norm(x[1, 2:], weight, 1e-6)[0].tobytes()


@pytest.mark.parametrize("neox", [False, True])
def test_rope_rotates_pairs(neox: bool) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 77, 5000], np.int32)
    rotary: Any = Rotary(ops, RopeConfig(16, 10000.0), None, 8192)
    rotary.reserve(5001)
    table = rotary.table
    angle = positions[:, None] * 10000.0 ** (-np.arange(8) / 8.0)
    pairs = x.reshape(4, 3, 2, 8).swapaxes(2, 3) if neox else x.reshape(4, 3, 8, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None, :]
    expected = np.concatenate([z.real, z.imag], axis=2) if neox else np.stack([z.real, z.imag], -1).reshape(4, 3, 16)
    assert np.abs(ops.rope(x.copy(), positions, table, neox) - expected).max() < 1e-6
    assert ops.rope(x.copy(), positions, table, neox)[0].tobytes() == x[0].tobytes()


def test_rope_scalings() -> None:
    plain = frequencies(RopeConfig(64, 10000.0), None)
    assert np.array_equal(frequencies(RopeConfig(64, 10000.0, scale=0.25), None), plain * 0.25)
    factors = np.linspace(1, 8, 32)
    assert np.array_equal(frequencies(RopeConfig(64, 10000.0), factors), plain / factors)
    yarn = RopeConfig(64, 10000.0, scale=0.25, yarn_ctx=4096)
    ratio = frequencies(yarn, None) / plain
    assert ratio[0] == 1
    assert ratio[-1] == 0.25
    assert np.all(np.diff(ratio) <= 0)
    # The corners of the ramp are rounded to whole pairs unless the model was trained without.
    exact = frequencies(replace(yarn, truncate=False), None) / plain
    assert exact[0] == 1 and exact[-1] == 0.25 and not np.array_equal(exact, ratio)


def test_a_grown_rope_table_keeps_its_rows() -> None:
    rotary: Any = Rotary(ops, RopeConfig(64, 1e6), None, 4096)
    rotary.reserve(10)
    small = rotary.table[:10].copy()
    rotary.reserve(3000)
    assert rotary.table[:10].tobytes() == small.tobytes()
    whole: Any = Rotary(ops, RopeConfig(64, 1e6), None, 4096)
    whole.reserve(3000)
    assert rotary.table[:3000].tobytes() == whole.table[:3000].tobytes()


def test_gated_units_and_softcap() -> None:
    rng = np.random.default_rng(0)
    gate, up = rng.uniform(-30, 30, (2, 5, 77)).astype(np.float32)
    wide = gate.astype(np.float64)
    silu = wide / (1 + np.exp(-wide))
    gelu = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert np.allclose(ops.activate(SWIGLU, gate, up), silu * up, rtol=4 * ULP, atol=0)
    assert np.allclose(ops.activate(GEGLU, gate, up), gelu * up, rtol=4 * ULP, atol=1e-6)
    few, value = wide.clip(max=1.5), up.astype(np.float64)
    near = value.clip(-1.5, 1.5)
    expected = {
        "swiglu_oai": few / (1 + np.exp(-np.float32(1.702) * few)) * (near + 1),
        "swiglu_clamped": few / (1 + np.exp(-few)) * near,
        "swiglu_limited": silu.clip(max=0.75) * value.clip(-0.75, 0.75),
        "gelu": 0.5 * value * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))),
        "relu2": value.clip(0) ** 2,
        "gelu_erf": 0.5 * value * (1 + np.vectorize(math.erf)(value / math.sqrt(2))),
        "xielu": np.where(
            value > 0, np.float32(0.8) * value**2, (np.expm1(value.clip(max=-1e-6)) - value) * np.float32(0.4)
        )
        + 0.5 * value,
    }
    assert {*expected, "swiglu", "geglu"} == {activation.kind for activation in EVERY_ACTIVATION}
    for activation in EVERY_ACTIVATION[2:]:
        y = ops.activate(activation, gate if activation.gated else None, up)
        assert np.allclose(y, expected[activation.kind], rtol=6 * ULP, atol=1e-6)
    assert np.allclose(ops.softcap(gate.copy(), 20.0), 20 * np.tanh(wide / 20), rtol=4 * ULP, atol=0)
