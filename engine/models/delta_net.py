"""What a gated delta net layer knows beside its inputs."""

from dataclasses import dataclass
from typing import Any

from engine.models.config import DeltaNetConfig


@dataclass(frozen=True)
class DeltaNet(DeltaNetConfig):
    """Its sizes, and: conv1d: float32 [n_channels, n_conv], the oldest tap first; a: float32 [n_v], negative; dt: float32
    [n_v]; norm: float32 [state_size].  Value head h uses key head h % n_k."""

    eps: float
    conv1d: Any
    a: Any
    dt: Any
    norm: Any
