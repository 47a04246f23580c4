"""The parameters of a gated delta net layer."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A
from engine.models.config import DeltaNetConfig


@dataclass(frozen=True)
class DeltaNet(DeltaNetConfig, Generic[A]):
    """Sizes and weights of a gated delta net: conv1d float32 [n_channels, n_conv], oldest tap first; a float32 [n_v],
    negative; dt float32 [n_v]; norm float32 [state_size]."""

    eps: float
    conv1d: A
    a: A
    dt: A
    norm: A
