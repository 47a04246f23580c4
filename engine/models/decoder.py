"""A decoder of layers that are described by data (``engine/models/layer.py``): most architectures."""

from dataclasses import replace

from engine.arrays import Array, Batch
from engine.errors import ModelError
from engine.models.base import Model
from engine.models.layer import Layer, load_layer
from engine.models.mtp import MTP


class StandardDecoder(Model):
    """A model of any architecture whose layers ``LayerConfig`` describes."""

    layers: list[Layer]

    def load_layer(self, il: int) -> Layer:
        """Layer ``il`` of the trunk."""
        return load_layer(self, il)

    def load_rest(self) -> None:
        """Load the layer that drafts, if the file has one.  The model runs without it if its tensors are wrong."""
        if self.config.mtp is None or self.config.mtp_apart:
            return
        try:
            self.drafter = MTP(self, self)
        except ModelError as error:
            problem = str(error).removeprefix(f"{self.gguf.path}: ").removesuffix(".")
            self.config = replace(self.config, mtp=None, mtp_problem=problem)

    def block(self, il: int, x: Array, batch: Batch[Array]) -> Array:
        """One layer of the trunk: residual stream in, residual stream out, float32 [rows, n_embd]."""
        return self.layers[il].run(self.ops, x, self.memory(il), batch)
