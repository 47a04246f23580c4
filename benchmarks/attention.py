"""The time of attention on a GPU by type of cache, depth and rows: rotation, storing, attention, the result as int8.

    python -m benchmarks.attention [--types f16 i8] [--heads 32,8,128] [--depths 4096 32768] [--rows 1 4 2048]

Microseconds per layer.  The caches of so many layers are read in turn that none of them stays in the GPU's own cache.  They
hold random keys and values.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np

from benchmarks.suites.cuda import COLD, microseconds
from engine.arrays import Batch
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import CACHE_TYPES, Types
from engine.compile.pool import compile_all
from engine.cuda.runtime.jobs import gpu_job
from engine.cuda.runtime.values import quantized
from engine.devices import open_device
from engine.ops.heads import Heads

HEADS = "32,8,128", "16,8,256", "24,4,256", "16,1,512"
"""Heads of queries, heads of keys, and their elements: of Qwen3-8B, Gemma 4 12B (a window, here without), Qwen3.6-27B, and
layers of Gemma 4 that see everything."""

TYPES = "f16", "q8_0", "i8", "i12"
MOST_LAYERS = 16


class Case:
    """The attention of layers of one kind, ``depth`` positions deep, with ``rows`` rows."""

    def __init__(self, gpu: Any, name: str, sizes: tuple[int, int, int], depth: int, rows: int) -> None:
        n_head, n_kv, d = sizes
        self.gpu, rng = gpu, np.random.default_rng(0)
        types, n_ctx = Types(*[CACHE_TYPES[name]] * 2), depth + rows
        of_layer = 2 * n_ctx * n_kv * types.k.row_bytes(d)
        n_layers = min(MOST_LAYERS, max(1, -(-COLD // of_layer)))
        cache = KVCache([AttentionCacheSpec(n_kv, d, d)] * n_layers, n_ctx, gpu.max_rows, types, gpu.zeros, gpu.store)
        Sequence(cache).reserve(n_ctx)
        cache.publish()
        self.layers = cache.layers
        norms = [gpu.upload(np.ones(d, np.float32)) for _ in range(2)]
        self.heads: Heads[Any] = Heads(n_head, n_kv, d, d, True, d**-0.5, 1e-6, *norms)
        angles = np.arange(n_ctx)[:, None] * 1e6 ** (-np.arange(d // 2) / (d // 2))
        self.table = gpu.upload(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
        self.q, self.k, self.v = (
            gpu.upload(rng.standard_normal((rows, heads * d), np.float32)) for heads in (n_head, n_kv, n_kv)
        )
        positions = gpu.upload(np.arange(depth, n_ctx, dtype=np.int32))
        self.batch = Batch(positions, positions, gpu.upload(np.zeros(positions.size, np.int32)))
        self.depth, self.piece = depth, min(depth, gpu.max_rows)
        if depth:
            self.stored = [gpu.upload(rng.standard_normal((self.piece, n_kv * d), np.float32)) for _ in range(2)]

    def attend(self, layers: Any = None) -> None:
        """Attention in each layer."""
        for layer in layers or self.layers:
            x = self.gpu.attention(self.heads, self.q, self.k, self.v, layer, self.batch, self.table)
            quantized(self.gpu.recorder, x, 256)

    def fill(self) -> None:
        """Store keys and values at all earlier positions."""
        for first in range(0, self.depth, self.piece or 1):
            begin = min(first, self.depth - self.piece)
            at = self.gpu.upload(np.arange(begin, begin + self.piece, dtype=np.int32))
            rows = Batch(at, at, self.gpu.upload(np.zeros(self.piece, np.int32)))
            for layer in self.layers:
                remember = partial(self.gpu.remember, self.heads, *self.stored, layer, rows, self.table)
                self.gpu.start(self.gpu.record(remember))

    def time(self) -> float:
        """Microseconds per layer."""
        plan = self.gpu.record(partial(self.attend, self.layers[:1]))
        kernels = dict.fromkeys(launch.kernel for launch in plan.launches)
        compile_all([gpu_job(kernel, self.gpu.device.compute_capability) for kernel in kernels])
        self.fill()
        return microseconds(self.gpu, self.attend, len(self.layers))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", nargs="+", default=list(TYPES), help=f"of the cache ({' '.join(TYPES)})")
    parser.add_argument("--heads", nargs="+", default=[HEADS[0]], help="of queries, of keys, elements (32,8,128)")
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 4096, 32768], help="positions before the rows")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 2048], help="of a pass")
    args = parser.parse_args()
    gpu = open_device("cuda", max_rows=max(args.rows))
    print(f"| heads | rows | depth | {' | '.join(args.types)} |\n| --- " + "| ---: " * (len(args.types) + 2) + "|")
    for heads in args.heads:
        sizes = tuple(int(n) for n in heads.split(","))
        for rows in args.rows:
            for depth in args.depths:
                found = [Case(gpu, name, (sizes[0], sizes[1], sizes[2]), depth, rows).time() for name in args.types]
                print(f"| {heads} | {rows} | {depth} | {' | '.join(f'{x:.1f}' for x in found)} |", flush=True)


if __name__ == "__main__":
    main()
