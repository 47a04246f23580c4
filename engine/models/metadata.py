"""The metadata of a model, by keys without the prefix of the architecture, and configurations that most families share.

The type and the range of every number are checked here.  The shapes of tensors are checked against these numbers when the
tensors are loaded (``engine/models/weights.py``).  Keys and defaults are those of llama.cpp.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from engine.checks import shown
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.attention_config import AttentionConfig
from engine.models.config import ASSISTANT, POOLINGS, LayerConfig, ModelConfig
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import DenseConfig, ExpertsConfig
from engine.models.nextn import DraftingLayers, find_drafting_layers
from engine.models.rope_config import RopeConfig
from engine.ops.activation import SWIGLU, Activation

MAX_DIMENSION = 1 << 20
MAX_LAYERS = 1024
MAX_HEAD = 4096
MAX_CONTEXT = 1 << 30

GATINGS = {1: "softmax", 2: "sigmoid", 4: "sqrt_softplus"}
"""The values of ``expert_gating_func``."""

ROPE_FREQS = "rope_freqs.weight"
"""The tensor of divisors that files of Llama 3 and Gemma 4 contain."""

LEAST_TURNS = 1e-3
"""The minimum of YaRN's bounds on the number of turns over the original context.  They must be positive, because their
logarithm is used."""


class Metadata:
    """The metadata of ``gguf`` whose keys begin with ``architecture``.

    drafts: the most layers that draft in a model of the family (``engine/models/nextn.py``).  Other families skip them: 0.

    All methods raise GGUFError if a value has the wrong type or is out of range.
    """

    def __init__(self, gguf: GGUF, architecture: str, drafts: int = 0) -> None:
        self.gguf, self.architecture = gguf, architecture
        #: The number of layers in the file, including layers that draft.
        self.n_blocks = self.integer("block_count", most=MAX_LAYERS)
        own = DraftingLayers(self.n_blocks, 0)
        # All layers of an assistant draft.
        if architecture != ASSISTANT:
            own = find_drafting_layers(gguf, self.key("nextn_predict_layers"), self.n_blocks, max(drafts, 1))
        self.n_layer, self.n_mtp = own.n_layer, own.count
        #: Why the layers that draft cannot be used; "" if they can, or if there are none.
        self.mtp_problem = own.problem
        if self.n_mtp and not drafts:
            self.mtp_problem = f"drafts by layers of {architecture} models are not supported"
        self.n_embd = self.integer("embedding_length")
        self.n_ctx_train = self.integer("context_length", most=MAX_CONTEXT)

    # --- single values -----------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """The full name of a key."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file has this key."""
        return self.key(name) in self.gguf.metadata

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise GGUFError for the value of a key."""
        self.gguf.refuse(self.key(name), problem)

    def unsupported(self, problem: str) -> NoReturn:
        """Raise ModelError for a model that the engine does not support."""
        raise ModelError(f"{self.gguf.path}: {problem}")

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_DIMENSION) -> int:
        """The value of a key as an integer from ``least`` to ``most``.  If ``default`` is None, the key must exist."""
        if default is None:
            return self.gguf.require(self.key(name), "int", least, most)
        return self.gguf.get(self.key(name), "int", default, least, most)

    def number(self, name: str, default: float | None = None, least: float = 0.0, most: float = 1e6) -> float:
        """The value of a key as a float from ``least`` to ``most``.  If ``default`` is None, the key must exist."""
        if default is None:
            return self.gguf.require(self.key(name), "f32", least, most)
        return self.gguf.get(self.key(name), "f32", float(default), least, most)

    def flag(self, name: str, default: bool) -> bool:
        """The value of a key as a boolean."""
        return self.gguf.get(self.key(name), "bool", default)

    # --- values per layer --------------------------------------------------------------------------------------

    def counts(self, name: str, default: int | None = None, least: int = 1) -> list[int]:
        """The value of a key as a list with an integer per layer.  The file may have one value for all layers."""
        key = self.key(name)
        if not self.listed(name):
            return [self.integer(name, default, least)] * self.n_blocks
        values = self.gguf.require(key, "int[]", least, MAX_DIMENSION)
        if len(values) < self.n_layer:
            self.refuse(name, f"has {len(values)} elements for {self.n_layer} layers: convert the model again")
        listed = [int(v) for v in values[: self.n_blocks]]
        # If the list has no element for a layer that drafts, the value of the last layer of the trunk is used.
        return listed + [listed[-1]] * (self.n_blocks - len(listed))

    def numbers(self, name: str, default: float = 0.0) -> list[float]:
        """The value of a key as a list with a float from 0 to 1e6 per layer.  The file may have one value for all layers."""
        if not self.listed(name):
            return [self.number(name, default)] * self.n_blocks
        wide = self.gguf.kinds[self.key(name)] == "f64[]"
        values = self.gguf.require(self.key(name), "f64[]" if wide else "f32[]", 0.0, 1e6)
        if len(values) < self.n_layer:
            self.refuse(name, f"has {len(values)} elements for {self.n_layer} layers: convert the model again")
        listed = [float(v) for v in values[: self.n_blocks]]
        return listed + [default] * (self.n_blocks - len(listed))

    def listed(self, name: str) -> bool:
        """Whether the value of the key is a list."""
        return self.gguf.kinds.get(self.key(name), "").endswith("[]")

    def flags(self, name: str) -> list[bool]:
        """The value of a key as a list with a boolean per layer of the trunk.  Some files have the numbers 0 and 1."""
        values = self._booleans(name)
        if len(values) < self.n_layer:
            self.refuse(name, f"has {len(values)} elements for {self.n_layer} layers: convert the model again")
        return values[: self.n_layer]

    def _booleans(self, name: str) -> list[bool]:
        key = self.key(name)
        if self.gguf.kinds.get(key) == "bool[]" or not self.listed(name):
            return [bool(v) for v in self.gguf.require(key, "bool[]")]
        return [bool(v) for v in self.gguf.require(key, "int[]", 0, 1)]

    def sliding(self, period: int, dense_first: bool = False) -> list[bool]:
        """For each layer, whether it has a sliding window.

        The file has a list of booleans or a number n.  In the second case, one of every n layers has no window.

        period: the default of n.
        dense_first: whether the first of every n layers has no window; otherwise it is the last one.
        """
        name = "attention.sliding_window_pattern"
        if self.listed(name):
            # Files may have values for the layers that draft, too.
            behind = self._booleans(name)[self.n_layer : self.n_blocks]
            return [*self.flags(name), *behind] + [False] * (self.n_mtp - len(behind))
        n = self.integer(name, period, 1, MAX_LAYERS)
        full = 0 if dense_first else n - 1
        return [il % n != full for il in range(self.n_layer)] + [False] * self.n_mtp

    def windows(self, period: int, window: int = 0) -> list[int]:
        """For each layer, the number of latest positions that a token sees; 0: all.

        If there is a window, the last of every n layers has none.  period: the default of n; window: that of the window.
        """
        window = self.integer("attention.sliding_window", window, 0, MAX_CONTEXT)
        slides = self.sliding(period) if window else [False] * self.n_blocks
        return [window if each else 0 for each in slides]

    # --- rotation ----------------------------------------------------------------------------------------------

    def width(self, name: str, default: int) -> int:
        """The number of elements of a head's keys or values.  If ``default`` is 0, the key must exist."""
        return self.integer(name, default or None, 1, MAX_HEAD)

    @property
    def d_k(self) -> int:
        """The number of elements of a head's key."""
        return self.width("attention.key_length", self.n_embd // self.counts("attention.head_count")[0])

    def rope(self, d_k: int = 0, neox: bool = True, base: float = 10000.0) -> RopeConfig:
        """The rotation of heads.

        Linear scaling, YaRN and longrope are supported.  longrope has different divisors of frequencies for short and for
        long contexts.  Raises ModelError for other kinds of scaling.

        d_k: the number of elements of a head; 0: ``self.d_k``.
        neox: whether rotation pairs are (i, i + n_rot / 2); otherwise they are (2i, 2i + 1).
        base: the default of the frequency base.
        """
        d_k = d_k or self.d_k
        n_rot = self.rotated("rope.dimension_count", d_k, d_k)
        base = self.number("rope.freq_base", base, 1.0, 1e12)
        factors = ROPE_FREQS if ROPE_FREQS in self.gguf.tensors else ""
        plain = RopeConfig(n_rot, base, neox=neox, factors=factors)
        kind = self.gguf.get(self.key("rope.scaling.type"), "str", "linear")
        factor = self.number("rope.scaling.factor", 0.0) or self.number("rope.scale_linear", 1.0) or 1.0
        attn_factor = self.number("rope.scaling.attn_factor", 1.0, 0.0, 1e3)
        original = self.integer("rope.scaling.original_context_length", self.n_ctx_train, 1, MAX_CONTEXT)
        if kind == "longrope" or "rope_factors_long.weight" in self.gguf.tensors:
            short, long = "rope_factors_short.weight", "rope_factors_long.weight"
            return RopeConfig(n_rot, base, 1.0, neox, short, attn_factor, long_factors=long, long_beyond=original)
        if kind == "none":
            return plain
        if kind == "linear":
            return RopeConfig(n_rot, base, 1.0 / factor, neox, factors)
        if kind != "yarn":
            self.unsupported(f"rope scaling {shown(kind)!r} is not supported; use none, linear, yarn or longrope.")
        if base <= 1.0:
            self.refuse("rope.freq_base", f"is {base}, which yarn cannot scale: convert the model again")
        scale = 1.0 / factor
        # DeepSeek has two multipliers of the logarithm.  The one in the numerator is 1, and the file has the other one.
        log_multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)
        magnitude = (1.0 + 0.1 * math.log(1.0 / scale)) * attn_factor
        if log_multiplier:
            magnitude /= 1.0 + 0.1 * log_multiplier * math.log(factor)
        fast = self.number("rope.scaling.yarn_beta_fast", 32.0, LEAST_TURNS)
        slow = self.number("rope.scaling.yarn_beta_slow", 1.0, LEAST_TURNS)
        return RopeConfig(n_rot, base, scale, neox, factors, magnitude, original, fast, slow)

    def rotated(self, name: str, default: int, d_k: int) -> int:
        """The number of rotated elements in heads of d_k elements."""
        n_rot = self.integer(name, default, 2, MAX_HEAD)
        if n_rot > d_k:
            self.refuse(name, f"is {n_rot}, but {self.architecture} rotates at most heads of {d_k}")
        if n_rot % 2:
            self.refuse(name, f"is {n_rot}, an odd number")
        return n_rot

    # --- mixers and networks -----------------------------------------------------------------------------------

    def attention(self, il: int, rope: RopeConfig | None, **others: Any) -> AttentionConfig:
        """The attention of layer il.

        others: further fields of :class:`AttentionConfig`.  The default of ``scale`` is 1 / sqrt(d_k).
        """
        n_head = self.counts("attention.head_count")[il]
        n_head_kv = self.counts("attention.head_count_kv", n_head, 0)[il]
        if not n_head_kv or n_head % n_head_kv:
            problem = f"is {n_head_kv}, which does not divide the {n_head} query heads"
            self.refuse("attention.head_count_kv", problem)
        if not self.has("attention.key_length") and self.n_embd % n_head:
            problem = f"is {n_head}, which does not divide the embedding length {self.n_embd}"
            self.refuse("attention.head_count", problem)
        d_k = self.width("attention.key_length", self.n_embd // n_head)
        d_v = self.width("attention.value_length", self.n_embd // n_head)
        scale = others.pop("scale", 1.0 / d_k**0.5)
        return AttentionConfig(n_head, n_head_kv, d_k, d_v, scale, rope, **others)

    def delta_net(self, grouped: bool = False) -> DeltaNetConfig:
        """The gated delta net, which has the same sizes in all recurrent layers.

        grouped: whether value head h uses key head h // (n_v / n_k); otherwise it uses key head h % n_k.
        """
        n_k = self.integer("ssm.group_count", most=4096)
        n_v = self.integer("ssm.time_step_rank", most=4096)
        d = self.integer("ssm.state_size", most=4096)
        if n_v % n_k:
            self.refuse("ssm.time_step_rank", f"is {n_v}, not a multiple of the {n_k} heads of ssm.group_count")
        if d % 32 or d > 128:
            self.refuse("ssm.state_size", f"is {d}, and heads of 32, 64, 96 or 128 are supported")
        inner = self.integer("ssm.inner_size")
        if inner != n_v * d:
            self.refuse("ssm.inner_size", f"is {inner}, but {n_v} heads of {d} have {n_v * d} elements")
        return DeltaNetConfig(n_k, n_v, d, self.integer("ssm.conv_kernel", None, 2, 8), grouped=grouped)

    def recurrent(self) -> list[bool]:
        """For each layer, whether its mixer is a delta net; otherwise it is attention.

        The file has a list of booleans or a number n, by default 4.  In the second case, the last of every n layers has
        attention.  A layer that drafts has attention.
        """
        if self.has("attention.recurrent_layers"):
            return self.flags("attention.recurrent_layers") + [False] * self.n_mtp
        n = self.integer("full_attention_interval", 4, 1, MAX_LAYERS)
        return [(il + 1) % n != 0 for il in range(self.n_layer)] + [False] * self.n_mtp

    def check_sections(self) -> None:
        """Check the sections of a rotation by several positions: time, height, width and an unused one.

        For text, the first three positions are equal, and pairs without a section rotate by time.  The sections therefore
        have no effect, unless the unused position has pairs.  Raises GGUFError in this case.
        """
        key = self.key("rope.dimension_sections")
        values = [int(v) for v in self.gguf.require(key, "int[]")]
        if len(values) != 4 or min(values) < 0:
            self.gguf.refuse(key, f"is {values}, but must be four counts, as [24, 20, 20, 0]: convert the model again")
        if values[3]:
            self.gguf.refuse(
                key, f"is {values}, but the last count must be 0 in models of text: convert the model again"
            )

    def dense(self, il: int, activation: Activation = SWIGLU) -> DenseConfig:
        """The dense network of layer il."""
        return DenseConfig(self.counts("feed_forward_length")[il], activation)

    @property
    def mixture(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return self.integer("expert_count", 0, 0) > 0

    def experts(
        self, gating: str = "softmax", normalized: bool = True, n_ff: int = 0, n_used: int = 0, **others: Any
    ) -> ExpertsConfig:
        """The mixture of experts, which has the same sizes in all layers that have one, unless they are given.

        gating, normalized: the defaults of the fields of :class:`ExpertsConfig`.
        n_ff: the width of an expert; 0: it is read from the file.
        n_used: the number of experts that a row uses; 0: it is read from the file.
        others: further fields of :class:`ExpertsConfig`.
        """
        n_expert = self.integer("expert_count", most=1024)
        n_used = n_used or self.integer("expert_used_count", None, 1, min(n_expert, 32))
        if n_used > min(n_expert, 32):
            self.refuse("expert_used_count", f"is {n_used}, and at most {min(n_expert, 32)} are supported")
        if self.has("expert_gating_func"):
            code = self.integer("expert_gating_func", None, 0, 100)
            if code not in GATINGS:
                self.unsupported(f"routers of kind {code} ({self.key('expert_gating_func')}) are not supported.")
            gating = GATINGS[code]
        n_group = self.integer("expert_group_count", 1, 0, 1024) or 1
        n_group_used = self.integer("expert_group_used_count", 1, 0, 1024) or 1
        if n_expert % n_group or n_group_used > n_group or n_used > n_expert // n_group * n_group_used:
            problem = (
                f"is {n_group}, of which {n_group_used} are used, and these have too few of the {n_expert} experts"
            )
            self.refuse("expert_group_count", problem)
        return ExpertsConfig(
            n_expert,
            n_used,
            n_ff or self._expert_width(n_used),
            gating=gating,
            normalized=self.flag("expert_weights_norm", normalized),
            weight_scale=self.number("expert_weights_scale", 0.0) or 1.0,
            n_group=n_group,
            n_group_used=n_group_used,
            **others,
        )

    def with_shared(self, experts: ExpertsConfig) -> ExpertsConfig:
        """A copy of the mixture with a shared network that is as wide as ``expert_shared_count`` experts."""
        return replace(experts, n_ff_shared=self.integer("expert_shared_count", 0, 0) * experts.n_ff)

    def _expert_width(self, n_used: int) -> int:
        """The width of an expert.  Older files have the total width of the ``n_used`` chosen experts instead."""
        name, whole = "expert_feed_forward_length", "feed_forward_length"
        if not self.has(name) and not self.listed(whole):
            fallback = self.integer(whole, 0, 0) // n_used
            if fallback:
                return fallback
        widths = set(self.counts(name))
        if len(widths) > 1:
            self.unsupported(f"{self.key(name)} differs from layer to layer, which is not supported.")
        return widths.pop()

    def taps(self, n_layer: int, target: str) -> tuple[int, ...]:
        """The layers of another model before which a network reads the residual stream; ``n_layer``: its output.

        n_layer: the number of layers of that model.
        target: the path of its file, for the error.

        Raises ModelError if the model has no such layers.
        """
        taps = tuple(int(il) for il in self.gguf.require(self.key("target_layers"), "int[]"))
        if not taps or not 0 <= min(taps) <= max(taps) <= n_layer or len(set(taps)) < len(taps):
            raise ModelError(
                f"{self.gguf.path} drafts for models with the layers {list(taps)}, and {target} has {n_layer} layers."
            )
        return taps

    # --- the model ---------------------------------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        """The number of tokens: the length of the token list, or ``vocab_size`` if the file has no tokenizer."""
        if "tokenizer.ggml.tokens" in self.gguf.metadata:
            return len(self.gguf.require("tokenizer.ggml.tokens", "str[]"))
        return self.integer("vocab_size", None, 1, 1 << 24)

    def model(
        self, layer: Callable[[int], LayerConfig], norm: str = "rms", eps: float | None = None, **others: Any
    ) -> ModelConfig:
        """The configuration of the model.

        layer: returns the configuration of layer il.  The index of the first layer that drafts is ``n_layer``.
        norm: the kind of the norms, "rms" or "layer".
        eps: the epsilon of the norms; None: it is read from the key of this kind.
        others: further fields of :class:`ModelConfig`.
        """
        if not self.flag("attention.causal", True) and others.get("causal", True):
            self.refuse(
                "attention.causal", "is false: a model that looks ahead, as for embeddings, cannot generate text"
            )
        if eps is None:
            eps = self.number(f"attention.layer_norm_{'rms_' if norm == 'rms' else ''}epsilon", None, 0.0, 1.0)
        n_mtp = 0 if self.mtp_problem else self.n_mtp
        layers = tuple(layer(il) for il in range(self.n_layer + n_mtp))
        has_trunk = any(name.startswith("blk.0.") for name in self.gguf.tensors)
        if self.mixture and has_trunk and not any(each.network.is_mixture for each in layers):
            a = self.architecture
            self.unsupported(f"{a} models with experts are not supported; use a dense {a} model.")
        return ModelConfig(
            architecture=self.architecture,
            name=shown(self.gguf.get("general.name", "str", self.gguf.path.stem)),
            n_embd=self.n_embd,
            n_vocab=self.n_vocab,
            n_ctx_train=self.n_ctx_train,
            norm_eps=eps,
            norm=norm,
            layers=layers[: self.n_layer],
            mtp=layers[self.n_layer :],
            n_mtp_in_file=self.n_mtp,
            mtp_problem=self.mtp_problem,
            pooling=self.pooling,
            labels=tuple(self.gguf.get(self.key("classifier.output_labels"), "str[]", [])),
            **others,
        )

    @property
    def pooling(self) -> str:
        """How the outputs of a text become one vector or score; "" if the file does not say, or names no pooling."""
        kind = POOLINGS[self.integer("pooling_type", 0, 0, len(POOLINGS) - 1)]
        return "" if kind == "none" else kind
