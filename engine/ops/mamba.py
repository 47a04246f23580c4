"""The parameters of a Mamba-2 layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a Mamba-2 layer: n_head heads of d elements, each of which has a state [d, n].

    n_group: the number of groups of neighbouring heads that share b and c.
    taps: the number of taps of the convolution.
    """

    n_head: int
    d: int
    n: int
    n_group: int
    taps: int

    @property
    def d_inner(self) -> int:
        """The number of elements of all heads."""
        return self.n_head * self.d

    @property
    def n_channels(self) -> int:
        """The number of channels of the convolution, which are those of x, b and c."""
        return self.d_inner + 2 * self.n_group * self.n

    @property
    def width(self) -> int:
        """The number of elements that the recurrence reads of a position: channels, steps and decays."""
        return self.n_channels + 2 * self.n_head


@dataclass(frozen=True)
class Mamba(MambaSizes, Generic[A]):
    """The sizes and weights of a Mamba-2 layer.

    conv: float32 [n_channels, taps], the weights of the convolution, oldest tap first.
    conv_bias: float32 [n_channels].
    dt: float32 [n_head], the bias of the steps.
    a: float32 [n_head], negative: the factor in the decay exp(a * step).
    skip: float32 [n_head], the factor with which x is added to the result.
    """

    conv: A
    conv_bias: A
    dt: A
    a: A
    skip: A
