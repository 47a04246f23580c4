"""Mamba-2."""

import numpy as np

from engine.arrays import Batch
from engine.cache.mamba import MambaCache
from engine.cpu import mamba
from engine.cpu.operations.shared import SharedOperations
from engine.ops.mamba import Mamba


class MambaOperations(SharedOperations):
    """The convolution and the recurrence, on the states of sequences."""

    def mamba(
        self,
        net: Mamba[np.ndarray],
        u: np.ndarray,
        z: np.ndarray,
        memory: MambaCache[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> np.ndarray:
        rows, block, places = batch.rows, mamba.ELEMENTS, (batch.positions, batch.sequences)
        y, out = self.empty((rows, net.width)), self.empty((rows, net.d_inner))
        given = u, *places, net.conv, net.conv_bias, net.dt, net.a, memory.inputs, y
        self.do(mamba.mamba_conv, *given, items=-(-net.width // block), ns=3.0 * block * rows)
        self._tell("convolved", y)
        read = y, z, net.skip, net.n_group, *places, memory.tokens, memory.states, out
        self.do(mamba.mamba_scan, *read, items=net.n_head, ns=(rows + 8) * net.d * net.n / 8.0)
        self.do(mamba.keep_tokens, y, *places, memory.tokens, items=rows, ns=0.1 * net.width)
        return out
