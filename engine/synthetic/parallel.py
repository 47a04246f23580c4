"""Shapes of models with parallel layers: Command R7B."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class Cohere2Shape(Shape):
    """cohere2: parallel layers with one norm, three of four with a window.  ``logit_scale``: a factor of the logits."""

    logit_scale: float = 0.25

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.n_embd,)
            yield from self._attention(block)
            yield from self._feed_forward(block)
        yield "output_norm.weight", (self.n_embd,)

    def metadata(self) -> dict[str, Value]:
        """The epsilon of layer norms, and the factor of the logits."""
        return {"attention.layer_norm_epsilon": self.eps, "logit_scale": self.logit_scale}


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
PARALLEL: dict[str, Shape] = {
    "command-r7b": Cohere2Shape("cohere2", 32, 4096, 32, 8, 128, 14336, 256000, 8192, 5e4, 1e-5, window=4096),
    # A width that is no multiple of 256, a layer (3 of 5) without a window, and one behind it.
    "tiny-cohere2": Cohere2Shape(
        "cohere2", 5, 288, 3, 1, 96, 512, N_VOCAB_TINY, 512, 5e4, 1e-5, window=32, logit_scale=0.875,
    ),
}
# fmt: on
