"""The sizes of a model, and the tensors that a file of this architecture has."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType as T

from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig

Value = int | float | bool | str | list[int] | list[float] | list[bool]
"""A value of the metadata."""

TABLE = "ffn_gate_tid2eid.weight"
"""How the name of a table ends that gives the experts of each token, int32 [n_vocab, n_used]."""

D2T = "d2t"
"""The tensor of a network that drafts with the token of each row of its output, int64 [rows]."""

N_VOCAB_TINY = 289
"""Size of the smallest vocabulary that can write any text (``engine.synthetic.model.vocabulary``)."""


@dataclass(frozen=True)
class Gemma4Shape:
    """The additional sizes of gemma4 and its assistants.  Every ``pattern``-th layer is global, with n_head_kv heads of
    head_dim; the others slide, with ``n_head_kv_sliding`` heads of ``head_dim_sliding``.  ``k_is_v``: global layers have no
    ``attn_v``.

    The last ``n_shared`` layers read the caches of earlier layers; ``wide_tail``: their feed-forward networks are twice
    as wide.  ``n_per_layer``: width of the embedding that each layer has of its own (0: none).  ``n_embd_out``: width of
    the model that an assistant drafts for (0: this is not an assistant).
    """

    pattern: int
    head_dim_sliding: int
    n_head_kv_sliding: int
    k_is_v: bool = False
    n_shared: int = 0
    wide_tail: bool = False
    n_per_layer: int = 0
    n_embd_out: int = 0

    def sliding(self, n_layer: int) -> tuple[bool, ...]:
        """For each layer, whether it slides."""
        return tuple((il + 1) % self.pattern != 0 for il in range(n_layer))

    def widths(self, n_layer: int, n_ff: int) -> tuple[int, ...]:
        """The width of each layer's feed-forward network."""
        return tuple(n_ff * (2 if self.wide_tail and il >= n_layer - self.n_shared else 1) for il in range(n_layer))

    def owns_values(self, n_layer: int) -> tuple[bool, ...]:
        """For each layer, whether it has an ``attn_v``."""
        return tuple(
            il < n_layer - self.n_shared and (slides or not self.k_is_v)
            for il, slides in enumerate(self.sliding(n_layer))
        )


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.  ``head_dim`` is the length of a key and of a value; ``window`` the sliding window of gemma3 and
    gemma4 (0: none); ``rope_factor`` the context extension of Llama 3.1 and later (0: none, and no ``rope_freqs`` tensor),
    over ``rope_n_ctx`` trained positions; ``n_rot`` the rotated dimensions of a head (0: all).

    ``experts``: the feed-forward networks are mixtures (``n_ff`` is then only a number in the metadata, 0: absent).
    ``delta_net``: all layers but every ``interval``-th are gated delta nets, and attention has gates.  ``n_mtp``: layers
    of attention that follow the n_layer of the trunk and draft tokens.  ``gemma4``: the model is of that architecture or an
    assistant of one; ``experts`` are then in addition to the network of n_ff.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    eps: float
    tied: bool = True
    window: int = 0
    rope_factor: float = 0.0
    rope_n_ctx: int = 8192
    n_rot: int = 0
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None
    interval: int = 4
    n_mtp: int = 0
    gemma4: Gemma4Shape | None = None

    @property
    def n_block(self) -> int:
        """The number of layers in the file: those of the trunk and those that follow it."""
        return self.n_layer + self.n_mtp

    @property
    def head_counts(self) -> int | list[int]:
        """The number of heads, or that of each layer of the file."""
        return self.n_head

    @property
    def head_counts_kv(self) -> int | list[int]:
        """The number of heads of keys, or that of each layer of the file."""
        return self.n_head_kv

    @property
    def widths(self) -> int | list[int]:
        """The width of the feed-forward networks, or of that of each layer of the file; 0: absent."""
        return self.n_ff

    @property
    def has_values(self) -> Sequence[bool]:
        """For each layer of the file, whether it has an ``attn_v``, or an ``attn_qkv``."""
        return self.gemma4.owns_values(self.n_layer) if self.gemma4 else [True] * self.n_block

    @property
    def per_layer(self) -> int:
        """The width of per-layer embeddings; 0: there are none."""
        return self.gemma4.n_per_layer if self.gemma4 else 0

    @property
    def is_unscaled(self) -> bool:
        """Whether scores have no other scale than that of queries."""
        return self.gemma4 is not None

    @property
    def value_dim(self) -> int:
        """The length of a value."""
        return self.head_dim

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer of the file, whether it is a gated delta net."""
        hybrid = self.delta_net is not None
        return tuple(hybrid and il < self.n_layer and (il + 1) % self.interval != 0 for il in range(self.n_block))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        if self.gemma4:
            yield from _gemma4_tensors(self, self.gemma4)
            return
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        if self.rope_factor:
            yield "rope_freqs.weight", (self.head_dim // 2,)
        for layer, recurrent in enumerate(self.recurrent):
            block, e = f"blk.{layer}.", self.n_embd
            yield block + "attn_norm.weight", (e,)
            yield from self._delta_net(block) if recurrent else self._attention(block)
            if self.architecture == "gemma3" or self.delta_net:
                yield block + "post_attention_norm.weight", (e,)
            if not self.delta_net:
                yield block + "ffn_norm.weight", (e,)
            yield from self._mixture(block) if self.experts else self._feed_forward(block)
            if self.architecture == "gemma3":
                yield block + "post_ffw_norm.weight", (e,)
            if layer >= self.n_layer:
                yield from self._nextn(block)
        yield "output_norm.weight", (self.n_embd,)
        if not self.tied:
            yield "output.weight", (self.n_vocab, self.n_embd)

    def _attention(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        gated = 2 if self.delta_net else 1  # each head's queries, then its gates
        for name, rows in (("attn_q", gated * q), ("attn_k", kv), ("attn_v", kv)):
            yield f"{block}{name}.weight", (rows, e)
            if self.architecture == "qwen2":
                yield f"{block}{name}.bias", (rows,)
        if self.architecture not in ("llama", "qwen2", "cohere2"):
            yield block + "attn_q_norm.weight", (self.head_dim,)
            yield block + "attn_k_norm.weight", (self.head_dim,)
        yield block + "attn_output.weight", (e, q)

    def _delta_net(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, net = self.n_embd, self.delta_net
        assert net is not None
        values = net.n_v * net.state_size
        yield block + "attn_qkv.weight", (net.n_channels, e)
        yield block + "attn_gate.weight", (values, e)
        yield block + "ssm_alpha.weight", (net.n_v, e)
        yield block + "ssm_beta.weight", (net.n_v, e)
        yield block + "ssm_conv1d.weight", (net.n_channels, net.n_conv)
        yield block + "ssm_a", (net.n_v,)
        yield block + "ssm_dt.bias", (net.n_v,)
        yield block + "ssm_norm.weight", (net.state_size,)
        yield block + "ssm_out.weight", (e, values)

    def _feed_forward(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield block + "ffn_gate.weight", (self.n_ff, self.n_embd)
        yield block + "ffn_up.weight", (self.n_ff, self.n_embd)
        yield block + "ffn_down.weight", (self.n_embd, self.n_ff)

    def _mixture(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, mix = self.n_embd, self.experts
        assert mix is not None
        yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
        yield block + "ffn_gate_exps.weight", (mix.n_expert, mix.n_ff, e)
        yield block + "ffn_up_exps.weight", (mix.n_expert, mix.n_ff, e)
        yield block + "ffn_down_exps.weight", (mix.n_expert, e, mix.n_ff)
        if mix.n_ff_shared:
            yield block + "ffn_gate_inp_shexp.weight", (e,)
            yield block + "ffn_gate_shexp.weight", (mix.n_ff_shared, e)
            yield block + "ffn_up_shexp.weight", (mix.n_ff_shared, e)
            yield block + "ffn_down_shexp.weight", (e, mix.n_ff_shared)

    def _nextn(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield block + "nextn.eh_proj.weight", (self.n_embd, 2 * self.n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"{block}nextn.{name}.weight", (self.n_embd,)

    def metadata(self) -> dict[str, Value]:
        """Metadata by keys without the architecture's prefix, in addition to what all architectures have."""
        return {}

    @property
    def mask_token(self) -> int | None:
        """The mask token of a network that drafts; None if there is none."""
        return None

    def format_of(self, part: str, main: T) -> T | None:
        """The format of the matrices ``blk.N.part``, or ``part`` outside the layers, in a quantized file whose usual format
        is ``main``; None: that of the quantization."""
        return None

    @property
    def n_params(self) -> int:
        """The number of trained parameters: everything but ``rope_freqs``, which is computed, and tables of experts."""
        others = ("rope_freqs.weight", TABLE, D2T)
        return sum(math.prod(shape) for name, shape in self.tensors() if not name.endswith(others))


