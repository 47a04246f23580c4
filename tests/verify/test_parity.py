"""``python -m engine.parity``, the parts that need no GPU; ``tests/cuda/simulated/test_parity.py`` runs it on a
simulated one."""

import os
from typing import Any

import numpy as np
import pytest

from engine import devices, parity
from engine.cache.spec import LayerMemory
from engine.cpu.products.repack import make_records
from engine.cpu.products.unpack import UNPACK
from engine.errors import DeviceError
from engine.gguf.quants import FORMATS
from engine.ops.weight import Weight
from engine.verify import passes
from tests.pages import layer_of
from tests.tiers import few

Capture = pytest.CaptureFixture[str]


def sentence(capsys: Capture) -> str:
    """The only line on stderr of a run that wrote nothing to stdout: an error of one sentence."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("error: ")
    return str(line)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-p", "0"], "-p must be 1 or more, not 0"),
        (["-n", "-1"], "-n must be 0 or more, not -1"),
        (["-p", "many"], "-p must be a whole number, not 'many'"),
        (["--device", "cpu"], "--device is the GPU to compare with the CPU"),
        (["--device", "gpu"], "device 'gpu' is unknown"),
        (["--sed", "1"], "did you mean --seed?"),
        (["a.gguf", "b.gguf"], "unexpected argument 'b.gguf'"),
        (["a.gguf", "-m", "b.gguf"], "MODEL and -m are both given"),
        (["-s", "-1"], "-s must be 0 to 18446744073709551615, not -1"),
        (["-ct", "f8"], "-ct must be f32, f16, q8_0, q4_0, i12 or i8, not 'f8'"),
        (["-b", "4097"], "-b must be 0 to 4096, not 4097"),
        (["--device", "simulator"], "run python -m tests.cuda.simulated.parity"),
    ],
)
def test_bad_flags(words: list[str], says: str, capsys: Capture) -> None:
    assert parity.main(words) == 2
    assert says in sentence(capsys)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The sentence says what is missing, and does not advise to use the CPU."""

    def missing(index: int, *given: Any) -> Any:
        raise DeviceError("no NVIDIA driver was found on this machine; install one, or use --device cpu.")

    monkeypatch.setattr(devices, "_gpu", missing)
    for words in ([], ["--device", "auto"], ["no.gguf", "-p", "5"]):
        assert parity.main(words) == 2
        assert sentence(capsys) == (
            "error: bitmirror parity compares the CPU with an NVIDIA GPU, and there is none to use: "
            "no NVIDIA driver was found on this machine; install one"
        )


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "the NVIDIA driver sees no GPU on this machine; use --device cpu.",
            "the NVIDIA driver sees no GPU on this machine",
        ),
        ("install it with pip, or use --device cpu.", "install it with pip"),
        (
            "there is no cuda:3 on this machine; use cuda:0 (bitmirror run --list-devices lists them), or cpu.",
            "there is no cuda:3 on this machine; use cuda:0.",
        ),
        (
            "choose a smaller context (-c), a smaller model, or --device cpu.",
            "choose a smaller context (-c) or a smaller model",
        ),
    ],
)
def test_advice_fits_a_comparison(message: str, advice: str) -> None:
    assert parity.without_cpu(DeviceError(message)) == advice


