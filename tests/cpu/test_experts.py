"""Mixtures of experts against float64, and the paths whose choice must not affect a bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu import simd
from engine.cpu.backend import Backend
from engine.cpu.products import experts as mixture
from engine.cpu.products.repack import make_records
from engine.gguf.quants import FORMATS, Format
from engine.ops.experts import Experts
from engine.ops.weight import Weight
from engine.synthetic.model import random_blocks
from tests.cpu.blocks import QUANTIZED, finite_rows, product, quantized, run
from tests.tiers import examples

F = np.float32
ULP = 2.0**-23


def route(logits: np.ndarray, n_expert: int, n_used: int) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = np.full((len(logits), n_used), -1, np.int32), np.empty((len(logits), n_used), F)
    run(mixture.route, logits.astype(F), n_expert, ids, weights, items=len(logits))
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
    ids, weights = route(np.array([[-3e38, 5, -1e30, 5, -200]]), 5, 4)
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


def runs(n: int) -> int:
    """The number of runs of a row of n columns."""
    return -(-n // mixture.RUN)


@pytest.mark.parametrize("n", [70, mixture.RUN, 2 * mixture.RUN + 6])
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_join(with_shared: bool, with_residual: bool, n: int) -> None:
    rng = np.random.default_rng(0)
    rows, n_used = 6, 3
    residual, shared = rng.standard_normal((2, rows, n)).astype(F)
    y, logits = rng.standard_normal((rows * n_used, n)).astype(F), rng.standard_normal((rows, 5)).astype(F)
    weights = rng.dirichlet(np.ones(n_used), rows).astype(F)
    expected = np.einsum("ts,tsn->tn", weights.astype(float), y.reshape(rows, n_used, n))
    if with_shared:
        expected += shared / (1 + np.exp(-logits[:, -1:].astype(float)))
    if with_residual:
        expected += residual
    given = (residual[: rows * with_residual], y, weights, shared[: rows * with_shared], logits)
    out = np.full((rows, n), np.nan, F)
    run(mixture.join, *given, out, items=rows * runs(n))
    assert np.abs(out - expected).max() < 8 * ULP * np.abs(y).max()
    alone = np.full((rows, n), np.nan, F)
    mixture.join(*given, alone, 2 * runs(n), 4 * runs(n))
    assert np.array_equal(alone[2:4], out[2:4])
    assert np.isnan(alone[[0, 1, 4, 5]]).all()


def test_factors_of_experts() -> None:
    rng = np.random.default_rng(0)
    ids, scales = rng.integers(0, 7, (5, 3)).astype(np.int32), rng.standard_normal(7).astype(F)
    weights = rng.standard_normal((5, 3)).astype(F)
    scaled = weights.copy()
    run(mixture.scale_weights, ids, scales, scaled, items=5)
    assert np.array_equal(scaled, weights * scales[ids])


@pytest.mark.parametrize(("scaled", "biased"), [(True, False), (False, True), (True, True)])
def test_scales_and_biases_of_products(scaled: bool, biased: bool) -> None:
    """Numbers of 20 bits: float64 has the exact results, which are rounded once."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, (5, 3)).astype(np.int32)
    y, scales, biases = (rng.integers(-(2**20), 2**20, shape).astype(F) / F(2**20) for shape in ((15, 20), 7, (7, 20)))
    found = y.copy()
    run(mixture.finish_products, found, ids, scales[: 7 * scaled], biases[: 7 * biased], items=15)
    e = ids.reshape(-1)
    exact = y.astype(float) * (scales[e, None] if scaled else 1) + (biases[e] if biased else 0)
    assert np.array_equal(found, exact.astype(F))


@pytest.mark.parametrize("gated", [True, False])
def test_weights_of_inputs(gated: bool) -> None:
    rng = np.random.default_rng(0)
    gate, up, weights = (rng.standard_normal(shape).astype(F) for shape in ((15, 20), (15, 20), (5, 3)))
    found, ones = [gate.copy() if gated else np.empty((0, 0), F), up.copy()], np.full((5, 3), np.nan, F)
    run(mixture.weigh_products, *found, weights, ones, items=15)
    assert np.array_equal(found[1], up * weights.reshape(15, 1)) and np.array_equal(ones, np.ones((5, 3), F))
    assert not gated or np.array_equal(found[0], gate * weights.reshape(15, 1))


