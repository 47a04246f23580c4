"""The description of attention over a window and compressed rows."""

from dataclasses import dataclass

from engine.cache.compressed import CompressedCacheSpec
from engine.cache.types import CHUNK
from engine.models.mixer_config import MixerConfig
from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses ``top_k`` compressed rows for each token: n_head heads of queries of d elements over keys of its own."""

    n_head: int
    d: int
    top_k: int


@dataclass(frozen=True)
class CompressedConfig(MixerConfig):
    """A mixer: attention of n_head heads over latents of d elements, each of which is key and value of all heads.  A token
    sees the latest ``window`` latents, and rows that compress ``ratio`` positions each; ratio 0: none.

    scale: the factor of the scores.
    rope: the rotation of the last elements of queries and latents, in pairs of neighbours.
    n_q: the width from which queries are made.
    n_group, n_out: the heads of each of n_group groups together become n_out elements, and those of all groups the output.
    indexer: what chooses among the compressed rows; None: a token sees all of them.
    rounded: whether everything that is stored, and queries of the indexer, are rounded to 8 and 4 bits as in ds4.
    """

    n_head: int
    d: int
    scale: float
    rope: RopeConfig
    window: int
    n_q: int
    n_group: int
    n_out: int
    ratio: int = 0
    indexer: IndexerConfig | None = None
    rounded: bool = False

    @property
    def overlap(self) -> int:
        """The number of consecutive blocks that a compressed row is made of."""
        return 2 if self.indexer is not None else 1

    def cache_spec(self, rewind: int, decode_rows: int) -> CompressedCacheSpec:
        """Latents of the window, compressed rows, and what the next ones are made of."""
        keys, top_k = (self.indexer.d, self.indexer.top_k) if self.indexer is not None else (0, 0)
        return CompressedCacheSpec(self.d, self.window, self.ratio, self.overlap, keys, top_k, rewind, decode_rows)

    @property
    def row_elements(self) -> int:
        """Queries, latents, results of groups, queries of the indexer with the rows that it chooses, values and scores of
        compressed rows."""
        indexer, keys = 0, 0
        if self.indexer is not None:
            keys = self.indexer.d
            indexer = self.indexer.n_head * (2 * keys + 1) + self.indexer.top_k
        states = 2 * self.overlap * (self.d + keys) if self.ratio else 0
        return 4 * self.n_head * self.d + 2 * self.n_q + 3 * self.d + self.n_group * self.n_out + indexer + states

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """``rope``."""
        return (self.rope,)

    @property
    def rounding(self) -> str:
        """ "ds4" if ``rounded``."""
        return "ds4" if self.rounded else ""

    def score_bytes(self, n_ctx: int) -> int:
        """Scores of the indexer over all compressed rows; 0 without one."""
        return 0 if self.indexer is None else 4 * (n_ctx // self.ratio + CHUNK)
