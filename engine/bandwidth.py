"""How fast memory can be read, and how much of it a generated token reads."""

import math
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import njit, prange

from engine.gguf import read_gguf


@njit(cache=True)
def sum_of(data):  # type: ignore[no-untyped-def]
    """The sum of uint64 data: integers, so that the compiler may add in any order, as wide as the machine can."""
    total = np.uint64(0)
    for i in range(data.size):
        total += data[i]
    return total


@njit(cache=True, parallel=True)
def read_sum(data, shares):  # type: ignore[no-untyped-def]
    """The sum of uint64 data, each of ``shares`` threads reading its part once: as little work as a read can be."""
    parts = np.zeros(shares, np.uint64)
    step = (data.size + shares - 1) // shares
    for c in prange(shares):
        parts[c] = sum_of(data[c * step : (c + 1) * step])
    return sum_of(parts)


def memory_bandwidth(n_threads: int, n_bytes: int = 1 << 30, passes: int = 5) -> float:
    """Bytes per second that ``n_threads`` threads read from memory: the best of some passes over ``n_bytes``.

    ``n_bytes`` must be far more than the caches hold for the figure to be memory's.
    """
    data = np.full(max(n_bytes // 8, 1), 1, np.uint64)
    numba.set_num_threads(n_threads)
    read_sum(data[:64], n_threads)
    best = math.inf
    for _ in range(passes):
        start = time.perf_counter()
        read_sum(data, n_threads)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


@cache
def machine_bandwidth(n_threads: int) -> float:
    """``memory_bandwidth`` over 1 GiB, or an eighth of the memory where that is less; measured once per process."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        installed = 4 << 30
    return memory_bandwidth(n_threads, min(1 << 30, installed // 8))


def weight_bytes_per_token(path: str | Path) -> int:
    """Bytes of weights that one generated token reads: all but an embedding that is not the output matrix as well, of
    which it reads one row."""
    tensors = read_gguf(path).tensors
    total = sum(tensor.nbytes for tensor in tensors.values())
    if "output.weight" in tensors:
        embedding = tensors["token_embd.weight"]
        total -= embedding.nbytes - embedding.nbytes // embedding.shape[0]
    return total


def cache_bytes_per_token(layers: Iterable[Any], first: int, count: int) -> float:
    """Mean bytes of keys and values that tokens at positions ``first`` ... ``first + count - 1`` read in ``layers``,
    each with arrays ``keys`` [n_head_kv, chunks, d_k, 64] and ``values`` [n_head_kv, chunks, 64, d_v] and a window."""
    total = 0.0
    visible = np.arange(first, first + count) + 1
    for layer in layers:
        n_head_kv, _, d_k, _ = layer.keys.shape
        position = n_head_kv * (d_k + layer.values.shape[3]) * layer.keys.dtype.itemsize
        seen = np.minimum(visible, layer.window) if layer.window else visible
        total += position * float(seen.mean())
    return total
