"""A small random model described by tables: names in ``transformers``, names in GGUF, and what the conversion does
between."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.oracle.shared import finish, permuted, uniform

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]

BARE = ("ssm_a", "ssm_d", "ffn_norm")
"""Names in GGUF files that have no ".weight" behind them; of the last one only in Falcon-H1."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""The last part of a GGUF name for a name of ``transformers`` without its layer, where families agree."""


@dataclass(frozen=True)
class Family:
    """A model.  ``model`` is what its class of ``transformers`` is called before "ForCausalLM", ``config`` the
    arguments of its configuration, and ``weights`` the shapes of its checkpoint.

    ``metadata`` has the keys of the GGUF file, those of the architecture without its name, as llama.cpp's conversion
    writes them; an integer is written as uint32, a float as float32.  ``names`` adds to ``NAMES`` or replaces some.
    ``permuted``: rows of q and k go from rotated halves to rotated pairs.  ``convert`` turns a weight, by its name
    without the layer, into the weights that take its place; ``extra`` has tensors that the checkpoint lacks.

    ``spreads``: standard deviation and mean of weights by the end of their names; others have 1 / sqrt(inputs) and 0,
    norms 0.3 and 1, biases 0.5 and 0.  ``tables``: weights with these values instead.

    ``prefix``: what the names of a layer's weights begin with, before the number of the layer.

    ``n_mtp`` layers behind the trunk draft tokens; their weights are named like those of layers in ``transformers``.
    """

    name: str
    architecture: str
    model: str
    config: Mapping[str, Any]
    weights: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    convert: Callable[[str, np.ndarray], Weights] | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    n_mtp: int = 0
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    prefix: str = "model.layers."

    @property
    def target(self) -> str:
        """No family drafts for another model."""
        return ""

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return bool(self.config["tie_word_embeddings"])

    def checkpoint(self) -> Weights:
        """Weights by their names in ``transformers``: float32."""
        drawn = {name: shape for name, shape in self.weights.items() if name not in self.tables}
        return {name: uniform(self.name, name, shape, *self._spread(name)) for name, shape in drawn.items()} | dict(
            self.tables
        )

    def _spread(self, name: str) -> tuple[float, float]:
        for end, spread in self.spreads.items():
            if name.endswith(end):
                return spread
        if "norm" in name:
            return 0.3, 1.0
        return (0.5, 0.0) if name.endswith("bias") else (1 / math.sqrt(self.weights[name][-1]), 0.0)

    def tensors(self) -> Weights:
        """The checkpoint under GGUF names and conventions."""
        names = NAMES | dict(self.names)
        out = dict(self.extra)
        for name, weight in self.checkpoint().items():
            block, part = "", name
            if name.startswith(self.prefix):
                _, _, il, part = name.split(".", 3)
                block = f"blk.{il}."
            for old, value in self._converted(part, weight).items():
                stem, dot, kind = old.rpartition(".")
                stem, kind = (stem, kind) if dot and kind in ("weight", "bias") else (old, "weight")
                out[block + (old if old in BARE else f"{names[stem]}.{kind}")] = value
        return out

    def _converted(self, part: str, weight: np.ndarray) -> Weights:
        if self.convert:
            parts = self.convert(part, weight)
            if list(parts) != [part]:
                return parts
            weight = parts[part]
        if self.permuted and part.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
            kv = part.startswith("self_attn.k_proj.")
            return {part: permuted(weight, self.config["num_key_value_heads" if kv else "num_attention_heads"])}
        if part.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), np.split(weight, 2, axis=1), strict=True)
            return {part.replace("gate_up_proj", half): rows for half, rows in halves}
        return {part: weight}

    def options(self, path: Path) -> dict[str, Any]:
        """Arguments of ``engine.load`` besides the file: a layer that drafts may have a file of its own, which is written
        beside ``path``."""
        return {}

    def write_gguf(self, path: Path) -> Path:
        """The model as a GGUF file of float32 tensors, with a vocabulary of bytes."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(f"Random {self.name}")
        self.write_metadata(writer, self.metadata)
        return finish(writer, self.tensors(), path)

    def write_metadata(self, writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
        """Write keys of the architecture."""
        for key, value in metadata.items():
            whole = key if key.startswith("xielu.") else f"{self.architecture}.{key}"
            match value:
                case bool():
                    writer.add_bool(whole, value)
                case int():
                    writer.add_uint32(whole, value)
                case float():
                    writer.add_float32(whole, value)
                case str():
                    writer.add_string(whole, value)
                case _:
                    writer.add_array(whole, value)
