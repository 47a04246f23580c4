"""MiMo V2 Flash, text only: a mixture whose layers with a window have sinks and more heads of keys.

Layer (llama.cpp, ``src/models/mimo2.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv              heads of v are shorter; the first n_rot dimensions rotate
    x = x + value_scale attention(q, k, v) Wo           layers with a window have a rotation of their own, and sinks
    x = x + network(rms_norm(x, ffn_norm))              SwiGLU, or experts

Experts are chosen by sigmoid(logits) + exp_probs_b.  They are weighted by sigmoid(logits), normalized over the chosen ones.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_CONTEXT, Metadata
from engine.models.rope_config import RopeConfig


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, tensors = m.rope(), m.gguf.tensors
    near = RopeConfig(rope.n_rot, m.number("rope.freq_base_swa", rope.base, 1.0, 1e12))
    window, slides = m.integer("attention.sliding_window", None, 1, MAX_CONTEXT), m.sliding(6)
    scale = m.number("attention.value_scale", 0.0) or 1.0

    def layer(il: int) -> LayerConfig:
        attention = m.attention(
            il,
            near if slides[il] else rope,
            window=window if slides[il] else 0,
            sinks=f"blk.{il}.attn_sinks.weight" in tensors,
            value_scale=scale,
        )
        mixed = m.mixture and f"blk.{il}.ffn_gate_inp.weight" in tensors
        return LayerConfig(attention, m.experts("sigmoid") if mixed else m.dense(il))

    return m.model(layer)


ARCHITECTURES = (Architecture("mimo2", "MiMo V2 Flash", read, "transformers MiMoV2FlashForCausalLM"),)
