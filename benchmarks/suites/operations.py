"""Every operation of the CPU backend, at the sizes of a small model: width 1024, 16 query heads of 64, 4 KV heads.

``rows`` is 1 for a step of generation and 128 for a batch of a prompt.  One thread computes, and the result is the processor
time of the fastest of many calls, because other programs on the machine can only add to it.
"""

from collections.abc import Callable
from time import process_time
from typing import ClassVar

import numpy as np
from gguf import GGMLQuantizationType

from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import CACHE_TYPES, Types
from engine.cpu.backend import Backend
from engine.gguf.quants import FORMATS
from engine.ops.activation import GEGLU, SWIGLU
from engine.ops.weight import Weight
from engine.synthetic.model import random_blocks

from .commits import layers_of, once

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM = 1024, 4096, 16, 4, 64
ROWS = (1, 128)
FORMAT_NAMES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "NVFP4", "TQ2_0", "TQ1_0", "Q1_0"),
)
"""Not read from ``FORMATS``: asv numbers parameters, and the numbers must mean the same for every commit."""

SECONDS = 2.0
"""The processor time, in seconds, to spend on the calls of one benchmark."""


def fastest(work: Callable[[], object]) -> float:
    """The processor time, in seconds, of the fastest of at least five calls, after a first call that may compile."""
    work()
    begin, times = process_time(), list[float]()
    while len(times) < 5 or process_time() - begin < SECONDS:
        start = process_time()
        work()
        times.append(process_time() - start)
    return min(times)


def random_weight(name: str, rows: int, columns: int) -> Weight:
    """A matrix of random blocks of the named format."""
    entry = FORMATS[GGMLQuantizationType[name]]
    blocks = random_blocks(entry.type, rows * columns // entry.block, columns**-0.5, np.random.PCG64(0))
    return Weight("weight", entry, columns, blocks.reshape(rows, entry.row_bytes(columns)))


class Operation:
    """The common part of all suites here: a backend, and random rows."""

    params: ClassVar[tuple[object, ...]] = ROWS
    param_names: ClassVar[tuple[str, ...]] = ("rows",)
    unit = "seconds"

    def backend(self) -> Backend:
        self.rng = np.random.default_rng(0)
        return Backend(1)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)


class Matmul(Operation):
    """A product with a matrix [4096, 1024] (4 Mi weights) of each format, including the quantization of its activations."""

    params: ClassVar[tuple[object, ...]] = (FORMAT_NAMES, ROWS)
    param_names = ("format", "rows")

    @once
    def setup(self, name: str, rows: int) -> None:
        self.ops = self.backend()
        self.weight = self.ops.weight(random_weight(name, N_FF, N_EMBD))
        self.x = self.normal(rows, N_EMBD)

    def track_matmul(self, name: str, rows: int) -> float:
        return fastest(lambda: self.ops.matmul(self.x, self.weight))


class Embed(Operation):
    """Rows of a table of 1024 columns."""

    params: ClassVar[tuple[object, ...]] = (("F16", "Q4_K", "Q6_K", "Q8_0"), ROWS)
    param_names = ("format", "rows")

    @once
    def setup(self, name: str, rows: int) -> None:
        self.ops = self.backend()
        self.table = self.ops.weight(random_weight(name, N_FF, N_EMBD))
        self.tokens = self.rng.integers(0, N_FF, rows, dtype=np.int32)

    def track_embed(self, name: str, rows: int) -> float:
        return fastest(lambda: self.ops.embed(self.table, self.tokens))


class Elementwise(Operation):
    """Norms, rotation, gates: the operations between two matrix products."""

    @once
    def setup(self, rows: int) -> None:
        self.ops = self.backend()
        self.x, self.y = self.normal(rows, N_EMBD), self.normal(rows, N_EMBD)
        self.gate, self.up = self.normal(rows, N_FF), self.normal(rows, N_FF)
        self.norm, self.head_norm = self.normal(N_EMBD), self.normal(HEAD_DIM)
        self.heads = self.normal(rows, N_HEAD, HEAD_DIM)
        self.positions = np.arange(rows, dtype=np.int32)
        angles = self.positions[:, None] * 1e4 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def track_rms_norm(self, rows: int) -> float:
        return fastest(lambda: self.ops.rms_norm(self.x, self.norm, 1e-6))

    def track_rms_norm_heads(self, rows: int) -> float:
        return fastest(lambda: self.ops.rms_norm(self.heads, self.head_norm, 1e-6))

    def track_rms_norm_add(self, rows: int) -> float:
        return fastest(lambda: self.ops.rms_norm_add(self.x, self.y, self.norm, 1e-6))

    def track_rope(self, rows: int) -> float:
        return fastest(lambda: self.ops.rope(self.heads, self.positions, self.table, False))

    def track_rope_neox(self, rows: int) -> float:
        return fastest(lambda: self.ops.rope(self.heads, self.positions, self.table, True))

    def track_swiglu(self, rows: int) -> float:
        return fastest(lambda: self.ops.activate(SWIGLU, self.gate, self.up))

    def track_geglu(self, rows: int) -> float:
        return fastest(lambda: self.ops.activate(GEGLU, self.gate, self.up))

    def track_softcap(self, rows: int) -> float:
        return fastest(lambda: self.ops.softcap(self.gate, 30.0))

    def track_add(self, rows: int) -> float:
        return fastest(lambda: self.ops.add(self.x, self.y))


class Attend(Operation):
    """Attention over a cache filled to ``depth``, and storing the keys and values of the rows."""

    params: ClassVar[tuple[object, ...]] = (("f16", "f32"), (0, 4096), ROWS)
    param_names = ("cache", "depth", "rows")

    @once
    def setup(self, cache_type: str, depth: int, rows: int) -> None:
        self.ops = self.backend()
        shape = AttentionCacheSpec(N_HEAD_KV, HEAD_DIM, HEAD_DIM)
        types = Types(*[CACHE_TYPES[cache_type]] * 2)
        (self.cache,) = layers_of([shape], depth + rows, max(ROWS), types, self.ops)
        whole = np.arange(depth + rows, dtype=np.int32)
        keys, values = (self.normal(whole.size, N_HEAD_KV, HEAD_DIM) for _ in range(2))
        self.ops.append(self.cache, keys, values, whole)
        self.positions = whole[depth:]
        self.keys, self.values, self.q = keys[depth:], values[depth:], self.normal(rows, N_HEAD, HEAD_DIM)

    def track_attend(self, cache_type: str, depth: int, rows: int) -> float:
        return fastest(lambda: self.ops.attend(self.q, self.cache, self.positions, HEAD_DIM**-0.5))

    def track_append(self, cache_type: str, depth: int, rows: int) -> float:
        return fastest(lambda: self.ops.append(self.cache, self.keys, self.values, self.positions))
