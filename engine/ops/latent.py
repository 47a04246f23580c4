"""The parameters of the latent attention of one layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A, M


@dataclass(frozen=True)
class Latent(Generic[A, M]):
    """The parameters of latent attention: n_head heads attend to the same vectors, one per position
    (``engine.models.latent_config.LatentConfig``).

    scale: the factor of the scores.
    eps: the epsilon of the norm.
    norm: float32 [rank], the weights of the norm of latents, which is applied before they are stored.
    k_b: the stacked matrices of all heads, [n_head * rank, n_nope], which map queries to the space of latents.
    v_b: the stacked matrices of all heads, [n_head * d_v, rank], which map weighted sums of latents to values.
    table: float32 [n_ctx, 2, n_rope / 2], the cosines and sines of the rotation of pairs (2i, 2i + 1); None:
        there is no rotation.
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
    table: A | None
    query_scales: A | None = None
