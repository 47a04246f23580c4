"""A decoder of layers that are described by data (``engine/models/layer.py``): most architectures."""

from engine.arrays import Array, Pass
from engine.models.base import Model
from engine.models.layer import Layer, load_layer
from engine.models.mtp import MTP


class Decoder(Model):
    """A model of any architecture whose layers ``LayerConfig`` describes."""

    layers: list[Layer]

    def load_layer(self, il: int) -> Layer:
        """Layer ``il``, of the trunk or the one after it, which drafts."""
        return load_layer(self, il)

    def load_rest(self) -> None:
        """Load the layer that drafts, if there is one."""
        if self.config.mtp is not None:
            self.mtp = MTP(self, self.load_layer(self.config.n_layer))

    def block(self, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer of the trunk: residual stream in, residual stream out, float32 [rows, n_embd]."""
        return self.layers[il].run(self.ops, x, self.memory(il), batch)
