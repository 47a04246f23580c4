"""The immutable description of a model: sizes, kinds of layers, rotation."""

from dataclasses import dataclass

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "gemma4")

ASSISTANT = "gemma4-assistant"
"""The architecture of models that draft for a gemma4 model and cannot run alone."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of one kind of layer: the number of dimensions ``n_rot``, the frequency base, the linear scale (1 / factor),
    and the frequency correction of YaRN (Peng et al. 2023) unless ``yarn_ctx`` (the original context) is 0."""

    n_rot: int
    base: float
    scale: float = 1.0
    yarn_ctx: int = 0
    attn_factor: float = 1.0


@dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of gated delta nets: n_k heads of queries and keys and n_v heads of values, each of ``state_size`` elements;
    ``n_conv``: the number of taps of the convolution."""

    n_k: int
    n_v: int
    state_size: int
    n_conv: int

    @property
    def n_channels(self) -> int:
        """The number of channels of the convolution: q, k, v."""
        return (2 * self.n_k + self.n_v) * self.state_size


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a mixture: each row uses n_used of n_expert networks of width n_ff, and one shared network of width
    n_ff_shared unless that is 0."""

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int


@dataclass(frozen=True)
class ModelConfig:
    """The parameters of the forward pass.  Sizes are counts of elements; ``sliding[il]`` says whether layer il sees
    only ``window`` positions, ``recurrent[il]`` whether it is a delta net; ``rope_sliding`` is the rotation of sliding
    layers.  ``n_mtp``: the number of layers after the n_layer of the trunk that draft tokens (multi-token prediction);
    ``n_mtp_in_file``: the number of such layers in the file.

    gemma4: sliding layers have ``n_head_kv_sliding`` KV heads of ``d_sliding`` elements (0: as in the other layers); layers
    from ``n_kv_layer`` on have no keys and values of their own and a feed-forward network of width ``n_ff_tail``;
    ``n_per_layer``: the width of per-layer embeddings (0: none); ``n_embd_out``: for an assistant, the width of the model
    that it drafts for.
    """

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope: RopeConfig
    rope_sliding: RopeConfig
    window: int
    sliding: tuple[bool, ...]
    attention_scale: float
    embedding_scale: float
    final_softcap: float
    recurrent: tuple[bool, ...] = ()
    delta_net: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    n_mtp: int = 0
    n_mtp_in_file: int = 0
    n_head_kv_sliding: int = 0
    d_sliding: int = 0
    n_kv_layer: int = 0
    n_ff_tail: int = 0
    n_per_layer: int = 0
    n_embd_out: int = 0

    def heads(self, il: int) -> tuple[int, int, int]:
        """(n_head_kv, d_k, d_v) of layer il."""
        if il < self.n_layer and self.sliding[il] and self.d_sliding:
            return self.n_head_kv_sliding, self.d_sliding, self.d_sliding
        return self.n_head_kv, self.d_k, self.d_v

    def memory(self, il: int) -> int:
        """The layer whose keys and values layer il reads: itself, or the last layer of its kind that has any."""
        if il < self.n_kv_layer or il >= self.n_layer:
            return il
        return self.n_kv_layer - (2 if self.sliding[il] else 1)
