"""Shapes of models with Mamba-2: Granite 4 H, dense and as a mixture."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.mamba_config import MambaConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class GraniteHybridShape(Shape):
    """granitehybrid: the layers ``attention`` have attention without rotation, the others Mamba-2.  factors: those of the
    embedding, of results, of scores, and of the logits, by which these are divided."""

    attention: tuple[int, ...] = ()
    mamba: MambaConfig = MambaConfig(2, 16, 32, 1, 4)
    factors: tuple[float, float, float, float] = (2.0, 0.5, 0.125, 0.9)

    @property
    def has_values(self) -> list[bool]:
        """For each layer of the file, whether it has an ``attn_v``."""
        return [il in self.attention for il in range(self.n_block)]

    @property
    def head_counts_kv(self) -> list[int]:
        """The number of heads of keys of each layer of the file; 0: it is Mamba-2."""
        return [self.n_head_kv if attends else 0 for attends in self.has_values]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, mix = self.n_embd, self.experts
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "token_embd.weight", (self.n_vocab, e)
        for layer, attends in enumerate(self.has_values):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            if attends:
                for name, rows, columns in (("q", q, e), ("k", kv, e), ("v", kv, e), ("output", e, q)):
                    yield f"{block}attn_{name}.weight", (rows, columns)
            else:
                yield from self._mamba(block)
            yield block + "ffn_norm.weight", (e,)
            if mix is None:
                yield from self._feed_forward(block)
            else:
                yield from (part for part in self._mixture(block) if not part[0].endswith("ffn_gate_inp_shexp.weight"))
        yield "output_norm.weight", (e,)

    def _mamba(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, net = self.n_embd, self.mamba
        yield block + "ssm_in.weight", (net.d_inner + net.n_channels + net.n_head, e)
        yield block + "ssm_conv1d.weight", (net.n_channels, net.taps)
        yield block + "ssm_conv1d.bias", (net.n_channels,)
        yield block + "ssm_dt.bias", (net.n_head,)
        yield block + "ssm_a", (net.n_head, 1)
        yield block + "ssm_d", (net.n_head, 1)
        yield block + "ssm_norm.weight", (net.n_group, net.d_inner // net.n_group)
        yield block + "ssm_out.weight", (e, net.d_inner)

    def metadata(self) -> dict[str, Value]:
        """The sizes of Mamba-2, and the factors."""
        net, (embedding, residual, scores, logits) = self.mamba, self.factors
        return {
            "ssm.conv_kernel": net.taps,
            "ssm.state_size": net.n,
            "ssm.group_count": net.n_group,
            "ssm.inner_size": net.d_inner,
            "ssm.time_step_rank": net.n_head,
            "rope.scaling.finetuned": False,
            "embedding_scale": embedding,
            "residual_scale": residual,
            "attention.scale": scores,
            "logit_scale": logits,
        }


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
MAMBAS: dict[str, Shape] = {
    "granite-4.0-h-micro": GraniteHybridShape(
        "granitehybrid", 40, 2048, 32, 8, 64, 8192, 100352, 131072, 1e4, 1e-5, attention=(5, 15, 25, 35),
        mamba=MambaConfig(64, 64, 128, 1, 4), factors=(12.0, 0.22, 0.015625, 8.0),
    ),
    "granite-4.0-h-tiny": GraniteHybridShape(
        "granitehybrid", 40, 1536, 12, 4, 128, 512, 100352, 131072, 1e4, 1e-5, attention=(5, 15, 25, 35),
        mamba=MambaConfig(48, 64, 128, 1, 4), factors=(12.0, 0.22, 0.0078125, 6.0),
        experts=ExpertsConfig(64, 6, 512, 1024, shared_gated=False),
    ),
    "granite-4.0-h-small": GraniteHybridShape(
        "granitehybrid", 40, 4096, 32, 8, 128, 768, 100352, 131072, 1e4, 1e-5, attention=(5, 15, 25, 35),
        mamba=MambaConfig(128, 64, 128, 1, 4), factors=(12.0, 0.22, 0.0078125, 16.0),
        experts=ExpertsConfig(72, 10, 768, 1536, shared_gated=False),
    ),
    # A width that is no multiple of 256, convolutions of three and of four tokens, at the end of the trunk or not.
    "tiny-granitehybrid": GraniteHybridShape(
        "granitehybrid", 5, 288, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e4, 1e-5, attention=(1, 3),
        mamba=MambaConfig(6, 48, 64, 1, 3),
    ),
    "tiny-granitehybrid-moe": GraniteHybridShape(
        "granitehybrid", 4, 256, 3, 1, 64, 96, N_VOCAB_TINY, 512, 1e4, 1e-5, attention=(1, 3),
        mamba=MambaConfig(8, 32, 32, 1, 4), experts=ExpertsConfig(7, 3, 96, 160, shared_gated=False),
    ),
}
# fmt: on
