"""What the steps of the ladder share: inputs, expected bits, and a run on a GPU or in the simulator.

    python examples/ladder/ladder.py                  all steps, one line each
    python examples/ladder/ladder.py 4096 12288       the steps of the product with another matrix: rows and columns

A step is a kernel.  Its program calls :func:`product` or :func:`attention`, which compare every bit of the result with what
the engine's CPU kernel computes and, on a GPU, measure the time.  Without a GPU, kernels run in Numba's simulator, one Python
thread for each thread of the GPU, on small inputs.  The simulator says nothing about speed.
"""

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.runtime.driver import require_gpu
from engine.errors import DeviceError

try:
    require_gpu()
except DeviceError:
    if find_spec("numba_cuda") is None or find_spec("greenlet") is None:
        sys.exit("There is no GPU, and its simulator needs packages: pip install 'bitmirror[cuda,simulator]'.")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported

sys.path.append(str(Path(__file__).parents[1]))  # for law.py

import law
from gguf import GGMLQuantizationType as T
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.backend import Backend
from engine.cuda.intrinsics import SIMULATED
from engine.cuda.products.repack import repack_rows
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Device
from engine.gguf.quants import FORMATS
from engine.ops.weight import Weight
from engine.synthetic.model import random_blocks

I8P = types.CPointer(types.int8)
"""A pointer to int8, as an argument of a kernel."""

MATRIX = (32, 2304) if SIMULATED else (24576, 4096)
"""Rows and columns: gate and up of Qwen3-8B; in the simulator nine units, so that the last chain is shorter than others."""

HEADS = (4, 2, 32, 550) if SIMULATED else (32, 8, 128, 8192)
"""Query heads, KV heads, elements of a head, positions: those of Qwen3-8B; in the simulator nine chunks, so that a second
group begins."""

COLD_BYTES = 128 << 20
"""More than twice the L2 cache of an H200: what was read so many bytes ago is no longer in it."""

# --- an instruction that the engine has no use for -------------------------------------------------------------


