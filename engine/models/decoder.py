"""The decoder of most architectures, whose layers are described by data (``engine/models/layer.py``)."""

from dataclasses import replace

from engine.arrays import Array, Batch
from engine.errors import ModelError
from engine.models.base import Model
from engine.models.layer import Layer, load_layer
from engine.models.mtp import MTP, drafting_layers
from engine.ops.operations import Ops


class StandardDecoder(Model):
    """A model of any architecture whose layers ``LayerConfig`` describes."""

    can_be_shared = True
    layers: list[Layer]

    def load_layer(self, il: int) -> Layer:
        """Load the weights of layer ``il`` of the trunk."""
        mixers, networks = self.loader(self.placement.mixers[il]), self.loader(self.placement.networks[il])
        return load_layer(mixers, networks, il)

    def load_rest(self) -> None:
        """Load the layers that draft, if the file has any.  If their tensors are wrong, the model runs without them."""
        if not self.config.mtp or self.config.mtp_apart:
            return
        try:
            self.drafter = MTP(self, drafting_layers(self, self))
        except ModelError as error:
            problem = str(error).removeprefix(f"{self.gguf.path}: ").removesuffix(".")
            self.config = replace(self.config, mtp=(), mtp_problem=problem)

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the mixer of layer ``il``, or the whole layer if it is parallel: the residual stream after it from x before
        it, float32 [rows, n_embd]."""
        return self.layer(ops, il, False).mix(ops, x, self.memory(il, ops), batch)

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the network of layer ``il``: the residual stream after it from x before it, float32 [rows, n_embd]."""
        return self.layer(ops, il, True).feed(ops, x, batch)
