"""Every kernel fits on every supported GPU: shared memory, registers and threads of a block, without a GPU.

What depends on the GPU is chosen by the shared memory of a block, so all choices for many sizes are tried for each target.
``tests/cuda/test_ptx.py`` checks the other kernels, whose constants are the same everywhere, together with their PTX."""

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator does not compile", allow_module_level=True)

import engine
from engine.cache.types import CACHE_TYPES
from engine.compile.jobs import Job
from engine.cuda import compressed_attention, wide_delta_net
from engine.cuda.attention import integer_steps, integer_tile, integer_tiled, latent, tiled
from engine.cuda.products import wide_experts, wide_matmul
from engine.cuda.runtime.compiler import KERNELS, Specialization
from engine.cuda.runtime.jobs import GPUJob
from engine.cuda.target import SIZES, Target
from engine.gguf.quants import FORMATS
from tests.cuda.test_ptx import EXAMPLES
from tests.tiers import few
from tests.tiles import CHOSEN, MULTIPROCESSORS, PAGE, PLACE, Use, constants_on, table, uses

QUANTIZED = [entry.name for entry in FORMATS.values() if entry.quantized]


def latents(target: Target) -> Iterator[Specialization]:
    """Of steps, for latents of DeepSeek's sizes and others."""
    of = target.multiprocessors, target.shared_memory, True
    for rank, n_rope in ((512, 64), (256, 64), (64, 16), (448, 64), (1024, 64)):
        for n_head, half, rows in product((1, 3, 16, 20, 128), (True, False), (1, 3, 16)):
            yield latent.geometry(rows, n_head, rank, n_rope, half, 64, *of, mixed=rows == 3).attend


def compressed(target: Target) -> Iterator[Specialization]:
    """Of DeepSeek V4: in steps, and in passes of many rows."""
    of = target.multiprocessors, target.shared_memory
    for n_head, d, half, rows in product((1, 8, 64, 128), (64, 128, 512), (True, False), (1, 16, 1024)):
        yield compressed_attention.geometry(rows, n_head, d, half, 128, 8, *of, rows <= 16, rows == 16).attend


def integers(target: Target) -> Iterator[Specialization]:
    wide = target.compute_capability >= (8, 0)
    shared = target.shared_memory if wide else 0
    for d, name, group in product((32, 64, 96, 128, 192, 256, 512), ("i8", "i12"), (1, 4, 16)):
        sizes = 2 * group, 2, d, d, name
        for rows in (1, 16):
            yield integer_steps.geometry(rows, *sizes, 64, target.multiprocessors, shared, True).attend
        tile = integer_tile.tile_of(CACHE_TYPES[name], d, d, shared) if wide else None
        if tile is not None:
            yield integer_tiled.geometry(1024, 2 * group, 2, tile, d == 64, d == 96)[0]


def wide(target: Target) -> Iterator[Specialization]:
    """Of passes of many rows."""
    if target.compute_capability < (8, 0):
        return
    shared = target.shared_memory
    for name in QUANTIZED:
        yield wide_matmul.geometry(name, 4096, 1024, shared)[0]
        yield wide_experts.geometry(name, 8, 768, 2048, shared)[0]
    yield from (wide_delta_net.delta_rule(d) for d in (32, 64, 96, 128, 256))
    for d, types, gated in product((64, 80, 96, 128, 256, 512), ("f16", "f32", "q8_0", "q4_0"), (False, True)):
        if tiled.takes(CACHE_TYPES[types], CACHE_TYPES[types], d, d):
            yield tiled.geometry(1024, 8, 4, d, d, types, types, gated, shared)[0]
    for types in ("f16", "f32"):
        yield tiled.geometry(1024, 16, 1, 576, 512, types, types, False, shared, latent=True)[0]


@pytest.mark.parametrize("kernels", [latents, compressed, integers, wide])
@pytest.mark.parametrize("target", SIZES)
def test_what_is_chosen_for_a_gpu_fits(target: str, kernels: Any) -> None:
    largest, n = 0, 0
    for kernel in kernels(Target(target)):
        static = 4 * kernel.constants[5] if kernel.kernel.name == "attend_tiles" else 0
        wish = kernel.kernel.threads
        threads = wish(*kernel.constants) if callable(wish) else wish
        # A thread has at least 32 registers; how many there are is known to the assembler only.
        assert Use(threads, 32, static, kernel.shared).problems(target) == [], kernel.name
        largest, n = max(largest, static + kernel.shared), n + 1
    assert n > 40 or (target == "sm_75" and kernels is wide)
    # What is chosen for a large GPU would not fit on a small one, so this test can fail.
    if target == "sm_90":
        assert largest > SIZES["sm_86"].shared_kib << 10 or kernels is compressed


