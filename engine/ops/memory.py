"""The memory of a backend: weights, caches and intermediate results."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import A, M_co
from engine.cache.kv import KVCache
from engine.compile.jobs import Job
from engine.ops.weight import Weight

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)`` reports the progress of a long operation."""


class MemoryOperations(Protocol[A, M_co]):
    """Memory for arrays ``A`` and matrices ``M_co``.  It may be requested at any time."""

    def free_memory(self, weights: int) -> int:
        """Bytes that remain for a cache after ``weights`` bytes of weights and the intermediate results of a pass; 0 if
        unknown."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention of ``n_head`` heads of size ``d_v`` over ``n_ctx`` positions needs besides the cache."""

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """Bytes that attention of ``n_head`` heads over latents of ``rank`` elements at ``n_ctx`` positions needs besides the
        cache, in passes of up to ``rows`` rows."""

    def buffer_bytes(self) -> int:
        """Bytes of memory for the intermediate results of passes."""

    def rest(self, cache: KVCache) -> None:
        """Give memory back to the system that holds nothing while no pass runs: free pages of a cache, intermediate results.
        No pass may be running."""

    def resume(self, cache: KVCache) -> None:
        """Prepare for passes after :meth:`rest`.  Passes may also run without it, but more slowly."""

    def upload(self, array: np.ndarray) -> A:
        """A device array with the values, shape and dtype of a NumPy array.  Raises DeviceError if memory runs out."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> A:
        """A zeroed array that outlives the pass.  Raises DeviceError if memory runs out."""

    def store(self, target: A, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""

    def download(self, array: A) -> np.ndarray:
        """The values as a NumPy array, after all work started earlier has ended."""

    def weight(self, weight: Weight, host: bool = False) -> M_co:
        """A weight matrix that the operations can read.  Raises DeviceError if memory runs out.

        host: keep it in host memory, for a table of which a pass reads only a few rows.
        """

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        """Prepare to load the tensors of a file.  ``progress("load", done, total)`` is called as their bytes are read, now or
        by ``loaded``."""

    def load_jobs(self) -> list[Job]:
        """Compile jobs of kernels that ``loaded`` uses, which may be compiled before it is called."""

    def loaded(self) -> None:
        """Complete the loading of all matrices, and release memory that only loading needs.  Call it after the last
        ``weight``."""
