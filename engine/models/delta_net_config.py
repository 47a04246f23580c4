"""The description of a gated delta net."""

from dataclasses import dataclass

from engine.ops.delta_net import DeltaNetSizes


@dataclass(frozen=True)
class DeltaNetConfig(DeltaNetSizes):
    """A mixer: a gated delta net of these sizes."""
