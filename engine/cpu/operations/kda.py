"""Kimi delta attention."""

import numpy as np

from engine.arrays import Batch
from engine.cache.mamba import MambaCache
from engine.cpu import kda
from engine.cpu.operations.shared import SharedOperations
from engine.ops.kda import KDA

f32 = np.float32


class KDAOperations(SharedOperations):
    """The convolutions and the recurrence, on the states of sequences."""

    def kda(
        self,
        net: KDA[np.ndarray],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        f: np.ndarray,
        b: np.ndarray,
        memory: MambaCache[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> np.ndarray:
        rows, places = batch.rows, (batch.positions, batch.sequences)
        y, out = self.empty((rows, net.d_inner + net.width)), self.empty((rows, net.d_inner))
        weights = net.conv, net.a, net.dt, f32(net.eps), f32(1.0 / net.d**0.5)
        given = q, k, v, f, b, *places, *weights, memory.inputs, y
        self.do(kda.kda_conv, *given, items=net.n_head, ns=26.0 * net.d * rows)
        self._tell("convolved", y)
        read = y, *places, memory.tokens, memory.states, out
        self.do(kda.kda_scan, *read, items=net.n_head, ns=(rows + 8) * net.d * net.d / 2.0)
        self.do(kda.kda_keep, y, *places, memory.tokens, items=rows, ns=0.1 * net.width)
        return out
