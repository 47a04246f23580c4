"""Shapes of models with Kimi delta attention: Kimi Linear."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.kda_config import KDAConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.latents import LatentShape
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class KimiLinearShape(LatentShape):
    """kimi-linear: the layers ``attention`` have latent attention, the others Kimi delta attention.  Some tensors have one
    dimension of 1, as in files that llama.cpp has quantized; its conversion writes more of them."""

    attention: tuple[int, ...] = ()
    kda: KDAConfig = KDAConfig(4, 32, 4)

    @property
    def has_values(self) -> list[bool]:
        """For each layer of the file, whether it has an ``attn_v``."""
        return [il not in self.attention for il in range(self.n_block)]

    @property
    def head_counts_kv(self) -> list[int]:
        """The number of heads of keys of each layer of the file; 0: it has Kimi delta attention."""
        return [int(il in self.attention) for il in range(self.n_block)]

    def _mixer(self, block: str, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if layer in self.attention:
            yield from super()._mixer(block, layer)
            return
        e, net, d = self.n_embd, self.kda, self.kda.d
        for part in "qkv":
            yield f"{block}attn_{part}.weight", (net.d_inner, e)
            yield f"{block}ssm_conv1d_{part}.weight", (net.d_inner, 1, net.taps)
        for gate in "fg":
            yield f"{block}ssm_{gate}_a.weight", (d, e)
            yield f"{block}ssm_{gate}_b.weight", (net.d_inner, d)
        yield block + "ssm_beta.weight", (net.n_head, e)
        yield block + "ssm_a", (net.n_head, 1)
        yield block + "ssm_dt.bias", (net.d_inner,)
        yield block + "ssm_norm.weight", (d,)
        yield block + "attn_output.weight", (e, net.d_inner)

    def metadata(self) -> dict[str, Value]:
        """The sizes of both mixers, the router, and which layers are dense."""
        found = super().metadata() | {"ssm.conv_kernel": self.kda.taps, "kda.head_dim": self.kda.d}
        found["expert_weights_scale"] = 2.446
        del found["nextn_predict_layers"]
        return found


# Layers, width, heads, KV heads, what a position stores, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
KDAS: dict[str, Shape] = {
    "kimi-linear-48b-a3b": KimiLinearShape(
        "kimi-linear", 27, 2304, 32, 1, 576, 9216, 163840, 1048576, 1e4, 1e-5, tied=False, n_rot=64,
        experts=ExpertsConfig(256, 8, 1024), attention=(3, 7, 11, 15, 19, 23, 26), kda=KDAConfig(32, 128, 4),
    ),
    # Three taps, seven experts, and a trunk that ends with attention.
    "tiny-kimi-linear": KimiLinearShape(
        "kimi-linear", 4, 288, 4, 1, 80, 512, N_VOCAB_TINY, 512, 1e4, 1e-5, tied=False, n_rot=16,
        experts=ExpertsConfig(7, 3, 96), rank=64, n_nope=32, d_v=32, attention=(1, 3), kda=KDAConfig(4, 64, 3),
    ),
}
# fmt: on
