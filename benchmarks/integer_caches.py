"""Attention over integer caches beside the other types: its error on made-up heads, and its speed on the CPU.

    python -m benchmarks.integer_caches [--threads N]

The errors are root mean squares, relative to attention in float64 over keys and values that are not rounded.  Heads are
random, with something that makes rounding hard: a *sink* is a first position whose score exceeds the others by its logit,
with values of 1 %; *outliers* are four elements of every key and of every value that are 20 times as large; a *needle* is
one position in the first half that has half of the weight, and values four times as large.  The speeds are ratios to f16 in
one run.
"""

import argparse
import time

import numpy as np

from engine.cache.kv import AttentionCache, AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import CACHE_TYPES, Types
from engine.cpu.backend import Backend

NAMES = ("f16", "i12", "q8_0", "i8", "q4_0")
KINDS = ("plain", "sink 10", "sink 20", "outliers", "needle")
LENGTHS = (64, 2048, 32768)
MOST_ROWS = 256
DEPTH = 4096
HEADS = ((32, 8, 128), (16, 8, 128), (8, 1, 256), (16, 16, 64), (32, 32, 96))
"""Heads of queries, heads of keys, and their elements, of the speeds."""

ROWS = 1, 4, 64
SEEDS = 4
REPEATED = 9
PIECE = 512

f32 = np.float32


def filled(ops: Backend, name: str, k: np.ndarray, v: np.ndarray) -> AttentionCache[np.ndarray]:
    """A layer's cache of a type that holds keys and values float32 [n, heads, d]."""
    n, heads, d = k.shape
    cache = KVCache([AttentionCacheSpec(heads, d, d)], n, n, Types(CACHE_TYPES[name], CACHE_TYPES[name]), ops.zeros)
    Sequence(cache).reserve(n)
    layer: AttentionCache[np.ndarray] = cache.layers[0]
    for first in range(0, n, PIECE):
        span = slice(first, min(first + PIECE, n))
        ops.append(layer, k[span], v[span], np.arange(span.start, span.stop, dtype=np.int32))
    return layer


def head(d: int, n: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values float32 [n, 1, d], with scores that deviate by 1.5."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, 1, d)) for _ in range(3))
    v += 0.3 * rng.standard_normal(d)
    q *= 1.5
    direction = rng.standard_normal(d)
    direction /= np.linalg.norm(direction)
    if kind.startswith("sink"):
        k[:, 0] -= (k[:, 0] @ direction)[:, None] * direction
        k[0, 0] = direction * np.sqrt(d)
        q[:, 0] += int(kind.split()[1]) * direction
        v[0] *= 0.01
    elif kind == "outliers":
        places = rng.choice(d, 4, replace=False)
        q[..., places] /= 20  # so that they do not decide the scores alone
        k[..., places] *= 20
        v[..., places] *= 20
    elif kind == "needle":
        # The others weigh exp(1.5^2 / 2) each on average.
        k[:, 0] -= (k[:, 0] @ direction)[:, None] * direction
        k[n // 4, 0] = direction * np.sqrt(d)
        q[:, 0] += (np.log(n) + 1.5**2 / 2) * direction - (q[:, 0] @ direction)[:, None] * direction
        v[n // 4] *= 4
    return q.astype(f32), k.astype(f32), v.astype(f32)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Attention of rows q [rows, 1, d] at positions ``last`` in float64: [rows, d]."""
    scores = q[:, 0].astype(np.float64) @ k[:, 0].astype(np.float64).T / np.sqrt(q.shape[2])
    scores[np.arange(len(k)) > last[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights @ v[:, 0].astype(np.float64) / weights.sum(axis=1, keepdims=True))


def error(ops: Backend, name: str, d: int, n: int, kind: str) -> float:
    """The mean error over some heads, of the last rows of the text."""
    found = []
    for seed in range(SEEDS):
        q, k, v = head(d, n, kind, seed)
        last = np.arange(max(n // 2, n - MOST_ROWS), n, dtype=np.int32)
        q = q[last[0] :]
        out = ops.attend(q, filled(ops, name, k, v), last, d**-0.5)
        theirs = exact(q, k, v, last)
        found.append(np.sqrt(np.mean((out - theirs) ** 2) / np.mean(theirs**2)))
    return float(np.mean(found))


def speeds(ops: Backend, heads: int, kv_heads: int, d: int, rows: int) -> dict[str, float]:
    """Milliseconds of attention of some rows at a depth, the least of several runs in turn."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((DEPTH, kv_heads, d)).astype(f32) for _ in range(2))
    q = rng.standard_normal((rows, heads, d)).astype(f32)
    layers = {name: filled(ops, name, k, v) for name in NAMES}
    last, least = np.arange(DEPTH - rows, DEPTH, dtype=np.int32), dict.fromkeys(NAMES, np.inf)
    for _ in range(REPEATED):
        for name, layer in layers.items():
            started = time.perf_counter()
            ops.attend(q, layer, last, d**-0.5)
            least[name] = min(least[name], 1e3 * (time.perf_counter() - started))
    return least


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    ops = Backend(parser.parse_args().threads)
    print(f"| elements | positions | heads | {' | '.join(NAMES)} |\n| ---: " + "| ---: " * (len(NAMES) + 2) + "|")
    for d in (64, 128, 256):
        for n in LENGTHS:
            for kind in KINDS:
                cells = " | ".join(f"{error(ops, name, d, n, kind):.1e}" for name in NAMES)
                print(f"| {d} | {n} | {kind} | {cells} |", flush=True)
    print(
        f"\n| heads | of keys | elements | rows | {' | '.join(NAMES)} |\n| ---: " + "| ---: " * (len(NAMES) + 3) + "|"
    )
    for heads, kv_heads, d in HEADS:
        for rows in ROWS:
            found = speeds(ops, heads, kv_heads, d, rows)
            cells = " | ".join(f"{found['f16'] / found[name]:.2f}" for name in NAMES[1:])
            print(f"| {heads} | {kv_heads} | {d} | {rows} | {found['f16']:.2f} ms | {cells} |", flush=True)


if __name__ == "__main__":
    main()
