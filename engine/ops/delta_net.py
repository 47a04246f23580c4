"""The parameters of a gated delta net layer."""

from dataclasses import dataclass, field
from typing import Generic

from engine.arrays import A


@dataclass(frozen=True)
class DeltaNetSizes:
    """The sizes of a gated delta net: n_k heads of queries and keys and n_v heads of values, each of ``state_size`` elements.

    n_conv: the number of taps of the convolution.
    grouped: whether value head h uses key head h // (n_v / n_k); otherwise it uses key head h % n_k.
    """

    n_k: int
    n_v: int
    state_size: int
    n_conv: int
    grouped: bool = field(default=False, kw_only=True)

    @property
    def n_channels(self) -> int:
        """The number of channels of the convolution, which are those of q, k and v."""
        return (2 * self.n_k + self.n_v) * self.state_size

    @property
    def value_segments(self) -> tuple[int, ...]:
        """The numbers of consecutive value heads in which every key head has an equal share, in its order."""
        return (self.n_v,) if self.grouped else (self.n_k,) * (self.n_v // self.n_k)


@dataclass(frozen=True)
class DeltaNet(DeltaNetSizes, Generic[A]):
    """The sizes and weights of a gated delta net.

    eps: the epsilon of the norms.
    conv1d: float32 [n_channels, n_conv], the weights of the convolution, oldest tap first.
    a: float32 [n_v], negative: the factor in the decay exp(a * softplus(alpha + dt)).
    dt: float32 [n_v], the bias in the decay.
    norm: float32 [state_size], the weights of the norm of each value head.
    """

    eps: float
    conv1d: A
    a: A
    dt: A
    norm: A
