"""The time of products of prompts on a GPU: matrices and experts, by warps and, where a GPU has them, by warpgroups.

    python -m benchmarks.prompt_products [--rows 2048] [Q4_K:24576x4096 ...] [qwen3-30b-a3b ...]

A product is a matrix, FORMAT:ROWSxCOLUMNS, or a layer of experts of ``benchmarks.mixtures``.  The kernels are those of the
backend; each is repeated and timed on its own, whatever its inputs contain.  Both ways must give the same bits.  Operations
are two for each weight that a row uses.
"""

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.mixtures import MODELS, experts_of
from benchmarks.suites.cuda import plan_microseconds
from benchmarks.suites.operations import random_weight
from engine.cuda.products import warpgroup_chain
from engine.cuda.runtime.tensor import Plan
from engine.devices import open_device

PRODUCTS = "Q4_K:24576x4096", "Q6_K:4096x12288", "qwen3-30b-a3b"
REPEATED = 8
"""The launches of a kernel in the graph that is timed."""


def matrix(gpu: Any, name: str, rows: int) -> tuple[Callable[[], Any], float]:
    """What records the product with a matrix, and its operations."""
    entry, _, shape = name.partition(":")
    n_rows, columns = map(int, shape.split("x"))
    weight = gpu.weight(random_weight(entry, n_rows, columns))
    x = gpu.upload(np.random.default_rng(0).standard_normal((rows, columns), np.float32))
    return lambda: gpu.matmul(x, weight)[0], 2.0 * rows * n_rows * columns


def mixture(gpu: Any, name: str, rows: int) -> tuple[Callable[[], Any], float]:
    """What records a layer of experts, from the router to the sum, and the operations of its experts."""
    model = MODELS[name]
    experts = experts_of(gpu, model)[0]()
    x = gpu.upload(np.random.default_rng(0).standard_normal((rows, model.n_embd), np.float32))
    used = model.n_used + model.shared
    return lambda: gpu.experts(experts, None, x), 6.0 * rows * used * model.n_embd * model.n_ff


def times(gpu: Any, record: Callable[[], Any]) -> tuple[list[tuple[str, float]], float, bytes]:
    """The kernels and their microseconds, the microseconds of all together, and the result."""
    plan = gpu.record(record)
    together = plan_microseconds(gpu, plan, 1)
    found, kernels = gpu.download(plan.result).tobytes(), []
    for launch in plan.launches:
        repeated = Plan([launch] * REPEATED, None, plan.devices)
        kernels.append((launch.kernel.name, plan_microseconds(gpu, repeated, REPEATED)))
    return kernels, together, found


def measure(gpu: Any, name: str, rows: int) -> list[str]:
    """Lines of the table."""
    record, operations = (matrix if ":" in name else mixture)(gpu, name, rows)
    ways, lines, results = {"warps": False, "warpgroups": True}, [], set()
    for way, warpgroups in ways.items():
        with patch.object(warpgroup_chain, "takes", warpgroup_chain.takes if warpgroups else lambda *_: False):
            kernels, together, found = times(gpu, record)
        results.add(found)
        lines += [f"| {name} | {way} | `{kernel}` | {time:.1f} | |" for kernel, time in kernels]
        lines.append(f"| {name} | {way} | all | {together:.1f} | {operations / together / 1e6:.0f} |")
    if len(results) > 1:
        raise SystemExit(f"{name}: warps and warpgroups give different bits")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("products", nargs="*", default=list(PRODUCTS), help=f"matrices, or {', '.join(MODELS)}")
    parser.add_argument("--rows", type=int, default=2048, help="of the prompt (2048)")
    args = parser.parse_args()
    gpu = open_device("cuda", max_rows=args.rows)
    print("| product | by | kernel | µs | TOPS |\n| --- | --- | --- | ---: | ---: |")
    for name in args.products:
        print("\n".join(measure(gpu, name, args.rows)), flush=True)


if __name__ == "__main__":
    main()
