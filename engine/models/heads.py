"""What the attention of one layer knows beside its inputs."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class Heads(Generic[A]):
    """n_head query heads of d_k share n_head_kv keys of d_k and values of d_v; ``neox``: rotation pairs are (i, i +
    n / 2), else (2i, 2i + 1); ``scale`` multiplies the queries.

    gated: behind its d_k queries, each head has as many gates, whose logistic function multiplies what it attends to.
    q_norm, k_norm: weights [d_k] of the normalization of each head (with eps), or None; v_normed: values are normalized as
    well, without weights; biases: of q, k and v, or None.
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
