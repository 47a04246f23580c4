"""Every format and every operation but attention and sampling, in the simulator, on small odd shapes: the bits of
the mirrors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from engine.cuda.intrinsics import SIMULATED
from engine.cuda.products import dense
from engine.cuda.runtime import values

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.products.repack import make_records
from engine.cuda import backend, rms_norm
from engine.cuda.products import matmul, regroup, repack, unpack_grid
from engine.cuda.products.quantize import NARROW, RUN, activation_words
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.simulator import run
from engine.gguf import grids
from engine.gguf.quants import FORMATS, Format
from engine.ops.activation import SWIGLU, Activation
from engine.ops.weight import Weight
from engine.synthetic.model import _random, random_blocks
from engine.verify.layout import activations as by_row
from tests.activations import EVERY_ACTIVATION
from tests.cuda.simulated.device import SimulatedDevice
from tests.mirror import Mirror as CPU
from tests.tiers import few

F = np.float32
cpu = CPU(1)

FORMATS_BY_NAME = {entry.name: entry for entry in FORMATS.values()}

GPT_OSS = ("MXFP4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
"""The formats of rows of 2880 weights."""

quantized = pytest.mark.parametrize("entry", [e for e in FORMATS.values() if e.quantized], ids=lambda e: e.name)
floats = pytest.mark.parametrize("entry", [e for e in FORMATS.values() if not e.quantized], ids=lambda e: e.name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> backend.Backend:
    """Threads run in a shuffled order, which must not show."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    monkeypatch.setattr(SimulatedDevice, "seed", 1)
    return backend.Backend()


