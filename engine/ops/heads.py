"""The parameters of the attention of one layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class Heads(Generic[A]):
    """n_head query heads of size d_k share n_head_kv heads of keys of size d_k and of values of size d_v.

    neox: rotation pairs are (i, i + n / 2), else (2i, 2i + 1).
    scale: the factor of the queries.
    gated: each head has d_k gates after its d_k queries; its result is multiplied by sigmoid(gates).
    q_norm, k_norm: weights [d_k] of the normalization of each head (with eps), or None.
    v_normed: whether values are normalized too, without weights.
    biases: the biases of q, k and v, or None.
    norm_after: heads of q and k are normalized after their rotation instead of before.
    sinks: float32 [n_head], or None: one more score of each softmax, without a value; it joins after all positions.
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
