"""Alternating updates and sparse gates: the formulas in float64, every rounding of the laws, and rows beside others."""

import numpy as np
import pytest
from numba import njit

from engine.cpu.backend import Backend
from engine.numerics import fma, gaussian_cutoff, magnitude_ratio, tanh

f32 = np.float32


@njit
def fused(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    return fma(x, y, z)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(f32)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def streams_of(x: np.ndarray, n: int) -> np.ndarray:
    """The four streams, float64 [rows, 4, n]."""
    return wide(x[:, : 4 * n].reshape(len(x), 4, n))


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum((x**2).mean(-1, keepdims=True), 1e-5))


def sparse(x: np.ndarray, multiplier: float) -> np.ndarray:
    x = wide(x)
    return np.maximum(x - (x.mean(1, keepdims=True) + multiplier * x.std(1, keepdims=True)), 0)


@pytest.mark.parametrize("n", [7, 70, 600])
def test_streams_against_float64(n: int) -> None:
    ops, rows = Backend(2), 3
    x, m, y, first, scale = draw(rows, 5 * n), draw(rows, 4), draw(rows, n), draw(rows, n, seed=1), draw(n)
    predict, correct = draw(16, 4), draw(4, 4)
    p = ops.altup_predict(x, m, predict)
    t, before = np.tanh(wide(m)), streams_of(x, n)
    expected = before + np.einsum("tds,tsi->tdi", (t @ wide(predict).T).reshape(rows, 4, 4), before)
    assert np.abs(streams_of(p, n) - expected).max() < 5e-6 and not p[:, 4 * n :].any()
    p = np.concatenate([p[:, : 4 * n], draw(rows, n, seed=2)], 1)  # kernels read nothing of the last n
    c, change = t @ wide(correct).T + 1, wide(y) - wide(p[:, :n])
    corrected = streams_of(p, n) + c[:, :, None] * change[:, None]
    active = ops.altup_active(p, y, m, correct, scale)
    assert np.abs(active - corrected[:, 0] * scale).max() < 2e-5
    found = ops.altup_correct(p, y, m, correct, first)
    corrected[:, 1:] += first[:, None]
    assert np.abs(streams_of(found, n) - corrected).max() < 2e-5 and not found[:, 4 * n :].any()


@pytest.mark.parametrize("n", [7, 70, 600])
def test_the_beginning_and_the_end_against_float64(n: int) -> None:
    ops, rows = Backend(2), 3
    x, a = draw(rows, n), 3 * draw(rows, 3 * n)
    a[1, n : 2 * n] *= f32(1e-4)  # shorter than what counts
    found, given = ops.altup_enter(x, a), wide(a.reshape(rows, 3, n))
    assert np.array_equal(found[:, :n], x) and not found[:, 4 * n :].any()
    scaled = given * np.sqrt((wide(x) ** 2).mean(1))[:, None, None] / rms(given)
    assert np.abs(streams_of(found, n)[:, 1:] - scaled).max() < 3e-6
    assert rms(streams_of(found, n))[2].std() < 1e-6
    left = ops.altup_leave(found, a)
    assert np.abs(left - (wide(x) + scaled.sum(1)) / 4).max() < 3e-6


def test_a_row_of_zeros_stays_finite() -> None:
    """As the padding that converted models have for tokens of images."""
    found = Backend(1).altup_enter(np.zeros((1, 9), f32), np.zeros((1, 27), f32))
    assert not found.any()
    assert not Backend(1).altup_leave(found, np.zeros((1, 27), f32)).any()


def test_columns() -> None:
    x = draw(3, 50)
    assert np.array_equal(Backend(2).columns(x, 20, 13), x[:, 20:33])


@pytest.mark.parametrize("n", [5, 256, 700])
def test_sparse_gates_against_float64(n: int) -> None:
    x = 1 + draw(4, n)
    for multiplier in (1.6448535, -0.5, 0.0):
        found = Backend(2).sparsify(x, multiplier)
        assert np.abs(found - sparse(x, multiplier)).max() < 2e-6
    if n == 700:
        assert 0.02 < (Backend(1).sparsify(x, 1.6448535) > 0).mean() < 0.08


def folded(chains: list[np.float32]) -> np.float32:
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [f32(a + b) for a, b in zip(chains[:half], chains[half:], strict=True)]
    return chains[0]


def test_every_rounding_of_sparse_gates() -> None:
    x, multiplier = draw(1, 600)[0], f32(1.25)
    sums, squares = [f32(0)] * 256, [f32(0)] * 256
    for i, value in enumerate(x):
        sums[i % 256] = f32(sums[i % 256] + value)
    mean = f32(folded(sums) / f32(600))
    for i, value in enumerate(x):
        distance = f32(value - mean)
        squares[i % 256] = fused(distance, distance, squares[i % 256])
    cutoff = fused(np.sqrt(f32(folded(squares) / f32(600))), multiplier, mean)
    expected = np.array([max(f32(value - cutoff), f32(0)) for value in x], f32)
    assert Backend(1).sparsify(x[None], 1.25)[0].tobytes() == expected.tobytes()


def test_every_rounding_of_streams() -> None:
    n, ops = 5, Backend(1)
    x, m, y, first, scale = draw(1, 5 * n), draw(1, 4), draw(1, n), draw(1, n, seed=1), draw(n)
    predict, correct = draw(16, 4), draw(4, 4)

    def coefficients(rows: np.ndarray) -> list[np.float32]:
        found = []
        for row in rows:
            total = f32(0)
            for k in range(4):
                total = fused(row[k], f32(tanh(m[0, k])), total)
            found.append(total)
        return found

    c, expected = coefficients(predict), np.zeros((1, 5 * n), f32)
    for d in range(4):
        for i in range(n):
            total = x[0, d * n + i]
            for s in range(4):
                total = fused(c[4 * d + s], x[0, s * n + i], total)
            expected[0, d * n + i] = total
    p = ops.altup_predict(x, m, predict)
    assert p.tobytes() == expected.tobytes()
    c, expected, active = [f32(each + f32(1)) for each in coefficients(correct)], np.zeros((1, 5 * n), f32), []
    for i in range(n):
        change = f32(y[0, i] - p[0, i])
        for d in range(4):
            value = fused(change, c[d], p[0, d * n + i])
            expected[0, d * n + i] = f32(value + first[0, i]) if d else value
        active.append(f32(expected[0, i] * scale[i]))
    assert ops.altup_correct(p, y, m, correct, first).tobytes() == expected.tobytes()
    assert ops.altup_active(p, y, m, correct, scale).tobytes() == np.array([active], f32).tobytes()
    wanted, own = f32(7.5), f32(0.7)
    ratio = magnitude_ratio(wanted, own, f32(9))
    assert ratio == f32(np.sqrt(f32(wanted / f32(9))) / np.sqrt(f32(own / f32(9))))
    assert magnitude_ratio(wanted, f32(1e-8), f32(9)) == f32(np.sqrt(f32(wanted / f32(9))) / np.sqrt(f32(1e-5)))
    assert np.isnan(magnitude_ratio(wanted, f32(np.inf), f32(9)))
    assert gaussian_cutoff(f32(0.5), f32(18), f32(9), f32(3)) == fused(np.sqrt(f32(2)), f32(3), f32(0.5))