def test_join_of_an_ungated_shared_network() -> None:
    rng = np.random.default_rng(0)
    residual, y, shared = rng.integers(-9, 9, (3, 4, 70)).astype(F)
    out = np.full((4, 70), np.nan, F)
    nothing = np.empty((0, 0), F)
    run(mixture.join, residual, y, np.full((4, 1), 0.5, F), shared, nothing, out, items=4 * runs(70))
    assert np.array_equal(out, residual + y / 2 + shared)


@dataclass
class Groups:
    """The pairs of a mixture by expert."""

    order: np.ndarray
    used: np.ndarray
    starts: np.ndarray
    n: np.ndarray


def grouped(ids: np.ndarray, n_expert: int) -> Groups:
    most = min(n_expert, ids.size)
    # The beginnings of arrays are written, and nothing else.
    groups = Groups(*(np.full(n, -1, np.int32) for n in (ids.size, most, most + 1, 1)))
    run(mixture.group, ids, n_expert, groups.order, groups.used, groups.starts, groups.n, items=1)
    return groups


@given(st.integers(1, 9), st.integers(1, 12), st.data())
@examples(100)
def test_group(rows: int, n_expert: int, data: st.DataObject) -> None:
    n_used = data.draw(st.integers(1, n_expert))
    ids = np.array([data.draw(st.permutations(range(n_expert)))[:n_used] for _ in range(rows)], np.int32)
    groups = grouped(ids, n_expert)
    order = np.argsort(ids.reshape(-1), kind="stable")
    used, starts = np.unique(ids.reshape(-1)[order], return_index=True)
    assert groups.order.tolist() == order.tolist()
    assert groups.n.tolist() == [len(used)]
    assert groups.used[: len(used)].tolist() == used.tolist()
    assert groups.starts[: len(used) + 1].tolist() == [*starts, order.size]


# --- products --------------------------------------------------------------------------------------------------

IDS = np.array([[1, 4], [1, 2], [5, 1], [1, 4], [2, 1]], np.int32)
"""Experts that many rows use, that two use, that one uses, and that no row uses."""


def products(
    weight: Weight, n_expert: int, groups: Groups, share: int, x: np.ndarray, instructions: str = ""
) -> np.ndarray:
    """Row ``pair // share`` of x times the matrix of the pair's expert: float32 [pairs, R]."""
    n_rows, pairs = weight.rows // n_expert, groups.order.size
    out = np.full((pairs, n_rows), np.nan, F)
    given = (groups.order, share, groups.used, groups.starts, groups.n, out)
    most, name = len(groups.used), weight.format.name
    if not weight.format.quantized:
        pitch = weight.pitch or n_rows
        kernel = mixture.matmul_float_experts(name, simd.host())
        run(kernel, weight.data, weight.first, pitch, x, *given, items=most * n_rows)
        return out
    records = make_records(weight, n_expert, run)
    kernel = mixture.matmul_experts(name, instructions or simd.host())
    run(kernel, records.data, *quantized(x, weight.format.unit), *given, items=most * records.data.shape[1])
    return out


