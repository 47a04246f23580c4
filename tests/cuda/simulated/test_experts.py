"""Mixtures of experts in the simulator: the bits of the mirror, whatever rows, formats and sizes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.products import experts as mirror
from engine.cuda import backend
from engine.cuda.products import matmul, repack, wide_experts
from engine.cuda.products.experts import MOST_TILES, ROUNDS, matmul_experts, matmul_experts_float, run_of, tiles
from engine.cuda.products.join import can_join, join_threads, matmul_join
from engine.cuda.runtime.simulator import run
from engine.gguf.quants import Format
from engine.ops.activation import GEGLU, SWIGLU, Activation
from engine.ops.experts import Experts
from engine.ops.weight import Weight
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, cpu, gpu, same, weight
from tests.mixtures import on_device
from tests.tiers import few

assert gpu


def other(entry: Format, rows: int, columns: int) -> Weight:
    """A random weight, none of whose rows is one of the first expert's."""
    w = weight(entry, rows, columns)
    return replace(w, data=w.data[::-1].copy())


def mixture(
    formats: str,
    n_expert: int,
    n_used: int,
    n_embd: int,
    n_ff: int,
    shared: str = "",
    n_shared: int = 0,
    activation: Activation = SWIGLU,
    scales: np.ndarray | None = None,
) -> Experts:
    """Random experts, gate, up and down of ``formats``; a shared network of formats ``shared``, n_shared or n_ff wide."""
    gate, up, down = (FORMATS_BY_NAME[name] for name in formats.split())
    common = None
    if shared:
        others = [FORMATS_BY_NAME[name] for name in shared.split()]
        n = n_shared or n_ff
        common = other(others[0], n, n_embd), other(others[1], n, n_embd), other(others[2], n_embd, n)
    if gate == up and activation == GEGLU:
        matrices = weight(gate, 2 * n_expert * n_ff, n_embd).halves(2 * n_ff)
    else:
        matrices = (weight(gate, n_expert * n_ff, n_embd), weight(up, n_expert * n_ff, n_embd))
    routing = weight(FORMATS_BY_NAME["F32"], n_expert + bool(shared), n_embd)
    # Two experts are always equal, so their order depends on their numbers.
    routing.data[n_expert - 1] = routing.data[0]
    last = weight(down, n_expert * n_embd, n_ff)
    return Experts(n_expert, n_used, routing, *matrices, last, common, activation, scales)


def launched(
    gpu: Any, experts: Experts, rows: int, normalized: bool = True, tokens: np.ndarray | None = None
) -> list[str]:
    """The kernels of the operation, after checking that its result is that of the CPU."""
    n = experts.router.columns
    x, residual, norm = activations(rows, n), activations(rows, n)[::-1].copy(), activations(1, n)[0]
    theirs = cpu.experts(experts, residual, cpu.rms_norm(x, norm, 1e-6) if normalized else x, None, tokens)
    given = on_device(gpu, experts)
    a, r, w = gpu.upload(x), gpu.upload(residual), gpu.upload(norm)
    t = None if tokens is None else gpu.upload(tokens)
    plan = gpu.record(lambda: gpu.experts(given, r, gpu.rms_norm(a, w, 1e-6) if normalized else a, None, t))
    gpu.start(plan)
    same(gpu.download(plan.result), theirs)
    return [launch.kernel.kernel.name for launch in plan.launches]


def test_a_single_row(gpu: backend.Backend) -> None:
    names = ["rms_norm_router", "matmul_experts", "matmul_join"]
    scales = np.array([0.5, 2.0, -1.0], F)
    assert launched(gpu, mixture("Q8_0 Q8_0 Q4_K", 3, 1, 32, 256, scales=scales), 1) == names


def test_several_rows(gpu: backend.Backend) -> None:
    names = ["rms_norm_router", "route", "matmul_experts", "quantize", "matmul_experts", "join"]
    assert launched(gpu, mixture("Q8_0 Q4_1 Q5_0", 3, 1, 32, 32, "Q8_0 Q4_1 Q5_0"), 2) == names


