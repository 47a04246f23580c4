"""An entry of the registry of architectures (``engine/models/registry.py``)."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.decoder import StandardDecoder
from engine.models.metadata import Metadata


@dataclass(frozen=True)
class Architecture:
    """An architecture that the engine runs.

    name: ``general.architecture`` of its files.
    models: well-known models.
    read: makes the configuration from the metadata; raises ModelError or GGUFError.
    oracle: the independent implementation that its logits are compared with.
    drafts: how its models can draft tokens by themselves; "" if they cannot.
    model: the class that computes its forward pass.
    """

    name: str
    models: str
    read: Callable[[Metadata], ModelConfig]
    oracle: str
    drafts: str = ""
    model: type[Model] = StandardDecoder
