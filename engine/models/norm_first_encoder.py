"""An encoder whose layers are those of a decoder, with a norm before each part, but whose tokens also see later ones.

In layers with a window, a token sees as many tokens after it as before it (``engine/ops/spans.py``), in others the whole
text.  After the last layer come a norm and, if the file has them, two matrices::

    y = rms_norm(x, output_norm);  outputs = (y dense_2) dense_3

sentence-transformers multiplies the mean of the outputs by these matrices.  Since there is nothing between them that is not
linear, each output can be multiplied before the mean is taken.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.models.attention import Attention
from engine.models.attention_config import AttentionConfig
from engine.models.encoder import Encoder
from engine.models.layer import Layer, load_layer
from engine.models.norm import load_norm
from engine.ops.operations import Ops
from engine.ops.spans import spans


class NormFirstEncoder(Encoder):
    """A model whose layers ``LayerConfig`` describes, and whose tokens attend to earlier and later ones."""

    layers: list[Layer]

    def load_output(self) -> None:
        """Load the norm after the last layer and the two matrices."""
        c = self.config
        self.output_norm = load_norm(self, c.output_norm)
        shapes = {"dense_2": (c.n_dense, c.n_embd), "dense_3": (c.n_embd, c.n_dense)} if c.n_dense else {}
        self.dense = [self.product(f"{name}.weight", *shape) for name, shape in shapes.items()]

    def load_layer(self, il: int) -> Layer:
        """Load the weights of layer ``il``."""
        return load_layer(self.loader(self.placement.mixers[il]), self.loader(self.placement.networks[il]), il)

    def load_rest(self) -> None:
        """Allocate memory for the last positions of texts, and for the spans of rows."""
        self.last = self.rows_of_integers()
        mixers = [layer.mixer for layer in self.config.layers]
        self.reaches = [mixer.reach if isinstance(mixer, AttentionConfig) else 0 for mixer in mixers]
        #: int32 [rows] for each reach: the spans of the rows of a pass.
        self.spans = {reach: self.rows_of_integers() for reach in dict.fromkeys(self.reaches) if reach}
        #: What each layer takes for the ends of what rows see.
        self.ends = [self.spans[reach] if reach else self.last for reach in self.reaches]

    def prepare_texts(self, lengths: SequenceOf[int]) -> None:
        """Tell attention how long the texts of the next pass are."""
        super().prepare_texts(lengths)
        for reach, array in self.spans.items():
            self.fill(array, np.concatenate([spans(n, reach) for n in lengths]))

    def enter(self, ops: Ops, x: Array) -> Array:
        """x itself, the embeddings."""
        return x

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the attention of layer ``il``: the residual stream after it from x before it, float32 [rows, n_embd]."""
        layer, ends = self.layers[il], self.ends[il][: batch.rows]
        assert isinstance(layer.mixer, Attention)
        a = layer.normalized(ops, x, layer.before_mixer)
        o = layer.mixer.mix_up_to(ops, a, self.memory(il, ops), batch, ends, self.reaches[il])
        return layer.after_mixer.add_product(ops, x, o, layer.mixer.output)

    def normed(self, x: Array) -> Value:
        """The outputs for the residual stream x after the last layer: [rows, n_embd]."""
        y = self.output_norm.apply(self.ops, x)
        for matrix in self.dense:
            y = matrix.apply(self.ops, y)
        return y
