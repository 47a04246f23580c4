"""The parameters of Kimi delta attention in a layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class KDASizes:
    """The sizes of Kimi delta attention: n_head heads of d elements, each of which has a state [d, d].

    taps: the number of taps of the convolutions.
    """

    n_head: int
    d: int
    taps: int

    @property
    def d_inner(self) -> int:
        """The number of elements of all heads."""
        return self.n_head * self.d

    @property
    def n_channels(self) -> int:
        """The number of channels of the convolutions, which are those of queries, keys and values."""
        return 3 * self.d_inner

    @property
    def width(self) -> int:
        """The number of elements by which a position changes the states: keys, values, decays and rates."""
        return 3 * self.d_inner + self.n_head


@dataclass(frozen=True)
class KDA(KDASizes, Generic[A]):
    """The sizes and weights of Kimi delta attention.

    eps: the epsilon in the lengths of queries and keys.
    conv: float32 [n_channels, taps], the weights of the convolutions, oldest tap first.
    a: float32 [n_head], negative: the factor in the decays exp(a * softplus(f + dt)).
    dt: float32 [d_inner], the bias in the decays.
    """

    eps: float
    conv: A
    a: A
    dt: A
