"""The parameters of compressed rows."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class Compressor(Generic[A]):
    """What makes a row of d elements of ``overlap`` blocks of ``ratio`` tokens each.

    ape: added to the scores of a token by its place in the block, float32 [ratio, overlap * d].
    norm: the weights of the norm of a row, float32 [d].
    """

    ratio: int
    overlap: int
    ape: A
    norm: A
    eps: float