EACH = [pytest.param(f, marks=() if f.name in ("Q4_K", "Q8_0") else pytest.mark.thorough, id=f.name) for f in QUANTIZED]


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("instructions", simd.INSTRUCTION_SETS)
@pytest.mark.parametrize("entry", EACH)
@pytest.mark.covering(1, 1)
def test_an_experts_product_is_that_of_its_matrix_alone(entry: Format, instructions: str, share: int) -> None:
    """Both have the same bits, for inputs of rows (share = 2) and of pairs."""
    if instructions not in simd.available():
        pytest.skip(f"this CPU has no {instructions}")
    n_expert, n_rows = 6, 19
    data = finite_rows(entry, n_expert * n_rows, 512, 0)
    x = np.random.default_rng(1).standard_normal((IDS.size // share, 512)).astype(F)
    found = products(Weight("w", entry, 512, data), n_expert, grouped(IDS, n_expert), share, x, instructions)
    for pair, e in enumerate(IDS.reshape(-1)):
        own = data[e * n_rows : (e + 1) * n_rows]
        activations = quantized(x[pair // share : pair // share + 1], entry.unit)
        assert found[pair].tobytes() == product(entry, instructions, "step", own, activations)[0].tobytes()


@pytest.mark.parametrize("kind", [T.F32, T.Q4_K], ids=lambda kind: kind.name)
def test_gate_and_up_that_a_file_stores_together(kind: T) -> None:
    n_expert, half = 6, 9
    weight = matrix("both", kind, n_expert * 2 * half, 256)
    x = np.random.default_rng(1).standard_normal((len(IDS), 256)).astype(F)
    groups = grouped(IDS, n_expert)
    together = products(weight, n_expert, groups, 2, x)
    parts = [products(part, n_expert, groups, 2, x) for part in weight.halves(2 * half)]
    assert np.concatenate(parts, axis=1).tobytes() == together.tobytes()


# --- the whole mixture -----------------------------------------------------------------------------------------


def matrix(name: str, kind: T, rows: int, columns: int) -> Weight:
    entry = FORMATS[kind]
    bits = np.random.PCG64(len(name) + rows)
    blocks = random_blocks(kind, rows * columns // entry.block, columns**-0.5, bits)
    return Weight(name, entry, columns, blocks.reshape(rows, -1))


def wide(weight: Weight) -> np.ndarray:
    """A weight decoded by ``gguf.quants``."""
    return gguf.quants.dequantize(weight.data, weight.format.type).astype(float).reshape(weight.rows, weight.columns)


def mix(kind: T, n_ff: int, n_expert: int, n_used: int, x: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, ...]:
    """The mixture of the rows x by our kernels, and in float64, row by row and expert by expert."""
    rows, n_embd = x.shape
    gate, up = (matrix(name, kind, n_expert * n_ff, n_embd) for name in ("gate", "up"))
    down = matrix("down", kind, n_expert * n_embd, n_ff)
    ids, weights = route(logits, n_expert, n_used)
    groups = grouped(ids, n_expert)
    inner = [products(w, n_expert, groups, n_used, x) for w in (gate, up)]
    g, u = (part.astype(float) for part in inner)
    y = products(down, n_expert, groups, 1, (g / (1 + np.exp(-g)) * u).astype(F))
    out, nothing = np.empty((rows, n_embd), F), np.empty((0, n_embd), F)
    run(mixture.join, x, y, weights, nothing, logits.astype(F), out, items=rows * runs(n_embd))
    expected = x.astype(float)
    matrices = [wide(w).reshape(n_expert, -1, w.columns) for w in (gate, up, down)]
    for t in range(rows):
        for s, e in enumerate(ids[t]):
            a, b = matrices[0][e] @ x[t], matrices[1][e] @ x[t]
            expected[t] += weights[t, s] * (matrices[2][e] @ (a / (1 + np.exp(-a)) * b))
    return out, expected


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16], ids=lambda kind: kind.name)
def test_the_mixture_against_float64(kind: T) -> None:
    rng = np.random.default_rng(0)
    x, logits = rng.standard_normal((25, 80)).astype(F), rng.standard_normal((25, 7)).astype(F)
    out, expected = mix(kind, 40, 7, 3, x, logits)
    assert np.abs(out - expected).max() < 5e-6


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([T.Q4_K, T.F32]))
@examples(20)
def test_other_rows_do_not_show(batches: list[int], kind: T) -> None:
    rows = sum(batches)
    rng = np.random.default_rng(rows)
    x, logits = rng.standard_normal((rows, 256)).astype(F), rng.standard_normal((rows, 5)).astype(F)
    whole, _ = mix(kind, 256, 5, 2, x, logits)
    first = 0
    for n in batches:
        span = slice(first, first + n)
        assert mix(kind, 256, 5, 2, x[span], logits[span])[0].tobytes() == whole[span].tobytes()
        first += n
    order = rng.permutation(rows)
    assert mix(kind, 256, 5, 2, x[order], logits[order])[0].tobytes() == whole[order].tobytes()


def test_operations_of_a_stage_do_not_read_what_others_write() -> None:
    """Threads compute them at the same time.  Weights are scaled by the factors of chosen experts: while pairs are grouped,
    but not while experts are chosen."""
    ops, (n_expert, n_embd, n_ff) = Backend(2), (6, 64, 32)
    inner, outer = (n_expert * n_ff, n_embd), (n_expert * n_embd, n_ff)
    sizes = {"router": (n_expert, n_embd), "gate": inner, "up": inner, "down": outer}
    matrices: Any = [ops.weight(matrix(name, T.Q8_0, *size)) for name, size in sizes.items()]
    router, gate, up, down = matrices
    experts = Experts(n_expert, 2, router, gate, up, down, scales=np.ones(n_expert, F))
    x = np.ones((3, n_embd), F)
    bodies: list[Callable[[], np.ndarray]] = [
        lambda: ops.choose_experts(experts, x).weights,
        lambda: ops.experts(experts, None, x),
    ]
    for body in bodies:
        stages: list[list[str]] = []
        for operation in ops.record(body).operations:
            assert operation.entry is not None
            if not operation.joined:
                stages.append([])
            stages[-1].append(operation.entry.name)
        assert ["route"] in stages
        assert any("scale_weights" in stage for stage in stages)
