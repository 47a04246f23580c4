"""The description of latent attention."""

from dataclasses import dataclass

from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class LatentConfig:
    """A mixer: causal attention whose heads share one latent vector per position (MLA).

    A position is stored as rank + n_rope elements: a latent, from which each head's key and value of the position could be
    computed, and a rotated part of the key that all heads share.

    n_nope, n_rope: elements of a head's query that are not rotated, and that are.
    rank: elements of a latent; q_rank: of a query's, from which the queries of all heads are computed; 0: there is none.
    d_v: elements of a head's value.
    scale: the factor of the scores.
    rope: the rotation of the last n_rope elements.
    temperature: as in ``AttentionConfig``.
    """

    n_head: int
    n_nope: int
    n_rope: int
    rank: int
    d_v: int
    scale: float
    rope: RopeConfig
    q_rank: int = 0
    temperature: tuple[float, int] | None = None

    @property
    def width(self) -> int:
        """Elements that are stored per position."""
        return self.rank + self.n_rope
