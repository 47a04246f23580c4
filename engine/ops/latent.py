"""The parameters of the latent attention of one layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A, M


@dataclass(frozen=True)
class Latent(Generic[A, M]):
    """n_head heads whose queries are multiplied by the same vectors, one per position (``engine/models/config.py``:
    ``LatentConfig``).

    scale: the factor of the scores; eps: that of ``norm``.
    norm: float32 [rank], the weights that normalize latents before they are stored.
    k_b: the matrices of all heads, stacked, [n_head * rank, n_nope]: from a query to its products with latents.
    v_b: [n_head * d_v, rank]: from a sum of latents to the value that it stands for.
    table: rotation angles, float32 [n_ctx, 2, n_rope / 2], of pairs (2i, 2i + 1).
    query_scales: float32 [n_ctx], or None: a factor of the queries by position.
    """

    n_head: int
    n_nope: int
    n_rope: int
    rank: int
    d_v: int
    scale: float
    eps: float
    norm: A
    k_b: M
    v_b: M
    table: A
    query_scales: A | None = None
