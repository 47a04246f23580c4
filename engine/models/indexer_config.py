"""The configuration of an indexer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerConfig:
    """An indexer, which selects ``top_k`` of the positions, or of the compressed rows, that a token sees.

    It has n_head heads of queries of d elements, and a key of d elements for each position or compressed row.

    neox: whether rotation pairs are (i, i + n_rot / 2); otherwise they are (2i, 2i + 1).
    """

    n_head: int
    d: int
    top_k: int
    neox: bool = False

    @property
    def factor(self) -> float:
        """The factor of the weights of heads."""
        return 1.0 / (self.n_head * self.d) ** 0.5
