"""Mixtures of experts against float64, and the paths whose choice must not affect a bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu import experts as mixture
from engine.cpu.backend import Backend
from engine.gguf.quants import FORMATS
from engine.models.experts import Experts
from engine.models.weights import Weight
from engine.synthetic.model import random_blocks
from tests.tiers import examples

F = np.float32
ULP = 2.0**-23


def route(logits: np.ndarray, n_expert: int, n_used: int) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = np.full((len(logits), n_used), -1, np.int32), np.empty((len(logits), n_used), F)
    mixture.route(logits.astype(F), n_expert, ids, weights)
    return ids, weights


def chosen(logits: np.ndarray, n_used: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits of each row, the lower expert first among equals, and softmax over all in float64, renormalized."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :n_used]
    p = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    p = np.take_along_axis(p / p.sum(axis=1, keepdims=True), ids, axis=1)
    return ids, p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("n_expert", "n_used"), [(1, 1), (5, 2), (7, 7), (128, 8), (256, 8)])
@pytest.mark.parametrize("levels", [0, 3, 20])
def test_route(n_expert: int, n_used: int, levels: int) -> None:
    """``levels``: the number of different logits, few enough for ties, also between chosen and other experts."""
    rng = np.random.default_rng(n_expert + levels)
    logits = rng.standard_normal((50, n_expert + 1)).astype(F) * 3
    if levels:
        logits = rng.integers(-levels, levels, logits.shape).astype(F) / F(levels)
    logits[:, -1] = 100  # the gate of the shared network, which must not be chosen
    ids, weights = route(logits, n_expert, n_used)
    expected, p = chosen(logits[:, :-1], n_used)
    assert np.array_equal(ids, expected)
    assert np.allclose(weights, p, rtol=8 * ULP, atol=0)


def test_route_at_its_ends() -> None:
    """Logits far below have no weight, but are still chosen in their order."""
    ids, weights = route(np.array([[-np.inf, 5, -1e30, 5, -200]]), 5, 4)
    assert ids.tolist() == [[1, 3, 4, 2]]
    assert weights.tolist() == [[0.5, 0.5, 0, 0]]
    assert route(np.full((1, 9), -3e38), 9, 3)[0].tolist() == [[0, 1, 2]]


@given(st.integers(1, 40), st.data())
@examples(100)
def test_a_row_chooses_for_itself(n_expert: int, data: st.DataObject) -> None:
    n_used = data.draw(st.integers(1, n_expert))
    value = st.floats(-100, 100, width=16)
    rows = data.draw(st.lists(st.lists(value, min_size=n_expert, max_size=n_expert), min_size=1, max_size=4))
    logits = np.array(rows, F) + F(0)  # no zeros of two signs
    ids, weights = route(logits, n_expert, n_used)
    assert np.array_equal(ids, chosen(logits, n_used)[0])
    assert np.allclose(weights.astype(float).sum(axis=1), 1, rtol=n_used * ULP)
    assert (np.diff(weights, axis=1) <= 0).all()
    for t in range(len(rows)):
        alone = route(logits[t : t + 1], n_expert, n_used)
        assert alone[0].tobytes() == ids[t].tobytes()
        assert alone[1].tobytes() == weights[t].tobytes()


@pytest.mark.parametrize("with_shared", [False, True])
def test_join(with_shared: bool) -> None:
    rng = np.random.default_rng(0)
    rows, n_used, n = 6, 3, 70
    residual, shared = rng.standard_normal((2, rows, n)).astype(F)
    y, gate = rng.standard_normal((rows, n_used, n)).astype(F), rng.standard_normal(rows).astype(F)
    weights = rng.dirichlet(np.ones(n_used), rows).astype(F)
    expected = np.einsum("ts,tsn->tn", weights.astype(float), y)
    if with_shared:
        expected += shared / (1 + np.exp(-gate.astype(float)))[:, None]
    out = np.empty((rows, n), F)
    mixture.join(residual, y, weights, shared if with_shared else shared[:0], gate, out)
    assert np.abs(out - (residual + expected)).max() < 8 * ULP * np.abs(y).max()


# --- the whole mixture -----------------------------------------------------------------------------------------


def matrix(name: str, kind: T, rows: int, columns: int) -> Weight:
    entry = FORMATS[kind]
    bits = np.random.PCG64(len(name) + rows)
    blocks = random_blocks(kind, rows * columns // entry.block, columns**-0.5, bits)
    return Weight(name, entry, columns, blocks.reshape(rows, -1))


def mix(kind: T, n_expert: int, n_used: int, n_embd: int, n_ff: int, n_ff_shared: int) -> Experts:
    shared = None
    if n_ff_shared:
        shared = (
            matrix("gate_shared", kind, n_ff_shared, n_embd),
            matrix("up_shared", kind, n_ff_shared, n_embd),
            matrix("down_shared", kind, n_embd, n_ff_shared),
        )
    return Experts(
        n_expert,
        n_used,
        matrix("router", T.F32, n_expert + (shared is not None), n_embd),
        matrix("gate", kind, n_expert * n_ff, n_embd),
        matrix("up", kind, n_expert * n_ff, n_embd),
        matrix("down", kind, n_expert * n_embd, n_ff),
        shared,
    )


def rows_of(n: int, n_embd: int) -> tuple[np.ndarray, np.ndarray]:
    """A residual, and the input."""
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, n_embd)).astype(F), rng.standard_normal((n, n_embd)).astype(F)


def wide(weight: Weight) -> np.ndarray:
    """A weight decoded by ``gguf.quants``."""
    return gguf.quants.dequantize(weight.data, weight.format.type).astype(float).reshape(weight.rows, weight.columns)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("n_ff_shared", [0, 56])
@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16], ids=lambda kind: kind.name)
def test_the_mixture_against_float64(kind: T, n_ff_shared: int) -> None:
    """Row by row and expert by expert, as defined by Shazeer et al.; with the gated shared expert of Qwen."""
    n_expert, n_used, n_embd, n_ff = 7, 3, 80, 40
    e = mix(kind, n_expert, n_used, n_embd, n_ff, n_ff_shared)
    residual, x = rows_of(25, n_embd)
    logits = x.astype(float) @ wide(e.router).T
    ids, weights = chosen(logits[:, :n_expert], n_used)
    gate, up, down = (wide(w).reshape(n_expert, -1, w.columns) for w in (e.gate, e.up, e.down))
    expected = residual.astype(float)
    for t in range(len(x)):
        for s, k in enumerate(ids[t]):
            expected[t] += weights[t, s] * (down[k] @ swiglu(gate[k] @ x[t], up[k] @ x[t]))
    if e.shared:
        gate, up, down = map(wide, e.shared)
        expected += (swiglu(x @ gate.T, x @ up.T) @ down.T) / (1 + np.exp(-logits[:, n_expert:]))
    assert np.abs(Backend().experts(e, residual, x) - expected).max() < 5e-6


@pytest.mark.parametrize("kind", [T.Q4_K, T.Q6_K, T.Q8_0, T.Q5_0, T.MXFP4], ids=lambda kind: kind.name)
def test_an_experts_product_is_that_of_its_matrix_alone(kind: T) -> None:
    """Both have the same bits, for experts that several rows use, that one row uses, and that no row uses."""
    ops, n_expert, n_rows = Backend(), 6, 37
    weight = matrix("gate", kind, n_expert * n_rows, 512)
    _, x = rows_of(9, 512)
    used, starts = np.array([1, 2, 5]), np.array([0, 4, 5, 9])
    products = ops._matmul_experts(x, weight, n_expert, used, starts)
    for e, first, last in zip(used, starts, starts[1:], strict=False):
        own = Weight("own", weight.format, 512, weight.data[e * n_rows : (e + 1) * n_rows])
        assert products[first:last].tobytes() == ops.matmul(x[first:last], own)[0].tobytes()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([T.Q4_K, T.F32]), st.booleans())
@examples(20)
def test_other_rows_do_not_show(batches: list[int], kind: T, with_shared: bool) -> None:
    e = mix(kind, 5, 2, 256, 256, 256 if with_shared else 0)
    residual, x = rows_of(sum(batches), 256)
    whole = Backend(2).experts(e, residual, x)
    first = 0
    for rows in batches:
        span = slice(first, first + rows)
        assert Backend(1).experts(e, residual[span], x[span]).tobytes() == whole[span].tobytes()
        first += rows
    order = np.random.default_rng(0).permutation(len(x))
    assert Backend(2).experts(e, residual[order], x[order]).tobytes() == whole[order].tobytes()
