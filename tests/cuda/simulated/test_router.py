"""The choice of experts in the simulator: the bits of the mirror, whatever the law, and the kernel that computes logits."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.products import experts as mirror
from engine.cpu.products.router import route_by
from engine.cuda import backend
from engine.cuda.products import router
from engine.cuda.runtime.simulator import run
from engine.ops.experts import GATINGS, Routing
from engine.verify import lockstep
from tests.cuda.simulated.test_experts import packed
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, cpu, gpu, same, weight
from tests.tiers import few

assert gpu


FLOOR = 2.0**-14


@pytest.mark.parametrize(
    ("n_expert", "n_used", "law"),
    [
        (40, 4, Routing("sigmoid", True, True, True, FLOOR, 2.5, 4, 2)),
        (35, 3, Routing("softmax", normalized=False)),
        (5, 5, Routing("sqrt_softplus", selected=True, floor=FLOOR, weight_scale=1.5)),
        (6, 2, Routing("sqrt_softplus", floor=FLOOR, tabled=True)),
        (32, 4, Routing(biased=True)),
        # A floor above the sum.
        (9, 2, Routing("sigmoid", floor=4.0)),
        (300, 8, Routing("softmax", False, True, True, FLOOR, 16.0, 30, 11)),
        (512, 22, Routing("sigmoid", selected=True, floor=FLOOR)),
        (512, 8, Routing("softmax", True, True, False, 0.0, 1.0, 32, 1)),
        # Groups of one and of two experts.
        (31, 3, Routing("sigmoid", n_group=31, n_group_used=5, floor=FLOOR)),
        (20, 3, Routing("sigmoid", False, True, False, n_group=10, n_group_used=2)),
        (160, 6, Routing("softmax", normalized=False, weight_scale=16.0, n_group=8, n_group_used=3, group_best=1)),
        (70, 6, Routing("softmax", normalized=False, tabled=True, biased=True)),
    ],
)
def test_laws(n_expert: int, n_used: int, law: Routing) -> None:
    """Few different values, so that most scores, and sums of two, are equal to others."""
    rng = np.random.default_rng(n_expert)
    rows, stride = 2, n_expert + 3
    logits = rng.choice(np.array([-1.5, -0.0, 0.0, 0.25, 2.0], F), (rows, stride))
    router_bias, selection_bias = rng.choice(np.array([-0.0, 0.25, -0.5], F), (2, n_expert))
    table = np.argsort(rng.random((7, n_expert)))[:, :n_used].astype(np.int32)
    tokens, scales = np.array([6, 0], np.int32), activations(1, n_expert)[0] if n_expert % 2 else None
    ids, weights = np.full((rows, n_used), -1, np.int32), np.full((rows, n_used), np.nan, F)
    other_ids, other_weights = np.empty_like(ids), np.empty_like(weights)
    gating, numbers = GATINGS.index(law.gating), (law.normalized, F(law.floor), F(law.weight_scale))
    biases = router_bias[: n_expert * law.biased], selection_bias[: n_expert * law.selected]
    groups, given = (law.n_group, law.n_group_used, law.group_best), (table if law.tabled else table[:0], tokens)
    route_by(logits, n_expert, gating, *biases, *numbers, *groups, *given, other_ids, other_weights, 0, rows)
    arguments = [logits, stride, router_bias, selection_bias, table, tokens, scales, ids, weights]
    run(router.route(n_expert, n_used, scales is not None, law), rows, 32, arguments)
    assert ids.tolist() == other_ids.tolist()
    same(weights, other_weights if scales is None else other_weights * scales[ids])


@pytest.mark.parametrize(("n_expert", "n_used"), [(3, 3), (32, 8), (70, 16), (256, 8), (1024, 10)])
def test_route(n_expert: int, n_used: int) -> None:
    rows, stride = 2, n_expert + 1
    # Few different values, so that most are equal to others; zeros of both signs, and one far below.
    rng = np.random.default_rng(n_expert)
    logits = rng.choice(np.array([-1.5, -0.0, 0.0, 0.25, 2.0, -3e38], F), (rows, stride)).astype(F)
    logits[:, 0] = 1.0
    ids, weights = np.full((rows, n_used), -1, np.int32), np.full((rows, n_used), np.nan, F)
    other_ids, other_weights = np.empty_like(ids), np.empty_like(weights)
    mirror.route(logits, n_expert, other_ids, other_weights, 0, rows)
    scales = activations(1, n_expert)[0] if n_expert % 3 else None
    run(
        router.route(n_expert, n_used, scales is not None),
        rows,
        32,
        [logits, stride, *[None] * 4, scales, ids, weights],
    )
    assert ids.tolist() == other_ids.tolist()
    same(weights, other_weights if scales is None else other_weights * scales[ids])


def test_no_numbers_give_experts_all_the_same() -> None:
    ids, weights = np.full((1, 4), -1, np.int32), np.empty((1, 4), F)
    run(router.route(40, 4), 1, 32, [np.full(40, np.nan, F), 40, *[None] * 5, ids, weights])
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("unit", "n", "held"), few([(32, 96, 64), (256, 512, 64), (256, 256, 3), (32, 320, 64), (16, 288, 64)], 2)
)
def test_norm_and_router(gpu: backend.Backend, unit: int, n: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch computes what three others do, whatever lanes hold of the router from the beginning."""
    monkeypatch.setattr(router, "HELD", held)
    rows, n_rows = 1 + (n < 256), 11
    x, norm, matrix = activations(rows, n), activations(1, n)[0], weight(FORMATS_BY_NAME["F32"], n_rows, n)
    seen = norm[::-1].copy()
    q, d, s = (np.full_like(array, -1) for array in packed(unit, x))
    logits = np.empty((rows, n_rows), F)
    grid = (-(-n // 256) + 2, rows)
    run(router.rms_norm_router(unit, n), grid, 256, [x, norm, seen, 1e-6, matrix.data, n_rows, q, d, s, logits])
    normed = cpu.rms_norm(x, norm, 1e-6)
    same(logits, cpu.matmul(cpu.rms_norm(x, seen, 1e-6), matrix)[0])
    theirs = lockstep.activations(unit, rows, n, *packed(unit, normed))
    for ours, other in zip(lockstep.activations(unit, rows, n, q, d, s), theirs, strict=True):
        same(ours, other)
