"""The states of recurrent layers after a token."""

import numpy as np

from engine.arrays import Array
from engine.cache.recurrent import RecurrentCache
from engine.cache.spec import StoredRows
from engine.ops.delta_net import DeltaNet
from engine.ops.operations import Ops

f64 = np.float64


def delta_states(ops: Ops, net: DeltaNet[Array], memory: RecurrentCache[Array], slot: int, length: int) -> np.ndarray:
    """The states of a delta net after the first ``length`` tokens of the sequence in ``slot``, which has no more: float64
    [n_v, d, d].

    The cache holds the state before a segment and the updates of the tokens since, M = e M + u k^T for each
    (``engine/cpu/delta_net.py``).
    """
    rows = {each.name: _gathered(ops, each) for each in memory.needed(slot, length, lambda paging: {})}
    heads = np.arange(net.n_v)
    of_key = heads // (net.n_v // net.n_k) if net.grouped else heads % net.n_k
    state = rows["state"][0] if len(rows["state"]) else np.zeros((net.n_v, net.state_size, net.state_size))
    for k, u, e in zip(rows["keys"], rows["deltas"], rows["decays"], strict=True):
        state = e[:, None, None] * state + u[:, :, None] * k[of_key][:, None, :]
    return state


def _gathered(ops: Ops, rows: StoredRows[Array]) -> np.ndarray:
    """The entries of a ring, float64 [n, ...]."""
    found = [ops.download(rows.ring[run]) for run in rows.runs()]
    return np.concatenate([np.empty((0, *rows.ring.shape[1:]), np.float32), *found]).astype(f64)
