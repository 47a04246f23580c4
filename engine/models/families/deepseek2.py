"""DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2, GLM-4.7-Flash, Mistral Large 3, Mistral Small 4 and related models: latent
attention, and a mixture with a shared network.

Layer (llama.cpp, ``src/models/deepseek2.cpp``)::

    a = rms_norm(x, attn_norm);  c, k' = a Wkv_a;  q, q' = a Wq, or rms_norm(a Wq_a) Wq_b
    x = x + latent_attention(q, rope(q'), rms_norm(c), rope(k')) Wo        rotation of pairs (2i, 2i + 1)
    x = x + network(b),  b = rms_norm(x, ffn_norm)

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p is the softmax or
sigmoid of b Wrouter.  They are weighted by p times expert_weights_scale, with p normalized over the chosen ones if the file
says so.  The output of the shared network is added.

With YaRN by a factor f, scores are multiplied by m^2 / sqrt(n_nope + n_rope), m = 1 + 0.1 M ln f, and rotations have no
factor.  Both of DeepSeek's multipliers of the logarithm are M, and ``rope.scaling.yarn_log_multiplier`` is 0.1 M.

In Mistral Large 3 and Small 4, a query at position p is multiplied, after its rotation, by 1 + s ln(1 + floor(p / n)), where
s is ``attention.temperature_scale`` and n is ``attention.temperature_length``, by default the original context of YaRN.

Experts may be chosen from the best groups only.  The score of a group is the sum of its two best scores in DeepSeek-V3
(sigmoid), and its best score in DeepSeek-V2 (softmax).  No metadata key distinguishes these cases, so the gating determines
the rule.  llama.cpp adds two scores in both cases.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.latent_config import LatentConfig
from engine.models.metadata import MAX_CONTEXT, MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    latent = latent_of(m)
    return model_of(m, lambda _: latent)


def model_of(m: Metadata, mixer: Callable[[int], LatentConfig]) -> ModelConfig:
    """The configuration of a file whose layers have the given mixers."""
    dense = m.n_layer
    experts = None
    if m.mixture:
        dense = m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
        # Files of GLM-4.7-Flash, and of copies of V3 that `transformers` has saved, do not specify the gating.
        sigmoid = any(name.endswith(".exp_probs_b.bias") for name in m.gguf.tensors)
        experts = m.experts("sigmoid" if sigmoid else "softmax", normalized=False, shared_gated=False)
        experts = m.with_shared(replace(experts, group_best=1 if experts.gating == "softmax" else 2))

    def layer(il: int) -> LayerConfig:
        return LayerConfig(mixer(il), m.dense(il) if experts is None or il < dense else experts)

    return m.model(layer)


def latent_of(m: Metadata) -> LatentConfig:
    """The latent attention of a file, which has the same sizes in all layers that have it."""
    n_head = m.counts("attention.head_count")[0]
    rank = m.width("attention.kv_lora_rank", 0)
    n_rope = m.rotated("rope.dimension_count", 0, m.width("attention.key_length", 0))
    # If the file has the keys of each head, key_length is the length of a head's key.
    name = "attention.key_length_mla" if m.has("attention.key_length_mla") else "attention.key_length"
    n_q = m.width(name, 0)
    if n_rope >= n_q:
        m.refuse(name, f"is {n_q}, of which {n_rope} are rotated, so nothing is left")
    d_v = m.width("attention.value_length" + ("_mla" if m.has("attention.value_length_mla") else ""), 0)
    rope, m_scale = m.rope(n_q, neox=False), 1.0
    log_multiplier = m.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)
    if rope.yarn_ctx and log_multiplier:
        m_scale = 1.0 - log_multiplier * math.log(rope.scale)
        rope = replace(rope, magnitude=m.number("rope.scaling.attn_factor", 1.0, 0.0, 1e3))
    s = m.number("attention.temperature_scale", 0.0, 0.0, 1e3)
    original = m.integer("rope.scaling.original_context_length", m.n_ctx_train, 1, MAX_CONTEXT)
    temperature = (s, m.integer("attention.temperature_length", original, 1, MAX_CONTEXT), 0) if s else None
    # `transformers` does not save that V2-Lite has no query rank.  A file that is converted from such a copy has the rank of
    # V2.
    direct = "blk.0.attn_q.weight" in m.gguf.tensors
    q_rank = 0 if direct else m.integer("attention.q_lora_rank", 0, 0)
    scale = m_scale * m_scale / math.sqrt(n_q)
    return LatentConfig(n_head, n_q - n_rope, n_rope, rank, d_v, scale, rope, q_rank, temperature)


ARCHITECTURES = (
    Architecture(
        "deepseek2",
        "DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, GLM 4.7 Flash, Mistral Large 3",
        read,
        "transformers DeepseekV2ForCausalLM, DeepseekV3ForCausalLM and Glm4MoeLiteForCausalLM",
        "MTP",
    ),
    Architecture("mistral4", "Mistral Small 4", read, "transformers Mistral4ForCausalLM"),
)
