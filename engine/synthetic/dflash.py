"""Shapes of networks of DFlash and DSpark, which draft for another model."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.config import DFLASH
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class DFlashShape(Shape):
    """A network that reads the layers ``taps`` of a model with the same width, and drafts blocks of ``block_size`` rows with
    the embedding and the output of that model; ``rank``: that of the Markov head of DSpark, 0: there is none."""

    taps: tuple[int, ...] = ()
    block_size: int = 16
    rank: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "fc.weight", (e, e * len(self.taps))
        yield "enc.output_norm.weight", (e,)
        for il in range(self.n_layer):
            block = f"blk.{il}."
            yield block + "attn_norm.weight", (e,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{block}attn_{name}.weight", (rows, e)
            yield block + "attn_q_norm.weight", (self.head_dim,)
            yield block + "attn_k_norm.weight", (self.head_dim,)
            yield block + "attn_output.weight", (e, q)
            yield block + "ffn_norm.weight", (e,)
            yield from self._feed_forward(block)
        yield "output_norm.weight", (e,)
        if self.rank:
            yield "markov_w1.weight", (self.n_vocab, self.rank)
            yield "markov_w2.weight", (self.n_vocab, self.rank)
            yield "conf_proj.weight", (1, e + self.rank)
            yield "conf_proj.bias", (1,)

    def metadata(self) -> dict[str, Value]:
        """What the network reads, and the rows of a block."""
        found: dict[str, Value] = {"target_layers": list(self.taps), "block_size": self.block_size}
        return found | ({"sample_from_anchor": True, "has_confidence_head": True} if self.rank else {})

    @property
    def mask_token(self) -> int:
        """The token in the place of a draft: the last one."""
        return self.n_vocab - 1


_QWEN3_8B = (DFLASH, 5, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6, 1e-6)

# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
DFLASHES: dict[str, Shape] = {
    "qwen3-8b-dflash": DFlashShape(*_QWEN3_8B, tied=False, taps=(2, 10, 18, 26, 34)),
    "qwen3-8b-dspark": DFlashShape(*_QWEN3_8B, tied=False, taps=(2, 10, 18, 26, 34), block_size=7, rank=256),
    "tiny-dflash": DFlashShape(
        *(DFLASH, 2, 256, 4, 2, 32, 320, N_VOCAB_TINY, 512, 1e6, 1e-6), tied=False, taps=(0, 1, 2), rank=32
    ),
}
