"""The configuration of attention over a window and compressed rows."""

from dataclasses import dataclass

from engine.cache.compressed import CompressedCacheSpec
from engine.cache.types import CHUNK
from engine.models.indexer_config import IndexerConfig
from engine.models.mixer_config import MixerConfig
from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class CompressedConfig(MixerConfig):
    """A mixer: attention of n_head heads over latents of d elements, each of which is both key and value of all heads.

    scale: the factor of the scores.
    rope: the rotation of the last elements of queries and latents, in pairs of neighbours.
    window: the number of latest positions whose latents a token sees, its own included.
    n_q: the number of elements from which queries are computed.
    n_group, n_out: the results of the heads of each of n_group groups are projected to n_out elements.  The output is
        computed from the elements of all groups.
    ratio: the number of positions per compressed row; 0: there are no compressed rows.
    indexer: the indexer, which selects compressed rows; None: a token sees all of them.
    rounded: whether all stored rows, and the queries of the indexer, are rounded to 8 and 4 bits as in ds4.
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
        """The number of consecutive blocks from which a compressed row is computed."""
        return 2 if self.indexer is not None else 1

    @property
    def reads_together(self) -> bool:
        """False: the attention of passes of many rows reads the latents and compressed rows of one sequence."""
        return False

    def cache_spec(self, rewind: int, decode_rows: int) -> CompressedCacheSpec:
        """The specification of the cache: latents of the window, compressed rows, and open blocks."""
        keys, top_k = (self.indexer.d, self.indexer.top_k) if self.indexer is not None else (0, 0)
        return CompressedCacheSpec(self.d, self.window, self.ratio, self.overlap, keys, top_k, rewind, decode_rows)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of queries, latents, results of groups, queries of the indexer,
        selected rows, and values and scores of compressed rows."""
        indexer, keys = 0, 0
        if self.indexer is not None:
            keys = self.indexer.d
            indexer = self.indexer.n_head * (2 * keys + 1) + self.indexer.top_k
        states = 2 * self.overlap * (self.d + keys) if self.ratio else 0
        return 4 * self.n_head * self.d + 2 * self.n_q + 3 * self.d + self.n_group * self.n_out + indexer + states

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """A tuple of ``rope``."""
        return (self.rope,)

    @property
    def rounding(self) -> str:
        """The name of the rule by which stored rows are rounded: "ds4", or "" if they are not rounded."""
        return "ds4" if self.rounded else ""

    def score_bytes(self, n_ctx: int) -> int:
        """The memory in bytes per row for scores of the indexer over all compressed rows; 0 without an indexer."""
        return 0 if self.indexer is None else 4 * (n_ctx // self.ratio + CHUNK)
