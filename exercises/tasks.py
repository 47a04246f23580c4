"""Ten kernels to write, and their checks: bits against the engine, in Numba's simulator."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

if find_spec("numba_cuda") is None or find_spec("greenlet") is None:
    sys.exit("Kernels run in Numba's simulator, which needs packages: pip install -e '.[dev]'.")
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cpu.backend import Backend
from engine.cpu.products.quantize import quantize_rows
from engine.cuda.intrinsics import SIMULATED, exp, fma
from engine.cuda.runtime.simulator import run
from engine.gguf.quants import FORMATS
from engine.ops.activation import SWIGLU
from engine.ops.weight import Weight
from engine.synthetic.model import random_blocks
from exercises.stub import Unwritten

FOLDER = Path(__file__).parent
F = np.float32


@dataclass(frozen=True)
class Run:
    """A launch: what it computes, in words; blocks and threads; arguments; and the expected content of some of them."""

    what: str
    blocks: int
    threads: int
    arguments: list[Any]
    expected: dict[int, np.ndarray]


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Random float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def unset(n: int, dtype: type = F) -> np.ndarray:
    """An array of bytes 0xFF, which no kernel should leave there."""
    return np.full(n * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)


def _add() -> Iterator[Run]:
    for n in (1, 128, 300):
        x, y = numbers(n, n), numbers(n + 1, n)
        yield Run(f"n = {n}", -(-n // 128), 128, [x, y, unset(n), n], {2: Backend(1).add(x, y, 1.0)})


def _gate() -> Iterator[Run]:
    for n in (5, 300):
        g, u = 4 * numbers(n, n), numbers(n + 1, n)
        expected = Backend(1).activate(SWIGLU, g[None], u[None])[0]
        yield Run(f"n = {n}", -(-n // 128), 128, [g, u, unset(n), n], {2: np.asarray(expected)})


def _blend() -> Iterator[Run]:
    for n in (3, 200):
        a, x, y = (numbers(n + k, n) for k in range(3))
        expected = np.array([fma(*three) for three in zip(a, x, y, strict=True)], F)
        yield Run(f"n = {n}", 1, 64, [a, x, y, unset(n), n], {3: expected})


def halves(x: np.ndarray) -> np.ndarray:
    """The sums of the last axis, in halves."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def _warp_sums() -> Iterator[Run]:
    for n in (32, 256):
        x = numbers(n, n)
        yield Run(f"{n // 32} warps", 1, n, [x, unset(n // 32), n], {1: halves(x.reshape(-1, 32))})


def _choose() -> Iterator[Run]:
    for n in (1, 3, 64, 1000):
        x = numbers(n, n)
        yield Run(f"n = {n}", 1, 64, [x, unset(1, np.int32), n], {1: np.array([x.argmax()], np.int32)})
    x = np.repeat(numbers(1, 250), 4)
    x[[130, 66, 700]] = 9
    yield Run("three that are equal", 1, 64, [x, unset(1, np.int32), 1000], {1: np.array([66], np.int32)})


def _rms_norm() -> Iterator[Run]:
    one = np.zeros(2000, F)
    one[5::256] = numbers(14, 8)  # a single chain, whose roundings show in the result
    for what, x in (("n = 300", numbers(1, 300)), ("n = 700", numbers(2, 700)), ("one chain", one)):
        weight = numbers(3, x.size)
        expected = Backend(1).rms_norm(x[None], weight, 1e-6)[0]
        yield Run(what, 1, 256, [x, weight, unset(x.size), x.size, F(1e-6)], {2: np.asarray(expected)})


def _rotate() -> Iterator[Run]:
    for heads, d in ((1, 64), (3, 32)):
        x, angles = numbers(d, heads, d), np.arange(d // 2) * 0.7
        cos, sin = np.cos(angles).astype(F), np.sin(angles).astype(F)
        expected = x.copy()
        for h in range(heads):
            for i in range(d // 2):
                a, b = x[h, i], x[h, i + d // 2]
                expected[h, i] = fma(a, cos[i], -(b * sin[i]))
                expected[h, i + d // 2] = fma(a, sin[i], b * cos[i])
        yield Run(f"{heads} heads of {d}", heads, d // 2, [x.copy(), cos, sin, d // 2], {0: expected})


def _quantize() -> Iterator[Run]:
    x = numbers(3, 3, 256)
    x[1] = 0
    x[2, :3] = 127, 0.5, -1.5  # the factor is 1, and ties go to even numbers
    x[2, 3:] = np.clip(x[2, 3:], -126, 126)
    q, d, sums = np.empty((1, 768), np.int8), np.empty((1, 3), F), np.empty((1, 24), np.int32)
    quantize_rows(x.reshape(1, 768), 256, q, d, sums, 0, 3)
    yield Run("three units", 3, 256, [x, unset(768, np.int8), unset(3)], {1: q[0], 2: d[0]})


def _product() -> Iterator[Run]:
    for rows, units in ((40, 9), (8, 16)):
        blocks = random_blocks(T.Q8_0, rows * units, 0.1, np.random.PCG64(rows)).reshape(rows, -1)
        x, cpu = numbers(rows, 1, 32 * units), Backend(1)
        (expected,) = cpu.matmul(x, cpu.weight(Weight("w", FORMATS[T.Q8_0], 32 * units, blocks)))
        q, d, sums = np.empty((1, 32 * units), np.int8), np.empty((1, units), F), np.empty((1, units), np.int32)
        quantize_rows(x, 32, q, d, sums, 0, units)
        arguments: list[Any] = [blocks.view(np.int8), q, d, unset(rows), rows, units]
        yield Run(f"{rows} rows of {units} units", -(-rows // 32), 32, arguments, {3: np.asarray(expected[0])})


def _chunk() -> Iterator[Run]:
    for n in (1, 41, 63, 64):  # with 41 and 63 positions, sums in other orders differ
        scores, values = 3 * numbers(n, 64), numbers(n + 1, 64, 64)
        top = scores[:n].max()
        weights = np.zeros(64, F)
        weights[:n] = [exp(score - top) for score in scores[:n]]
        o = np.zeros(64, F)
        for j in range(n):
            o[:] = [fma(weights[j], value, before) for value, before in zip(values[j], o, strict=True)]
        expected = np.concatenate([o, np.array([top, halves(weights)], F)])
        yield Run(f"{n} positions", 1, 64, [scores[:n].copy(), values[:n].copy(), unset(66), n], {2: expected})


TASKS: dict[str, Callable[[], Iterator[Run]]] = {
    "add": _add,
    "gate": _gate,
    "blend": _blend,
    "warp_sums": _warp_sums,
    "choose": _choose,
    "rms_norm": _rms_norm,
    "rotate": _rotate,
    "quantize": _quantize,
    "product": _product,
    "chunk": _chunk,
}
"""The launches that check each kernel."""


def load(folder: str, name: str) -> ModuleType:
    """A module of ``kernels`` or ``solutions``."""
    return importlib.import_module(f"exercises.{folder}.{name}")


def check(name: str, folder: str = "kernels") -> tuple[bool, str]:
    """Run a kernel: whether all of its bits are those of the engine, and a sentence about it."""
    if not SIMULATED:
        sys.exit("These checks run in Numba's simulator: python -m exercises check k1, in a process of its own.")
    step = getattr(load(folder, name), name)()
    for case in TASKS[name]():
        for seed in (None, 1):  # threads in order, then in a shuffled order, which shows where a syncthreads is missing
            arguments = [a.copy() if isinstance(a, np.ndarray) else a for a in case.arguments]
            try:
                run(step, case.blocks, case.threads, arguments, seed=seed, strict=False)
            except Unwritten as error:
                return False, str(error)
            except Exception as error:
                return False, f"{name}, {case.what}: {type(error).__name__}: {error}"
            for place, expected in case.expected.items():
                got, wanted = np.asarray(arguments[place]).reshape(-1), expected.reshape(-1)
                wrong = np.flatnonzero(got.view(f"u{got.itemsize}") != wanted.view(f"u{got.itemsize}"))
                if wrong.size:
                    i, shuffled = wrong[0], ", with threads in another order" if seed else ""
                    return False, (
                        f"{name}, {case.what}{shuffled}: {wrong.size} of {got.size} results differ; "
                        f"number {i} is {got[i]} and should be {wanted[i]}."
                    )
    return True, f"{name}: all bits are those of the engine."
