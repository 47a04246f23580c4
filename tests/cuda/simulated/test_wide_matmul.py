"""Products of many rows in the simulator: the bits of the mirror, whatever formats and sizes."""

import itertools
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda import backend
from engine.cuda.products import repack, warpgroup_chain, warpgroup_matmul, wide_matmul
from engine.cuda.products.quantize import block_layouts
from engine.cuda.products.unpack import unpack
from engine.cuda.runtime.plans import decode_size
from engine.cuda.runtime.simulator import run
from engine.ops.weight import Weight
from tests.cuda.simulated.test_experts import packed
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, cpu, gpu, same, weight
from tests.tiers import few

assert gpu


def product(gpu: Any, x: np.ndarray, *matrices: Weight) -> tuple[list[str], list[np.ndarray]]:
    """The kernels of a product, and its results."""
    on_device, device_weights = gpu.upload(x), [gpu.weight(w) for w in matrices]
    plan = gpu.record(lambda: gpu.matmul(on_device, *device_weights))
    gpu.start(plan)
    return [launch.kernel.name for launch in plan.launches], [gpu.download(out) for out in plan.result]


LARGE = 227 << 10
"""Bytes of shared memory that large blocks may have; those of the simulated GPU are small."""


@pytest.mark.parametrize(
    ("name", "rows", "units", "n_rows", "large"),
    few(
        [
            # Two stages, and a tile of weight rows that is not full.
            ("Q4_K", 17, 2, 21, False),
            ("Q6_K", 17, 1, 16, True),
            # Warpgroups: one plane, and a table in shared memory.
            ("Q3_K", 17, 1, 16, True),
            ("IQ3_XXS", 17, 1, 5, True),
            # Fewer units than a stage has; one more than it has, which is also the last chain.
            ("Q8_0", 17, 9, 24, True),
            ("Q4_1", 17, 3, 5, True),
            # Records of four units, and chains of two.
            ("NVFP4", 17, 12, 5, False),
            ("NVFP4", 17, 36, 5, True),
            # A stage of two units.
            ("Q1_0", 17, 3, 5, False),
            ("Q1_0", 17, 9, 21, True),
            *((name, 17, 1, 3, False) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")),
            *((name, 17, 1, 3, True) for name in ("IQ1_M", "TQ2_0", "TQ1_0")),
            # A row of gpt-oss: not a multiple of 64 positions, and a last stage that is not full.
            ("MXFP4", 17, 90, 3, False),
            ("Q5_1", 17, 26, 3, False),
            ("Q8_0", 17, 3, 24, False),
            ("Q4_1", 20, 9, 5, False),
            ("Q6_K", 17, 1, 16, False),
            ("Q2_K", 19, 1, 3, True),
            # Warpgroups: a stage that is used again, a second block of activations, and a second block of weights.
            ("Q5_K", 17, 4, 5, True),
            ("Q4_K", 130, 1, 5, True),
            ("Q6_K", 17, 1, 130, True),
        ],
        7,
    ),
)
def test_formats(gpu: Any, name: str, rows: int, units: int, n_rows: int, large: bool) -> None:
    if large:
        gpu.device.shared_memory = LARGE
    columns = units * FORMATS_BY_NAME[name].unit
    w, x = weight(FORMATS_BY_NAME[name], n_rows, columns), activations(rows, columns)
    names, (ours,) = product(gpu, x, w)
    expected = f"matmul_wide[{name}]" if large else f"matmul_wide[{name}, True]"
    if large and name in warpgroup_chain.FORMATS_OF_PLANES:
        expected = f"matmul_warpgroups[{name}, {4 if rows <= 32 else 16}, {3 if n_rows > 128 else 2}, False]"
    assert names[1:] == [expected]
    same(ours, cpu.matmul(x, w)[0])


@pytest.mark.parametrize(
    ("name", "rows", "units", "tiles", "groups", "split"),
    few(
        [
            # Blocks with two chains, with one, and with none.
            ("Q4_K", 31, 3, 4, 2, 4),
            # Stages and places of records that are used again.
            ("Q4_K", 17, 6, 4, 2, 1),
            ("Q6_K", 33, 6, 8, 3, 1),
            ("Q6_K", 64, 3, 8, 2, 2),
            ("Q5_K", 100, 2, 16, 2, 8),
            ("Q5_K", 32, 3, 4, 4, 2),
            # Chains of two units, the last with one.
            ("Q6_K", 32, 9, 4, 2, 4),
            ("Q4_K", 97, 1, 16, 2, 1),
            ("Q4_K", 66, 3, 12, 2, 2),
            ("Q6_K", 96, 4, 12, 2, 1),
            ("Q4_K", 128, 4, 16, 2, 4),
            ("Q5_K", 33, 8, 8, 3, 8),
            # Weights with an offset of 128, tables in shared memory, and minimums of 16 weights.
            ("IQ4_XS", 32, 2, 4, 2, 4),
            ("IQ3_S", 33, 2, 8, 2, 1),
            ("IQ3_XXS", 17, 1, 4, 2, 1),
            ("IQ2_XXS", 17, 1, 4, 2, 1),
            ("IQ2_XS", 65, 1, 12, 2, 1),
            ("IQ2_S", 17, 1, 4, 2, 8),
            ("IQ1_S", 17, 1, 4, 2, 1),
            ("IQ1_M", 17, 1, 4, 2, 1),
            ("Q3_K", 17, 3, 4, 2, 4),
            ("Q2_K", 97, 1, 16, 2, 1),
            ("Q2_K", 17, 2, 4, 2, 4),
        ],
        2,
    ),
)
def test_blocks_of_warpgroups(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, units: int, tiles: int, groups: int, split: int
) -> None:
    """Neither the shape of blocks nor the number of blocks that share the chains of a row shows; with a residual, or a
    second matrix in the same launch."""
    gpu.device.shared_memory = LARGE
    shape = warpgroup_chain.TileShape(tiles, groups, split)
    # A matrix whose last tile has fewer than 16 rows has a single launch.
    monkeypatch.setattr(warpgroup_matmul, "shape_of", lambda *_: shape)
    x, residual = activations(rows, units * 256), activations(rows, 21)
    matrices = [weight(FORMATS_BY_NAME[name], n, units * 256) for n in (21, 3)]
    given, before, held = gpu.upload(x), gpu.upload(residual), [gpu.weight(w) for w in matrices]
    if split > 1:
        plan = gpu.record(lambda: [gpu.matmul_add(before, given, held[0])])
        expected = [cpu.matmul_add(residual, x, matrices[0])]
    else:
        plan = gpu.record(lambda: gpu.matmul(given, *held))
        expected = cpu.matmul(x, *matrices)
    gpu.start(plan)
    names = [launch.kernel.name for launch in plan.launches]
    product_of = f"matmul_warpgroups[{name}, {tiles}, {groups}, {split > 1}]"
    assert names[1:] == [product_of] + [f"matmul_chains[{tiles}]"] * (split > 1)
    for ours, theirs in zip(plan.result, expected, strict=True):
        same(gpu.download(ours), theirs)


@pytest.mark.parametrize(
    ("matrices", "split", "expected"),
    few(
        [
            # A block with a warpgroup of each format, one of which has minimums.
            ((("Q4_K", 64), ("Q6_K", 21)), 4, ["Q4_K, 4, 2, True, Q6_K"]),
            # A single matrix is the last, also if its format is the first.
            ((("Q3_K", 5), ("Q5_K", 48), ("Q5_K", 16)), 1, ["Q5_K, 4, 2, False, Q3_K"]),
            # The matrix with whole warpgroups is the first, with a table; the last block has a warpgroup past the end.
            ((("IQ3_S", 128), ("Q4_K", 16)), 2, ["IQ3_S, 4, 2, True, Q4_K"]),
            ((("Q4_K", 21), ("Q6_K", 64)), 1, ["Q6_K, 4, 2, False, Q4_K"]),
            # No matrix has whole warpgroups; there is room for one table; there are too many matrices.
            ((("Q4_K", 21), ("Q6_K", 21)), 1, ["Q4_K, 4, 2, False", "Q6_K, 4, 2, False"]),
            ((("IQ2_S", 64), ("IQ3_S", 21)), 1, ["IQ2_S, 4, 2, False", "IQ3_S, 4, 2, False"]),
            ((*[("Q4_K", 64)] * 3, ("Q6_K", 5)), 1, ["Q4_K, 4, 2, False", "Q6_K, 4, 2, False"]),
        ],
        1,
    ),
)
def test_two_formats(
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    matrices: tuple[tuple[str, int], ...],
    split: int,
    expected: list[str],
) -> None:
    """A launch has up to three matrices of two formats, whose warpgroups may be in the same block."""
    gpu.device.shared_memory = LARGE
    shape, columns = warpgroup_chain.TileShape(4, 2, split), 512 if split > 1 else 256
    monkeypatch.setattr(warpgroup_matmul, "shape_of", lambda *_: shape)
    monkeypatch.setattr(warpgroup_matmul, "launches_of", lambda _, n, *__: ((n, shape),))
    given, x = [weight(FORMATS_BY_NAME[name], n, columns) for name, n in matrices], activations(17, columns)
    names, found = product(gpu, x, *given)
    chains = ["matmul_chains[4]"] * (split > 1)
    assert names[1:] == [each for constants in expected for each in (f"matmul_warpgroups[{constants}]", *chains)]
    for ours, theirs in zip(found, cpu.matmul(x, *given), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize(("first", "split"), few([(2, 2), (3, 1), (1, 8)], 1))
def test_two_launches(gpu: Any, monkeypatch: pytest.MonkeyPatch, first: int, split: int) -> None:
    """One with the first tiles of 16 rows, and one with the others: part of a matrix, or one and part of another."""
    gpu.device.shared_memory = LARGE
    shapes = warpgroup_chain.TileShape(4, 2), warpgroup_chain.TileShape(4, 3, split)
    monkeypatch.setattr(
        warpgroup_matmul, "launches_of", lambda rows, n, *_: ((first, shapes[0]), (n - first, shapes[1]))
    )
    x, residual = activations(17, 512), activations(17, 64)
    matrices = [weight(FORMATS_BY_NAME["Q4_K"], n, 512) for n in (64, 32)]
    given, before, held = gpu.upload(x), gpu.upload(residual), [gpu.weight(w) for w in matrices]
    plan = gpu.record(lambda: [*gpu.matmul(given, *held), gpu.matmul_add(before, given, held[0])])
    gpu.start(plan)
    expected = [*cpu.matmul(x, *matrices), cpu.matmul_add(residual, x, matrices[0])]
    assert sum(launch.kernel.kernel.name == "matmul_warpgroups" for launch in plan.launches) == 4
    for ours, theirs in zip(plan.result, expected, strict=True):
        same(gpu.download(ours), theirs)


@pytest.mark.thorough
def test_two_launches_of_two_formats(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first with tiles of one format, and the second with tiles of both, or of the other one."""
    gpu.device.shared_memory = LARGE
    shape = warpgroup_chain.TileShape(4, 2)
    x = activations(17, 256)
    given = [weight(FORMATS_BY_NAME[name], n, 256) for name, n in (("Q4_K", 64), ("Q4_K", 64), ("Q6_K", 32))]
    for first, formats in ((4, "Q4_K, 4, 2, False, Q6_K"), (8, "Q6_K, 4, 2, False")):
        monkeypatch.setattr(
            warpgroup_matmul, "launches_of", lambda _, n, *__, first=first: ((first, shape), (n - first, shape))
        )
        names, found = product(gpu, x, *given)
        assert names[1:] == ["matmul_warpgroups[Q4_K, 4, 2, False]", f"matmul_warpgroups[{formats}]"]
        for ours, theirs in zip(found, cpu.matmul(x, *given), strict=True):
            same(ours, theirs)


def test_two_formats_fit() -> None:
    """There is room for what warpgroups of two formats have in a block, and both agree where it is."""
    for first, second in (("Q2_K", "Q6_K"), ("Q4_K", "Q6_K"), ("IQ1_S", "Q6_K"), ("IQ2_S", "IQ4_XS")):
        assert warpgroup_chain.can_share(first, second)
        for tiles, groups in warpgroup_matmul.MOST_GROUPS.items():
            for split in (1, 8):
                shape = warpgroup_chain.TileShape(tiles, groups, split)
                one = warpgroup_chain.Areas(first, shape, other=second)
                other = one.of_other
                table = max(unpack(T[name], unsigned=True).table_bytes for name in (first, second))
                assert one.bytes + table <= warpgroup_chain.SHARED
                assert (one.stage, one.place, one.places, one.bytes) == (
                    other.stage,
                    other.place,
                    other.places,
                    other.bytes,
                )


def test_the_rest_of_a_product_is_shared() -> None:
    """Where a few tiles are left after as many blocks for each multiprocessor, smaller blocks share them."""
    whole, rest = warpgroup_chain.TileShape(4, 4), warpgroup_chain.TileShape(4, 2, 8)
    assert warpgroup_matmul.launches_of(32, 2176, 20, 132, 4) == ((2112, whole), (64, rest))
    assert warpgroup_matmul.launches_of(32, 1024, 20, 132, 4) == ((1024, warpgroup_chain.TileShape(4, 2)),)
    assert [count for count, _ in warpgroup_matmul.launches_of(2048, 2176, 20, 132, 16)] == [2176]


@pytest.mark.parametrize(
    ("rows", "n_rows", "units", "expected"),
    [
        (32, 24576, 16, (4, 3, 1)),
        (32, 6144, 16, (4, 3, 4)),
        (32, 4096, 48, (4, 4, 8)),
        (64, 4096, 16, (8, 2, 4)),
        (96, 4096, 16, (12, 2, 4)),
        (96, 24576, 16, (12, 2, 1)),
        (128, 4096, 16, (16, 2, 4)),
        (2048, 24576, 16, (16, 2, 1)),
        (2048, 4096, 16, (16, 2, 1)),
    ],
)
def test_shapes_for_an_h200(rows: int, n_rows: int, units: int, expected: tuple[int, int, int]) -> None:
    """Few rows have narrow blocks, and few weights are spread over all multiprocessors."""
    columns = block_layouts(rows)[0]
    shape = warpgroup_matmul.shape_of(rows, n_rows // 16, units, 132, columns)
    assert shape == warpgroup_chain.TileShape(*expected)


@pytest.mark.parametrize(
    ("rows", "n_rows", "units", "expected"),
    [
        (64, 12288, 16, (4, 3, 1)),
        (64, 24576, 16, (8, 3, 1)),
        (96, 6144, 16, (4, 3, 1)),
        (128, 4096, 16, (4, 2, 1)),
        (128, 24576, 16, (8, 3, 1)),
        (128, 4096, 48, (16, 2, 4)),
        (2048, 24576, 16, (16, 2, 1)),
    ],
)
def test_narrower_blocks(rows: int, n_rows: int, units: int, expected: tuple[int, int, int]) -> None:
    """Where blocks of fewer rows fill all multiprocessors evenly, weights are read more than once."""
    size = warpgroup_matmul.ProductSize(n_rows // 16, True)
    (((_, shape),),) = warpgroup_matmul.launches_of_all(rows, [size], units, 132, True)
    assert shape == warpgroup_chain.TileShape(*expected)
    widest = warpgroup_matmul.launches_of_all(rows, [size], units, 132, False)
    assert widest[0][0][1].tiles == block_layouts(rows)[0]


def test_rows_of_decode_passes() -> None:
    """Powers of two, and 96, for which blocks of warpgroups have columns enough."""
    assert [decode_size(n) for n in (2, 3, 17, 64, 65, 96, 97)] == [2, 4, 32, 64, 96, 96, 128]


@pytest.mark.parametrize(("rows", "n_rows", "units"), [(32, 4096, 48), (64, 4096, 16), (96, 5120, 16), (128, 6144, 16)])
def test_the_memory_of_shared_chains(rows: int, n_rows: int, units: int) -> None:
    """Is at most what loading a model counts."""
    for multiprocessors, columns in itertools.product((114, 132), block_layouts(rows)):
        shape = warpgroup_matmul.shape_of(rows, n_rows // 16, units, multiprocessors, columns)
        taken = 4 * warpgroup_matmul.chain_floats(shape, rows, n_rows // 16)
        assert shape.split == 1 or taken <= warpgroup_matmul.most_chain_bytes(rows, n_rows, multiprocessors)
        assert shape.split > 1 or columns < block_layouts(rows)[0]


def test_matrices_side_by_side(gpu: backend.Backend) -> None:
    """Matrices of one format share a launch, three at most; others do not.  Rows are those of passes of one row."""
    matrices = [
        weight(FORMATS_BY_NAME[name], n_rows, 64)
        for name, n_rows in (("Q8_0", 8), ("Q4_0", 16), ("Q8_0", 24), ("Q8_0", 1), ("Q8_0", 3))
    ]
    x = activations(17, 64)
    names, together = product(gpu, x, *matrices)
    assert names[1:] == ["matmul_wide[Q4_0, True]", "matmul_wide[Q8_0, True]", "matmul_wide[Q8_0, True]"]
    for ours, theirs in zip(together, cpu.matmul(x, *matrices), strict=True):
        same(ours, theirs)
    for ours, theirs in zip(together, product(gpu, x[16:], *matrices)[1], strict=True):
        same(ours[16:], theirs)


@pytest.mark.parametrize("block", few([wide_matmul.SMALL, wide_matmul.LARGE]))
def test_more_rows_than_a_block_has(block: wide_matmul.BlockShape) -> None:
    """Tiles of activations and of weights, where the second block has a single tile, of a second matrix; with a residual."""
    n, rows = 16 * block.row_tiles, 8 * block.tiles + 2
    entry = FORMATS_BY_NAME["Q4_0"]
    matrices = weight(entry, n, 32), weight(entry, 2, 32)
    x, residual = activations(rows, 32), activations(rows, n)
    outs = [np.full((rows, w.rows), np.nan, F) for w in matrices]
    records = [repack.repack_rows(w.format, w.data) for w in matrices]
    ends = [block.row_tiles] + [block.row_tiles + 1] * 2
    arguments: list[Any] = [*records, records[0], *outs, outs[0], residual, 1, *ends, n, 2, 0, 1, *packed(32, x), rows]
    kernel, grid, threads = wide_matmul.geometry("Q4_0", rows, ends[2], LARGE if block is wide_matmul.LARGE else 0)
    assert (grid, threads) == ((2, 2), block.threads)
    run(kernel, grid, threads, arguments)
    same(outs[0], cpu.matmul_add(residual, x, matrices[0]))
    same(outs[1], cpu.matmul_add(residual.reshape(-1)[: 2 * rows].reshape(rows, 2), x, matrices[1]))
