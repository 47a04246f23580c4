"""Shapes of models with Mamba-2: Granite 4 H and Nemotron-H, dense and as mixtures, and Falcon-H1."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.mamba_config import MambaConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


def mamba_tensors(block: str, e: int, net: MambaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a Mamba-2 mixer in a model of width e; block: what the names begin with."""
    yield block + "ssm_in.weight", (net.d_inner + net.n_channels + net.n_head, e)
    yield block + "ssm_conv1d.weight", (net.n_channels, net.taps)
    yield block + "ssm_conv1d.bias", (net.n_channels,)
    yield block + "ssm_dt.bias", (net.n_head,)
    yield block + "ssm_a", (net.n_head, 1)
    yield block + "ssm_d", (net.n_head, 1)
    if net.normed:
        yield block + "ssm_norm.weight", (net.n_group, net.d_inner // net.n_group)
    yield block + "ssm_out.weight", (e, net.d_inner)


def mamba_metadata(net: MambaConfig) -> dict[str, Value]:
    """The sizes of a Mamba-2 mixer."""
    return {
        "ssm.conv_kernel": net.taps,
        "ssm.state_size": net.n,
        "ssm.group_count": net.n_group,
        "ssm.inner_size": net.d_inner,
        "ssm.time_step_rank": net.n_head,
    }


def attention_tensors(block: str, shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of attention without norms; block: what the names begin with."""
    e, q, kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    for name, rows, columns in (("q", q, e), ("k", kv, e), ("v", kv, e), ("output", e, q)):
        yield f"{block}attn_{name}.weight", (rows, columns)


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
        yield "token_embd.weight", (self.n_vocab, e)
        for layer, attends in enumerate(self.has_values):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            yield from attention_tensors(block, self) if attends else mamba_tensors(block, e, self.mamba)
            yield block + "ffn_norm.weight", (e,)
            if mix is None:
                yield from self._feed_forward(block)
            else:
                yield from (part for part in self._mixture(block) if not part[0].endswith("ffn_gate_inp_shexp.weight"))
        yield "output_norm.weight", (e,)

    def metadata(self) -> dict[str, Value]:
        """The sizes of Mamba-2, and the factors."""
        embedding, residual, scores, logits = self.factors
        return {
            **mamba_metadata(self.mamba),
            "rope.scaling.finetuned": False,
            "embedding_scale": embedding,
            "residual_scale": residual,
            "attention.scale": scores,
            "logit_scale": logits,
        }


@dataclass(frozen=True)
class NemotronHShape(Shape):
    """nemotron_h and nemotron_h_moe.  pattern: for each block, "M" if it is Mamba-2, "*" if it has attention, otherwise it is
    a network or a mixture; n_latent: the width of latents of experts, 0: there are none."""

    pattern: str = ""
    mamba: MambaConfig = MambaConfig(2, 16, 32, 1, 4)
    n_latent: int = 0

    @property
    def has_values(self) -> list[bool]:
        """For each layer of the file, whether it has an ``attn_v``."""
        return [kind == "*" for kind in self.pattern]

    @property
    def head_counts_kv(self) -> list[int]:
        """The number of heads of keys of each layer of the file; 0: it has no attention."""
        return [self.n_head_kv if attends else 0 for attends in self.has_values]

    @property
    def widths(self) -> list[int]:
        """The width of the network of each layer of the file, or of an expert; 0: it has no network."""
        n_ff = self.experts.n_ff if self.experts else self.n_ff
        return [0 if kind in "M*" else n_ff for kind in self.pattern]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e = self.n_embd
        yield "token_embd.weight", (self.n_vocab, e)
        for layer, kind in enumerate(self.pattern):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            if kind == "M":
                yield from mamba_tensors(block, e, self.mamba)
            elif kind == "*":
                yield from attention_tensors(block, self)
            elif self.experts is None:
                yield block + "ffn_up.weight", (self.n_ff, e)
                yield block + "ffn_down.weight", (e, self.n_ff)
            else:
                yield from self._experts(block, self.experts)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def _experts(self, block: str, mix: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, width = self.n_embd, self.n_latent or self.n_embd
        yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
        yield block + "exp_probs_b.bias", (mix.n_expert,)
        yield block + "ffn_up_exps.weight", (mix.n_expert, mix.n_ff, width)
        yield block + "ffn_down_exps.weight", (mix.n_expert, width, mix.n_ff)
        yield block + "ffn_up_shexp.weight", (mix.n_ff_shared, e)
        yield block + "ffn_down_shexp.weight", (e, mix.n_ff_shared)
        if self.n_latent:
            yield block + "ffn_latent_down.weight", (width, e)
            yield block + "ffn_latent_up.weight", (e, width)

    def metadata(self) -> dict[str, Value]:
        """The sizes of Mamba-2, the epsilon, and the law of the router."""
        found = {**mamba_metadata(self.mamba), "attention.layer_norm_epsilon": self.eps}
        found |= {"rope.scaling.finetuned": False}
        if self.experts:
            found |= {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 1}
        return found | ({"moe_latent_size": self.n_latent} if self.n_latent else {})


@dataclass(frozen=True)
class FalconH1Shape(Shape):
    """falcon-h1: attention and Mamba-2 in every layer."""

    mamba: MambaConfig = MambaConfig(2, 16, 32, 1, 4, normed=False)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e = self.n_embd
        yield "token_embd.weight", (self.n_vocab, e)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            yield from attention_tensors(block, self)
            yield from mamba_tensors(block, e, self.mamba)
            yield block + "ffn_norm", (e,)  # without the usual end
            yield from self._feed_forward(block)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def metadata(self) -> dict[str, Value]:
        """The sizes of Mamba-2."""
        return mamba_metadata(self.mamba)


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
    "nemotron-nano-9b-v2": NemotronHShape(
        "nemotron_h", 56, 4480, 40, 8, 128, 15680, 131072, 131072, 1e4, 1e-5, tied=False,
        pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", mamba=MambaConfig(128, 80, 128, 8, 4),
    ),
    "nemotron-3-nano-30b-a3b": NemotronHShape(
        "nemotron_h_moe", 52, 2688, 32, 2, 128, 1856, 131072, 262144, 1e4, 1e-5, tied=False,
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba=MambaConfig(64, 64, 128, 8, 4),
        experts=ExpertsConfig(128, 6, 1856, 3712, shared_gated=False),
    ),
    "falcon-h1-0.5b": FalconH1Shape(
        "falcon-h1", 36, 1024, 8, 2, 64, 2048, 32784, 16384, 1e11, 1e-5, tied=False,
        mamba=MambaConfig(24, 64, 128, 1, 4, normed=False),
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
    # Groups of heads; blocks that follow one of their kind; a trunk that ends with a mixer, or with a mixture.
    "tiny-nemotron_h": NemotronHShape(
        "nemotron_h", 7, 288, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e4, 1e-5, tied=False, pattern="M-*--MM",
        mamba=MambaConfig(6, 48, 64, 3, 3),
    ),
    "tiny-falcon-h1": FalconH1Shape(
        "falcon-h1", 3, 288, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False,
        mamba=MambaConfig(6, 48, 64, 3, 4, normed=False),
    ),
    "tiny-nemotron_h_moe": NemotronHShape(
        "nemotron_h_moe", 5, 256, 3, 1, 64, 96, N_VOCAB_TINY, 512, 1e4, 1e-5, tied=False, pattern="ME*ME",
        mamba=MambaConfig(8, 32, 32, 2, 4), experts=ExpertsConfig(7, 3, 96, 160, shared_gated=False),
    ),
    "tiny-nemotron_h_moe-latent": NemotronHShape(
        "nemotron_h_moe", 3, 288, 3, 1, 64, 96, N_VOCAB_TINY, 512, 1e4, 1e-5, tied=False, pattern="M*E",
        mamba=MambaConfig(8, 32, 32, 4, 4), experts=ExpertsConfig(7, 3, 96, 160, shared_gated=False), n_latent=64,
    ),
}
# fmt: on
