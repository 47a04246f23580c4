"""An entry in the registry of architectures (``engine/models/registry.py``)."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.decoder import StandardDecoder
from engine.models.metadata import Metadata


@dataclass(frozen=True)
class Architecture:
    """An architecture that the engine supports.

    name: the value of ``general.architecture`` in its files.
    models: well-known models with this architecture.
    read: reads the configuration from the metadata.  Raises ModelError or GGUFError.
    oracle: the independent implementation with which the logits are compared.
    drafts: how its models can draft tokens without another model; "" if they cannot.
    model: the class that computes the forward pass.
    chain: the most layers that draft in one model, if its own layers draft.
    """

    name: str
    models: str
    read: Callable[[Metadata], ModelConfig]
    oracle: str
    drafts: str = ""
    model: type[Model] = StandardDecoder
    chain: int = 1

    @property
    def n_mtp(self) -> int:
        """The most layers of its own that draft in one model."""
        return self.chain if self.drafts == "MTP" else 0
