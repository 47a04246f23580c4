"""The laws of the choice of experts: against float64, and replayed in NumPy, bit for bit."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.products import router
from engine.numerics import exp, sigmoid, softplus
from engine.ops.experts import GATINGS, Routing
from tests.cpu.blocks import run
from tests.tiers import examples

F = np.float32
ULP = 2.0**-23
FLOOR = 2.0**-14


class Case:
    """A law, and inputs for it: of few different values if ``levels`` is not 0, so that most scores are equal to others."""

    def __init__(self, law: Routing, n_expert: int, n_used: int, levels: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows, self.law, self.n_expert, self.n_used = 4, law, n_expert, n_used

        def values(*shape: int) -> np.ndarray:
            some = rng.integers(-levels, levels + 1, shape) / levels if levels else 3 * rng.standard_normal(shape)
            return some.astype(F)

        self.logits = values(rows, n_expert + 1)
        self.logits[:, -1] = 100  # the gate of the shared network, which must not be chosen
        self.router_bias, self.selection_bias = values(n_expert), values(n_expert) / F(4)
        self.table = np.argsort(rng.random((9, n_expert)))[:, :n_used].astype(np.int32)
        self.tokens = rng.integers(0, 9, rows).astype(np.int32)

    def route(self) -> tuple[np.ndarray, np.ndarray]:
        """The experts and weights of the kernel."""
        law, rows = self.law, len(self.logits)
        ids, weights = np.full((rows, self.n_used), -1, np.int32), np.full((rows, self.n_used), np.nan, F)
        biases = self.router_bias[: self.n_expert * law.biased], self.selection_bias[: self.n_expert * law.selected]
        numbers = law.normalized, F(law.floor), F(law.weight_scale)
        groups, table = (law.n_group, law.n_group_used, law.group_best), self.table if law.tabled else self.table[:0]
        given = self.logits, self.n_expert, GATINGS.index(law.gating), *biases, *numbers, *groups, table, self.tokens
        run(router.route_by, *given, ids, weights, items=rows)
        return ids, weights

    def by_probability(self) -> bool:
        return self.law.selected or self.law.n_group > 1


def best_groups(scores: np.ndarray, n_group: int, n: int, best: int) -> np.ndarray:
    """Whether the experts of a row may be chosen: those of the n groups with the largest sums of their ``best`` scores."""
    size = scores.size // n_group
    two = -np.sort(-scores.reshape(n_group, size), axis=1)[:, :2]
    sums = two[:, 0] + two[:, 1] if size > 1 and best > 1 else two[:, 0]
    chosen = np.argsort(-sums, kind="stable")[:n]
    return np.isin(np.arange(scores.size) // size, chosen)


def fold32(values: np.ndarray) -> F:
    """The sum of a float32 array by 32 chains and the tree over them."""
    chains = np.zeros(32, F)
    for at in range(0, values.size, 32):
        part = values[at : at + 32]
        chains[: part.size] += part
    while chains.size > 1:
        chains = chains[: chains.size // 2] + chains[chains.size // 2 :]
    return chains[0]


def replay(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The law of ``engine/cpu/products/router.py`` in NumPy, with the functions of ``engine/numerics.py``."""
    law, all_ids, all_weights = case.law, [], []
    for t, logits in enumerate(case.logits[:, :-1]):
        z = logits + case.router_bias if law.biased else logits
        if law.gating == "softmax":
            p = np.array([exp(v) for v in z - z.max()], F)
            p = p / fold32(p)
        elif law.gating == "sigmoid":
            p = np.array([sigmoid(v) for v in z], F)
        elif law.gating == "sqrt_softplus":
            p = np.sqrt(np.array([softplus(v) for v in z], F))
        else:
            p = z
        scores = p if case.by_probability() else z
        if law.selected:
            scores = scores + case.selection_bias
        if law.n_group > 1:
            allowed = best_groups(scores, law.n_group, law.n_group_used, law.group_best)
            scores = np.where(allowed, scores, F(-np.inf))
        ids = case.table[case.tokens[t]] if law.tabled else np.argsort(-scores, kind="stable")[: case.n_used]
        v = np.array([exp(d) for d in z[ids] - z[ids[0]]], F) if law.gating == "chosen" else p[ids]
        if law.normalized:
            total = F(0)
            for value in v:
                total = total + value
            v = v / (total if law.gating == "chosen" else max(total, F(law.floor)))
        if law.weight_scale != 1:
            v = v * F(law.weight_scale)
        all_ids.append(ids)
        all_weights.append(v)
    return np.array(all_ids, np.int32), np.array(all_weights, F)


