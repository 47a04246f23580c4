"""What each kernel takes of a multiprocessor, for every kind of GPU, found without one: registers, shared memory, and how
many blocks fit.

    python -m tests.tiles                     the table, in Markdown
    python -m tests.tiles --write             the table into docs/tiles.md
    python -m tests.tiles rope matmul_wide    these kernels only

NVIDIA's assembler reports registers, the machine code has the size of shared arrays, and kernels say how much dynamic shared
memory they need.
"""

import argparse
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cuda.runtime.compiler import Specialization, link
from engine.cuda.target import SIZES, Target

PAGE = Path(__file__).parent.parent / "docs" / "tiles.md"
PLACE = re.compile(r"(<!-- tiles -->\n).*(<!-- end of tiles -->)", re.DOTALL)

REGISTERS = 1 << 16
"""Registers of a multiprocessor, and the most of a block."""

WARP_REGISTERS = 256
"""Registers are given to warps in multiples of this number."""

PARTS = 4
"""Parts of a multiprocessor, each of which has warps and registers of its own."""


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on a multiprocessor share: ``shared_kib`` of shared memory, given in units of ``unit`` bytes, of which
    the driver takes ``reserved`` bytes for each block; and the most ``warps`` and ``blocks``."""

    shared_kib: int
    warps: int
    blocks: int
    unit: int = 128
    reserved: int = 1024


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(64, 32, 16, unit=256, reserved=0),
    "sm_80": Multiprocessor(164, 64, 32),
    "sm_86": Multiprocessor(100, 48, 16),
    "sm_89": Multiprocessor(100, 48, 24),
    "sm_90": Multiprocessor(228, 64, 32),
    "sm_100": Multiprocessor(228, 64, 32),
    "sm_120": Multiprocessor(100, 48, 24),
}
"""Sources: NVIDIA's CUDA C++ Programming Guide, table of technical specifications, and ``cuda_occupancy.h`` of CUDA 13."""

WIDE = {"attend_integers", "attend_tiles", "couple", "delta_rule", "matmul_experts_wide", "matmul_wide"}
"""Kernels of passes of more rows than a step, which copy to shared memory while they compute; 7.5 does not support that."""


