"""The metadata of gemma4 models and of their assistants (keys and defaults of llama.cpp, ``src/models/gemma4.cpp``)."""

from dataclasses import replace

import numpy as np

from engine.models.attention_config import AttentionConfig
from engine.models.config import ASSISTANT, LayerConfig, ModelConfig, Norms
from engine.models.metadata import MAX_CONTEXT, MAX_HEAD, Metadata
from engine.models.network_config import ExpertsConfig
from engine.models.rope_config import RopeConfig
from engine.ops.activation import GEGLU

SOFTCAP = 30.0
"""The bound on logits if the file does not specify one."""

NORMS = Norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file of a model or of an assistant.  The layers of an assistant have no keys."""
    assistant = m.architecture == ASSISTANT
    slides = m.flags("attention.sliding_window_pattern")
    window = m.integer("attention.sliding_window", most=MAX_CONTEXT)
    d = _width(m, "", 0)
    d_sliding = _width(m, "_swa", d)
    heads = m.counts("attention.head_count")
    if len(set(heads)) > 1:
        m.unsupported(f"{m.key('attention.head_count')} differs from layer to layer, which is not supported.")
    heads_kv = m.counts("attention.head_count_kv", heads[0])
    for n in heads_kv:
        if heads[0] % n:
            m.refuse("attention.head_count_kv", f"is {n}, which does not divide the {heads[0]} query heads")
    sources = sources_of(m, slides)
    rope = m.rope(d)
    n_rot = m.integer("rope.dimension_count_swa", min(rope.n_rot, d_sliding), 2, MAX_HEAD)
    if n_rot > d_sliding or n_rot % 2:
        m.refuse("rope.dimension_count_swa", f"is {n_rot}, for heads of {d_sliding}")
    near = RopeConfig(n_rot, m.number("rope.freq_base_swa", 10000.0, 1.0, 1e12))
    n_per_layer = 0 if assistant else m.integer("embedding_length_per_layer_input", None, 0)
    mixture = m.integer("expert_count", 0, 0, 1024) > 0
    if assistant and mixture:
        m.unsupported("an assistant with experts is not supported.")
    experts = _experts(m) if mixture else None

    def layer(il: int) -> LayerConfig:
        near_or_far = (d_sliding, near, window) if slides[il] else (d, rope, 0)
        width, own_rope, own_window = near_or_far
        mixer = AttentionConfig(
            *(heads[il], heads_kv[il], width, width, 1.0, own_rope, own_window),
            norm="heads",
            normed_values=True,
            source=sources[il],
        )
        dense = m.dense(il, GEGLU)
        if experts is not None and f"blk.{il}.ffn_gate_inp.weight" in m.gguf.tensors:
            return LayerConfig(mixer, replace(experts, beside=dense), NORMS)
        return LayerConfig(mixer, dense, NORMS)

    return m.model(
        layer,
        embedding_scale=float(np.sqrt(np.float32(m.n_embd))),
        final_softcap=0.0 if assistant else m.number("final_logit_softcapping", SOFTCAP),
        n_per_layer=n_per_layer,
        n_embd_out=m.integer("embedding_length_out") if assistant else 0,
    )


def _width(m: Metadata, kind: str, default: int) -> int:
    """The number of elements of a head's keys, which must be equal to that of its values."""
    key, value = f"attention.key_length{kind}", f"attention.value_length{kind}"
    d = m.integer(key, default or None, 2, MAX_HEAD)
    if m.integer(value, d, 1, MAX_HEAD) != d:
        m.refuse(value, f"is not {d}, the length of the keys: convert the model again")
    return d


def sources_of(m: Metadata, slides: list[bool]) -> list[int | None]:
    """For each layer, the index of the layer whose keys and values it reads; None: it has its own.

    The last layers may read those of the last layer of the same kind that has its own.  The layers of an assistant read those
    of another model, so None is returned for them.
    """
    n = m.n_layer
    if m.architecture == ASSISTANT:
        return [None] * n
    shared = m.integer("attention.shared_kv_layers", 0, 0, n)
    own = n - shared
    if shared and (own < 2 or not slides[own - 2] or slides[own - 1]):
        m.refuse(
            "attention.shared_kv_layers",
            f"is {shared}, but the last two layers before those must be one that slides and one that does not",
        )
    return [None if il < own else own - (2 if slides[il] else 1) for il in range(n)]


def _experts(m: Metadata) -> ExpertsConfig:
    m.counts("expert_feed_forward_length")  # must exist; feed_forward_length is the width of the dense network
    return m.experts(activation=GEGLU)