@st.composite
def cases(draw: Any) -> Case:
    gating = draw(st.sampled_from(GATINGS))
    n_group, size = draw(st.sampled_from([(1, 1), (1, 7), (1, 40), (2, 16), (4, 9), (8, 32), (5, 1), (7, 2)]))
    if gating == "chosen":
        n_group, size = 1, n_group * size
    n_group_used = draw(st.integers(1, n_group))
    n_used = draw(st.integers(1, min(32, n_group_used * size)))
    tabled = draw(st.booleans()) and n_group == 1 and gating != "chosen"
    selected = gating != "chosen" and not tabled and draw(st.booleans())
    normalized = gating == "chosen" or draw(st.booleans())
    floor = draw(st.sampled_from([0.0, FLOOR, 1.25])) if gating != "chosen" else 0.0
    scale = draw(st.sampled_from([1.0, 2.5, 0.1]))
    groups = n_group, n_group_used, tabled, draw(st.sampled_from([1, 2]))
    law = Routing(gating, draw(st.booleans()), selected, normalized, floor, scale, *groups)
    return Case(law, n_group * size, n_used, draw(st.sampled_from([0, 2, 6])), draw(st.integers(0, 99)))


@given(cases())
@examples(300)
def test_the_law_in_numpy(case: Case) -> None:
    ids, weights = case.route()
    expected_ids, expected = replay(case)
    assert ids.tolist() == expected_ids.tolist()
    assert weights.tobytes() == expected.tobytes()


@given(cases())
@examples(300)
def test_choice_and_weights_against_float64(case: Case) -> None:
    """No expert that could be chosen has a larger score than one that is, and weights follow from the choice."""
    law, (ids, weights) = case.law, case.route()
    z = case.logits[:, :-1].astype(float) + case.router_bias * float(law.biased)
    softmax = np.exp(z - z.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    p = {"sigmoid": 1 / (1 + np.exp(-z)), "sqrt_softplus": np.sqrt(np.log1p(np.exp(z)))}.get(law.gating, softmax)
    scores = p + case.selection_bias * float(law.selected)
    rows = np.arange(len(z))[:, None]
    for t in range(len(z)):
        assert len(set(ids[t])) == case.n_used
        if law.tabled:
            assert ids[t].tolist() == case.table[case.tokens[t]].tolist()
            continue
        size = case.n_expert // law.n_group
        used = np.unique(ids[t] // size)
        assert used.size <= law.n_group_used
        others = np.setdiff1d(np.flatnonzero(np.isin(np.arange(case.n_expert) // size, used)), ids[t])
        assert not others.size or scores[t, others].max() <= scores[t, ids[t]].min() + 1e-5
        assert (np.diff(scores[t, ids[t]]) < 1e-5).all()
    v = p[rows, ids]
    if law.normalized:
        v = v / np.maximum(v.sum(1, keepdims=True), law.floor)
    assert np.allclose(weights, v * law.weight_scale, rtol=64 * ULP, atol=1e-30)


def test_scores_of_groups() -> None:
    """A group's score is the sum of its two best, which no single good expert outweighs; lower groups first where equal."""
    case = Case(Routing("sigmoid", selected=True, floor=FLOOR, n_group=4, n_group_used=2), 12, 3, 0, 0)
    case.logits = np.zeros((1, 13), F)
    for bias, expected in (
        ([9, 0, 0, 5, 5, 0, 0, 6, 6, 0, 0, 0], [7, 8, 3]),
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2]),
        ([0, 0, 0, 3, 0, 3, 2, 4, 0, 0, 5, 1], [7, 3, 5]),
    ):
        case.selection_bias = np.array(bias, F)
        assert case.route()[0].tolist() == [expected]


def test_a_floor_of_the_sum() -> None:
    case = Case(Routing("sigmoid", floor=FLOOR), 4, 2, 0, 0)
    case.logits = np.array([[-30, -31, -29, -40, 0], [-3, 1, 1, -9, 0]], F)
    ids, weights = case.route()
    assert ids.tolist() == [[2, 0], [1, 2]]
    assert np.allclose(weights[0], np.exp([-29.0, -30.0]) / FLOOR, rtol=64 * ULP)
    assert weights[1].tolist() == [0.5, 0.5]
