"""The parameters of the attention of one layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class Heads(Generic[A]):
    """The parameters of attention: n_head query heads of size d_k share n_head_kv key heads of size d_k and as many value
    heads of size d_v.

    neox: whether rotation pairs are (i, i + n / 2); otherwise they are (2i, 2i + 1).
    scale: the factor of the queries.
    eps: the epsilon of the norms.
    gated: each head has d_k gates after its d_k queries; its result is multiplied by sigmoid(gates).
    q_norm, k_norm: weights [d_k] of the norm of each head of q and of k, or None.
    v_normed: whether heads of v are also normalized, without weights.
    biases: the biases of q, k and v, or None.
    norm_after: whether heads of q and k are normalized after their rotation; otherwise they are normalized before it.
    sinks: float32 [n_head], or None: an additional score of each softmax, without a value, added after all positions.
    softcap: the bound c of scores s, which are replaced by c tanh(s / c); 0: they are not bounded.
    query_scales: float32 [n_ctx], or None: a factor of the queries by position, applied after rotation and normalization.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    neox: bool
    scale: float
    eps: float = 0.0
    q_norm: A | None = None
    k_norm: A | None = None
    biases: tuple[A, A, A] | None = None
    gated: bool = False
    v_normed: bool = False
    norm_after: bool = False
    sinks: A | None = None
    query_scales: A | None = None
    softcap: float = 0.0
