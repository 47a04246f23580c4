"""Shapes of networks of EAGLE-3, which draft for another model."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.config import EAGLE3
from engine.synthetic.shape import D2T, N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """A network of one layer that reads the layers ``taps`` of a model with the same width; ``n_draft``: how many of the
    tokens it can draft."""

    taps: tuple[int, ...] = ()
    n_draft: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, q, kv, block = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim, "blk.0."
        yield D2T, (self.n_draft,)
        yield "fc.weight", (e, e * len(self.taps))
        yield block + "attn_norm.weight", (e,)
        yield block + "attn_norm_2.weight", (e,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{block}attn_{name}.weight", (rows, 2 * e)
        yield block + "attn_output.weight", (e, q)
        yield block + "ffn_norm.weight", (e,)
        yield from self._feed_forward(block)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_draft, e)

    def metadata(self) -> dict[str, Value]:
        """What the network reads."""
        return {"target_hidden_size": self.n_embd, "target_layers": list(self.taps)}


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
EAGLE3S: dict[str, Shape] = {
    "qwen3-8b-eagle3": Eagle3Shape(
        *(EAGLE3, 1, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6, 1e-6), tied=False, taps=(2, 18, 33), n_draft=32000
    ),
    "tiny-eagle3": Eagle3Shape(
        *(EAGLE3, 1, 256, 4, 2, 32, 320, N_VOCAB_TINY, 512, 1e6, 1e-6), tied=False, taps=(0, 1, 2), n_draft=200
    ),
}