@pytest.mark.parametrize("target", few(SIZES))
@pytest.mark.parametrize(("model", "cache_type"), [("pycoder", "f16"), ("pycoder-moe-mtp", "i12"), ("pycoder", "q4_0")])
def test_the_kernels_of_a_model_fit(target: str, model: str, cache_type: str) -> None:
    """Whatever chooses them."""
    gpu = Target(target)
    llm = engine.load(model, device=gpu, n_ctx=256, parallel=2, cache_type=cache_type)
    jobs: list[Job] = llm.jobs()
    kernels = {*gpu.launched, *(KERNELS[job.name](*job.constants) for job in jobs if isinstance(job, GPUJob))}
    assert len(kernels) > 20
    for kernel in kernels:
        assert kernel.shared <= gpu.shared_memory, kernel.name
        wish = kernel.kernel.threads
        assert (wish(*kernel.constants) if callable(wish) else wish) <= 1024, kernel.name


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOSEN)
def test_the_assembler_agrees(name: str) -> None:
    """Registers and shared arrays of the kernels whose constants depend on the GPU."""
    found = list(uses(name))
    assert [target for target, _, _ in found] == [t for t in SIZES if constants_on(name, Target(t)) is not None]
    for target, constants, use in found:
        assert use.problems(target) == [] and use.blocks(target) >= 1, (target, constants)


def test_shared_arrays_are_read_from_machine_code() -> None:
    """This kernel has one, of 32 words of eight bytes; the other has none, and the same registers in the table."""
    assert {target: use.static for target, _, use in uses("argmax")} == dict.fromkeys(SIZES, 256)
    found = {target: use for target, _, use in uses("scale")}
    assert {use.static for use in found.values()} == {0}
    head, _, row = table(["scale"])
    cells = [f"{use.blocks(target)} ({use.registers}, 0)" for target, use in found.items()]
    assert row == f"| `scale` | 256 | {' | '.join(cells)} |" and head.count("|") == row.count("|")


# --- what fits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "use", "blocks"),
    [
        # As NVIDIA's cuda_occupancy.h computes it.
        ("sm_75", Use(256, 64, 0, 0), 4),
        ("sm_75", Use(64, 100, 16000, 0), 4),
        ("sm_80", Use(256, 64, 8192, 0), 4),
        ("sm_80", Use(128, 235, 0, 72704), 2),
        ("sm_86", Use(32, 40, 0, 0), 16),
        ("sm_89", Use(32, 40, 0, 0), 24),
        ("sm_86", Use(256, 40, 0, 0), 6),
        ("sm_90", Use(256, 168, 0, 0), 1),
        ("sm_90", Use(96, 168, 0, 0), 4),
        ("sm_90", Use(32, 16, 0, 227 << 10), 1),
        ("sm_100", Use(128, 32, 0, 37 << 10), 6),
        ("sm_120", Use(128, 32, 0, 49 << 10), 2),
        ("sm_120", Use(128, 32, 0, 50 << 10), 1),
    ],
)
def test_blocks_on_a_multiprocessor(target: str, use: Use, blocks: int) -> None:
    assert use.problems(target) == [] and use.blocks(target) == blocks


@pytest.mark.parametrize(
    ("target", "use", "says"),
    [
        ("sm_75", Use(256, 32, 0, (64 << 10) + 1), "65537 bytes of shared memory, of at most 65536"),
        ("sm_86", Use(256, 32, 1024, 99 << 10), "bytes of shared memory, of at most 101376"),
        ("sm_90", Use(512, 129, 0, 0), "129 registers of 512 threads, of at most 65536"),
        ("sm_90", Use(1056, 32, 0, 0), "1056 threads"),
        ("sm_90", Use(32, 32, (48 << 10) + 4, 0), "bytes of shared arrays"),
    ],
)
def test_a_kernel_that_does_not_fit(target: str, use: Use, says: str) -> None:
    (problem,) = use.problems(target)
    assert says in problem


def test_the_limits_agree_with_those_that_kernels_are_chosen_by() -> None:
    assert MULTIPROCESSORS.keys() == SIZES.keys()
    for name, of in MULTIPROCESSORS.items():
        assert SIZES[name].shared_kib << 10 == (of.shared_kib << 10) - of.reserved


def test_the_table_of_the_book_names_every_kernel() -> None:
    """Its numbers depend on the version of the assembler; ``python -m tests.tiles --write`` writes them anew."""
    found = PLACE.search(PAGE.read_text(encoding="utf-8"))
    assert found
    rows = [line.split("|") for line in found[0].splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `") for row in rows} == EXAMPLES.keys()
    assert {len(row) for row in rows} == {4 + len(SIZES)}
    assert "**" not in found[0], "a kernel does not fit"