def test_bad_models(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(devices, "_gpu", lambda *given: None)
    assert parity.main(["/no/such/model.gguf"]) == 2
    assert "/no/such/model.gguf" in sentence(capsys)
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    assert parity.main(["-c", "100"]) == 2
    assert sentence(capsys) == "error: -c must be 0 or at least 400, for 200 + 200 tokens, not 100"


@pytest.mark.parametrize("n", [1, 5, 16, 17, 40, 135, 136, 137, 200, 1000])
def test_sizes(n: int) -> None:
    found = passes.sizes(n)
    assert sum(found) == n and set(found) <= set(range(1, 17))
    if n >= 136:
        assert set(found) == set(range(1, 17))
    ids = list(range(n))
    batches = list(passes.passes(ids, found))
    assert [len(tokens) for tokens, _ in batches] == found
    assert [int(t) for tokens, _ in batches for t in tokens] == [int(p) for _, places in batches for p in places] == ids


@pytest.mark.parametrize(
    ("most", "n", "expected"),
    [
        (16, 100, []),
        (1024, 16, []),
        (1024, 17, [17]),
        (1024, 20, [17, 3]),
        (1024, 700, [420, 17, 263]),
        (100, 700, [100, 17, 100, 100, 100, 100, 100, 83]),
    ],
)
def test_sizes_of_few_passes(most: int, n: int, expected: list[int]) -> None:
    assert passes.wide_sizes(most, n) == expected


# --- what needs the GPU's packages, but no GPU -------------------------------------------------------------------


@pytest.fixture
def lockstep() -> Any:
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("runs outside of the simulator")
    from engine.verify import lockstep

    return lockstep


@pytest.fixture
def layout(lockstep: Any) -> Any:
    from engine.verify import layout

    return layout


def test_a_check_counts_and_shows_bits(lockstep: Any) -> None:
    cpu = np.array([[0.0, 1.0, np.nan], [2.0, 3.0, 4.0]], np.float32)
    gpu = np.array([[-0.0, 1.0, np.nan], [2.0, 3.0, 5.0]], np.float32)
    check = lockstep.Check("result", cpu, gpu)
    assert check.values == 6
    assert check.differing.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert check.show().splitlines() == [
        "result[0, 0] differs, as do 2 of 6 values in all:",
        "  CPU  0x00000000  0.0",
        "  GPU  0x80000000  -0.0",
    ]
    seen = lockstep.Check("result", cpu, gpu, np.array([[False], [True]]))
    assert seen.values == 3 and seen.show().startswith("result[1, 2] differs, as do 1 of 3 values")
    halves = lockstep.Check("key", np.array([1.5], np.float16), np.array([1.5009765625], np.float16))
    assert halves.show().splitlines()[1:] == ["  CPU  0x3e00  1.5", "  GPU  0x3e01  1.501"]


@pytest.mark.parametrize("types", few(["f16 f16", "q8_0 q4_0", "f32 f32", "q4_0 f32", "f16 q8_0"], 2))
def test_parts_of_chunks_join_to_the_whole(layout: Any, types: str) -> None:
    """A chunk's part follows from the mirror's result over all chunks: here the parts are joined in float64."""
    from engine.cache.kv import AttentionCacheSpec
    from engine.cache.types import Types, cache_type
    from engine.cpu.backend import Backend
    from engine.cpu.quantized_cache import rotate_rows

    rng = np.random.default_rng(1)
    rows, n_head, n_kv, d, ops = 3, 4, 2, 32, Backend(1)
    positions = np.array([130, 131, 132], np.int32)
    q, k, v = (
        rng.normal(size=(n, heads, d)).astype(np.float32) for n, heads in ((rows, n_head), (133, n_kv), (133, n_kv))
    )
    for window in (0, 69):
        cache = layer_of(AttentionCacheSpec(n_kv, d, d), 192, 1, Types(*map(cache_type, types.split())), ops.zeros)
        ops.append(cache, k, v, np.arange(133, dtype=np.int32))
        whole = ops.attend(q, cache, positions, 0.5, window).reshape(rows, n_head, d)
        mass = np.zeros((rows, n_head, 3, 2), np.float32)
        sums = np.zeros((rows, n_head, 3, d), np.float32)
        seen = np.zeros((rows, 3), np.bool_)
        integers, scales = ops.int8_queries(q, 0.5, cache.k_type)
        words = (memory.reshape(n_kv, 3, -1).view(np.uint32) for memory in (cache.keys, cache.values))
        given = (*words, positions, cache.table[0], np.float32(0.5), window)
        layout.chunk_parts(cache.k_type.bits, cache.v_type.bits)(q, integers, scales, *given, mass, sums, seen)
        assert seen.sum(1).tolist() == ([3, 3, 3] if window == 0 else [3, 3, 2])
        m, part, values_of = (np.where(seen[:, None, :], a, 0).astype(float) for a in (mass[..., 0], mass[..., 1], 1))
        factor = np.exp(m - np.where(seen[:, None, :], m, -np.inf).max(2, keepdims=True)) * values_of
        joined = (factor[..., None] * sums).sum(2) / (factor * part).sum(2)[..., None]
        if cache.v_type.quantized:
            joined = joined.astype(np.float32)
            rotate_rows(joined.reshape(-1, d), 0, rows * n_head)
        assert np.abs(joined - whole).max() < 1e-6


def contents(layer: LayerMemory[np.ndarray], length: int) -> list[np.ndarray]:
    """Keys and values that the token at position ``length`` can see."""
    return [array for _, array in layer.contents(length, np.asarray)]


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("i12", "i12")])
@pytest.mark.parametrize("window", [0, 5, 100])
def test_pages_of_two_memories(layout: Any, window: int, types: tuple[str, str]) -> None:
    """The visible positions are the same whatever the pages and their number, and whichever pages they are copied to."""
    from engine.cache.kv import AttentionCacheSpec
    from engine.cache.types import Types, cache_type
    from engine.cpu.backend import Backend

    rng, ops = np.random.default_rng(0), Backend(1)
    length, shape = 400, AttentionCacheSpec(2, 32, 64, window)
    k, v = (rng.normal(size=(length, 2, d)).astype(np.float32) for d in (32, 64))
    layers = []
    for seed, max_rows in enumerate((16, 128)):
        layer = layer_of(shape, 512, max_rows, Types(*map(cache_type, types)), ops.zeros, seed=seed)
        for first in range(0, length, max_rows):
            at = np.arange(first, min(first + max_rows, length), dtype=np.int32)
            ops.append(layer, k[at], v[at], at)
        layers.append(layer)
    small, large = layers
    assert (small.pages < large.pages) == (window > 0)
    expected = contents(small, length)
    if types == ("f32", "f32"):
        first = length - window if window else 0
        assert all(a.tobytes() == b[first:].tobytes() for a, b in zip(expected, (k, v), strict=True))
    moved = large.placed_like(small, length, np.asarray)
    assert moved.keys.shape == small.keys.shape and moved.values.shape == small.values.shape
    for layer in (large, moved):
        for mine, theirs in zip(contents(layer, length), expected, strict=True):
            assert mine.tobytes() == theirs.tobytes() and mine.size


@pytest.mark.parametrize("name", UNPACK)
def test_records_are_turned_back_into_rows(layout: Any, name: str) -> None:
    """Rows of a file, of several stacked matrices, whose last groups of eight are not full."""
    (entry,) = (entry for entry in FORMATS.values() if entry.name == name)
    columns, count = 2 * entry.block, 3
    data = np.random.default_rng(0).integers(0, 256, (count * 13, entry.row_bytes(columns)), dtype=np.uint8)
    weight = Weight("w", entry, columns, data)
    records = make_records(weight, count, lambda kernel, *given, items: kernel(*given, 0, items))
    for first, last in ((0, 39), (0, 16), (5, 6), (12, 14), (25, 39), (32, 48)):
        assert np.array_equal(layout.rows_of(records, first, last), data[first:last])
