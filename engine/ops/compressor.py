"""The parameters of the compressor, which computes compressed rows."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class Compressor(Generic[A]):
    """The parameters by which a row of d elements is computed from ``overlap`` blocks of ``ratio`` tokens each.

    ape: float32 [ratio, overlap * d], added to the scores of a token according to its position in the block.
    norm: float32 [d], the weights of the norm of a row.
    eps: the epsilon of the norm.
    """

    ratio: int
    overlap: int
    ape: A
    norm: A
    eps: float
