"""What a gated delta net layer knows beside its inputs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeltaNet:
    """n_k heads of queries and keys and n_v heads of values, all of ``state_size`` elements; value head h uses key head
    h % n_k.  ``n_conv``: taps of the convolution, over n_channels = (2 n_k + n_v) state_size channels: q, k, v.

    conv1d: float32 [n_channels, n_conv], the oldest tap first; a: float32 [n_v], negative; dt: float32 [n_v]; norm: float32
    [state_size].
    """

    n_k: int
    n_v: int
    state_size: int
    n_conv: int
    eps: float
    conv1d: Any
    a: Any
    dt: Any
    norm: Any

    @property
    def n_channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.n_k + self.n_v) * self.state_size