def _gemma4_tensors(shape: Shape, gemma: Gemma4Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    e, n_layer, per_layer = shape.n_embd, shape.n_layer, gemma.n_per_layer
    yield "token_embd.weight", (shape.n_vocab, e)
    yield "rope_freqs.weight", (shape.head_dim // 2,)
    if gemma.n_embd_out:
        yield "nextn.pre_projection.weight", (e, 2 * gemma.n_embd_out)
        yield "nextn.post_projection.weight", (gemma.n_embd_out, e)
    if per_layer:
        yield "per_layer_token_embd.weight", (shape.n_vocab, n_layer * per_layer)
        yield "per_layer_model_proj.weight", (n_layer * per_layer, e)
        yield "per_layer_proj_norm.weight", (per_layer,)
    layers = zip(gemma.sliding(n_layer), gemma.owns_values(n_layer), gemma.widths(n_layer, shape.n_ff), strict=True)
    for layer, (slides, owns_values, n_ff) in enumerate(layers):
        block = f"blk.{layer}."
        d = gemma.head_dim_sliding if slides else shape.head_dim
        kv = d * (gemma.n_head_kv_sliding if slides else shape.n_head_kv)
        yield block + "attn_norm.weight", (e,)
        yield block + "attn_q.weight", (shape.n_head * d, e)
        yield block + "attn_q_norm.weight", (d,)
        if layer < n_layer - gemma.n_shared:
            yield block + "attn_k.weight", (kv, e)
            yield block + "attn_k_norm.weight", (d,)
        if owns_values:
            yield block + "attn_v.weight", (kv, e)
        yield block + "attn_output.weight", (e, shape.n_head * d)
        yield block + "post_attention_norm.weight", (e,)
        yield block + "ffn_norm.weight", (e,)
        yield block + "ffn_gate.weight", (n_ff, e)
        yield block + "ffn_up.weight", (n_ff, e)
        yield block + "ffn_down.weight", (e, n_ff)
        yield block + "post_ffw_norm.weight", (e,)
        if shape.experts:
            yield from _gemma4_mixture(block, e, shape.experts)
        if per_layer:
            yield block + "inp_gate.weight", (per_layer, e)
            yield block + "proj.weight", (e, per_layer)
            yield block + "post_norm.weight", (e,)
        yield block + "layer_output_scale.weight", (1,)
    yield "output_norm.weight", (e,)


def _gemma4_mixture(block: str, e: int, mix: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
    yield block + "ffn_gate_inp.scale", (e,)
    yield block + "ffn_gate_up_exps.weight", (mix.n_expert, 2 * mix.n_ff, e)
    yield block + "ffn_down_exps.weight", (mix.n_expert, e, mix.n_ff)
    yield block + "ffn_down_exps.scale", (mix.n_expert,)
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield f"{block}{name}.weight", (e,)
