"""The GPU backend: matrix products, attention, a decode step, a prompt.  Every suite is skipped if there is no GPU.

A kernel takes microseconds, less than it takes to start one from Python.  So single operations are recorded into a CUDA graph
that repeats them, and the GPU's own clock times the graph.  The unit is microseconds per operation.

The models have real shapes and random weights.  They are kept in the cache folder, like those of
``python -m engine.bench --keep``, and take 6 GB.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np

import engine
from engine.arrays import Batch
from engine.bench import generate_tokens, random_model, read_prompt, rewind
from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import CACHE_TYPES, Types
from engine.devices import open_device
from engine.errors import DeviceError
from engine.ops.heads import Heads

from .commits import layers_of, once, sequence_of
from .operations import FORMAT_NAMES, random_weight

SHAPES = ("qwen3-0.6b", "llama3.2-1b", "qwen3-8b")
DEPTHS = (0, 4096)
N_GEN, N_PROMPT = 32, 512

N_FF, N_EMBD = 12288, 4096
"""The shape of a matrix of qwen3-8b: gate or up of its feed-forward network."""

COLD = 256 << 20
"""Bytes of weights that are read before a weight is read again: more than the GPU's caches hold."""

ROUNDS = 9
"""The number of times that a graph is started; the median is reported."""


@cache
def backend() -> Any:
    """The GPU backend; raises NotImplementedError, with which asv skips a suite, if there is no GPU."""
    try:
        return open_device("cuda")
    except DeviceError as error:
        raise NotImplementedError(str(error)) from None


def microseconds(ops: Any, work: Callable[[], object], count: int) -> float:
    """The time, in microseconds, of one of the ``count`` operations that ``work`` requests from the backend."""
    return plan_microseconds(ops, ops.record(work), count)


def plan_microseconds(ops: Any, plan: Any, count: int) -> float:
    """The time, in microseconds, of one of the ``count`` operations of a recorded pass."""
    ops.capture(plan)
    seconds = []
    for _ in range(ROUNDS):
        plan.graph.launch()  # keeps the GPU busy while the timed launches are queued
        start = ops.device.event()
        plan.graph.launch()
        seconds.append(ops.device.elapsed(start, ops.device.event()))
    return 1e6 * float(np.median(seconds)) / count


class Matmul:
    """A product with a matrix [12288, 4096] of each format, including the quantization of its activations; the weights do not
    fit into a cache."""

    params: ClassVar[tuple[object, ...]] = (FORMAT_NAMES, (1, 2, 4, 8, 16))
    param_names = ("format", "rows")
    unit = "us"

    @once
    def setup(self, name: str, rows: int) -> None:
        self.ops = backend()
        matrix = random_weight(name, N_FF, N_EMBD)
        self.weights = [self.ops.weight(matrix) for _ in range(-(-COLD // matrix.data.nbytes))]
        self.x = self.ops.upload(np.random.default_rng(0).standard_normal((rows, N_EMBD), np.float32))

    def track_matmul(self, name: str, rows: int) -> float:
        def work() -> None:
            for weight in self.weights:
                self.ops.matmul(self.x, weight)

        return microseconds(self.ops, work, len(self.weights))


class Attention:
    """The attention of a layer of qwen3-8b with 32 query heads and 8 KV heads of 128: normalize, rotate, store, attend from
    position ``depth`` on, and quantize."""

    params: ClassVar[tuple[object, ...]] = (("f16", "f32"), (0, 1024, 4096, 16384), (1, 4, 16))
    param_names = ("cache", "depth", "rows")
    unit = "us"
    layers = 16

    @once
    def setup(self, cache_type: str, depth: int, rows: int) -> None:
        self.ops = ops = backend()
        n_head, n_head_kv, width = 32, 8, 128
        shapes = [AttentionCacheSpec(n_head_kv, width, width)] * self.layers
        types = Types(*[CACHE_TYPES[cache_type]] * 2)
        self.caches = layers_of(shapes, depth + rows, ops.max_rows, types, ops)
        rng = np.random.default_rng(0)
        self.q, self.k, self.v = (
            ops.upload(rng.standard_normal((rows, heads * width), np.float32))
            for heads in (n_head, n_head_kv, n_head_kv)
        )
        angles = np.arange(depth + rows)[:, None] * 1e6 ** (-np.arange(width // 2) / (width // 2))
        self.table = ops.upload(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
        positions = ops.upload(np.arange(depth, depth + rows, dtype=np.int32))
        self.batch = Batch(positions, positions, ops.upload(np.zeros(rows, np.int32)))
        norms = [ops.upload(np.ones(width, np.float32)) for _ in range(2)]
        self.heads = Heads(n_head, n_head_kv, width, width, True, width**-0.5, 1e-6, *norms)

    def track_attention(self, cache_type: str, depth: int, rows: int) -> float:
        from engine.cuda.runtime.values import quantized

        def work() -> None:
            for layer in self.caches:
                x = self.ops.attention(self.heads, self.q, self.k, self.v, layer, self.batch, self.table)
                quantized(self.ops.recorder, x, 256)

        return microseconds(self.ops, work, self.layers)


class Model:
    """A random model in Q4_K_M with ``depth`` tokens in its cache."""

    params: ClassVar[tuple[object, ...]] = (SHAPES, DEPTHS)
    param_names = ("shape", "depth")
    timeout = 1800  # a first run writes the model

    @once
    def setup(self, shape: str, depth: int) -> None:
        backend()  # skip the suite before it writes a model that it cannot run
        with random_model(f"{shape}:Q4_K_M", True) as (_, path):
            self.llm = engine.load(path, device="cuda", n_ctx=max(DEPTHS) + N_PROMPT)
        self.llm.compile()
        self.rng = np.random.default_rng(0)
        rewind(self.llm, depth, self.tokens)

    def tokens(self, n: int) -> np.ndarray:
        """Random ones."""
        return self.rng.integers(0, self.llm.config.n_vocab, n, dtype=np.int32)


class Decode(Model):
    """32 tokens one at a time, including all work of the host; and the kernels of one step, in microseconds by the GPU's own
    clock."""

    @once
    def setup(self, shape: str, depth: int) -> None:
        super().setup(shape, depth)
        self.time_generation(shape, depth)

    def time_generation(self, shape: str, depth: int) -> None:
        sequence_of(self.llm).truncate(depth)
        generate_tokens(self.llm, self.tokens(N_GEN))

    def track_step(self, shape: str, depth: int) -> float:
        model = self.llm.model
        ops: Any = model.ops
        ops.device.write(ops.positions.address, np.full(1, depth, np.int32))
        return microseconds(
            ops, lambda: model.compute(Batch(ops.tokens[:1], ops.positions[:1], ops.sequences[:1]), 1), 1
        )

    track_step.unit = "us"  # type: ignore[attr-defined]


class Prompt(Model):
    """Reading 512 tokens; divide 512 by the time for tokens per second."""

    @once
    def setup(self, shape: str, depth: int) -> None:
        super().setup(shape, depth)
        self.time_prompt(shape, depth)

    def time_prompt(self, shape: str, depth: int) -> None:
        sequence_of(self.llm).truncate(depth)
        read_prompt(self.llm, self.tokens(N_PROMPT))
