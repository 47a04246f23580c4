"""Shapes of models with short convolutions: LFM2, dense and as a mixture."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class Lfm2Shape(Shape):
    """lfm2 and lfm2moe: the layers ``attention`` have attention, the others short convolutions of ``taps`` tokens.  In a
    mixture, the first ``n_dense`` layers are dense."""

    attention: tuple[int, ...] = ()
    taps: int = 3
    n_dense: int = 0

    @property
    def has_values(self) -> list[bool]:
        """For each layer of the file, whether it has an ``attn_v``."""
        return [il in self.attention for il in range(self.n_block)]

    @property
    def head_counts_kv(self) -> list[int]:
        """The number of heads of keys of each layer of the file; 0: it is a convolution."""
        return [self.n_head_kv if attends else 0 for attends in self.has_values]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, mix = self.n_embd, self.experts
        yield "token_embd.weight", (self.n_vocab, e)
        for layer, attends in enumerate(self.has_values):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            if attends:
                yield from self._attention(block)
            else:
                yield block + "shortconv.conv.weight", (e, self.taps)
                yield block + "shortconv.in_proj.weight", (3 * e, e)
                yield block + "shortconv.out_proj.weight", (e, e)
            yield block + "ffn_norm.weight", (e,)
            if mix is None or layer < self.n_dense:
                yield from self._feed_forward(block)
            else:
                yield from self._mixture(block)
                yield block + "exp_probs_b.bias", (mix.n_expert,)
        yield "token_embd_norm.weight", (e,)

    def metadata(self) -> dict[str, Value]:
        """The convolution, the router, and which layers are dense."""
        mixture: dict[str, Value] = {"leading_dense_block_count": self.n_dense, "expert_gating_func": 2}
        return {"shortconv.l_cache": self.taps, **(mixture if self.experts else {})}


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
CONVOLUTIONS: dict[str, Shape] = {
    "lfm2-1.2b": Lfm2Shape(
        "lfm2", 16, 2048, 32, 8, 64, 8192, 65536, 128000, 1e6, 1e-5, attention=(2, 5, 8, 10, 12, 14),
    ),
    "lfm2-8b-a1b": Lfm2Shape(
        "lfm2moe", 24, 2048, 32, 8, 64, 7168, 65536, 128000, 1e6, 1e-5, attention=(2, 6, 10, 14, 18, 21), n_dense=2,
        experts=ExpertsConfig(32, 4, 1792),
    ),
    # A width that is no multiple of 256, convolutions of three and of four tokens, at the end of the trunk or not.
    "tiny-lfm2": Lfm2Shape(
        "lfm2", 5, 288, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, attention=(1, 3),
    ),
    "tiny-lfm2moe": Lfm2Shape(
        "lfm2moe", 4, 256, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, attention=(1, 3), n_dense=1, taps=4,
        experts=ExpertsConfig(7, 3, 96),
    ),
}
# fmt: on
