"""The configuration of latent attention."""

from dataclasses import dataclass

from engine.cache.latent import LatentCacheSpec
from engine.cache.types import CHUNK
from engine.models.indexer_config import IndexerConfig
from engine.models.mixer_config import MixerConfig, Scratch
from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class LatentConfig(MixerConfig):
    """A mixer: causal attention whose heads share one latent vector per position (MLA).

    A position is stored as rank + n_rope elements: a latent, from which the key and value of each head could be computed, and
    a rotated part of the key that all heads share.

    n_head: the number of heads.
    n_nope, n_rope: the numbers of elements of a head's query that are not rotated and that are rotated.
    rank: the number of elements of a latent.
    d_v: the number of elements of a head's value.
    scale: the factor of the scores.
    rope: the rotation of the last n_rope elements; None: they are not rotated.
    q_rank: the number of elements of a latent from which the queries of all heads are computed; 0: there is no such latent.
    temperature: (s, n, o), if queries at position p are multiplied by 1 + s ln(1 + (p + o) // n); None: there is no such
        factor.
    indexer: the indexer, which selects the positions that a token attends to; None: there is none.
    shared: the number of positions that the indexer of an earlier layer selects for this layer, too; 0: a layer without an
        indexer attends to all.
    """

    n_head: int
    n_nope: int
    n_rope: int
    rank: int
    d_v: int
    scale: float
    rope: RopeConfig | None
    q_rank: int = 0
    temperature: tuple[float, int, int] | None = None
    indexer: IndexerConfig | None = None
    shared: int = 0

    @property
    def top_k(self) -> int:
        """The number of positions that a token attends to; 0: all."""
        return self.indexer.top_k if self.indexer is not None else self.shared

    @property
    def n_shared(self) -> int:
        """The positions that the layer takes from an earlier one."""
        return self.shared

    @property
    def width(self) -> int:
        """The number of elements that are stored per position."""
        return self.rank + self.n_rope

    def cache_spec(self, rewind: int, decode_rows: int) -> LatentCacheSpec:
        """The specification of the cache: latents, and keys of the indexer."""
        return LatentCacheSpec(self.width, self.indexer.d if self.indexer is not None else 0, self.top_k)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of a latent and, for each head, of its query before and after the
        product with k_b and of its result before and after the product with v_b; and of the indexer's queries, key and
        selected positions."""
        heads, own = self.n_head * (self.n_nope + 2 * self.n_rope + 2 * self.rank + self.d_v), self.indexer
        index = self.top_k + 1
        if own is not None:
            index += own.n_head * (2 * own.d + 1) + 3 * own.d
        return self.q_rank + 2 * self.width + heads + index

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """A tuple of ``rope``, which is empty if there is no rotation."""
        return () if self.rope is None else (self.rope,)

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """The memory in bytes for the results of chunks before they are joined."""
        positions = min(n_ctx, self.top_k or n_ctx)
        return scratch.latent_scratch_bytes(self.n_head, self.rank, positions, rows)

    def score_bytes(self, n_ctx: int) -> int:
        """The memory in bytes per row for scores of the indexer over all positions; 0 if it never leaves one out."""
        return 4 * (n_ctx + CHUNK) if self.indexer is not None and n_ctx > self.indexer.top_k else 0