@intrinsic
def _dp4a(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """One instruction."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        instruction = ir.InlineAsm(ir.FunctionType(word, [word] * 3), "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
        return builder.call(instruction, args)

    return types.int32(types.uint32, types.uint32, types.int32), codegen


def _sum_of_products(a: Any, b: Any, c: Any) -> Any:
    """Its law, for the simulator."""
    x, y = (np.array([word]).view(np.int8).astype(np.int32) for word in (a, b))
    return np.int32(c + x @ y)


dp4a: Any = _sum_of_products if SIMULATED else _dp4a
"""dp4a(a, b, c): c plus the products of the four signed bytes of the words a and b, int32."""


# --- inputs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What kernels read and what they should compute.

    arrays: arrays and numbers by name; cold: the names of arrays of which there are several copies on a GPU, so that none is
    in a cache when it is read; expected: the result, float32; n_bytes: bytes that must be read; shape: for the printed line.
    """

    arrays: dict[str, np.ndarray | int]
    cold: tuple[str, ...]
    expected: np.ndarray
    n_bytes: int
    shape: str


@cache
def matrix(rows: int, columns: int) -> Inputs:
    """A random matrix in Q4_K, a multiple of 16 rows of U = columns / 256 units, and a row of activations.

    weights: blocks as in a file, 144 bytes each: uint8 [rows, U, 144];
    q, d, sums: activations as int8 [256 U], their scales float32 [U], and sums of 32 of them, int32 [8 U];
    records, tensor_q, tensor_d, tensor_sums: all of these in the order of the tensor cores
    (``engine/cuda/products/repack.py``, ``quantize.py``);
    rows, units, tiles: rows, U, and rows / 16.
    """
    if rows <= 0 or rows % 16 or columns <= 0 or columns % 256:
        sys.exit(f"{rows} x {columns}: give a multiple of 16 rows and a multiple of 256 columns.")
    entry, units = FORMATS[T.Q4_K], columns // 256
    blocks = random_blocks(T.Q4_K, rows * units, columns**-0.5, np.random.PCG64(1)).reshape(rows, -1)
    x = np.random.default_rng(2).standard_normal(columns, np.float32)
    cpu = Backend()
    (expected,) = cpu.matmul(x[None], cpu.weight(Weight("w", entry, columns, blocks)))
    integers, d = law.quantize(x.reshape(units, 256))
    q = integers.astype(np.int8)
    # Lane i of the first four has words (h, k) of activation row 0: positions 64 v + 32 h + 16 k + 4 i .. + 3.
    tensor_q = np.zeros((units, 4, 32, 4, 4), np.int8)
    tensor_q[:, :, :4] = q.reshape(units, 4, 4, 4, 4).swapaxes(2, 3)
    tensor_d, tensor_sums = np.zeros((units, 8), np.float32), np.zeros((units, 8, 24), np.int16)
    tensor_d[:, 0] = d
    tensor_sums[:, 0, :16] = q.reshape(units, 16, 16).sum(axis=2)
    tensor_sums[:, 0, 16:] = q.reshape(units, 8, 32).sum(axis=2)
    arrays: dict[str, np.ndarray | int] = {
        **{"weights": blocks, "q": q, "d": d, "sums": q.reshape(-1, 32).sum(axis=1, dtype=np.int32)},
        **{"records": repack_rows(entry, blocks), "tensor_q": tensor_q, "tensor_d": tensor_d},
        **{"tensor_sums": tensor_sums, "rows": rows, "units": units, "tiles": rows // 16},
    }
    return Inputs(arrays, ("weights", "records"), expected[0], blocks.nbytes, f"{rows} x {columns}")


@cache
def cache_of_keys() -> Inputs:
    """The queries of one token, and the keys and values that it sees, for H query heads, K KV heads, elements d, positions n,
    and C = ceil(n / 64) chunks.

    queries: scaled, float32 [H, d]; keys, values: float16 [K, n, d];
    pairs: keys as words of two elements, [K, C, d / 2, 64], so that neighbouring words belong to neighbouring positions;
    states: room for the chunks of each head, float32 [H, C, d + 2]: the elements, the maximum and the sum of weights;
    n, chunks: n and C.
    """
    heads, kv, d, n = HEADS
    rng, chunks = np.random.default_rng(3), -(-n // 64)
    queries = rng.standard_normal((heads, d), np.float32) * np.float32(d**-0.5)
    keys, values = (rng.standard_normal((kv, n, d), np.float32).astype(np.float16) for _ in range(2))
    expected = law.attention(
        queries.reshape(kv, heads // kv, d), keys.astype(np.float32), values.astype(np.float32)
    ).reshape(heads, d)
    padded = np.zeros((kv, chunks * 64, d // 2), np.uint32)
    padded[:, :n] = keys.view(np.uint32)
    pairs = np.ascontiguousarray(padded.reshape(kv, chunks, 64, d // 2).swapaxes(2, 3))
    arrays: dict[str, np.ndarray | int] = {
        **{"queries": queries, "keys": keys, "values": values, "pairs": pairs, "n": n, "chunks": chunks},
        "states": np.full((heads, chunks, d + 2), np.nan, np.float32),
    }
    cold, shape = ("keys", "values", "pairs"), f"{heads} heads, {n} positions"
    return Inputs(arrays, cold, expected, keys.nbytes + values.nbytes, shape)


# --- steps -----------------------------------------------------------------------------------------------------

Argument = str | int | None
"""An argument of a kernel: a name of ``Inputs.arrays``, "out", a number, or None for a pointer that is not used."""

Launch = tuple[Specialization, tuple[int, int], tuple[Argument, ...]]
"""A kernel, its number of blocks and the threads of a block, and its arguments."""

PLAIN: tuple[Argument, ...] = ("weights", "q", "d", "sums", "out", "rows", "units")
"""The arguments of a product that reads weights as a file has them."""


def product(
    title: str | None,
    step: Specialization,
    geometry: Callable[[int, int], tuple[int, int]],
    arguments: tuple[Argument, ...] = PLAIN,
) -> None:
    """Run a step of the product.  title: the docstring of its file; geometry(rows, units): blocks, and threads of a block."""
    rows, columns = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else MATRIX
    given = matrix(rows, columns)
    compare(title, given, (step, geometry(rows, columns // 256), arguments))


def attention(title: str | None, *launches: Launch) -> None:
    """Run a step of attention, one or two kernels."""
    compare(title, cache_of_keys(), *launches)


def compare(title: str | None, given: Inputs, *launches: Launch) -> None:
    """Run kernels in order and print a line: the title, whether all bits are those of the CPU, and the speed.  Ends the
    program if a bit differs."""
    out, seconds = (_simulated if SIMULATED else _on_gpu)(given, launches)
    name = (title or "").splitlines()[0].rstrip(".")
    different = int((out.view(np.int32) != given.expected.view(np.int32)).sum())
    if different:
        sys.exit(f"{name}: {different} of {out.size} results differ from those of the CPU.")
    speed = f"{1e6 * seconds:8.1f} us {given.n_bytes / seconds / 1e9:6.0f} GB/s" if seconds else "simulator"
    print(f"{name:50} {given.shape:24} bits equal  {speed}", flush=True)


# --- runs ------------------------------------------------------------------------------------------------------


def _simulated(given: Inputs, launches: tuple[Launch, ...]) -> tuple[np.ndarray, float]:
    """The result, and no time."""
    from engine.cuda.runtime.simulator import run

    arrays = given.arrays | {"out": (out := np.full_like(given.expected, np.nan))}
    for step, (blocks, threads), arguments in launches:
        run(step, blocks, threads, [arrays[a] if isinstance(a, str) else a for a in arguments], strict=False)
    return out, 0.0


@cache
def _device() -> Device:
    return Device()


_uploaded: dict[int, dict[str, list[Buffer]]] = {}


def _buffers(given: Inputs) -> dict[str, list[Buffer]]:
    """The arrays in the memory of the GPU."""
    if id(given) not in _uploaded:
        device, copies = _device(), 1 + -(-COLD_BYTES // given.n_bytes)
        buffers = _uploaded[id(given)] = {}
        for name, array in (given.arrays | {"out": given.expected}).items():
            if isinstance(array, np.ndarray):
                buffers[name] = [
                    device.allocate(array.nbytes, name) for _ in range(copies if name in given.cold else 1)
                ]
                for buffer in buffers[name]:
                    device.write(buffer.address, array)
    return _uploaded[id(given)]


def _on_gpu(given: Inputs, launches: tuple[Launch, ...]) -> tuple[np.ndarray, float]:
    """The result, and the seconds of one run: the least of five graphs of runs that take the copies in turn."""
    device, buffers = _device(), _buffers(given)

    def value(argument: Argument, i: int) -> int:
        if isinstance(argument, str) and argument in buffers:
            return buffers[argument][i % len(buffers[argument])].address
        number = given.arrays[argument] if isinstance(argument, str) else argument or 0
        assert isinstance(number, int)
        return number

    def launch(i: int) -> None:
        for step, (blocks, threads), arguments in launches:
            device.launch(step, blocks, threads, [value(argument, i) for argument in arguments])
            if len(launches) > 1:
                device.finish()  # the second kernel does not wait for the first one itself

    device.write(buffers["out"][0].address, np.full_like(given.expected, np.nan))
    launch(0)
    out = device.read(buffers["out"][0].address, given.expected.shape, np.float32)
    n = 4 * max(map(len, buffers.values()))
    with device.capture() as graph:
        for i in range(n):
            launch(i)
    seconds = []
    for _ in range(5):
        graph.launch()  # while it runs, the timed one is queued
        start = device.event()
        graph.launch()
        seconds.append(device.elapsed(start, device.event()))
    return out, min(seconds) / n


def main() -> None:
    """Run all steps."""
    steps = sorted(Path(__file__).parent.glob("[0-9]*.py"))
    steps += sorted(Path(__file__).parent.glob("attention_*.py")) if len(sys.argv) < 3 else []
    for path in steps:
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
