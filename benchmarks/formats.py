"""The speed of products in every block format beside Q4_K's; on a GPU, after a check that they have the CPU's bits.

    python -m benchmarks.formats [--device cpu] [FORMAT ...]

The matrix has 14336 rows of 4096 weights.  A product with one row is a step of an answer and limited by memory: bytes of
weights per second.  One with 512 rows (64 on the CPU) is a prompt and limited by arithmetic: operations per second.  Both
include the quantization of the activations.  On a GPU, so many copies of the matrix are read in turn that none of them stays
in a cache.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.suites.cuda import COLD, microseconds
from benchmarks.suites.operations import random_weight
from engine.compile.pool import compile_all
from engine.cpu.backend import Backend
from engine.cuda.runtime.jobs import gpu_job
from engine.devices import open_device
from engine.gguf.quants import FORMATS

N_ROWS, N_COLUMNS = 14336, 4096
PROMPT = 512
PROMPT_CPU = 64
REPEATED = 7
"""Measurements on the CPU, of which the fastest counts."""

CHECKED = (1, 5, 16, 40)
"""Activation rows of the products that are compared with the CPU's."""

SMALL = 21, 9 * 256
"""The shape of the matrix that is compared: a tile that is not full, and chains of which the last is shorter."""

BASE = "Q4_K"
"""The format that the others are compared with."""


@dataclass(frozen=True)
class Speed:
    """Microseconds of a product with one row and with the rows of a prompt."""

    name: str
    n_bytes: int
    one: float
    many: float


def names() -> list[str]:
    """The quantized formats."""
    return [entry.name for entry in FORMATS.values() if entry.quantized]


def activations(rows: int, columns: int) -> np.ndarray:
    """Random rows."""
    return np.random.default_rng(rows).standard_normal((rows, columns), np.float32)


def compile_kernels(gpu: Any, formats: Sequence[str]) -> None:
    """Compile all kernels, on all cores."""
    kernels = {}
    for name in formats:
        for shape, counts in ((SMALL, CHECKED), ((N_ROWS, N_COLUMNS), (1, PROMPT))):
            weight = gpu.weight(random_weight(name, *shape))
            for rows in counts:
                x = gpu.upload(activations(rows, shape[1]))
                plan = gpu.record(lambda x=x, weight=weight: gpu.matmul(x, weight)[0])
                kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))
    compile_all([gpu_job(kernel, gpu.device.compute_capability) for kernel in kernels])


def differing(gpu: Any, name: str) -> list[int]:
    """The numbers of activation rows for which a product has other bits than on the CPU."""
    cpu, matrix = Backend(1), random_weight(name, *SMALL)
    ours, theirs, found = gpu.weight(matrix), cpu.weight(matrix), []
    for rows in CHECKED:
        x = activations(rows, SMALL[1])
        on_device = gpu.upload(x)
        plan = gpu.record(lambda on_device=on_device: gpu.matmul(on_device, ours)[0])
        gpu.start(plan)
        if gpu.download(plan.result).tobytes() != cpu.matmul(x, theirs)[0].tobytes():
            found.append(rows)
    return found


def speed(gpu: Any, name: str) -> Speed:
    """Measure one format."""
    matrix = random_weight(name, N_ROWS, N_COLUMNS)
    weights = [gpu.weight(matrix) for _ in range(-(-COLD // matrix.data.nbytes))]
    times = []
    for rows in (1, PROMPT):
        x = gpu.upload(activations(rows, N_COLUMNS))

        def work(x: Any = x) -> None:
            for weight in weights:
                gpu.matmul(x, weight)

        times.append(microseconds(gpu, work, len(weights)))
    return Speed(name, matrix.data.nbytes, *times)


def cpu_speed(cpu: Backend, name: str) -> Speed:
    """Measure one format on the CPU."""
    matrix = random_weight(name, N_ROWS, N_COLUMNS)
    weight, times = cpu.weight(matrix), []
    for rows in (1, PROMPT_CPU):
        x, spent = activations(rows, N_COLUMNS), []
        for _ in range(REPEATED + 1):  # the first compiles
            started = time.perf_counter()
            cpu.matmul(x, weight)
            spent.append(time.perf_counter() - started)
        times.append(1e6 * min(spent[1:]))
    return Speed(name, matrix.data.nbytes, *times)


def table(speeds: Sequence[Speed], prompt: int) -> list[str]:
    """The lines of a Markdown table.  prompt: rows of the larger product."""
    base = next(each for each in speeds if each.name == BASE)
    lines = [
        f"| format | bits | one row, µs | GB/s | time of {BASE} | {prompt} rows, µs | TOP/s | time of {BASE} |",
        "| --- " + "| ---: " * 7 + "|",
    ]
    for each in speeds:
        weights = N_ROWS * N_COLUMNS
        cells = (
            *(each.name, f"{8 * each.n_bytes / weights:.2f}"),
            *(f"{each.one:.1f}", f"{each.n_bytes / each.one / 1e3:.0f}", f"{each.one / base.one:.2f}"),
            *(f"{each.many:.0f}", f"{2e-6 * prompt * weights / each.many:.3g}", f"{each.many / base.many:.2f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("formats", nargs="*", default=names(), help="formats such as IQ3_S (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to measure (cuda)")
    args = parser.parse_args()
    formats = list(dict.fromkeys([BASE, *args.formats]))
    if args.device == "cpu":
        cpu = Backend()
        print(f"{cpu.n_threads} threads\n")
        print("\n".join(table([cpu_speed(cpu, name) for name in formats], PROMPT_CPU)))
        return
    gpu: Any = open_device("cuda")
    compile_kernels(gpu, formats)
    for name in formats:
        rows = differing(gpu, name)
        print(f"{name}: {f'other bits than on the CPU for {rows} rows' if rows else 'the bits of the CPU'}", flush=True)
    print()
    print("\n".join(table([speed(gpu, name) for name in formats], PROMPT)))


if __name__ == "__main__":
    main()