@dataclass(frozen=True)
class Use:
    """What a block takes: threads, registers of each, static and dynamic shared memory, and bytes that each thread spills."""

    threads: int
    registers: int
    static: int
    dynamic: int
    spilled: int = 0

    def problems(self, target: str) -> list[str]:
        """Why the kernel cannot run on a target; empty if it can."""
        most, problems = SIZES[target].shared_kib << 10, []
        if self.threads > 1024:
            problems.append(f"{self.threads} threads, of at most 1024")
        if self.registers * self.threads > REGISTERS:
            problems.append(f"{self.registers} registers of {self.threads} threads, of at most {REGISTERS}")
        if self.static > 48 << 10:
            problems.append(f"{self.static} bytes of shared arrays, of at most {48 << 10}")
        if self.static + self.dynamic > most:
            problems.append(f"{self.static + self.dynamic} bytes of shared memory, of at most {most}")
        return problems

    def blocks(self, target: str) -> int:
        """How many blocks fit on a multiprocessor of a target."""
        of, warps = MULTIPROCESSORS[target], -(-self.threads // 32)
        by_registers = PARTS * (REGISTERS // PARTS // _rounded(32 * self.registers, WARP_REGISTERS)) // warps
        shared = _rounded(self.static + self.dynamic + of.reserved, of.unit)
        by_shared = (of.shared_kib << 10) // shared if shared else of.blocks
        return min(of.blocks, of.warps // warps, by_registers, by_shared)


def _rounded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def assembled(ptx: str, target: tuple[int, int]) -> tuple[str, bytes]:
    """The assembler's report on registers and memory, and the machine code.  Raises DeviceError if it rejects the PTX."""
    code, report = link(ptx, target, "-Xptxas=-v")
    return report, code


def shared_arrays(code: bytes, target: str) -> int:
    """Bytes of the shared arrays of a kernel's machine code, an ELF file: the size of its section ``.nv.shared``.  From 9.0
    on it has what the driver reserves, too."""
    start, (size, count, names) = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<HHH", code, 58)
    # Of each section: where its name begins, where its contents begin, and how large they are.
    sections = [struct.unpack_from("<I20xQQ", code, start + k * size) for k in range(count)]
    text = sections[names][1]
    found = [n for name, _, n in sections if code[text + name :].startswith(b".nv.shared.")]
    compute_capability = Target(target).compute_capability
    return max(0, sum(found) - MULTIPROCESSORS[target].reserved * (compute_capability >= (9, 0)))


def use_of(specialization: Specialization, report: str, code: bytes, target: str) -> Use:
    """What a block of a kernel takes, from the assembler's report and the machine code."""
    wish = specialization.kernel.threads
    threads = wish(*specialization.constants) if callable(wish) else wish
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    assert registers and spilled, report
    static = shared_arrays(code, target)
    return Use(threads or 1024, int(registers[1]), static, specialization.shared, int(spilled[1]))


# --- which kernels -----------------------------------------------------------------------------------------------


def _tiles(target: Target) -> tuple[Any, ...]:
    from engine.cuda.attention import tiled

    return tiled.geometry(1024, 32, 8, 128, 128, "f16", "f16", False, target.shared_memory)[0].constants


def _integers(target: Target) -> tuple[Any, ...]:
    from engine.cache.types import CACHE_TYPES
    from engine.cuda.attention import integer_tile, integer_tiled

    tile = integer_tile.tile_of(CACHE_TYPES["i8"], 128, 128, target.shared_memory)
    assert tile is not None
    return integer_tiled.geometry(1024, 32, 8, tile, False, False)[0].constants


def _integer_chunks(target: Target) -> tuple[Any, ...]:
    from engine.cuda.attention import integer_steps

    shared = target.shared_memory if target.compute_capability >= (8, 0) else 0
    sizes = 1, 32, 8, 128, 128, "i8", 64, target.multiprocessors, shared, True
    return integer_steps.geometry(*sizes).attend.constants


def _chunks(target: Target) -> tuple[Any, ...]:
    from engine.cuda.attention import attend

    of = True, 64, target.multiprocessors, True
    return attend.geometry(1, 32, 8, 128, 128, *of).attend.constants


def _in_place(target: Target) -> tuple[Any, ...]:
    from engine.cuda.attention import direct

    sizes = 1, 32, 8, 128, 128, "q8_0", "q8_0", 64
    return direct.geometry(*sizes, multiprocessors=target.multiprocessors, early=True).attend.constants


def _latents(target: Target) -> tuple[Any, ...]:
    from engine.cuda.attention import latent

    sizes = 1, 128, 512, 64, True, 64, target.multiprocessors, target.shared_memory, True
    return latent.geometry(*sizes).attend.constants


def _compressed(rows: int) -> Callable[[Target], tuple[Any, ...]]:
    def chosen(target: Target) -> tuple[Any, ...]:
        from engine.cuda import compressed_attention

        sizes = rows, 64, 512, True, 128, 8, target.multiprocessors, target.shared_memory
        return compressed_attention.geometry(*sizes, rows <= 16, False).attend.constants

    return chosen


def _wide_matmul(target: Target) -> tuple[Any, ...]:
    from engine.cuda.products import wide_matmul

    return wide_matmul.geometry("Q4_K", 4096, 1024, target.shared_memory)[0].constants


def _wide_experts(target: Target) -> tuple[Any, ...]:
    from engine.cuda.products import wide_experts

    return wide_experts.geometry("Q4_K", 8, 768, 2048, target.shared_memory)[0].constants


CHOSEN: dict[str, Callable[[Target], tuple[Any, ...]]] = {
    "attend_chunks": _chunks,
    "attend_compressed": _compressed(1024),
    "attend_compressed_chunks": _compressed(1),
    "attend_in_place": _in_place,
    "attend_integer_chunks": _integer_chunks,
    "attend_integers": _integers,
    "attend_latents": _latents,
    "attend_tiles": _tiles,
    "matmul_experts_wide": _wide_experts,
    "matmul_wide": _wide_matmul,
}
"""Kernels whose constants depend on the GPU, and how they are chosen for one: for heads of 128 elements, 32 heads with 8 for
keys and values, and of latents for the sizes of DeepSeek's models."""


def constants_on(name: str, target: Target) -> tuple[Any, ...] | None:
    """The constants of a kernel on a target; None if it is not used there."""
    from engine.cuda.runtime.compiler import KERNELS
    from tests.cuda.test_ptx import EXAMPLES

    if KERNELS[name].target not in (None, target.compute_capability):
        return None
    if target.compute_capability < (8, 0) and name in {*WIDE, "attend_compressed"}:
        return None
    return CHOSEN[name](target) if name in CHOSEN else EXAMPLES[name][0]


def uses(name: str) -> Iterator[tuple[str, tuple[Any, ...], Use]]:
    """(target, constants, what a block takes) of a kernel on each target that uses it."""
    from engine.cuda.runtime.compiler import KERNELS, Intermediate, intermediate

    compiled: dict[tuple[Any, ...], Intermediate] = {}
    for target in map(Target, SIZES):
        constants = constants_on(name, target)
        if constants is not None:
            specialization = KERNELS[name](*constants)
            if constants not in compiled:
                compiled[constants] = intermediate(specialization)
            capability = target.compute_capability
            report, code = assembled(compiled[constants].ptx(capability), capability)
            yield target.name, constants, use_of(specialization, report, code, target.name)


# --- the table ---------------------------------------------------------------------------------------------------


def row(name: str) -> str:
    """The row of a kernel: for each target the blocks on a multiprocessor, registers, and KiB of shared memory of a block."""
    found = {target: use for target, _, use in uses(name)}
    threads = sorted({use.threads for use in found.values()})
    cells = [f"`{name}`", " or ".join(map(str, threads))]
    for target in SIZES:
        use = found.get(target)
        cells.append("-" if use is None else _cell(use, target))
    return f"| {' | '.join(cells)} |"


def _cell(use: Use, target: str) -> str:
    kib = (use.static + use.dynamic) / 1024
    shared = str(math.ceil(kib)) if not kib or kib > 10 else f"{math.ceil(10 * kib) / 10}"
    spilled = f", {use.spilled} spilled" if use.spilled else ""
    wrong = f" **{'; '.join(use.problems(target))}**" if use.problems(target) else ""
    return f"{use.blocks(target)} ({use.registers}, {shared}{spilled}){wrong}"


def table(names: Sequence[str]) -> Iterator[str]:
    """The lines of the table of some kernels."""
    yield f"| kernel | threads | {' | '.join(SIZES)} |"
    yield f"| --- | ---: |{' ---: |' * len(SIZES)}"
    for name in names:
        yield row(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the book."""
    from tests.cuda.test_ptx import EXAMPLES

    parser = argparse.ArgumentParser("python -m tests.tiles", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="default: all")
    args = parser.parse_args(argv)
    lines = []
    for line in table(args.names or list(EXAMPLES)):
        print(line, flush=True)
        lines.append(line)
    if args.write:
        text = PAGE.read_text(encoding="utf-8")
        new = "\n".join(lines) + "\n"
        PAGE.write_text(PLACE.sub(lambda found: found[1] + new + found[2], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
