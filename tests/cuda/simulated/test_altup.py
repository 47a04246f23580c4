"""Alternating updates and sparse gates in the simulator: the bits of the mirrors."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from functools import partial

from engine.cuda import backend
from tests.cuda.simulated.test_operations import computed, cpu, gpu, same
from tests.tiers import few

assert gpu

f32 = np.float32


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(f32)


@pytest.mark.parametrize(
    "n", few([40, 300])
)  # a row of fewer chains, and one of more elements than a block has threads
def test_streams(gpu: backend.Backend, n: int) -> None:
    rows = 2
    x, m, y, first, scale = draw(rows, 5 * n), draw(rows, 4), draw(rows, n), draw(rows, n, seed=1), draw(n)
    predict, correct, a = draw(16, 4), draw(4, 4), draw(rows, 3 * n)
    up = gpu.upload
    g_x, g_m, g_y, g_first, g_scale, g_predict, g_correct, g_a = map(up, (x, m, y, first, scale, predict, correct, a))
    p = cpu.altup_predict(x, m, predict)
    g_p = up(p)
    same(computed(gpu, lambda: gpu.altup_predict(g_x, g_m, g_predict))[0], p)
    (ours,) = computed(gpu, lambda: gpu.altup_active(g_p, g_y, g_m, g_correct, g_scale))
    same(ours, cpu.altup_active(p, y, m, correct, scale))
    (ours,) = computed(gpu, lambda: gpu.altup_correct(g_p, g_y, g_m, g_correct, g_first))
    same(ours, cpu.altup_correct(p, y, m, correct, first))
    same(computed(gpu, lambda: gpu.altup_enter(g_y, g_a))[0], cpu.altup_enter(y, a))
    same(computed(gpu, lambda: gpu.altup_leave(g_x, g_a))[0], cpu.altup_leave(x, a))
    same(computed(gpu, lambda: gpu.columns(g_x, n, 3 * n))[0], x[:, n : 4 * n].copy())


@pytest.mark.parametrize("n", few([40, 600]))
def test_sparse_gates(gpu: backend.Backend, n: int) -> None:
    x = draw(2, n)
    given = gpu.upload(x)
    for multiplier in (1.6448535, -0.5):
        same(computed(gpu, partial(gpu.sparsify, given, multiplier))[0], cpu.sparsify(x, multiplier))
