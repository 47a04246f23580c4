"""The gated delta net."""

from collections.abc import Sequence

import numpy as np

from engine.arrays import Batch
from engine.cache.recurrent import RecurrentCache
from engine.cpu import (
    delta_net,
)
from engine.cpu.operations.shared import SharedOperations
from engine.ops.delta_net import DeltaNet

f32 = np.float32


class DeltaNetOperations(SharedOperations):
    """The convolution and the delta rule, on the states of sequences."""

    def delta_net(
        self,
        net: DeltaNet[np.ndarray],
        x: np.ndarray,
        gates: Sequence[np.ndarray],
        memory: RecurrentCache[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> np.ndarray:
        rows, d = batch.rows, net.state_size
        places = batch.positions, batch.sequences
        y = self.convolved(net, x, memory, batch)
        self._tell("convolved", y)
        out = self.empty((rows, net.n_v, d))
        beta_at = 0 if len(gates) == 2 else net.n_v
        lists = memory.states, memory.keys, memory.deltas, memory.decays
        given = gates[0], gates[-1], beta_at, net.a, net.dt, *places, *lists, out
        ns = (rows + 1) * d * d / 32.0
        self.do(delta_net.delta_rule, y, net.n_k, net.grouped, *given, items=net.n_v, ns=ns)
        self.do(delta_net.keep_keys, y, net.n_k, *places, memory.keys, items=rows, ns=0.1 * net.n_k * d)
        return out.reshape(rows, -1)

    def convolved(
        self, net: DeltaNet[np.ndarray], x: np.ndarray, memory: RecurrentCache[np.ndarray], batch: Batch[np.ndarray]
    ) -> np.ndarray:
        """The inputs of the rule made from x: float32 [rows, n_channels], queries and keys, normalized, and values."""
        rows, channels = x.shape
        y = self.empty(x.shape)
        block = delta_net.CHANNELS
        given = x, batch.positions, batch.sequences, net.conv1d, memory.conv, y
        self.do(delta_net.causal_conv, *given, items=-(-channels // block), ns=3.0 * block * rows)
        d, items = net.state_size, rows * 2 * net.n_k
        self.do(delta_net.l2_norm, y, net.n_k, d, f32(net.eps), f32(1.0 / d**0.5), items=items, ns=20 + 0.5 * d)
        return y
