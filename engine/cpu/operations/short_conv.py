"""The gated short convolution."""

import numpy as np

from engine.arrays import Batch
from engine.cache.short_conv import ShortConvCache
from engine.cpu import short_conv
from engine.cpu.operations.shared import SharedOperations


class ShortConvOperations(SharedOperations):
    """The short convolution, on the inputs that sequences keep."""

    def short_conv(
        self, weight: np.ndarray, bcx: np.ndarray, memory: ShortConvCache[np.ndarray], batch: Batch[np.ndarray]
    ) -> np.ndarray:
        (rows, _), (n, taps), block = bcx.shape, weight.shape, short_conv.ELEMENTS
        y = self.empty((rows, n))
        given = bcx, batch.positions, batch.sequences, weight, memory.inputs, y
        self.do(short_conv.short_conv, *given, items=-(-n // block), ns=0.2 * (taps + 2) * block * rows)
        return y
