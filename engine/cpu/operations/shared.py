"""What the operations of the CPU share: recording, and telling an observer.

Arrays are NumPy arrays.  Times of items, in nanoseconds, only decide how many items a thread takes at a time.
"""

import numpy as np

from engine.cpu.products.repack import Matrix
from engine.cpu.runtime.recorder import Recorder
from engine.ops.arithmetic import Arithmetic
from engine.ops.observation import Observation, Observer

f32 = np.float32


class SharedOperations(Recorder, Arithmetic[np.ndarray, np.ndarray, Matrix]):
    """The base of each group of operations, which ``engine/ops/arithmetic.py`` describes.  ``do`` calls a kernel."""

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._observer: Observer[np.ndarray] | None = None

    def _tell(self, name: str, value: np.ndarray) -> None:
        if self._observer is not None:
            self.flush()
            self._observer(Observation("", "", {name: value}))
