"""On a real GPU: every operation, sampling, and whole models give the CPU's bits, again and again, side by side, and memory
that runs out is one sentence.  ``pytest --gpu`` runs them; ``tests/cuda/simulated`` runs the same kernels without a GPU.

Tests that need the same kernels are together, so that each is compiled by one of the processes that share the work."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine
from engine import parity
from engine.arrays import Batch
from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import CACHE_TYPES, Types
from engine.decode.evaluate import evaluate
from engine.devices import open_device
from engine.errors import DeviceError, ModelError
from engine.gguf.file import read_gguf
from engine.gguf.pages import MappedFile
from engine.gguf.quants import FORMATS, Format
from engine.hub import catalog
from engine.hub.resolve import resolve
from engine.models.registry import read_config
from engine.ops.activation import GEGLU
from engine.ops.experts import Experts
from engine.ops.heads import Heads
from engine.ops.weight import Weight
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import _random, make_model, random_blocks
from engine.verify.tally import Tally
from tests import downloads
from tests.activations import EVERY_ACTIVATION
from tests.batches import one_sequence
from tests.conftest import REPOSITORY, shared_model
from tests.mirror import Mirror
from tests.pages import layer_of
from tests.speculative.test_drafted_answers import PENALIZED, PROMPTS, TEMPERATURES
from tests.tiers import together

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs a real GPU", allow_module_level=True)

from engine.cuda.attention import integer_tile
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.products import warpgroup_chain, warpgroup_matmul
from engine.cuda.products.quantize import BLOCKS
from engine.cuda.products.repack import repack_rows
from engine.cuda.runtime.device import Device
from engine.verify.comparison import Comparison

pytestmark = pytest.mark.gpu

F = np.float32
EPS = 1e-6
BY_NAME = {entry.name: entry for entry in FORMATS.values()}


@pytest.fixture(scope="module")
def gpu() -> Any:
    """A backend on the first GPU; skips, with the reason, if there is none."""
    _ = engine.load  # chooses the folder of compiled kernels
    try:
        return open_device("cuda")
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cpu(gpu: Any) -> Any:
    return Mirror()


def computed(gpu: Any, operation: Callable[..., Any], *args: Any, twice: bool = True) -> list[np.ndarray]:
    """Results of an operation: its kernels are started one after another and, if ``twice``, again as a graph: the same
    bits."""
    plan = gpu.record(partial(operation, *args))
    for launch in plan.launches:
        gpu.device.launch(launch.kernel, launch.grid, launch.block, launch.arguments)
    tensors = plan.result if isinstance(plan.result, (list, tuple)) else [plan.result]
    arrays = [gpu.download(tensor) for tensor in tensors]
    if twice:
        gpu.capture(plan)
        for _ in range(2):
            plan.graph.launch()
        for tensor, array in zip(tensors, arrays, strict=True):
            assert gpu.download(tensor).tobytes() == array.tobytes(), "a graph gives other bits"
    return arrays


def same(found: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Asserts equal shapes and bits."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    size = f"u{found.dtype.itemsize}"
    a, b = np.ascontiguousarray(found).view(size), np.ascontiguousarray(expected).view(size)
    if not np.array_equal(a, b):
        at = tuple(int(i) for i in np.argwhere(a != b)[0])
        text = f"{what}{list(at)}: GPU {a[at]:#x} {found[at]}, CPU {b[at]:#x} {expected[at]}"
        pytest.fail(f"{text}; {np.count_nonzero(a != b)} of {a.size} values differ")


def matrix(entry: Format, rows: int, columns: int, seed: int = 0, name: str = "w") -> Weight:
    """A random matrix of weights of variance 1 / columns."""
    blocks = random_blocks(
        entry.type, rows * columns // entry.block, columns**-0.5, _random(seed, f"{name} {entry.name}")
    )
    return Weight(name, entry, columns, blocks.reshape(rows, entry.row_bytes(columns)))


def activations(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of different magnitudes, with a run of zeros and one of values too small for a scale."""
    rng = np.random.default_rng([seed, rows, columns])
    x = (rng.standard_normal((rows, columns)) * rng.choice([1e-3, 1, 30], (rows, 1))).astype(F)
    x[0, : columns // 3] = 0
    x[-1, columns // 2 :] *= F(1e-35)
    return x


# --- loading ---------------------------------------------------------------------------------------------------


def test_weights_of_a_file(tmp_path: Path) -> None:
    """More bytes than all pinned buffers hold, read by all threads: every one is in its place, and nothing else is kept."""
    shapes = [("Q4_K", 40_000, 4096), ("F16", 3001, 4096), ("Q6_K", 4099, 4096), ("Q8_0", 33, 32)]
    sizes = [rows * BY_NAME[name].row_bytes(columns) for name, rows, columns in shapes]
    (tmp_path / "weights").write_bytes(np.random.default_rng(0).bytes(sum(sizes)))
    with (tmp_path / "weights").open("rb") as file:
        data = np.frombuffer(MappedFile(tmp_path / "weights", file.fileno(), sum(sizes)), np.uint8)
    ops: Any = open_device("cuda")
    before, weights = ops.device.allocated, []
    for (name, rows, columns), part in zip(shapes, np.split(data, np.cumsum(sizes)[:-1]), strict=True):
        weights.append(Weight(name, BY_NAME[name], columns, part.reshape(rows, -1)))
    reports: list[tuple[str, int, int]] = []
    ops.loading([data], lambda *report: reports.append(report))
    held = [ops.weight(weight) for weight in weights]
    ops.loaded()
    for found, weight in zip(held, weights, strict=True):
        law = repack_rows(weight.format, weight.data) if weight.format.quantized else weight.data
        assert np.array_equal(ops.device.read(found.address, law.shape, np.uint8), law), weight.name
    assert reports[-1] == ("load", data.nbytes, data.nbytes)
    gc.collect()
    assert ops.device.allocated - before == sum(found.memory.n_bytes for found in held)


# --- products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", together("products", BY_NAME))
def test_matmul(gpu: Any, cpu: Any, name: str) -> None:
    """Every number of rows; row tiles and chains that are not full."""
    entry = BY_NAME[name]
    for rows, units in ((17, 3), (40, 17)):
        columns = entry.block * units if entry.quantized else 111 * units
        weight = matrix(entry, rows, columns)
        held = gpu.weight(weight)
        for k in range(1, 17):
            x = activations(k, columns)
            (expected,) = cpu.matmul(x, weight)
            given = gpu.upload(x)
            (found,) = computed(gpu, gpu.matmul, given, held, twice=k in (1, 16))
            same(found, expected, f"{name} {rows} x {columns}, {k} rows: ")


@pytest.mark.parametrize("name", together("wide products", BY_NAME))
def test_wide_matmul(gpu: Any, cpu: Any, name: str) -> None:
    """More rows than a step has, of activations and of weights; tiles that are not full in both."""
    entry = BY_NAME[name]
    for rows, units, counts in ((17, 3, (17, 40, 128, 129)), (300, 8, (31, 257)), (128, 17, (64,))):
        columns = entry.block * units if entry.quantized else 111 * units
        weight = matrix(entry, rows, columns)
        held = gpu.weight(weight)
        for k in counts:
            x, residual = activations(k, columns), activations(k, rows, 1)
            (expected,) = cpu.matmul(x, weight)
            given, before = gpu.upload(x), gpu.upload(residual)
            (found,) = computed(gpu, gpu.matmul, given, held)
            same(found, expected, f"{name} {rows} x {columns}, {k} rows: ")
            (found,) = computed(gpu, gpu.matmul_add, before, given, held)
            same(found, cpu.matmul_add(residual, x, weight), f"{name} {rows} x {columns}, {k} rows, added: ")


@pytest.mark.parametrize("tiles", [4, 8, 12, 16])
@pytest.mark.parametrize("name", together("wide", ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S"]))
def test_blocks_of_warpgroups(gpu: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, tiles: int) -> None:
    """Whatever the shape of blocks and however many share the chains of a row; again and again, in graphs, too."""
    fewest = max([17, *(8 * n + 1 for n in BLOCKS if n < tiles)])
    device = gpu.device
    if not warpgroup_chain.takes(name, device.compute_capability, device.shared_memory):
        pytest.skip("this GPU has no warpgroups")
    counts = [fewest, 8 * tiles - 1, 8 * tiles]
    if 16 * tiles in (8 * n for n in BLOCKS):
        counts.append(16 * tiles)  # two blocks of columns
    for rows, units in ((700, 17), (2500, 5)):
        weight = matrix(BY_NAME[name], rows, 256 * units)
        held = gpu.weight(weight)
        for k in counts:
            x, residual = activations(k, 256 * units), activations(k, rows, 1)
            expected = cpu.matmul_add(residual, x, weight)
            given, before = gpu.upload(x), gpu.upload(residual)
            for groups, split in product(range(2, warpgroup_matmul.MOST_GROUPS[tiles] + 1), (1, 2, 4, 8)):
                shape = warpgroup_chain.TileShape(tiles, groups, split)
                monkeypatch.setattr(warpgroup_matmul, "launches_of", lambda _, n, *__, shape=shape: ((n, shape),))
                plan = gpu.record(partial(gpu.matmul_add, before, given, held))
                gpu.start(plan)
                what = f"{name} {rows} x {256 * units}, {k} rows, {shape}"
                same(gpu.download(plan.result), expected, f"{what}: ")
                gpu.capture(plan)
                for _ in range(20):
                    plan.graph.launch()
                    same(gpu.download(plan.result), expected, f"{what}, in a graph: ")


@pytest.mark.parametrize("tiles", [4, 8, 12, 16])
@pytest.mark.parametrize(("name", "last"), together("wide", [("Q4_K", "Q6_K"), ("IQ3_S", "Q5_K")]))
def test_two_formats_in_a_launch(
    gpu: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, last: str, tiles: int
) -> None:
    """Whatever the shape of blocks, one of which has warpgroups of both formats; again and again, in graphs."""
    device, k = gpu.device, 8 * tiles - 1
    if not warpgroup_chain.takes(name, device.compute_capability, device.shared_memory):
        pytest.skip("this GPU has no warpgroups")
    for units in (17, 5):
        sizes = ((name, 640), (name, 64), (last, 500))
        weights = [matrix(BY_NAME[n], rows, 256 * units, i) for i, (n, rows) in enumerate(sizes)]
        x, held = activations(k, 256 * units), [gpu.weight(weight) for weight in weights]
        expected, given = cpu.matmul(x, *weights), gpu.upload(x)
        for split in (1, 2, 4, 8):
            shape = warpgroup_chain.TileShape(tiles, warpgroup_matmul.MOST_GROUPS[tiles], split)
            monkeypatch.setattr(warpgroup_matmul, "shape_of", lambda *_, shape=shape: shape)
            plan = gpu.record(partial(gpu.matmul, given, *held))
            assert [launch.kernel.kernel.name for launch in plan.launches].count("matmul_warpgroups") == 1
            gpu.capture(plan)
            for _ in range(20):
                plan.graph.launch()
                for which, out, wanted in zip("qkv", plan.result, expected, strict=True):
                    what = f"{which} of {name} and {last}, {256 * units} columns, {k} rows, {shape}: "
                    same(gpu.download(out), wanted, what)


@pytest.mark.parametrize("k", together("several products", [1, 7, 16, 40]))
def test_several_products_of_what_is_normalized_or_gated(gpu: Any, cpu: Any, k: int) -> None:
    """Four matrices of three formats and both units, on activations that are computed on demand."""
    columns = 2304
    names = ("Q4_K", "Q6_K", "Q4_K", "Q8_0", "F16")
    weights = [
        matrix(BY_NAME[n], rows, columns, i) for i, (n, rows) in enumerate(zip(names, (48, 33, 16, 20, 9), strict=True))
    ]
    held = [gpu.weight(weight) for weight in weights]
    x, y = activations(k, columns), activations(k, columns, 1)
    norm, residual = activations(1, columns, 2)[0], activations(k, 48, 3)
    gx, gy, gnorm = (gpu.upload(a) for a in (x, y, norm))
    sources: dict[str, tuple[Any, Any]] = {
        "rms_norm": ((x, norm, EPS), (gx, gnorm, EPS)),
        "activate": ((GEGLU, x, y), (GEGLU, gx, gy)),
        "plain": ((x,), (gx,)),
    }

    def source_of(ops: Any, name: str, given: Any) -> Any:
        return given[0] if name == "plain" else getattr(ops, name)(*given)

    for source, (mine, theirs) in sources.items():
        expected = cpu.matmul(source_of(cpu, source, mine), *weights)

        def products(source: str = source, theirs: Any = theirs) -> Any:
            return gpu.matmul(source_of(gpu, source, theirs), *held)

        for name, a, b in zip(names, computed(gpu, products), expected, strict=True):
            same(a, b, f"{source} into {name}: ")
        for i in (0, 4):
            part = np.ascontiguousarray(residual[:, : weights[i].rows])
            gpart = gpu.upload(part)

            def added(source: str = source, theirs: Any = theirs, i: int = i, gpart: Any = gpart) -> Any:
                return gpu.matmul_add(gpart, source_of(gpu, source, theirs), held[i])

            expected_sum = cpu.matmul_add(part, source_of(cpu, source, mine), weights[i])
            same(computed(gpu, added)[0], expected_sum, f"{source} into {names[i]}, added: ")


@pytest.mark.parametrize("name", BY_NAME)
def test_embed(gpu: Any, cpu: Any, name: str) -> None:
    entry = BY_NAME[name]
    columns = entry.block * 9 if entry.quantized else 333
    table = matrix(entry, 37, columns)
    held = gpu.weight(table)
    for tokens in ([36], [0, 15, 16, 31, 32, 36, 7, 7], list(range(16)), list(range(36, 0, -1))):
        ids = np.array(tokens, np.int32)
        given = gpu.upload(ids)
        for scale in (1.0, 1.7):
            (found,) = computed(gpu, gpu.embed, held, given, scale)
            same(found, cpu.embed(table, ids, scale), f"{name}: ")


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16"])
def test_a_table_in_host_memory(gpu: Any, cpu: Any, name: str) -> None:
    """A table in host memory that is larger than what is copied at a time takes no memory of the device."""
    entry, columns, rows = BY_NAME[name], 8960, 7500
    table, ids = matrix(entry, rows, columns), np.array([0, rows - 1, 17, 4096], np.int32)
    given = gpu.upload(ids)
    gpu.weight(matrix(entry, 16, columns))
    before = gpu.device_memory()
    held = gpu.weight(table, host=True)
    after = gpu.device_memory()
    assert (after.allocated, after.weights) == (before.allocated, before.weights)
    same(computed(gpu, gpu.embed, held, given, 16.0)[0], cpu.embed(table, ids, 16.0))


@pytest.mark.parametrize(("layers", "n"), [(35, 256), (2, 96), (3, 32)])
def test_inputs_of_layers(gpu: Any, cpu: Any, layers: int, n: int) -> None:
    for rows in (1, 3, 16, 50):
        given = activations(rows, layers * n), activations(rows, layers * n, 1), activations(1, n, 2)[0]
        (found,) = computed(gpu, gpu.per_layer_inputs, *(gpu.upload(array) for array in given), 0.025, EPS)
        same(found, cpu.per_layer_inputs(*given, 0.025, EPS))


@pytest.mark.parametrize(
    "formats",
    together(
        "experts", ["Q4_K Q5_0", "Q4_K Q8_0", "Q6_K Q8_0", "F16 F16", "IQ2_XS NVFP4", "NVFP4 MXFP4", "IQ3_S IQ4_NL"]
    ),
)
def test_experts_beside_another_network(gpu: Any, cpu: Any, formats: str) -> None:
    """A layer of Gemma 4: no residual, GeGLU, gate and up in one tensor, another norm for the router, and scales."""
    n_expert, n_used, n_embd, n_ff = 24, 8, 2816, 704
    first, last = (BY_NAME[name] for name in formats.split())
    router, scales = matrix(BY_NAME["F32"], n_expert, n_embd), activations(1, n_expert, 3)[0]
    gate, up = matrix(first, 2 * n_expert * n_ff, n_embd, 1).halves(2 * n_ff)
    down = matrix(last, n_expert * n_embd, n_ff, 2)
    experts = Experts(n_expert, n_used, router, gate, up, down, None, GEGLU, scales)
    stacks = {name: gpu.weight(getattr(experts, name)) for name in ("router", "gate", "up", "down")}
    held, norms = replace(experts, **stacks, scales=gpu.upload(scales)), activations(2, n_embd, 4)
    for rows in (1, 2, 16, 17, 100):
        x = activations(rows, n_embd)
        given, (w, v) = gpu.upload(x), [gpu.upload(norm) for norm in norms]

        def mixed(x: Any, w: Any, v: Any) -> Any:
            return gpu.experts(held, None, gpu.rms_norm(x, w, EPS), gpu.rms_norm(x, v, EPS))

        (found,) = computed(gpu, mixed, given, w, v)
        same(found, cpu.experts(experts, None, *(cpu.rms_norm(x, norm, EPS) for norm in norms)), f"{rows} rows: ")


# --- element by element, and norms -----------------------------------------------------------------------------


def plain(gpu: Any, name: str, *args: Any) -> Any:
    """An operation's value as float32, which the GPU would otherwise compute only where it is used."""
    return gpu.plain(getattr(gpu, name)(*args))


@pytest.mark.parametrize("n", [1, 7, 64, 80, 128, 129, 255, 256, 257, 576, 1152, 4096, 5120])
def test_norms(gpu: Any, cpu: Any, n: int) -> None:
    for rows in (1, 3, 16, 50):
        x, y = activations(rows, n), activations(rows, n, 1)
        weight = activations(1, n, 2)[0]
        gx, gy, gw = (gpu.upload(a) for a in (x, y, weight))
        (found,) = computed(gpu, plain, gpu, "rms_norm", gx, gw, EPS)
        same(found, cpu.rms_norm(x, weight, EPS), "rms_norm")
        (found,) = computed(gpu, gpu.rms_norm_add, gx, gy, gw, EPS, -0.37)
        same(found, cpu.rms_norm_add(x, y, weight, EPS, -0.37), "rms_norm_add")


@pytest.mark.parametrize(
    ("n", "name"), [(96, "Q8_0"), (640, "Q5_0"), (768, "F16"), (1600, "Q8_0"), (2880, "NVFP4"), (8192, "Q4_K")]
)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norms(gpu: Any, cpu: Any, n: int, name: str, biased: bool) -> None:
    w = matrix(BY_NAME[name], 64, n)
    held = gpu.weight(w)
    for rows in (1, 9, 50):
        x, (weight, added) = activations(rows, n), activations(2, n, 2)
        given, bias = (
            (gpu.upload(x), gpu.upload(weight), gpu.upload(added) if biased else None),
            added if biased else None,
        )
        (found,) = computed(gpu, plain, gpu, "layer_norm", *given, EPS)
        expected = cpu.layer_norm(x, weight, bias, EPS)
        same(found, expected, f"{rows} rows: ")

        def product(given: Any = given) -> Any:
            return gpu.matmul(gpu.layer_norm(*given, EPS), held)

        (found,) = computed(gpu, product)
        same(found, cpu.matmul(expected, w)[0], f"a product of {rows} rows: ")


@pytest.mark.parametrize(
    ("n", "name"),
    [(96, "Q8_0"), (640, "Q5_0"), (2880, "MXFP4"), (2880, "NVFP4"), (3840, "Q4_K"), (5376, "Q6_K"), (1920, "Q1_0")],
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_norm_that_is_added_on_the_way_to_int8(gpu: Any, cpu: Any, n: int, name: str, normed: bool) -> None:
    w = matrix(BY_NAME[name], 64, n)
    held = gpu.weight(w)

    def summed(ops: Any, matrix: Any, x: Any, y: Any, first: Any, second: Any) -> list[Any]:
        z = ops.rms_norm_add(x, y, first, EPS, 0.7)
        return [z, *ops.matmul(ops.rms_norm(z, second, EPS) if normed else z, matrix)]

    for rows in (1, 9, 50):
        given = activations(rows, n), activations(rows, n, 1), *activations(2, n, 2)
        found = computed(gpu, summed, gpu, held, *(gpu.upload(a) for a in given))
        for what, one, other in zip(("sum", "product"), found, summed(cpu, w, *given), strict=True):
            same(one, other, f"{what} of {rows} rows: ")


def test_element_by_element(gpu: Any, cpu: Any) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((16, 1003)) * rng.choice([1e-30, 0.1, 1, 10, 100], (16, 1003))).astype(F)
    x[0, :8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38]
    y, bias = np.ascontiguousarray(x[::-1]), x[3].copy()
    gx, gy, gbias = (gpu.upload(a) for a in (x, y, bias))
    with np.errstate(all="ignore"):
        for activation in EVERY_ACTIVATION:
            gate, ggate = (x, gx) if activation.gated else (None, None)
            (found,) = computed(gpu, plain, gpu, "activate", activation, ggate, gy)
            expected = cpu.activate(activation, gate, y)
            where = np.isnan(expected)
            same(np.where(where, F(0), found), np.where(where, F(0), expected), activation.kind)
            assert np.isnan(found[where]).all()
        clean = np.where(np.isfinite(x), x, F(1))
        gclean, gother = gpu.upload(clean), gpu.upload(clean[::-1].copy())
        same(computed(gpu, gpu.add, gclean, gother)[0], cpu.add(clean, clean[::-1]), "add")
        same(computed(gpu, gpu.add, gclean, gbias)[0][:, 8:], cpu.add(clean, bias)[:, 8:], "add a bias")
        same(computed(gpu, gpu.add, gclean, gother, 0.22)[0], cpu.add(clean, clean[::-1].copy(), 0.22), "add scaled")
        same(computed(gpu, gpu.scale, gclean, 0.22)[0], cpu.scale(clean, 0.22), "scale")
        (found,) = computed(gpu, gpu.softcap, gclean, 30.0, twice=False)
        same(found, cpu.softcap(clean.copy(), 30.0), "softcap")


# --- attention -------------------------------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "heads that share": {"n_head": 8, "n_head_kv": 2, "d": 64},
    "three to one": {"n_head": 9, "n_head_kv": 3, "d": 64, "neox": False},
    "five to one, with biases": {"n_head": 5, "n_head_kv": 1, "d": 64, "biased": True},
    "normed heads of 128": {"n_head": 4, "n_head_kv": 4, "d": 128, "normed": True},
    "a window": {"n_head": 4, "n_head_kv": 1, "d": 256, "window": 70, "normed": True},
    "a window of a chunk": {"n_head": 2, "n_head_kv": 2, "d": 32, "window": 64},
    "part of a head turns": {"n_head": 2, "n_head_kv": 1, "d": 80, "n_rot": 20, "neox": False},
    "wide groups": {"n_head": 16, "n_head_kv": 1, "d": 64, "window": 33},
    "wide heads, keys as values": {"n_head": 16, "n_head_kv": 1, "d": 512, "normed": True, "keys_only": True},
    "three wide heads to one": {"n_head": 6, "n_head_kv": 2, "d": 288, "normed": True, "window": 100},
    "sinks": {"n_head": 16, "n_head_kv": 2, "d": 64, "biased": True, "window": 128, "sinks": True},
    "norms after rotation": {"n_head": 12, "n_head_kv": 1, "d": 96, "normed": True, "norm_after": True, "n_rot": 48},
    "no rotation": {"n_head": 8, "n_head_kv": 2, "d": 128, "rotated": False, "scaled": True, "sinks": True},
    "several groups of chunks": {"n_head": 8, "n_head_kv": 2, "d": 128, "before": 1490},
    "capped scores": {"n_head": 16, "n_head_kv": 8, "d": 256, "window": 200, "cap": 2.0},
    "a window of several groups": {"n_head": 4, "n_head_kv": 1, "d": 64, "before": 1490, "window": 1200, "sinks": True},
}

CACHES = ("f16", "f32", "q8_0", "q4_0", "f16/q8_0", "q8_0/f16", "q4_0/f32", "q8_0/q4_0", "i8", "i12")


def pairs() -> list[Any]:
    """Every shape of a layer with every type of a cache; without ``--all``, each shape with three types, in turn."""
    cases = together("attention", [(layer, cache_type) for layer in LAYERS for cache_type in CACHES])
    for at, case in enumerate(cases):
        layer, cache_type = divmod(at, len(CACHES))
        if (cache_type - 3 * layer) % len(CACHES) not in (0, 1, 5):
            cases[at] = pytest.param(*case.values, marks=[*case.marks, pytest.mark.thorough])
    return cases


@pytest.mark.parametrize("kind", ["steps", "alone", "wide", "tiled"])
@pytest.mark.parametrize(("layer", "cache_type"), pairs())
def test_attention(gpu: Any, cpu: Any, layer: str, cache_type: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 positions, so that a window's pages have been used again, in passes that begin and end anywhere in a chunk."""
    counts = (16, 1, 3, 7, 2) if kind in ("steps", "alone") else (40, 1, 100, 17, 64)
    if kind == "alone":
        # All chunks of a head in one block: each warp takes its own.
        monkeypatch.setattr(Device, "multiprocessors", 1)
    elif kind != "steps":
        # Tiles even with few rows, or never.
        monkeypatch.setattr(tiled_attention, "fills", lambda *given: kind == "tiled")
        monkeypatch.setattr(integer_tile.IntegerTile, "fills", lambda *given: kind == "tiled")
    given = {
        "window": 0,
        "normed": False,
        "biased": False,
        "neox": True,
        "n_rot": 0,
        "keys_only": False,
        "norm_after": False,
        "rotated": True,
        "scaled": False,
        "sinks": False,
        "cap": 0.0,
        "before": 0,
        **LAYERS[layer],
    }
    n_head, n_head_kv, d = given["n_head"], given["n_head_kv"], given["d"]
    types = Types(*(CACHE_TYPES[name] for name in (cache_type.split("/") * 2)[:2]))
    if d % 32 and (types.k.quantized or types.v.quantized):
        pytest.skip("heads of this size have no blocks of 32")
    before = given["before"]
    n_ctx, rng = before + 400, np.random.default_rng(d + n_head)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(F)

    norms = (normal(d), normal(d)) if given["normed"] else (None, None)
    biases = (normal(n_head * d), normal(n_head_kv * d), normal(n_head_kv * d)) if given["biased"] else None
    heads = Heads(
        n_head, n_head_kv, d, d, given["neox"], d**-0.5, EPS, norms[0], norms[1], biases, v_normed=given["keys_only"]
    )
    heads = replace(
        heads,
        norm_after=given["norm_after"],
        # Some are much larger than all scores, some much smaller.
        sinks=normal(n_head) * F(20) if given["sinks"] else None,
        query_scales=1 + rng.random(n_ctx, F) if given["scaled"] else None,
        softcap=given["cap"],
    )
    on_gpu = replace(
        heads,
        sinks=None if heads.sinks is None else gpu.upload(heads.sinks),
        query_scales=None if heads.query_scales is None else gpu.upload(heads.query_scales),
        q_norm=None if norms[0] is None else gpu.upload(norms[0]),
        k_norm=None if norms[1] is None else gpu.upload(norms[1]),
        biases=None if biases is None else tuple(gpu.upload(b) for b in biases),
    )
    angles = rng.uniform(-np.pi, np.pi, (n_ctx, (given["n_rot"] or d) // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(F) if given["rotated"] else None
    shape = AttentionCacheSpec(n_head_kv, d, d, given["window"])
    mine = layer_of(shape, n_ctx, max(counts), types, np.zeros)
    # Lanes that have never been written are NaN: they must have no effect.
    poison = {np.float32: F(np.nan), np.uint16: np.uint16(0x7E00), np.uint32: np.uint32(0x7E007E00)}
    poisoned = (gpu.upload(np.full_like(memory, poison[memory.dtype.type])) for memory in (mine.keys, mine.values))
    theirs = replace(mine, **dict(zip(("keys", "values"), poisoned, strict=True)), table=gpu.upload(mine.table))
    gtable = None if table is None else gpu.upload(table)
    if before:
        k, v, positions = (
            normal(before, n_head_kv * d),
            normal(before, n_head_kv * d),
            np.arange(before, dtype=np.int32),
        )
        for begin in range(0, before, max(counts)):
            part = slice(begin, min(begin + max(counts), before))
            stored = [np.ascontiguousarray(a[part]) for a in (k, v, positions)]
            on_device, batch = [gpu.upload(a) for a in stored[:2]], one_sequence(stored[2], gpu)
            plan = gpu.record(partial(gpu.remember, on_gpu, *on_device, theirs, batch, gtable))
            for launch in plan.launches:
                gpu.device.launch(launch.kernel, launch.grid, launch.block, launch.arguments)
            cpu.remember(heads, stored[0], stored[1], mine, one_sequence(stored[2]), table)
    first = before
    while first < before + 300:
        rows = counts[first % 5]
        positions = np.arange(first, first + rows, dtype=np.int32)
        q, k, v = normal(rows, n_head * d) * F(3), normal(rows, n_head_kv * d), normal(rows, n_head_kv * d)
        v = k if given["keys_only"] else v
        tensors, batch = [gpu.upload(a) for a in (q, k, v)], one_sequence(positions, gpu)
        inputs = (on_gpu, *tensors, theirs, batch, gtable)
        found = computed(gpu, plain, gpu, "attention", *inputs, twice=first % 3 == 0)[0]
        expected = cpu.attention(heads, q.copy(), k.copy(), v.copy(), mine, one_sequence(positions), table)
        same(found, expected, f"{layer}, {rows} rows at {first}: ")
        last, window = np.full(rows, first, np.int32), given["window"]
        inputs = (on_gpu, tensors[0], theirs, batch, gpu.upload(last), gtable, window)
        found = computed(gpu, plain, gpu, "attend_past", *inputs)[0]
        expected = cpu.attend_past(heads, q.copy(), mine, one_sequence(positions), last, table, window)
        same(found, expected, f"{layer}, {rows} rows at {first}, of the past: ")
        first += rows
    both = theirs.contents(first, gpu.download), mine.contents(first, np.asarray)
    for (what, found), (_, expected) in zip(*both, strict=True):
        same(found, expected, what)


SHAPES = [(4, 2, 0), (16, 1, 0), (9, 3, 100)]


@pytest.mark.parametrize(
    ("cache_type", "d", "n_head", "n_head_kv", "window"),
    [
        pytest.param(
            *(cache_type, d, *shape),
            marks=[
                pytest.mark.together(f"sequences {cache_type} {d}"),
                *([pytest.mark.thorough] if (at + at // 3 + k) % 3 else []),
            ],
        )
        for at, (cache_type, d) in enumerate(product(CACHES, (64, 128, 256)))
        for k, shape in enumerate(SHAPES)
    ],
)
def test_rows_of_several_sequences(
    gpu: Any, cpu: Any, cache_type: str, d: int, n_head: int, n_head_kv: int, window: int
) -> None:
    """Mixed passes: sequences of one row and of several, in chunks that the pass begins, and a row that occurs twice."""
    types = Types(*(CACHE_TYPES[name] for name in (cache_type.split("/") * 2)[:2]))
    n_ctx, rng = 700, np.random.default_rng(d)
    heads = Heads[Any](n_head, n_head_kv, d, d, True, d**-0.5, EPS)
    table = rng.standard_normal((n_ctx, 2, d // 2)).astype(F)
    shape, angles = AttentionCacheSpec(n_head_kv, d, d, window), gpu.upload(table)
    mine = layer_of(shape, n_ctx, 16, types, np.zeros, None, 4, seed=1)
    theirs = layer_of(shape, n_ctx, 16, types, gpu.zeros, gpu.store, 4, seed=2)
    lengths = {3: 126, 0: 5, 2: 600, 1: 63}

    def made(slots: list[int], positions: list[int]) -> tuple[Batch[Any], Batch[Any], list[np.ndarray]]:
        tokens, at, of = (np.array(x, np.int32) for x in (positions, positions, slots))
        x = [rng.standard_normal((len(slots), heads * d)).astype(F) for heads in (n_head, n_head_kv, n_head_kv)]
        on_device = Batch(gpu.upload(tokens), gpu.upload(at), gpu.upload(of), True)
        return Batch(tokens, at, of, True), on_device, x

    for slot, first in [(slot, first) for slot, n in lengths.items() for first in range(0, n, 16)]:
        positions = [*range(first, min(first + 16, lengths[slot]))]
        own, batch, (_, k, v) = made([slot] * len(positions), positions)
        arrays = [gpu.upload(a) for a in (k, v)]
        gpu.start(gpu.record(partial(gpu.remember, heads, *arrays, theirs, batch, angles)))
        cpu.remember(heads, k.copy(), v.copy(), mine, own, table)
    for counts in ({3: 4, 0: 1, 2: 3, 1: 2}, {2: 1, 1: 1}, {0: 9, 3: 6}):
        slots = [slot for slot, n in counts.items() for _ in range(n)]
        positions = [lengths[slot] + i for slot, n in counts.items() for i in range(n)]
        own, batch, given = made([*slots, slots[0]], [*positions, positions[0]])
        for x in given:
            x[-1] = x[0]
        arrays = [gpu.upload(x) for x in given]
        found = computed(gpu, plain, gpu, "attention", heads, *arrays, theirs, batch, angles, twice=True)[0]
        expected = cpu.attention(heads, *(x.copy() for x in given), mine, own, table)
        same(found, expected, f"{cache_type}, {counts}: ")
        inputs = heads, arrays[0], theirs, batch, batch.positions, angles, window
        expected = cpu.attend_past(heads, given[0].copy(), mine, own, own.positions, table, window)
        same(computed(gpu, plain, gpu, "attend_past", *inputs)[0], expected, f"{cache_type}, {counts}, of the past: ")
        for slot, n in counts.items():
            lengths[slot] += n


# --- sampling --------------------------------------------------------------------------------------------------

SAMPLERS = [
    SamplerParams(temperature=0),
    SamplerParams(seed=1),
    SamplerParams(temperature=1.5, top_k=256, top_p=1, min_p=0, seed=2),
    SamplerParams(temperature=0.3, top_k=1, seed=3),
    SamplerParams(temperature=1, top_k=64, top_p=0.5, seed=2**63),
    SamplerParams(repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, seed=4),
    SamplerParams(temperature=0, repeat_penalty=1.3, logit_bias={0: 3.0, 5: float("-inf"), 288: 1.5}),
]


@pytest.mark.together("sampling")
@pytest.mark.parametrize("n_vocab", [289, 32000, 151936])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("permitted", [None, 0.0, 1e-4, 0.5])
def test_sampling(gpu: Any, n_vocab: int, ties: bool, permitted: float | None) -> None:
    """20 tokens of each sampler, each chosen with the ones before it; permitted: the share of the vocabulary that a mask
    permits besides one token."""
    from engine.cuda.permit import Masks
    from engine.decode.device_params import edits
    from engine.decode.device_sampler import DeviceSampler, Rows

    n_ctx, rng = 64, np.random.default_rng(n_vocab)
    machine, masks = DeviceSampler(gpu.device, n_vocab, n_ctx), Masks(gpu.device, n_vocab)
    mask = np.zeros(-(-n_vocab // 32), np.int32)
    matcher: Any = None if permitted is None else SimpleNamespace(mask=lambda history: mask)
    for params in SAMPLERS:
        sampler = Sampler(params, n_vocab, matcher)
        history = [3, 200, 3]
        memory = np.zeros(n_ctx, np.int32)
        memory[:3] = history
        tokens, positions, slots = (gpu.upload(np.full(16, value, np.int32)) for value in (3, 2, 0))
        past, starts = gpu.upload(memory), gpu.upload(np.array([0, 1], np.int32))
        at = gpu.upload(np.array([2], np.int32))
        machine.begin(sampler)
        for _ in range(20):
            logits = (rng.standard_normal(n_vocab) * 4).astype(F)
            if ties:
                logits = np.round(logits)
            row = gpu.upload(logits)
            if permitted is not None:
                bits = rng.random(32 * mask.size) < permitted
                bits[9] = True
                mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
                masks.apply(row.address, n_vocab, [(0, mask)])
            rows = Rows(*(array.address for array in (tokens, positions, slots, starts, past)))
            machine.launch(row.address, n_vocab, 1, rows, at.address, params.greedy, edits(params))
            gpu.device.synchronize()
            expected = sampler.sample(logits, len(history), history)
            history.append(expected)
            assert machine.take() == [expected], params
            assert gpu.download(tokens)[0] == expected
            assert gpu.download(positions)[0] == gpu.download(at)[0] == len(history) - 1
        assert gpu.download(past)[: len(history)].tolist() == history


# --- whole models ----------------------------------------------------------------------------------------------

MODELS = [
    *(("tiny-llama", quant) for quant in ("Q4_K_M", "Q8_0", "MXFP4")),
    *(("tiny-qwen2", quant) for quant in ("Q5_K_M", "F16")),
    *(("tiny-qwen3", quant) for quant in ("Q4_K_M", "IQ4_XS", "BF16")),
    *(("tiny-gemma3", quant) for quant in ("Q4_K_M", "Q4_0")),
    *(("tiny-qwen3moe", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-qwen35", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-qwen35moe", quant) for quant in ("Q4_K_M", "BF16")),
    *(("tiny-gemma4", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-gemma4-moe", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-gemma4-e", quant) for quant in ("Q4_K_M", "BF16")),
    *(("tiny-gpt-oss", quant) for quant in ("Q4_K_M", "Q8_0", "F32")),
    *(("tiny-glm4moe", quant) for quant in ("Q4_K_M", "IQ3_S", "F16")),
    *(("tiny-step35", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-lfm2", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-lfm2moe", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-granitehybrid", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-granitehybrid-moe", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-kimi-linear", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-nemotron_h", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-nemotron_h_moe", quant) for quant in ("Q4_K_M", "Q8_0")),
    ("tiny-nemotron_h_moe-latent", "Q4_0"),
    *(("tiny-falcon-h1", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-gemma3n", quant) for quant in ("Q4_K_M", "F16")),
    *(("tiny-cohere2", quant) for quant in ("Q4_K_M", "Q8_0")),
    *(("tiny-llama4", quant) for quant in ("Q4_K_M", "Q4_0", "F16")),
    *(("tiny-qwen3", quant) for quant in ("IQ2_XS", "IQ1_M", "NVFP4", "TQ1_0")),
]
MIXED = (
    "tiny-qwen3moe",
    "tiny-gpt-oss",
    "tiny-glm4moe",
    "tiny-step35",
    "tiny-qwen35",
    "tiny-qwen35moe",
    "tiny-lfm2",
    "tiny-lfm2moe",
    "tiny-granitehybrid",
    "tiny-granitehybrid-moe",
    "tiny-kimi-linear",
    "tiny-nemotron_h",
    "tiny-nemotron_h_moe",
    "tiny-nemotron_h_moe-latent",
    "tiny-falcon-h1",
    "tiny-gemma3n",
    "tiny-cohere2",
    "tiny-llama4",
    "tiny-gemma4",
    "tiny-gemma4-moe",
    "tiny-gemma4-e",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A random model of a shape and quantization."""
    folder = tmp_path_factory.mktemp("models")

    def make(shape: str, quant: str) -> Path:
        path = folder / f"{shape}-{quant}.gguf"
        return path if path.exists() else make_model(path, shape, quant)

    return make


def equal(path: Path, n_prompt: int, n_gen: int, cache_type: str) -> None:
    """Logits of a prompt, and the answer of generate, without ``engine.parity``."""
    cpu, gpu = (engine.load(path, device=device, n_ctx=512, cache_type=cache_type) for device in ("cpu", "cuda"))
    ids = np.random.default_rng(7).integers(0, cpu.config.n_vocab, n_prompt).tolist()
    same(gpu.logits(ids), cpu.logits(ids), f"{path.name}, logits")
    options: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 5}, {"seed": 6, "top_k": 0, "typical_p": 0.9}]
    for option in options:
        a, b = (llm.complete(ids, max_tokens=n_gen, ignore_eos=True, **option) for llm in (cpu, gpu))
        assert a.ids == b.ids and a.text == b.text and len(a.ids) == n_gen


@pytest.mark.parametrize(("shape", "quant"), together("model", MODELS, 1))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_tiny_models(tiny: Any, shape: str, quant: str) -> None:
    equal(tiny(shape, quant), 90, 24, "f16")


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize(
    "shape", together("model", ["tiny-llama", "tiny-qwen35", "tiny-gemma3", "tiny-gemma4", "tiny-gemma4-e"])
)
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_quantized_caches(tiny: Any, shape: str, cache_type: str) -> None:
    equal(tiny(shape, "Q4_K_M"), 90, 24, cache_type)


@pytest.mark.parametrize("shape", together("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3", *MIXED]))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_parity_of_tiny_models(tiny: Any, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    quant = next(quant for name, quant in MODELS if name == shape)
    status = parity.main([str(tiny(shape, quant)), "-p", "150", "-n", "40", "-ct", "f32"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    assert "equal, bit for bit" in out


WIDE = [
    ("tiny-llama", "Q4_K_M", "f16"),
    ("tiny-llama", "MXFP4", "f32"),
    ("tiny-llama", "Q8_0", "q8_0"),
    ("tiny-qwen2", "Q5_K_M", "f16"),
    ("tiny-qwen3", "IQ4_XS", "q4_0"),
    ("tiny-qwen3", "BF16", "f16"),
    ("tiny-gemma3", "Q4_0", "f16"),
    ("tiny-qwen3moe", "Q4_K_M", "f16"),
    ("tiny-qwen35", "Q4_K_M", "f16"),
    ("tiny-qwen35", "Q8_0", "q8_0"),
    ("tiny-qwen35moe", "Q4_K_M", "f16"),
    ("tiny-qwen35moe", "BF16", "f32"),
    ("tiny-gemma4", "Q4_K_M", "f16"),
    ("tiny-gemma4", "Q8_0", "q8_0"),
    ("tiny-gemma4-moe", "Q4_K_M", "f16"),
    ("tiny-gemma4-e", "Q4_K_M", "f16"),
    ("tiny-gpt-oss", "Q4_K_M", "f16"),
    ("tiny-gpt-oss", "Q8_0", "q8_0"),
    ("tiny-glm4moe", "Q4_K_M", "f16"),
    ("tiny-glm4moe", "IQ2_S", "f32"),
    ("tiny-step35", "Q4_K_M", "f16"),
    ("tiny-lfm2", "Q4_K_M", "f16"),
    ("tiny-lfm2moe", "Q8_0", "q8_0"),
    ("tiny-granitehybrid", "Q4_K_M", "f16"),
    ("tiny-granitehybrid-moe", "Q8_0", "q8_0"),
    ("tiny-kimi-linear", "Q4_K_M", "f16"),
    ("tiny-nemotron_h", "Q4_K_M", "f16"),
    ("tiny-nemotron_h_moe", "Q8_0", "q8_0"),
    ("tiny-nemotron_h_moe-latent", "Q4_0", "f16"),
    ("tiny-falcon-h1", "Q4_K_M", "q8_0"),
    ("tiny-gemma3n", "Q4_K_M", "f16"),
    ("tiny-cohere2", "Q4_K_M", "f16"),
    *(("tiny-llama4", "Q4_K_M", cache_type) for cache_type in ("f16", "i8", "q8_0")),
]


@pytest.mark.parametrize(("shape", "quant", "cache_type"), together("wide model", WIDE, 1))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_wide_prompts(tiny: Any, shape: str, quant: str, cache_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, keys, values and states after a prompt are those of the CPU, whatever passes it was read in; so are the
    logits of every row, and of the tokens that follow."""
    options: dict[str, Any] = {"n_ctx": 768, "cache_type": cache_type}
    cpu = engine.load(tiny(shape, quant), device="cpu", **options)
    rng = np.random.default_rng(9)
    ids, following = (rng.integers(0, cpu.config.n_vocab, n).tolist() for n in (700, 20))
    every = cpu.logits(ids)
    expected = np.array([cpu.prefill(ids)[0], *(cpu.step(token) for token in following)])
    for size in (512, 100, 16, 1):
        monkeypatch.setattr(tiled_attention, "fills", lambda *given, size=size: size == 512)
        gpu = engine.load(tiny(shape, quant), device="cuda", batch_size=size, **options)
        what = f"{shape} {quant}, passes of {size} rows: "
        if size > 1:
            same(gpu.logits(ids), every, f"{what}logits of all rows")
        for _ in range(2):  # the kernels one by one, and as a graph
            gpu.reset()
            cpu.prefill(ids)
            same(gpu.prefill(ids)[0], expected[0], f"{what}logits")
            Comparison(cpu, gpu, ids, 0, Tally()).caches()
        found = np.array([gpu.prefill(ids)[0], *(gpu.step(token) for token in following)])
        same(found, expected, f"{what}logits of what follows")
        prompt = [*ids[:650], *following]
        same(gpu.prefill(prompt)[0], cpu.prefill(prompt)[0], f"{what}logits where the prompt goes another way")


SHARED = ("dense", "draft", "gemma4", "gemma4-assistant", "hybrid-mtp", "moe-mtp")


@pytest.mark.parametrize("name", together("shared", SHARED))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_shared_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens of prompt and 200 greedy ones, of every model whose architecture is built."""
    path = shared_model(f"pycoder-{name}-Q4_K_M.gguf")
    try:
        read_config(read_gguf(path))
    except ModelError as error:
        pytest.skip(str(error))
    status = parity.main([str(path)])
    out, err = capsys.readouterr()
    assert status == 0, out + err


@pytest.mark.together("shared dense")
@pytest.mark.usefixtures("gpu")
def test_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    status = parity.main(["--text", "def fibonacci(n):\n    ", "-n", "32", "--verbose"])
    out, err = capsys.readouterr()
    assert status == 0, out + err


# --- repeated and concurrent use -------------------------------------------------------------------------------


@pytest.mark.together("model tiny-qwen3")
@pytest.mark.usefixtures("gpu")
def test_the_same_decode_100_times(tiny: Any) -> None:
    llm = engine.load(tiny("tiny-qwen3", "Q4_K_M"), device="cuda", n_ctx=256)
    ids = np.random.default_rng(0).integers(0, llm.config.n_vocab, 130).tolist()
    llm.prefill(ids)
    token, position = np.array([11], np.int32), np.array([130], np.int32)
    results = set()
    for _ in range(100):
        results.add(evaluate(llm.model, token, position, 1, llm.model.sequence).tobytes())
        llm.sequence.truncate(130)
    assert len(results) == 1
    answers = set()
    for _ in range(10):
        llm.reset()
        answers.add(tuple(llm.complete(ids, max_tokens=50, seed=3, ignore_eos=True).ids))
    assert len(answers) == 1


def decode(llm: engine.LLM, ids: list[int]) -> Iterator[bytes]:
    """Logits of ids, one after another."""
    llm.reset()
    for position, token in enumerate(ids):
        yield evaluate(
            llm.model, np.array([token], np.int32), np.array([position], np.int32), 1, llm.model.sequence
        ).tobytes()


@pytest.mark.together("model tiny-qwen3")
@pytest.mark.usefixtures("gpu")
def test_two_engines_on_one_gpu(tiny: Any) -> None:
    """Two models give the results that each gives alone: alternating, and from two threads."""
    paths = [tiny("tiny-llama", "Q4_K_M"), tiny("tiny-qwen3", "Q4_K_M"), tiny("tiny-llama", "Q4_K_M")]
    llms = [engine.load(path, device="cuda", n_ctx=128) for path in paths]
    prompts = [np.random.default_rng(i).integers(0, 289, 100).tolist() for i in range(3)]
    alone = [list(decode(llm, ids)) for llm, ids in zip(llms, prompts, strict=True)]
    turns = [decode(llm, ids) for llm, ids in zip(llms, prompts, strict=True)]
    found: list[list[bytes]] = [[], [], []]
    for _ in range(100):
        for one, turn in zip(found, turns, strict=True):
            one.append(next(turn))
    assert found == alone

    at_once: list[list[bytes]] = [[], [], []]

    def work(i: int) -> None:
        at_once[i] = list(decode(llms[i], prompts[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == alone


# --- drafts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(gpu: Any) -> dict[str, tuple[engine.LLM, engine.LLM]]:
    """The bundled model on the CPU and on the GPU with a draft model: its own weights, one trained to draft, and the former
    made useless by a script."""
    from engine.speculative.draft_model import DraftModel

    def pair(draft: str) -> tuple[engine.LLM, engine.LLM]:
        cpu, on_gpu = (engine.load(device=device, n_ctx=256, draft_model=draft) for device in ("cpu", "cuda"))
        return cpu, on_gpu

    pairs = {"perfect": pair("pycoder"), "real": pair("pycoder-draft")}
    useless = pair("pycoder-draft")
    for llm in useless:
        assert isinstance(llm.draft, DraftModel)
        llm.draft.script = np.full(256, 5, np.int32)
    return pairs | {"useless": useless}


@pytest.mark.together("drafts")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("draft", ["perfect", "real", "useless"])
@pytest.mark.begin(-1)
def test_drafts_change_nothing(drafted: Any, draft: str, temperature: float) -> None:
    """Plain answers of the CPU, and those of the GPU with drafts of a model, with lookup, and with both."""
    cpu, on_gpu = drafted[draft]
    model = on_gpu.draft
    for seed, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {
            "max_tokens": 40,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": seed % 2 == 0,
        }
        if seed % 5 == 4:
            options |= PENALIZED
        expected = cpu.complete(prompt, speculation=SpeculationParams(enabled=False), **options)
        for lookup, with_model, most in ((False, True, 0), (False, True, 15), (True, False, 0), (True, True, 3)):
            on_gpu.draft = model if with_model else None
            params = SpeculationParams(lookup=lookup, draft_max=most)
            found = on_gpu.complete(prompt, speculation=params, **options)
            assert (found.ids, found.text) == (expected.ids, expected.text), (prompt, params, found.speculation)
    on_gpu.draft = model


@pytest.mark.together("drafts")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("draft", ["perfect", "useless"])
@pytest.mark.begin(-1)
def test_answers_with_grammars(drafted: Any, draft: str, temperature: float) -> None:
    """Those of the CPU, without drafts, with drafts of a model and with lookup; the host chooses only the first token."""
    pytest.importorskip("llguidance", reason="grammars need the extra serve")
    cpu, on_gpu = drafted[draft]
    person = {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"enum": ["a", ["b"], None]},
    }
    schema = {"type": "object", "properties": person, "required": [*person], "additionalProperties": False}
    grammars = [
        engine.Grammar.json_schema(schema),
        engine.Grammar.regex(r"(.|\n)*"),
        engine.Grammar.regex("[a-f]{3,30}"),
    ]
    ways: list[dict[str, Any]] = [{"enabled": False}, {}, {"lookup": True}]
    launched: list[str] = []
    for seed, grammar in enumerate(grammars):
        options: dict[str, Any] = {"grammar": grammar, "max_tokens": 60, "temperature": temperature, "seed": seed}
        expected = cpu.complete(PROMPTS[0], speculation=SpeculationParams(enabled=False), **options).ids
        for params in ways:
            launched.clear()
            on_gpu.model.ops.device.on_launch = launched.append
            answer = on_gpu.complete(PROMPTS[0], speculation=SpeculationParams(**params), **options)
            on_gpu.model.ops.device.on_launch = None
            assert answer.ids == expected
            steps = len(answer.ids) - (answer.speculation.accepted if answer.speculation is not None else 0)
            assert sum(name.startswith("permit") for name in launched) >= steps - 1


@pytest.mark.together("drafts")
@pytest.mark.parametrize("accept", ["ratio", "p-min"])
@pytest.mark.parametrize("draft", ["perfect", "real", "useless"])
@pytest.mark.begin(-1)
def test_other_ways_to_accept_give_the_text_of_the_cpu(drafted: Any, draft: str, accept: str) -> None:
    for seed, prompt in enumerate(PROMPTS[:8]):
        params = SpeculationParams(accept=accept, draft_max=3, accept_p_min=0.1)
        options = {"max_tokens": 40, "temperature": 0.9, "seed": seed, "speculation": params}
        answers = [llm.complete(prompt, **options) for llm in drafted[draft]]
        assert answers[0].ids == answers[1].ids
        assert answers[0].speculation.accepted_at == answers[1].speculation.accepted_at


# --- recurrent layers, experts, and the layer that drafts --------------------------------------------------------

PLAIN = SpeculationParams(enabled=False)


@pytest.fixture(scope="module", params=together("hybrid", ["moe-mtp", "hybrid-mtp"]))
def hybrids(gpu: Any, request: pytest.FixtureRequest) -> tuple[engine.LLM, engine.LLM]:
    """A trained model that drafts with a layer of its own, on the CPU and on the GPU."""
    name = f"pycoder-{request.param}"
    path = resolve(name) if name in catalog.CATALOG else shared_model(f"{name}-Q4_K_M.gguf")
    cpu, on_gpu = (engine.load(path, device=device, n_ctx=256, draft_max=15) for device in ("cpu", "cuda"))
    return cpu, on_gpu


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.begin(-1)
def test_its_own_drafts_change_nothing(hybrids: Any, temperature: float) -> None:
    """Its drafts, drafts made useless by a script, as many as a pass can read, together with lookup, and through the host."""
    cpu, on_gpu = hybrids
    assert on_gpu.draft is not None and on_gpu.draft.name == "mtp"
    kept = 0
    for seed, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": seed, "ignore_eos": True}
        if seed % 5 == 4:
            options |= PENALIZED
        expected = cpu.complete(prompt, speculation=PLAIN, **options)
        first = len(expected.prompt_ids)
        for wrong, given in (
            (False, {}),
            (True, {}),
            (False, {"draft_max": 15}),
            (False, {"draft_max": 2, "lookup": True}),
            (False, {"draft_p_min": 0.4}),
        ):
            on_gpu.draft.script = np.full(256, -1, np.int32) if wrong else None
            if wrong:
                on_gpu.draft.script[first : first + 40] = [
                    (token + 1) % on_gpu.config.n_vocab for token in expected.ids
                ]
            found = on_gpu.complete(prompt, speculation=SpeculationParams(**given), **options)
            assert (found.ids, found.text) == (expected.ids, expected.text), (prompt, given, wrong, found.speculation)
            assert not wrong or found.speculation.accepted_by["mtp"] == 0
            kept += found.speculation.accepted_by["mtp"]
        on_gpu.draft.script = None
    assert kept > 100


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.begin(-1)
def test_its_own_drafts_after_long_prompts(hybrids: Any, temperature: float) -> None:
    """A prompt read in one pass of many rows: what the layer that drafts continues from is stored."""
    cpu, on_gpu = hybrids
    assert on_gpu.batch_size == on_gpu.n_ctx == 256
    ids = cpu.tokenize("".join(PROMPTS))[:180]
    assert len(ids) > 100
    for n in (17, 100, len(ids)):
        options = {"max_tokens": 40, "temperature": temperature, "seed": n, "ignore_eos": True}
        expected = cpu.complete(ids[:n], speculation=PLAIN, **options)
        on_gpu.reset()
        found = on_gpu.complete(ids[:n], speculation=SpeculationParams(), **options)
        assert found.ids == expected.ids
        for llm in hybrids:
            llm.reset()
            llm.prefill(ids[:n])
        drafted = [llm.model.drafter.forward(ids[n - 1], n, llm.model.sequence) for llm in hybrids]
        same(drafted[1], drafted[0], "logits of a draft")


@pytest.mark.parametrize("accept", ["ratio", "p-min"])
@pytest.mark.begin(-1)
def test_its_own_drafts_accepted_otherwise_give_the_text_of_the_cpu(hybrids: Any, accept: str) -> None:
    for seed, prompt in enumerate(PROMPTS[:8]):
        params = SpeculationParams(accept=accept, draft_max=3, accept_p_min=0.1)
        options = {"max_tokens": 40, "temperature": 0.9, "seed": seed, "speculation": params}
        answers = [llm.complete(prompt, **options) for llm in hybrids]
        assert answers[0].ids == answers[1].ids
        assert answers[0].speculation.accepted_at == answers[1].speculation.accepted_at


@pytest.mark.begin(-1)
def test_states_are_those_of_the_cpu(hybrids: Any) -> None:
    """After every number of accepted tokens of a pass, after a snapshot is restored, and in a conversation."""
    cpu, on_gpu = hybrids
    tokens = np.random.default_rng(5).integers(3, cpu.config.n_vocab, 80).tolist()
    first, rows = 20, 16
    expected = []
    cpu.reset()
    for token in tokens[:50]:
        cpu.step(token)
        expected.append([array.tobytes() for array in cpu.model.save(cpu.model.sequence).arrays])
    for accepted in range(1, rows + 1):
        on_gpu.reset()
        on_gpu.read(tokens[:first])
        batch, positions = (
            np.array(tokens[first : first + rows], np.int32),
            np.arange(first, first + rows, dtype=np.int32),
        )
        evaluate(on_gpu.model, batch, positions, rows, on_gpu.model.sequence)
        on_gpu.sequence.truncate(first + accepted)
        snapshot = on_gpu.model.save(on_gpu.model.sequence)
        assert [array.tobytes() for array in snapshot.arrays] == expected[first + accepted - 1]
    on_gpu.model.restore(snapshot, on_gpu.model.sequence)
    assert [array.tobytes() for array in on_gpu.model.save(on_gpu.model.sequence).arrays] == expected[first + rows - 1]
    (end, *_) = cpu.tokenizer.eog_ids
    beginning = [*tokens[:20], end, *tokens[20:45], end]
    for rest in (tokens[45:60], tokens[50:80], tokens[45:60]):
        logits = [llm.prefill([*beginning, *rest])[0] for llm in hybrids]
        same(logits[1], logits[0], "logits of prompts with a common beginning")
    assert on_gpu.reread is None


# --- memory and errors -----------------------------------------------------------------------------------------

SLACK = 64 << 20
"""Bytes of device memory that the driver may keep for itself."""


def test_copies_that_nobody_waits_for(gpu: Any) -> None:
    downloads.check(gpu)


@pytest.mark.alone
def test_out_of_memory(gpu: Any) -> None:
    device = gpu.device
    before, free = device.allocated, device.free_memory()
    with pytest.raises(DeviceError, match=r"GB free and the test needs .* GB more; choose a smaller context"):
        device.allocate(free + (1 << 30), "the test")
    assert device.allocated == before
    x = gpu.upload(np.arange(1000, dtype=F))
    assert computed(gpu, gpu.add, x, x)[0].tolist() == [2 * i for i in range(1000)]


@pytest.mark.alone
def test_a_load_that_runs_out_of_memory_gives_back_what_it_had(
    gpu: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, device = tiny("tiny-llama", "Q4_K_M"), gpu.device
    engine.load(path, device="cuda", n_ctx=64).logits([1, 2, 3])
    gc.collect()
    free, allocate, calls = device.free_memory(), type(device).allocate, 0

    def until_full(self: Any, n_bytes: int, what: str) -> Any:
        nonlocal calls
        calls += 1
        # The rest of the load requests more than any GPU has.
        return allocate(self, n_bytes if calls < 20 else 1 << 50, what)

    monkeypatch.setattr(type(device), "allocate", until_full)
    with pytest.raises(DeviceError, match=r"GB free and .* needs .* GB more; choose a smaller context"):
        engine.load(path, device="cuda", n_ctx=64)
    monkeypatch.undo()
    gc.collect()
    assert device.free_memory() > free - SLACK
    assert np.isfinite(engine.load(path, device="cuda", n_ctx=64).logits([1, 2, 3])).all()


@pytest.mark.alone
def test_a_freed_model_gives_its_memory_back(gpu: Any, tiny: Any) -> None:
    gc.collect()
    free = gpu.device.free_memory()
    devices = []
    for _ in range(3):
        llm: Any = engine.load(tiny("tiny-qwen2", "Q5_K_M"), device="cuda", n_ctx=512)
        llm.complete([1, 2, 3], max_tokens=5, seed=1)
        devices.append(llm.model.ops.device)
        assert devices[-1].allocated > llm.cache_bytes > 0
        del llm
        gc.collect()
        assert devices[-1].allocated == 0
    assert gpu.device.free_memory() > free - SLACK


@pytest.mark.alone
@pytest.mark.usefixtures("gpu")
def test_a_limit_of_memory(tiny: Any) -> None:
    """A process with a limit takes no more free memory than that, and gives the same answer; a context that needs more is
    refused.  In a process of its own, so that nothing has been taken before."""
    code = """
import sys
import engine
from engine.cuda.runtime.device import CONTEXT, Device
from engine.cuda.runtime.driver import list_devices
from engine.errors import ContextError, DeviceError

limit = 2 << 30
before = list_devices()[0].free
options = dict(device="cuda", cache_type="f32")
device = Device(0, limit)
assert limit - CONTEXT - (64 << 20) <= device.free_memory() <= limit - CONTEXT
with engine.load(sys.argv[1], n_ctx=512, gpu_memory="2G", **options) as llm:
    answer = llm.complete([1, 2, 3], max_tokens=20, seed=1).ids
    taken = before - list_devices()[0].free
    assert 0 < taken <= limit - CONTEXT
    left = llm.model.ops.device.free_memory()
    assert abs(limit - CONTEXT - taken - left) <= 64 << 20, (taken, left)
    try:
        llm.model.ops.device.allocate(left + (1 << 20), "the test")
    except DeviceError as error:
        assert "GB free and the test needs" in str(error)
    else:
        sys.exit("more than the limit was allocated")
    assert answer == engine.load(sys.argv[1], n_ctx=512, **options).complete([1, 2, 3], max_tokens=20, seed=1).ids
try:
    engine.load(sys.argv[1], n_ctx=1 << 22, gpu_memory="2G", **options)
except ContextError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tiny("tiny-llama", "Q4_K_M"))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MiB are free; choose" in done.stdout


@pytest.mark.usefixtures("gpu")
def test_an_error_names_its_kernel() -> None:
    """In a separate process, whose context it ends."""
    code = """
import engine
load = engine.load
import numpy as np
from engine.devices import open_device
from engine.errors import DeviceError
ops = open_device("cuda")
x = ops.upload(np.zeros(256, np.float32))
launch = ops.record(lambda: ops.add(x, x)).launches[0]
try:
    ops.device.launch(launch.kernel, launch.grid, launch.block, (4096, *launch.arguments[1:]))
    ops.device.synchronize()
except DeviceError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "reported illegal address during the kernels up to add;" in done.stdout, done.stdout + done.stderr


# --- assistants ------------------------------------------------------------------------------------------------


def assisted(cache_type: str, device: str, device_draft: str | None = None) -> engine.LLM:
    """The trained gemma4 model with its assistant."""
    target, assistant = (shared_model(f"pycoder-gemma4{kind}-Q4_K_M.gguf") for kind in ("", "-assistant"))
    options: dict[str, Any] = {"n_ctx": 384, "cache_type": cache_type, "draft_model": assistant}
    return engine.load(target, device=device, device_draft=device_draft, **options)


def same_with_an_assistant(cpu: engine.LLM, on_gpu: engine.LLM, n_prompts: int) -> None:
    """The GPU's answers with drafts equal the CPU's with drafts, and the CPU's plain answers."""
    kept = 0
    for seed, prompt in enumerate(PROMPTS[:n_prompts]):
        for temperature in (0.0, 0.8):
            options: dict[str, Any] = {
                "max_tokens": 40,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": seed % 2 == 0,
            }
            expected = cpu.complete(prompt, speculation=SpeculationParams(enabled=False), **options)
            for params in (
                SpeculationParams(draft_max=3),
                SpeculationParams(draft_p_min=0.3),
                SpeculationParams(lookup=True),
            ):
                found = on_gpu.complete(prompt, speculation=params, **options)
                assert (found.ids, found.text) == (expected.ids, expected.text), (prompt, params, found.speculation)
                kept += found.speculation.accepted if found.speculation is not None else 0
        # Read in one pass, the first one longer than what is kept for the assistant.
        history = cpu.tokenize(prompt if seed else "".join(PROMPTS))[:200]
        proposals = []
        for llm in (cpu, on_gpu):
            llm.reset()
            llm.prefill(history[:-1])
            assert llm.draft is not None
            sampler = Sampler(SamplerParams(temperature=0), llm.config.n_vocab)
            proposals.append(llm.draft.propose(history, 4, sampler, 0.0, False, llm.sequence).tokens)
        assert proposals[0] == proposals[1]
    assert kept > 0


@pytest.mark.parametrize("cache_type", together("assistant", ["f16", "q8_0", "q4_0"]))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_an_assistant(cache_type: str) -> None:
    same_with_an_assistant(assisted(cache_type, "cpu"), assisted(cache_type, "cuda"), 20 if cache_type == "f16" else 8)


@pytest.mark.parametrize("cache_type", together("assistant", ["f16", "q8_0"]))
@pytest.mark.usefixtures("gpu")
@pytest.mark.begin(-1)
def test_an_assistant_on_another_gpu(cache_type: str) -> None:
    from engine.cuda.runtime.driver import list_devices

    if len(list_devices()) < 2:
        pytest.skip("needs two GPUs")
    same_with_an_assistant(assisted(cache_type, "cpu"), assisted(cache_type, "cuda:0", "cuda:1"), 8)
