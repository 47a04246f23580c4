"""Hybrids: models whose layers are attention or a delta net, each followed by a feed-forward network or a mixture."""

from dataclasses import dataclass

from engine.arrays import Array, Matrix, Pass
from engine.models.base import Model
from engine.models.delta_net import DeltaNet
from engine.models.experts import Experts
from engine.models.feed_forward import FeedForward
from engine.models.heads import Heads
from engine.models.rotary import Rotary


@dataclass
class Attention:
    """Weights of an attention layer, up to and including its output."""

    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    heads: Heads[Array]


@dataclass
class Recurrent:
    """Weights of a delta net, up to and including its output; alpha and beta of one format are stacked into one matrix, which
    saves a launch."""

    attn_qkv: Matrix
    attn_gate: Matrix
    ssm_alpha_beta: tuple[Matrix, ...]
    ssm_out: Matrix
    net: DeltaNet[Array]


@dataclass
class Layer:
    """Weights of one layer."""

    attn_norm: Array
    mixer: Attention | Recurrent
    post_attention_norm: Array
    ffn: FeedForward | Experts[Array, Matrix]


class Hybrid(Model):
    """A model whose layers are attention or a delta net.  An additional layer after the trunk may draft
    (``engine/models/mtp.py``)."""

    layers: list[Layer]
    rotary: Rotary

    def layer(self, layer: Layer, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer with memory ``il`` of the cache: residual stream in, residual stream out, float32 [rows, n_embd]."""
        raise NotImplementedError
