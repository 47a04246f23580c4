"""engine/cuda/rope.py in the simulator: the bits of engine/cpu/rms_norm.py, rope.py and append."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import CHUNK
from engine.cpu import attention, rms_norm
from engine.cpu import rope as mirror
from engine.cuda import rope
from engine.cuda.simulator import run

EPS = np.float32(1e-6)
N_HEAD, N_HEAD_KV, CHUNKS = 3, 2, 2
POSITIONS = np.array([127, 128, 300], np.int32)


def agree(
    d_k: int,
    d_v: int,
    n_rot: int,
    *,
    half: bool,
    neox: bool,
    normed: bool,
    biased: bool,
    early: bool = False,
    gated: bool = False,
    n_head: int = N_HEAD,
) -> None:
    """q, k and v as slices of one matrix product, of which some columns belong to nobody."""
    rng = np.random.default_rng(d_k + d_v)
    rows = POSITIONS.size
    sizes = n_head * d_k * (2 if gated else 1), N_HEAD_KV * d_k, N_HEAD_KV * d_v
    product = rng.normal(size=(rows, sum(sizes) + 5)).astype(np.float32)
    flat, stride = product.reshape(-1), product.shape[1]
    starts = 0, sizes[0], sizes[0] + sizes[1]
    biases = [rng.normal(size=size).astype(np.float32) for size in (n_head * d_k, *sizes[1:])]
    norms = [rng.normal(size=d_k).astype(np.float32) for _ in range(2)]
    angles = rng.uniform(-3, 3, (301, n_rot // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    dtype = np.uint16 if half else np.float32
    keys = rng.integers(0, 999, (N_HEAD_KV, CHUNKS, d_k, CHUNK)).astype(dtype)
    values = rng.integers(0, 999, (N_HEAD_KV, CHUNKS, CHUNK, d_v)).astype(dtype)
    expected_keys, expected_values = keys.copy(), values.copy()

    q, k, v = (product[:, start : start + size] for start, size in zip(starts, sizes, strict=True))
    if gated:
        # Behind the queries of a head lie its gates.
        q = q.reshape(rows, n_head, 2, d_k)[:, :, 0].reshape(rows, -1)
    q, k, v = (x.copy() + (bias if biased else np.float32(0.0)) for x, bias in zip((q, k, v), biases, strict=True))
    if normed:
        for x, norm in ((q, norms[0]), (k, norms[1])):
            rms_norm.rms_norm(x.copy().reshape(-1, d_k), norm, EPS, x.reshape(-1, d_k))
    for x in (q, k):
        mirror.rope(x.reshape(rows, x.shape[1] // d_k, d_k), POSITIONS, table, neox)
    heads_k, heads_v = k.reshape(rows, N_HEAD_KV, d_k), v.reshape(rows, N_HEAD_KV, d_v)
    attention.append(heads_k, heads_v, POSITIONS, half, expected_keys, expected_values)

    q_out = np.full_like(q, np.nan)
    new = np.full((rows, N_HEAD_KV, d_k + d_v), 0xFFFFFFFF, np.uint32)
    slices = [flat[start:] for start in starts]
    weights = (norms if normed else [None, None]) + (biases if biased else [None] * 3)
    strides = [stride] * 3
    arguments = [*slices, *strides, POSITIONS, table, *weights, EPS, n_head, CHUNKS, q_out, new, keys, values]
    specialization = rope.rope(half, d_k, d_v, n_rot, neox, normed, biased, early, gated)
    run(specialization, rope.grid(rows, n_head, N_HEAD_KV), rope.BLOCK, arguments)
    assert q_out.tobytes() == q.tobytes()
    assert keys.tobytes() == expected_keys.tobytes()
    assert values.tobytes() == expected_values.tobytes()
    kind = np.float16 if half else np.float32
    appended = np.concatenate([heads_k, heads_v], axis=2).astype(kind)
    assert np.array_equal(new, appended.view(f"u{appended.itemsize}"))


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("d_k", [2, 16, 80, 128])
def test_heads(d_k: int, neox: bool, half: bool) -> None:
    agree(d_k, d_k + 6, d_k, half=half, neox=neox, normed=True, biased=False, early=half)


@pytest.mark.parametrize("d_k", [256, 258, 512])
def test_heads_with_more_elements_than_chains(d_k: int) -> None:
    agree(d_k, 32, d_k, half=True, neox=True, normed=True, biased=True)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("neox", [True, False])
def test_with_and_without(normed: bool, biased: bool, neox: bool) -> None:
    agree(40, 24, 40, half=True, neox=neox, normed=normed, biased=biased, early=biased)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n_rot", [2, 34])
def test_only_some_elements_rotate(n_rot: int, neox: bool) -> None:
    agree(48, 16, n_rot, half=False, neox=neox, normed=True, biased=False)


@pytest.mark.parametrize(("d_k", "n_rot", "biased"), [(64, 16, False), (40, 24, True), (256, 64, False)])
def test_gates_are_left_alone(d_k: int, n_rot: int, biased: bool) -> None:
    agree(d_k, d_k, n_rot, half=True, neox=True, normed=True, biased=biased, early=True, gated=True)


@pytest.mark.parametrize("gated", [False, True])
def test_keys_and_values_without_queries(gated: bool) -> None:
    agree(64, 32, 16, half=True, neox=True, normed=True, biased=False, early=True, gated=gated, n_head=0)
