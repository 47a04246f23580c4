"""Attention of rows with spans in the simulator: the bits of the mirrors, which see what a mask says that they see."""

from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import Types, cache_type
from engine.cuda import backend
from engine.ops.heads import Heads
from engine.ops.spans import spans
from tests.batches import one_sequence
from tests.cuda.simulated.device import SimulatedDevice
from tests.mirror import Mirror as CPU
from tests.pages import layer_of
from tests.tiers import few

N = 70
"""Tokens of a text, whose last chunk is short."""

REACH = 9


@pytest.mark.parametrize(
    ("types", "rows", "mixed"),
    few(
        [
            ("f16 f16", [60, 61, 68, 69], False),
            ("i8 i8", [55, 69], True),
            ("q8_0 q8_0", list(range(52, 70)), False),
            ("f32 f32", list(range(52, 70)), False),
            ("i8 i8", list(range(52, 70)), False),
            ("q8_0 q4_0", [0, 54, 69], False),
            ("f16 q8_0", [54, 69], True),
        ],
        2,
    ),
)
def test_rows_see_their_spans(monkeypatch: pytest.MonkeyPatch, types: str, rows: list[int], mixed: bool) -> None:
    """Near the end of a text, and around the border of a chunk; in narrow and in wide passes."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    gpu, cpu, rng, d = backend.Backend(), CPU(1), np.random.default_rng(0), 32
    k_type, v_type = (cache_type(name) for name in types.split())
    kinds, heads = Types(k_type, v_type), Heads[Any](2, 1, d, d, True, 0.5)
    shape = AttentionCacheSpec(1, d, d)
    mine, theirs = (layer_of(shape, 128, 128, kinds, ops.zeros, ops.store) for ops in (cpu, gpu))
    at = np.arange(N, dtype=np.int32)
    k, v = (rng.normal(size=(N, d)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(len(rows), 2 * d)).astype(np.float32)
    own = spans(N, REACH)[rows]
    cpu.remember(heads, k.copy(), v.copy(), mine, one_sequence(at), None)
    law = cpu.attend_past(heads, q.copy(), mine, one_sequence(at[rows]), own, None, 2 * REACH + 1, True)
    if k_type.bits == 32:
        scores = 0.5 * np.einsum("rhd,jd->rhj", q.reshape(-1, 2, d).astype(np.float64), k)
        scores[(abs(at[rows][:, None] - at) > REACH)[:, None].repeat(2, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("rhj,jd->rhd", weights / weights.sum(-1, keepdims=True), v).reshape(law.shape)
        assert np.abs(law - expected).max() < 1e-5
    numbers, slots = gpu.upload(at[rows]), gpu.upload(np.zeros(len(rows), np.int32))
    stored = one_sequence(at, gpu)
    given = gpu.upload(k), gpu.upload(v), gpu.upload(q), gpu.upload(own)

    def work() -> Any:
        gpu.remember(heads, given[0], given[1], theirs, stored, None)
        batch = Batch(numbers, numbers, slots, mixed)
        return gpu.plain(gpu.attend_past(heads, given[2], theirs, batch, given[3], None, 2 * REACH + 1, True))

    plan: Any = gpu.record(work)
    gpu.start(plan)
    assert gpu.download(plan.result).tobytes() == law.tobytes()
