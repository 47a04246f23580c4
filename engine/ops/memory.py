"""The memory of a backend: weights, caches and intermediate results."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import A, M_co, Matrix
from engine.cache.copies import Copies
from engine.cache.pages import PagedMemory
from engine.compile.jobs import Job
from engine.ops.crossing import Crossing
from engine.ops.device import DeviceOperations
from engine.ops.exchange import Exchange, Host
from engine.ops.weight import Weight

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)`` reports the progress of a long operation."""


class WeightStream(Protocol[M_co]):
    """Weights in host memory that a device copies, one part of a model after another, while it computes."""

    @property
    def matrices(self) -> Sequence[Sequence[M_co]]:
        """The matrices of each part in memory that the operations can read, which they are in from :meth:`wait` for the part
        until :meth:`begin` for the second part after it."""

    def begin(self, part: int) -> None:
        """Begin to copy the weights of a part, unless they are in place or there is no such part.  Passes over the second
        part before it must have ended."""

    def wait(self, part: int) -> None:
        """Wait until the copies that :meth:`begin` has begun for a part have ended.  Raises DeviceError if they fail."""


class MemoryOperations(Protocol[A, M_co]):
    """Memory for arrays ``A`` and matrices ``M_co``.  It may be allocated at any time."""

    def free_memory(self, weights: int) -> int:
        """The memory in bytes that is left for a cache after ``weights`` bytes of weights and the intermediate results of a
        pass; 0 if it is unknown."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """The memory in bytes, not counting the cache, that attention of ``n_head`` heads of size ``d_v`` over ``n_ctx``
        positions needs."""

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """The memory in bytes, not counting the cache, that attention of ``n_head`` heads over latents of ``rank`` elements
        at ``n_ctx`` positions needs in passes of up to ``rows`` rows."""

    def product_bytes(self, rows: int, columns: int) -> int:
        """An estimate of the memory in bytes, besides activations and results, that products of ``rows`` rows with matrices
        of up to ``columns`` columns in all need."""

    def buffer_bytes(self) -> int:
        """The memory in bytes for the intermediate results of passes."""

    def rest(self, cache: PagedMemory) -> None:
        """Return memory to the system that is unused while no pass runs: free pages of a cache, and intermediate results.

        No pass may be running.
        """

    def resume(self, cache: PagedMemory) -> None:
        """Prepare for passes after :meth:`rest`.  Without this call, the next passes are slower."""

    def upload(self, array: np.ndarray) -> A:
        """A device array with the values, shape and dtype of a NumPy array.  Raises DeviceError if memory runs out."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> A:
        """A zeroed array, which is valid beyond the end of a pass.  Raises DeviceError if memory runs out."""

    def store(self, target: A, first: int, rows: np.ndarray) -> None:
        """Copy a NumPy array to rows of an array: target[first : first + len(rows)] = rows."""

    def download(self, array: A, out: np.ndarray | None = None) -> np.ndarray:
        """The values of an array as a NumPy array, read after all work that was started earlier has ended.  out: a contiguous
        array of this shape and dtype that they are written to, and which is returned; None: a new one."""

    def begin_download(self, pairs: Sequence[tuple[A, np.ndarray]]) -> Sequence[Copies]:
        """Begin to copy arrays to contiguous NumPy arrays of the same shapes and dtypes, as they are after all work that was
        started earlier; work that is started later does not change the copies.  Returns what must be awaited before they are
        read; nothing if they are there.  Raises DeviceError if memory runs out."""

    def copy_in(self, target: A, source: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis from a contiguous NumPy array to an array of the same shape and dtype, after
        all work that was started earlier."""

    def copy_out(self, source: A, target: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis to a contiguous NumPy array of the same shape and dtype, after all work that
        was started earlier has ended."""

    def read_entries(self, source: A, axis: int, first: int, end: int) -> np.ndarray:
        """Entries [first, end) of an axis of an array as a NumPy array of their own, read after all work that was started
        earlier has ended."""

    def write_entries(self, target: A, axis: int, first: int, values: np.ndarray) -> None:
        """Replace the entries of an axis from ``first`` on by a NumPy array of the same dtype and, but for this axis, the
        same shape, after all work that was started earlier."""

    def host_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An uninitialized array in host memory whose copies to and from the device are fast."""

    def host_side(self) -> Host | None:
        """How recorded passes of this backend exchange rows with those of a device; None if it is a device itself."""

    def exchange(self, borders: int, rows: int, width: int, n_used: int = 0) -> Exchange[A] | None:
        """A number of borders at which recorded passes of this device exchange up to ``rows`` rows, float32 [rows, width],
        with the host while they run, and up to ``n_used`` experts of each row.  None if the device cannot.  Raises
        DeviceError if memory runs out."""

    def crossing(self, source: DeviceOperations, n_bytes: int) -> Crossing[A]:
        """The way of up to ``n_bytes`` bytes at a time from ``source``, a backend of the same kind, to this one.  Raises
        DeviceError if memory runs out."""

    def weight(self, weight: Weight, host: bool = False) -> M_co:
        """A weight matrix in memory that the operations can read.  Raises DeviceError if memory runs out.

        host: whether to keep the matrix in host memory, which suits a table of which a pass reads only a few rows.
        """

    def weight_bytes(self, weight: Weight) -> int:
        """The memory in bytes that :meth:`weight` takes for a matrix."""

    def array_bytes(self, n_bytes: int) -> int:
        """The memory in bytes that an array of ``n_bytes`` bytes takes."""

    def weight_stream(self, parts: Sequence[Sequence[Matrix]]) -> WeightStream[M_co] | None:
        """Matrices of parts of a model that stay in the memory of the CPU and that this device copies when a pass needs them.
        None if the device cannot.  Raises DeviceError if memory runs out.

        parts: the matrices of each part, in the order in which a pass computes the parts, as the CPU's :meth:`weight`
            returned them.
        """

    def stream_bytes(self, parts: Sequence[int]) -> int:
        """The memory in bytes that :meth:`weight_stream` needs for parts with these numbers of bytes; 0 if the device cannot
        stream."""

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        """Prepare to load the tensors of a file.

        ``progress("load", done, total)`` is called, with numbers of bytes, while the tensors are read, by this method or by
        :meth:`loaded`.
        """

    def load_jobs(self) -> list[Job]:
        """Compile jobs for the kernels that :meth:`loaded` uses.  They may be compiled before it is called."""

    def loaded(self) -> None:
        """Complete the loading of all matrices, and release memory that only loading needs.

        Must be called after the last call of :meth:`weight`.
        """

    def stop_loading(self) -> None:
        """End a loading that cannot be completed.

        Must be called if an error occurs between :meth:`loading` and :meth:`loaded`.
        """