def test_a_shared_network_of_another_size(gpu: backend.Backend) -> None:
    """A shared network of another size has its own launches, and so have experts of a float format."""
    names = launched(gpu, mixture("F16 Q8_0 Q8_0", 3, 2, 32, 32, "Q8_0 Q8_0 Q8_0", 64), 1)
    assert names == [
        *(
            "rms_norm",
            "matmul_float",
            "rms_norm",
            "route",
            "matmul_experts_float",
            "rms_norm_quantize",
            "matmul_experts",
        ),
        *(
            "rms_norm_quantize",
            "matmul_quantized",
            "quantize",
            "matmul_quantized",
            "quantize",
            "down",
            "join",
        ),
    ]


@pytest.mark.parametrize(
    ("formats", "n_embd", "n_ff", "rows"), [("Q4_0 Q4_0 Q5_0", 64, 32, 1), ("Q8_0 Q8_0 Q8_0", 32, 32, 3)]
)
def test_experts_beside_another_network(gpu: backend.Backend, formats: str, n_embd: int, n_ff: int, rows: int) -> None:
    """A layer of Gemma 4: no residual, GeGLU, gate and up in one tensor, another norm for the router, and scales."""
    experts = mixture(formats, 5, 2, n_embd, n_ff, activation=GEGLU, scales=activations(1, 5)[0])
    assert experts.gate is not None and experts.gate.pitch == 2 * n_ff
    x, norms = activations(rows, n_embd), activations(2, n_embd)
    theirs = cpu.experts(experts, None, *(cpu.rms_norm(x, norm, 1e-6) for norm in norms))
    given, a, (w, v) = on_device(gpu, experts), gpu.upload(x), [gpu.upload(norm) for norm in norms]
    plan: Any = gpu.record(lambda: gpu.experts(given, None, gpu.rms_norm(a, w, 1e-6), gpu.rms_norm(a, v, 1e-6)))
    gpu.start(plan)
    same(gpu.download(plan.result), theirs)
    names = ["rms_norm_router", "gate_up", "down", "join"]
    if rows > 1:
        names = ["rms_norm_router", "route", "matmul_experts", "quantize", "matmul_experts", "join"]
    assert [launch.kernel.kernel.name for launch in plan.launches] == names
    if rows > 1:
        return
    # The router's input need not be a norm of the experts' input.
    plan = gpu.record(lambda: gpu.experts(given, None, gpu.rms_norm(a, w, 1e-6), a))
    gpu.start(plan)
    same(gpu.download(plan.result), cpu.experts(experts, None, cpu.rms_norm(x, norms[0], 1e-6), x))


@pytest.mark.parametrize(("formats", "shared"), few([("Q8_0 Q8_0 Q4_1", "Q8_0 Q8_0 Q4_1"), ("Q8_0 Q4_0 F16", "")]))
def test_many_rows(gpu: backend.Backend, formats: str, shared: str) -> None:
    """Pairs are sorted once, whatever formats there are, and the network that every row uses has its own launches."""
    names = launched(gpu, mixture(formats, 3, 1, 32, 32, shared), 17, normalized=False)
    first = ["matmul_float_wide", "quantize", "route", "sort_pairs", "matmul_experts_wide"]
    common = ["quantize", "matmul_wide", "quantize", "matmul_wide"]
    if shared:
        assert names == [*first, *common, "quantize", "matmul_experts_wide", "join"]
    else:
        assert names == [*first, "matmul_experts_wide", "activate", "matmul_experts_float", "join"]


@pytest.mark.thorough
def test_a_single_row_with_geglu(gpu: backend.Backend) -> None:
    """Whatever the activation is, what follows gate and up is one launch."""
    names = ["rms_norm_router", "matmul_experts", "matmul_join"]
    assert launched(gpu, mixture("Q8_0 Q8_0 Q4_K", 3, 1, 32, 256, activation=GEGLU), 1) == names


