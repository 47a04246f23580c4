"""The vector loops of attention against scalar chains, and against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.cpu.lanes import ROWS, add_weighted, hide
from engine.numerics import fma
from tests.tiers import examples


@njit
def chains(c, x, out):
    """out[r, t] = fma(c[r, i], x[i, t], out[r, t]) in rising i."""
    for r in range(out.shape[0]):
        for t in range(out.shape[1]):
            for i in range(x.shape[0]):
                out[r, t] = fma(c[r, i], x[i, t], out[r, t])


@pytest.mark.parametrize("rows", [1, ROWS])
@given(st.integers(0, 2**32 - 1), st.integers(0, 70), st.integers(1, 200), st.booleans())
@examples(60, 20)
def test_every_lane_is_one_chain(rows: int, seed: int, n: int, width: int, half: bool) -> None:
    """Of any number of lanes, at any place of the arrays; nothing else is written."""
    rng = np.random.default_rng(seed)
    i, j, k = rng.integers(0, 9, 3)
    c, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, n + 3), (n, width + 5)))
    start = rng.standard_normal((rows, width + 2)).astype(np.float32)
    if half:
        x = x.astype(np.float16)
    expected = start.copy()
    part = np.ascontiguousarray(expected[:, :width])
    chains(c[:, :n], x[:, :width].astype(np.float32), part)
    expected[:, :width] = part

    def shifted(array: np.ndarray, by: int) -> np.ndarray:
        return np.concatenate([np.full(by, np.nan, array.dtype), array.reshape(-1)])

    rows_of_x = shifted(x, j).view(np.uint16 if half else np.float32)
    out = shifted(start, k)
    add_weighted(half)(shifted(c, i), i, n + 3, rows, n, rows_of_x, j, width + 5, width, out, k, width + 2)
    assert out[k:].tobytes() == expected.tobytes()


@njit
def hidden(p, first, last):
    return hide(p, first, last)


@given(st.integers(0, 2**32 - 1), st.integers(0, 63), st.integers(1, 64))
@examples(100)
def test_hidden_lanes(seed: int, first: int, n: int) -> None:
    p = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
    last, visible = min(64, first + n), p.copy()
    p[:first], p[last:] = np.nan, np.inf
    assert hidden(p, first, last) == visible[first:last].max()
    assert np.array_equal(p[first:last], visible[first:last])
    assert np.isneginf(p[:first]).all() and np.isneginf(p[last:]).all()