def weight(entry: Format, rows: int, columns: int) -> Weight:
    """Random rows of a format."""
    if entry.quantized:
        blocks = random_blocks(entry.type, rows * columns // entry.block, columns**-0.5, _random(1, entry.name))
        return Weight("w", entry, columns, blocks.reshape(rows, entry.row_bytes(columns)))
    values = np.random.default_rng(1).standard_normal((rows, columns)).astype(F)
    if entry.name == "F16":
        return Weight("w", entry, columns, values.astype(np.float16).view(np.uint8))
    if entry.name == "BF16":
        return Weight("w", entry, columns, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return Weight("w", entry, columns, values.view(np.uint8))


def computed(gpu: backend.Backend, operation: Callable[[], Any]) -> list[np.ndarray]:
    """Results of an operation, one launch after the other."""
    plan: Any = gpu.record(operation)
    gpu.start(plan)
    results = plan.result if isinstance(plan.result, list) else [plan.result]
    return [gpu.download(result) for result in results]


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


def activations(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    return (rng.standard_normal((rows, columns)) * rng.choice([1e-3, 1.0, 30.0], (rows, 1))).astype(F)


@quantized
def test_repacked_rows_are_those_of_the_file_in_another_order(gpu: backend.Backend, entry: Format) -> None:
    w = weight(entry, 21, 2 * entry.block)
    device_weight = gpu.weight(w)
    law = repack.repack_rows(entry, w.data)
    same(gpu.device.read(device_weight.address, law.shape, np.uint8), law)
    order = repack.record(entry.type)
    assert np.array_equal(np.sort(order), np.arange(16 * entry.block_bytes))


@quantized
def test_records_of_the_cpu_become_those_of_the_gpu(gpu: backend.Backend, entry: Format) -> None:
    w = weight(entry, 21, 2 * entry.block)  # the last record of the CPU has five rows, and has no neighbour
    records = make_records(w, 1, lambda kernel, *given, items: kernel(*given, 0, items))
    law = repack.repack_rows(entry, w.data)
    target, order = gpu.zeros((law.size,), np.uint8), gpu.upload(regroup.order(entry.type))
    given = gpu.upload(records.data), order, target
    kernel = regroup.kernel_of(entry)
    sizes = records.data.shape[1], 2, 0
    gpu.device.launch(kernel, (2, law.shape[0]), 256, (*(each.address for each in given), *sizes))
    same(gpu.device.read(target.address, law.shape, np.uint8), law)


@pytest.mark.covering(1)
@quantized
@pytest.mark.parametrize("k", [1, 3])
def test_matmul(gpu: backend.Backend, entry: Format, k: int) -> None:
    # Three units: three warps, and a tile that is not full.
    columns = 3 * entry.block
    w, x = weight(entry, 5, columns), activations(k, columns)
    (theirs,) = cpu.matmul(x, w)
    on_device, device_weight = gpu.upload(x), gpu.weight(w)
    (ours,) = computed(gpu, lambda: gpu.matmul(on_device, device_weight))
    same(ours, theirs)


@pytest.mark.parametrize(
    ("name", "deep"),
    few(
        [
            ("MXFP4", 0),
            ("Q8_0", 2),
            *((name, 2 * (k % 2)) for k, name in enumerate(["Q5_0", "Q4_0", "Q4_1", "Q5_1", "IQ4_NL"])),
        ],
        2,
    ),
)
def test_a_single_row_of_units_of_32(
    gpu: backend.Backend, monkeypatch: pytest.MonkeyPatch, name: str, deep: int
) -> None:
    """Chains of 9 and of 7 units, more and fewer than the columns of a tensor-core product; two groups in flight, or one."""
    monkeypatch.setattr(dense, "DEEP_TILES", deep)
    columns = 32 * (7 * 9 + 7)
    w, x = weight(FORMATS_BY_NAME[name], 19, columns), activations(1, columns)
    on_device, device_weight = gpu.upload(x), gpu.weight(w)
    (ours,) = computed(gpu, lambda: gpu.matmul(on_device, device_weight))
    same(ours, cpu.matmul(x, w)[0])


@pytest.mark.parametrize(("name", "rows"), few([("Q8_0", 1), ("Q4_K", 3), ("F16", 2), ("Q5_0", 17)]))
def test_a_bias(gpu: backend.Backend, name: str, rows: int) -> None:
    """A product of few rows adds it, other products are followed by sums."""
    columns = 256 if name == "Q4_K" else 64
    w, x, residual, bias = weight(FORMATS_BY_NAME[name], 19, columns), activations(rows, columns), *activations(2, 19)
    residual = np.tile(residual, (rows, 1))
    r, b, on_device, device_weight = gpu.upload(residual), gpu.upload(bias), gpu.upload(x), gpu.weight(w)
    plan: Any = gpu.record(lambda: gpu.matmul_add(r, on_device, device_weight, b))
    gpu.start(plan)
    same(gpu.download(plan.result), residual + (cpu.matmul(x, w)[0] + bias))
    same(cpu.matmul_add(residual, x, w, bias), residual + (cpu.matmul(x, w)[0] + bias))
    assert sum(launch.kernel.kernel.name == "add" for launch in plan.launches) == (
        0 if rows < 17 and name != "F16" else 2
    )


@pytest.mark.parametrize(("rows", "single", "deep"), few([(3, 16, 2), (1, 0, 2), (1, 0, 0), (1, 16, 2)], 3))
def test_matmul_in_every_way(
    gpu: backend.Backend, monkeypatch: pytest.MonkeyPatch, rows: int, single: int, deep: int
) -> None:
    """A warp per unit, or chains of two units, the last of one, with one record in flight, or of four with two."""
    monkeypatch.setattr(matmul, "SINGLE_WARPS", single)
    monkeypatch.setattr(dense, "DEEP_TILES", deep)
    columns = 256 * (31 if deep and not single else 9)
    w, x, residual = weight(FORMATS_BY_NAME["Q4_K"], 5, columns), activations(rows, columns), activations(rows, 5)
    r, on_device, device_weight = gpu.upload(residual), gpu.upload(x), gpu.weight(w)
    plan: Any = gpu.record(lambda: gpu.matmul_add(r, on_device, device_weight))
    assert plan.launches[-1].kernel.constants[-2:] == (deep > 0 and not single, 9 if single else 0)
    gpu.start(plan)
    same(gpu.download(plan.result), cpu.matmul_add(residual, x, w))


@pytest.mark.parametrize(
    ("name", "rows"), few([("MXFP4", 1), ("NVFP4", 9), *((name, 1 + 8 * (k % 2)) for k, name in enumerate(GPT_OSS))])
)
def test_columns_that_are_not_a_multiple_of_128(gpu: backend.Backend, name: str, rows: int) -> None:
    """A row of gpt-oss, from a norm."""
    w, x, norm = weight(FORMATS_BY_NAME[name], 3, 2880), activations(rows, 2880), activations(1, 2880)[0]
    on_device, on_norm, device_weight = gpu.upload(x), gpu.upload(norm), gpu.weight(w)
    (ours,) = computed(gpu, lambda: gpu.matmul(gpu.rms_norm(on_device, on_norm, 1e-6), device_weight))
    same(ours, cpu.matmul(cpu.rms_norm(x, norm, 1e-6), w)[0])


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K", "Q4_K"), ("Q5_K", "Q4_K", "Q6_K")])
def test_matmul_of_two_tiles_of_rows_and_several_formats(gpu: backend.Backend, names: tuple[str, ...]) -> None:
    weights = [weight(FORMATS_BY_NAME[name], rows, 512) for name, rows in zip(names, (17, 3, 16), strict=True)]
    x, norm = activations(9, 512), activations(1, 512)[0]
    theirs = cpu.matmul(cpu.rms_norm(x, norm, 1e-6), *weights)
    on_device, on_norm, device_weights = gpu.upload(x), gpu.upload(norm), [gpu.weight(w) for w in weights]
    ours = computed(gpu, lambda: gpu.matmul(gpu.rms_norm(on_device, on_norm, 1e-6), *device_weights))
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


@pytest.mark.parametrize("act", EVERY_ACTIVATION, ids=lambda activation: activation.kind)
def test_an_activation_and_a_residual(gpu: backend.Backend, act: Activation) -> None:
    w = weight(FORMATS_BY_NAME["Q5_0"], 7, 96)
    both, residual = activations(2, 96), activations(2, 7)
    gate, up = both if act.gated else None, both[::-1].copy()
    theirs = cpu.matmul_add(residual, cpu.activate(act, gate, up), w)
    g, u, r, device_weight = (
        gpu.upload(both) if act.gated else None,
        gpu.upload(up),
        gpu.upload(residual),
        gpu.weight(w),
    )
    (ours,) = computed(gpu, lambda: gpu.matmul_add(r, gpu.activate(act, g, u), device_weight))
    same(ours, theirs)
    same(computed(gpu, lambda: gpu.plain(gpu.activate(act, g, u)))[0], cpu.activate(act, gate, up))


def test_sums_and_products_with_a_number(gpu: backend.Backend) -> None:
    x, y = activations(3, 100), activations(3, 100)[::-1].copy()
    a, b, c = gpu.upload(x), gpu.upload(y), gpu.upload(y[0])
    same(computed(gpu, lambda: gpu.add(a, b, 0.22))[0], cpu.add(x, y, 0.22))
    same(computed(gpu, lambda: gpu.add(a, c, -3.0))[0], cpu.add(x, y[0], -3.0))
    same(computed(gpu, lambda: gpu.scale(a, 0.22))[0], cpu.scale(x, 0.22))


@pytest.mark.covering(1)
@floats
@pytest.mark.parametrize("k", [1, 3, NARROW_ROWS + 3])
def test_float_matmul(gpu: backend.Backend, entry: Format, k: int) -> None:
    weights, x = [weight(entry, rows, 44) for rows in (6, 3, 5)], activations(k, 44)
    on_device, device_weights = gpu.upload(x), [gpu.weight(w) for w in weights]
    ours = computed(gpu, lambda: gpu.matmul(on_device, *device_weights))
    for one, other in zip(ours, cpu.matmul(x, *weights), strict=True):
        same(one, other)


COMMON = ("F16", "MXFP4", "Q1_0", "Q4_K", "Q6_K", "Q8_0")
"""Formats of many files.  Only ``--all`` tests embeddings of others, whose unpacking is that of products."""


@pytest.mark.parametrize("name", few([*COMMON, *sorted(FORMATS_BY_NAME.keys() - {*COMMON})], len(COMMON)))
def test_embed(gpu: backend.Backend, name: str) -> None:
    entry = FORMATS_BY_NAME[name]
    w = weight(entry, 19, 2 * entry.block if entry.quantized else 6)
    tokens = np.array([0, 9, 18], np.int32)
    on_device, device_weight = gpu.upload(tokens), gpu.weight(w)
    same(computed(gpu, lambda: gpu.embed(device_weight, on_device, 1.7))[0], cpu.embed(w, tokens, 1.7))


def test_every_scale_of_nvfp4(gpu: backend.Backend) -> None:
    """All 256 codes, of which real files have half: subnormal ones, the one that is not a number, and those with a sign."""
    blocks = np.arange(256, dtype=np.uint8).reshape(64, 4)
    blocks = np.concatenate([blocks, np.random.default_rng(0).integers(0, 256, (64, 32), np.uint8)], 1)
    w = Weight("w", FORMATS_BY_NAME["NVFP4"], 64 * 64, blocks.reshape(1, -1))
    token, device_weight = gpu.upload(np.zeros(1, np.int32)), gpu.weight(w)
    (ours,) = computed(gpu, lambda: gpu.embed(device_weight, token, 1.0))
    same(ours[0], gguf.quants.dequantize(blocks, T.NVFP4).astype(F).reshape(-1))


@pytest.mark.parametrize("grid", [name for name in vars(grids) if name.endswith("_GRID")])
def test_packed_grids(grid: str) -> None:
    """The words and the values of a grid give its bytes."""
    words, values = unpack_grid.packed(getattr(grids, grid))
    codes = np.stack([words >> (4 * k) & 15 for k in range(4)], 1)
    assert len(values) <= 8 and np.array_equal(np.array(values)[codes].reshape(-1), getattr(grids, grid))


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [24, 96, 576])
@pytest.mark.parametrize("scale", [1.0, -0.37])
def test_norms(gpu: backend.Backend, n: int, scale: float) -> None:
    # A sum in another order differs in its last bit, which shows in the result of about every seventh row.
    rows = 16 if scale == 1.0 else 2
    x, residual, norm = activations(rows, n), activations(rows, n)[::-1].copy(), activations(1, n)[0]
    a, r, w = gpu.upload(x), gpu.upload(residual), gpu.upload(norm)
    same(computed(gpu, lambda: gpu.plain(gpu.rms_norm(a, w, 1e-6)))[0], cpu.rms_norm(x, norm, 1e-6))
    expected = cpu.rms_norm_add(residual, x, norm, 1e-6, scale)
    same(computed(gpu, lambda: gpu.rms_norm_add(r, a, w, 1e-6, scale))[0], expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [24, 96, 576])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norms(gpu: backend.Backend, n: int, biased: bool) -> None:
    rows = 16 if biased else 2
    x, (norm, added) = activations(rows, n) + F(0.5), activations(2, n)
    bias = added if biased else None
    a, w, b = gpu.upload(x), gpu.upload(norm), gpu.upload(added) if biased else None
    same(computed(gpu, lambda: gpu.plain(gpu.layer_norm(a, w, b, 1e-5)))[0], cpu.layer_norm(x, norm, bias, 1e-5))


def test_layer_norms_of_heads(gpu: backend.Backend) -> None:
    """Three heads of two rows, each with weights of its own."""
    x, weights = activations(6, 40) + F(0.5), activations(3, 40).reshape(-1)
    a, w = gpu.upload(x), gpu.upload(weights)
    same(computed(gpu, lambda: gpu.plain(gpu.layer_norm(a, w, None, 1e-5)))[0], cpu.layer_norm(x, weights, None, 1e-5))


@pytest.mark.parametrize(("n", "name"), few([(96, "Q8_0"), (512, "Q4_K"), (352, "Q5_0")], 2))
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_norm_on_the_way_to_int8(gpu: backend.Backend, n: int, name: str, biased: bool) -> None:
    x, (norm, added), matrix = activations(3, n) - F(0.5), activations(2, n), weight(FORMATS_BY_NAME[name], 3, n)
    bias = added if biased else None
    a, w, b, held = gpu.upload(x), gpu.upload(norm), gpu.upload(added) if biased else None, gpu.weight(matrix)
    plan: Any = gpu.record(lambda: gpu.matmul(gpu.layer_norm(a, w, b, 1e-5), held)[0])
    assert [launch.kernel.kernel.name for launch in plan.launches] == ["layer_norm_quantize", "matmul_quantized"]
    gpu.start(plan)
    same(gpu.download(plan.result), cpu.matmul(cpu.layer_norm(x, norm, bias, 1e-5), matrix)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("n", "name"), few([(96, "Q8_0"), (512, "Q4_K"), (320, "NVFP4"), (352, "Q5_0"), (384, "Q1_0")], 3)
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_norm_that_is_added_on_the_way_to_int8(gpu: backend.Backend, n: int, name: str, normed: bool) -> None:
    """One kernel gives the sum and its int8, with the same bits as the two kernels that are used elsewhere."""
    x, residual = activations(3, n), activations(3, n)[::-1].copy()
    norms = activations(2, n) * F(0.1)
    matrices = [weight(FORMATS_BY_NAME[name], 3, n) for _ in range(2)]
    a, r, (v, w) = gpu.upload(x), gpu.upload(residual), [gpu.upload(norm.copy()) for norm in norms]
    on_device = [gpu.weight(matrix) for matrix in matrices]

    def operation(ops: Any, r: Any, a: Any, v: Any, w: Any, matrices: Any, between: bool) -> Any:
        y = ops.rms_norm_add(r, a, v, 1e-6, 0.7)
        others = [ops.add(y, y)] if between else []
        results = ops.matmul(ops.rms_norm(y, w, 1e-5) if normed else y, *matrices)
        return [y, *results, *others]

    theirs = operation(cpu, residual, x, norms[0], norms[1], matrices, True)
    for between in (False, True):
        plan: Any = gpu.record(partial(operation, gpu, r, a, v, w, on_device, between))
        names = [launch.kernel.kernel.name for launch in plan.launches]
        assert ("rms_norm_add_quantize" in names) != between and len(names) == (4 if between else 2)
        gpu.start(plan)
        for one, other in zip(plan.result, theirs, strict=False):
            same(gpu.download(one), other)


@pytest.mark.parametrize("kind", ["plain", "swiglu", "rms_norm", "rms_norm_add", "gated_norm", "layer_norm"])
def test_a_wide_pass_has_its_sums_as_halves(gpu: backend.Backend, kind: str) -> None:
    rows, n = NARROW_ROWS + 1, 256
    x, other, norm = activations(rows, n), activations(rows, n)[::-1].copy(), activations(1, n)[0]

    def operation(ops: Any, x: Any, other: Any, norm: Any) -> Any:
        if kind == "plain":
            return x
        if kind == "swiglu":
            return ops.activate(SWIGLU, x, other)
        if kind == "gated_norm":
            return ops.gated_norm(x, norm, other, 1e-6)
        if kind == "layer_norm":
            return ops.layer_norm(x, norm, norm, 1e-6)
        return ops.rms_norm(x if kind == "rms_norm" else ops.rms_norm_add(other, x, norm, 1e-6, 0.7), norm, 1e-6)

    a, o, w = gpu.upload(x), gpu.upload(other), gpu.upload(norm)

    def quantized() -> Any:
        return list(values.quantized(gpu.recorder, operation(gpu, a, o, w), n))

    plan: Any = gpu.record(quantized)
    assert len(plan.launches) == 1 and tuple(t.size for t in plan.result) == activation_words(n, rows, n)
    gpu.start(plan)
    q, d, s = cpu._quantize(operation(cpu, x, other, norm), n)
    ours = by_row(n, rows, n, *map(gpu.download, plan.result))
    for one, theirs in zip(ours, (q, d, s.astype(np.float16)), strict=True):
        same(one, theirs)


@pytest.mark.parametrize(("rows", "n", "tiles"), few([(33, 256, 4), (33, 256, 8), (65, 256, 12), (97, 256, 16)], 1))
def test_int8_in_blocks(gpu: backend.Backend, rows: int, n: int, tiles: int) -> None:
    """Blocks for warpgroups, one or several: all of an activation is in one array."""
    x = activations(rows, n)
    on_device = gpu.upload(x)
    plan: Any = gpu.record(lambda: values.quantized(gpu.recorder, on_device, 256, layout=tiles).q)
    assert plan.launches[0].kernel.name == f"wide_quantize[plain, {tiles}]"
    assert plan.result.size == activation_words(256, rows, n, tiles)[0]
    gpu.start(plan)
    q, d, s = cpu._quantize(x, 256)
    ours = by_row(256, rows, n, gpu.download(plan.result))
    for one, theirs in zip(ours, (q, d, s.astype(np.float16)), strict=True):
        same(one, theirs)


@pytest.mark.parametrize(("unit", "n"), [(256, 1536), (32, 1184)])
def test_a_norm_of_several_runs(unit: int, n: int) -> None:
    """A block quantizes four runs of a row, or what is left, which is not a whole run."""
    x, norm = activations(2, n)
    words = [np.zeros(k, np.uint32) for k in activation_words(unit, 1, n)]
    kernel, grid = rms_norm.rms_norm_quantize(unit, n, NARROW, 4), (-(-n // (4 * RUN)), 1)
    run(kernel, grid, RUN, [x, norm, 1e-6, *words], seed=1)
    q, d, _ = cpu._quantize(cpu.rms_norm(x[None], norm, 1e-6), unit)
    ours = by_row(unit, 1, n, *words)
    same(ours[0], q)
    same(ours[1], d)


@pytest.mark.parametrize(("unit", "n"), [(16, 320), (64, 192), (128, 384)])
def test_int8_of_other_units(gpu: backend.Backend, unit: int, n: int) -> None:
    x = activations(9, n)
    on_device = gpu.upload(x)
    plan: Any = gpu.record(lambda: list(values.quantized(gpu.recorder, on_device, unit)))  # type: ignore[arg-type, return-value]
    assert tuple(t.size for t in plan.result) == activation_words(unit, 9, n)
    gpu.start(plan)
    q, d, _ = cpu._quantize(x, unit)
    ours = by_row(unit, 9, n, *map(gpu.download, plan.result))
    same(ours[0], q)
    same(ours[1], d)
    assert ours[2].size == 0


def test_sums_and_softcap(gpu: backend.Backend) -> None:
    x, bias = activations(3, 40), activations(1, 40)[0]
    a, b = gpu.upload(x), gpu.upload(bias)
    same(computed(gpu, lambda: gpu.add(a, b))[0], cpu.add(x, bias))
    gates = x.reshape(-1)[: x.shape[0] * 2].reshape(x.shape[0], 2).copy()
    c = gpu.upload(gates)
    same(computed(gpu, lambda: gpu.gate_heads(a, c))[0], cpu.gate_heads(x, gates))
    same(computed(gpu, lambda: gpu.softcap(a, 30.0))[0], cpu.softcap(x.copy(), 30.0))