@pytest.mark.parametrize(
    ("formats", "shared", "rows", "scaled"),
    [
        ("Q8_0 Q8_0 Q4_K", "", 1, True),
        ("Q4_1 Q4_1 Q8_0", "Q4_1 Q4_1 Q8_0", 2, False),
        ("F16 Q8_0 Q8_0", "Q8_0 Q8_0 Q8_0", 18, True),
    ],
)
def test_a_mixture_in_parts(gpu: backend.Backend, formats: str, shared: str, rows: int, scaled: bool) -> None:
    """The choice of experts, their sum, and what is added to it: the bits of the mixture as a whole, on both devices."""
    scales = np.array([0.5, 2.0, -1.0], F) if scaled else None
    experts = mixture(formats, 3, 2, 32, 256, shared, 64 if shared else 0, scales=scales)
    x, residual = activations(rows, 32), activations(rows, 32)[::-1].copy()

    def parts(ops: Any, experts: Experts, x: Any, residual: Any) -> Any:
        choice = ops.choose_experts(experts, x)
        total = ops.sum_experts(experts, x, choice.ids, choice.weights)
        if experts.shared is not None:
            gate, up = ops.matmul(x, *experts.shared[:2])
            (y,) = ops.matmul(ops.activate(experts.activation, gate, up), experts.shared[2])
            total = ops.add_gated(total, y, choice.logits)
        return ops.add(residual, total)

    whole = cpu.experts(experts, residual, x)
    same(parts(cpu, experts, x, residual), whole)
    given, a, r = on_device(gpu, experts), gpu.upload(x), gpu.upload(residual)
    plan = gpu.record(lambda: parts(gpu, given, a, r))
    gpu.start(plan)
    assert plan.result is not None
    same(gpu.download(plan.result), whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_shared_network_with_another_activation(gpu: backend.Backend, rows: int) -> None:
    experts = mixture(
        "Q8_0 Q8_0 Q8_0", 3, 2, 32, 32, "Q8_0 Q8_0 Q8_0", activation=Activation("swiglu_limited", (0.25,))
    )
    limited = replace(experts, shared_activation=Activation("swiglu_limited", (0.125,)))
    assert "activate" not in launched(gpu, limited, rows)
    x = activations(rows, 32)
    assert not np.array_equal(cpu.experts(limited, None, x), cpu.experts(experts, None, x))


def test_a_row_does_not_depend_on_others() -> None:
    experts = mixture("Q8_0 Q8_0 Q8_0", 4, 2, 64, 32, "Q8_0 Q8_0 Q8_0")
    x, residual = activations(5, 64), activations(5, 64)[::-1].copy()
    together = cpu.experts(experts, residual, x)
    for t in range(5):
        same(cpu.experts(experts, residual[t : t + 1], x[t : t + 1]), together[t : t + 1])


# --- products --------------------------------------------------------------------------------------------------


def packed(unit: int, x: np.ndarray, wide: bool = False) -> list[np.ndarray]:
    """Rows in the layout of the kernels of ``engine/cuda/products/quantize.py``, optionally for a wide pass."""
    rows, columns = x.shape
    n, units = -(-rows // 8), columns // unit
    padded = np.zeros((8 * n, columns), F)
    padded[:rows] = x
    q, d, s = cpu._quantize(padded, unit)
    d = d.reshape(n, 8, units).transpose(0, 2, 1)
    if unit == 256:
        s = s.reshape(n, 8, units, 16)
        s16 = s.astype(np.float16).view(np.int16) if wide else s
        s = np.concatenate([s16, s.reshape(n, 8, units, 8, 2).sum(4, dtype=np.int16)], 3).transpose(0, 2, 1, 3)
        # tile, column, unit, v, h, k, i, byte: position 64 v + 32 h + 16 k + 4 i + byte
        q = q.reshape(n, 8, units, 4, 2, 2, 4, 4).transpose(0, 2, 3, 1, 6, 4, 5, 7)
    else:
        s = s.reshape(n, 8, units, 2).sum(3, dtype=np.int32).transpose(0, 2, 1) if unit == 32 else np.empty(0, np.int32)
        width = min(unit, 32)
        q = q.reshape(n, 8, columns // width, width // 16, 4, 4).transpose(0, 2, 1, 4, 3, 5)
    return [np.ascontiguousarray(array) for array in (q, d, s)]


@pytest.mark.parametrize(
    ("formats", "rows", "n_used", "shared", "down", "units", "n_rows"),
    few(
        [
            ("Q4_K Q6_K", 10, 2, True, False, 1, 16),
            ("IQ2_XXS", 1, 3, True, True, 1, 16),
            ("Q8_0 Q5_1", 9, 1, False, False, 3, 80),
            # Experts begin within a record; more units than chains.
            ("Q2_K", 2, 2, False, True, 1, 24),
            ("Q4_1", 2, 1, True, True, 18, 8),
            # Chains of two units of a record, which has four.
            ("NVFP4", 2, 1, False, True, 12, 8),
            ("NVFP4 NVFP4", 1, 2, True, False, 20, 16),
            ("Q1_0 Q1_0", 9, 1, False, False, 9, 16),
            ("IQ2_S", 2, 1, False, True, 1, 16),
            ("IQ3_S IQ3_XXS", 3, 1, True, False, 2, 16),
            ("IQ1_M TQ1_0", 1, 1, False, False, 1, 16),
            ("Q5_K", 3, 2, True, True, 2, 16),
            ("Q3_K Q3_K", 1, 2, True, False, 1, 16),
            ("MXFP4", 11, 2, True, True, 1, 16),
            ("Q4_0 Q4_0", 1, 2, True, False, 1, 8),
        ],
        6,
    ),
)
def test_products(formats: str, rows: int, n_used: int, shared: bool, down: bool, units: int, n_rows: int) -> None:
    """Rows that use the same experts, at other indices; every expert's weights belong to their pair."""
    n_expert, pairs = 4, rows * n_used
    entries = [FORMATS_BY_NAME[name] for name in formats.split()]
    columns = units * entries[0].unit
    stacks = [weight(entry, n_expert * n_rows, columns) for entry in entries]
    commons = [other(entry, n_rows, columns) for entry in entries]
    ids = np.array([(t // 2 + s * (1 + t % 3)) % n_expert for t in range(rows) for s in range(n_used)], np.int32)
    ids.reshape(rows, n_used)[:, -1:] = (ids.reshape(rows, n_used)[:, :1] + 1) % n_expert
    n_outputs = pairs + shared * rows
    x = activations(n_outputs if down else rows, columns)
    outs = [np.full((n_outputs, n_rows), np.nan, F) for _ in entries]
    records = [repack.repack_rows(w.format, w.data) for w in stacks]
    others = [repack.repack_rows(w.format, w.data) for w in commons]
    kernel = matmul_experts(tuple(e.name for e in entries), 1 if rows == 1 else -(-rows // 8) * 8, n_used, shared, down)
    own_run = 1 if rows == 1 else 2 if tiles(n_rows) < 4 else 4  # tiles of a block; the last one may have fewer
    n_runs = -(-tiles(n_rows) // own_run)
    sizes = (rows, n_runs, own_run, n_rows, units)
    arguments = [records[0], records[-1], others[0], others[-1], outs[0], outs[-1], ids, *[None] * 11, *sizes]
    grid = (len(entries) * n_runs, pairs + shared)
    run(kernel, grid, 32 * matmul.warps(units, False), [*arguments, *packed(entries[0].unit, x)])
    for stack, common, out in zip(stacks, commons, outs, strict=True):
        for pair in range(n_outputs):
            e = ids[pair] if pair < pairs else 0
            own = stack.data[e * n_rows : (e + 1) * n_rows] if pair < pairs else common.data
            at = pair if down else pair // n_used if pair < pairs else pair - pairs
            same(out[pair], cpu.matmul(x[at : at + 1], Weight("w", stack.format, columns, own))[0][0])


@given(st.integers(1, 400), st.integers(2, 160), st.integers(1, 2), st.integers(1, 600))
def test_runs_of_tiles(n_tiles: int, pairs: int, n_matrices: int, at_once: int) -> None:
    """A power of two, the largest that leaves each place several blocks."""

    def blocks(size: int) -> int:
        return pairs * n_matrices * -(-n_tiles // size)

    size = run_of(n_tiles, pairs, n_matrices, at_once)
    assert size in (1, 2, 4, MOST_TILES)
    assert size == 1 or blocks(size) >= ROUNDS * at_once
    assert size == MOST_TILES or blocks(2 * size) < ROUNDS * at_once


def by_expert(
    ids: np.ndarray, n_expert: int, columns: int = wide_experts.COLUMNS, dense: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The result of ``sort_pairs`` for the experts of pairs, after checking that it is right; dense: only its items."""
    listed = np.full(ids.size, -1, np.int32)
    items = np.full((wide_experts.n_items(ids.size, n_expert, columns), 4), -1, np.int32)
    constants = (columns, True) if dense else (columns,)
    run(wide_experts.sort_pairs(*constants), n_expert, wide_experts.SORTERS, [ids, ids.size, listed, items])
    if dense:
        n = items[0, 3]
        assert (items[:n, 3] == n).all() and (items[:n, 2] > 0).all() and (items[n:] == -1).all()
        items = items[:n]
    assert sorted(listed) == list(range(ids.size)) and (np.diff(ids.reshape(-1)[listed]) >= 0).all()
    found = np.zeros(ids.size, int)
    for expert, start, count, _ in items[items[:, 2] != 0]:
        own = listed[start : start + count]
        assert 0 < count <= columns and (ids.reshape(-1)[own] == expert).all()
        found[own] += 1
    assert (found == 1).all() and (items[:, 2] >= 0).all()
    return listed, items


@pytest.mark.parametrize(("rows", "n_used", "n_expert"), [(17, 1, 1), (90, 8, 12), (64, 2, 2), (4200, 1, 3)])
def test_pairs_by_expert(rows: int, n_used: int, n_expert: int) -> None:
    rng = np.random.default_rng(rows)
    ids = np.minimum(rng.geometric(0.1, rows * n_used) - 1, n_expert - 1).astype(np.int32)
    ids = np.where(ids == n_expert // 2, 0, ids) if n_expert > 2 else ids
    by_expert(ids, n_expert)
    by_expert(ids, n_expert, 8, True)


@pytest.mark.parametrize(
    ("formats", "rows", "n_used", "down", "units", "n_rows", "large"),
    few(
        [
            # Experts begin within a record, and the last one has a record less; two stages.
            ("Q4_K Q4_K", 18, 2, False, 2, 24, False),
            # More columns than a block has, and groups of them of which one has a single column.
            ("Q6_K", 97, 1, True, 1, 16, False),
            # A second stage of a single unit, which also ends the last chain; tiles of more rows than a small block has.
            ("Q4_1", 17, 2, True, 9, 40, True),
            ("Q4_1", 17, 1, True, 1, 72, False),
            # Chains of three units of records of four; a second stage of one record.
            ("NVFP4", 17, 1, True, 20, 8, True),
            ("NVFP4 NVFP4", 17, 2, False, 20, 24, False),
            # More threads than scales.
            ("Q1_0 Q1_0", 17, 2, False, 3, 24, True),
            ("Q1_0", 17, 1, True, 2, 8, False),
            ("IQ2_S IQ2_S", 17, 2, False, 1, 16, True),
            ("IQ3_XXS", 17, 1, True, 1, 16, False),
            ("TQ2_0", 17, 1, True, 1, 16, False),
            # Chains of two units, the last one alone.
            ("Q2_K", 17, 1, False, 9, 16, True),
            ("Q6_K", 97, 1, True, 1, 16, True),
            ("Q8_0 Q8_0", 20, 1, False, 3, 8, True),
            ("Q8_0 Q8_0", 20, 1, False, 3, 8, False),
        ],
        3,
    ),
)
def test_products_of_many_rows(
    formats: str, rows: int, n_used: int, down: bool, units: int, n_rows: int, large: bool
) -> None:
    """Most rows use expert 0, and none uses expert 2."""
    n_expert, pairs = 5, rows * n_used
    ids = np.array([(0, (1, 3, 4)[t % 3])[s] for t in range(rows) for s in range(n_used)], np.int32)
    ids[-1] = 4
    listed, items = by_expert(ids, n_expert)
    entries = [FORMATS_BY_NAME[name] for name in formats.split()]
    unit = entries[0].unit
    stacks = [weight(entries[0], n_expert * n_rows, units * unit), other(entries[0], n_expert * n_rows, units * unit)]
    x = activations(pairs if down else rows, units * unit)
    outs = [np.full((pairs, n_rows), np.nan, F) for _ in entries]
    records = [repack.repack_rows(w.format, w.data) for w in stacks[: len(entries)]]
    end = len(entries) * tiles(n_rows)
    arguments = [
        *(records[0], records[-1], outs[0], outs[-1], items, listed, *[None] * 4, tiles(n_rows), end, n_rows, units),
        *packed(unit, x, True),
    ]
    sizes = 1 if down else n_used, len(items), end
    run(*wide_experts.geometry(entries[0].name, *sizes, 227 << 10 if large else 0), arguments)
    for stack, out in zip(stacks, outs, strict=False):
        for e in range(n_expert):
            own = Weight("w", stack.format, units * unit, stack.data[e * n_rows : (e + 1) * n_rows])
            at = np.flatnonzero(ids == e)
            if at.size:
                same(out[at], cpu.matmul(x[at if down else at // n_used], own)[0])


def test_a_product_that_chooses() -> None:
    """A single row: the experts are those of its logits, and the kernel writes them."""
    n_expert, n_used, n_rows = 37, 3, 16
    logits = activations(1, n_expert + 1)
    stack, x = weight(FORMATS_BY_NAME["Q8_0"], n_expert * n_rows, 32), activations(1, 32)
    scales = activations(1, n_expert)[0]
    ids, weights, out = (
        np.full((1, n_used), -1, np.int32),
        np.full((1, n_used), np.nan, F),
        np.empty((n_used, n_rows), F),
    )
    records = repack.repack_rows(stack.format, stack.data)
    arguments = [records, records, None, None, out, out, ids, weights, logits, scales, *[None] * 8, 1, 1, 1, n_rows, 1]
    arguments += packed(32, x)
    run(matmul_experts(("Q8_0",), 1, n_used, False, False, n_expert, True), (1, n_used), 32, arguments)
    theirs, shares = np.empty_like(ids), np.empty_like(weights)
    mirror.route(logits, n_expert, theirs, shares, 0, 1)
    assert ids.tolist() == theirs.tolist()
    same(weights, shares * scales[theirs])
    for e, row in zip(ids[0], out, strict=True):
        own = Weight("w", stack.format, 32, stack.data[e * n_rows : (e + 1) * n_rows])
        same(row, cpu.matmul(x, own)[0][0])


@pytest.mark.parametrize("down", [False, True])
def test_float_products(down: bool) -> None:
    n_rows, n_used, columns, ids = 9, 2, 40, np.array([[1, 0], [2, 1]], np.int32)
    stack, x = weight(FORMATS_BY_NAME["BF16"], 3 * n_rows, columns), activations(4 if down else 2, columns)
    out = np.empty((4, n_rows), F)
    kernel = matmul_experts_float("BF16", n_used, down)
    run(kernel, (4, 2), 256, [stack.data.reshape(-1).view(np.uint32), x, ids, None, None, columns, n_rows, out])
    for pair, e in enumerate(ids.reshape(-1)):
        own = Weight("w", stack.format, columns, stack.data[e * n_rows : (e + 1) * n_rows])
        at = pair if down else pair // n_used
        same(out[pair], cpu.matmul(x[at : at + 1], own)[0][0])


def test_records_of_an_expert() -> None:
    assert [tiles(n) for n in (32, 40, 8)] == [2, 4, 2]


@pytest.mark.parametrize(
    ("name", "units", "n_used", "shared"),
    few(
        [
            ("Q4_K", 2, 2, True),
            ("IQ4_XS", 9, 1, False),
            ("Q6_K", 1, 3, False),
            ("Q3_K", 1, 1, True),
            ("Q2_K", 3, 1, True),
        ],
        2,
    ),
)
def test_the_end_of_a_single_row(name: str, units: int, n_used: int, shared: bool) -> None:
    """From gate and up to the sum of all networks and the residual, in one launch."""
    n_ff, n_rows, n_expert, groups = 256 * units, 32, 4, n_used + shared
    entry = FORMATS_BY_NAME[name]
    stack, common = weight(entry, n_expert * n_rows, n_ff), other(entry, n_rows, n_ff)
    gate, up = activations(groups, n_ff), activations(groups, n_ff)[:, ::-1].copy()
    ids, weights = np.array([3, 0, 2], np.int32)[:n_used], np.array([0.5, 0.3, 0.2], F)[:n_used]
    residual, logit, out = activations(1, n_rows)[0], np.array([0.7], F), np.empty(n_rows, F)
    records, shared_records = (repack.repack_rows(entry, w.data) for w in (stack, common))
    kernel = matmul_join(name, units, n_used, shared)
    arguments = [records, shared_records, gate, up, *[0.0] * 4, ids, weights, logit, None, None, residual, n_rows, out]
    assert can_join(name, units, n_rows, n_used, shared)
    run(kernel, n_rows // 16, join_threads(*kernel.constants), arguments)
    matrices = [Weight("w", entry, n_ff, stack.data[e * n_rows : (e + 1) * n_rows]) for e in ids] + [common] * shared
    act = cpu.activate(SWIGLU, gate, up)
    y = np.stack([cpu.matmul(act[g : g + 1], w)[0][0] for g, w in enumerate(matrices)])
    theirs = np.empty((1, n_rows), F)
    mirror.join(residual[None], y[:n_used], weights[None], y[n_used:], logit[None], theirs, 0, 1)
    same(out[None], theirs)
