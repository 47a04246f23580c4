"""The description of attention over a window and compressed rows."""

from dataclasses import dataclass

from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses ``top_k`` compressed rows for each token: n_head heads of queries of d elements over keys of its own."""

    n_head: int
    d: int
    top_k: int


@dataclass(frozen=True)
class CompressedConfig:
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
