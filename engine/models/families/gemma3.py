"""Gemma 3, text only: sliding and global layers, four norms per layer, GeGLU, scaled embedding; and EmbeddingGemma, which is
the same network as an encoder.

Layer (llama.cpp, ``src/models/gemma3.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head; sliding layers have their own rotation and window
    y = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = y + rms_norm(geglu(b Wgate, b Wup) Wdown, post_ffw_norm),  b = rms_norm(y, ffn_norm)

EmbeddingGemma (``src/models/gemma-embedding.cpp``): a token attends to later tokens, too, in sliding layers to those at a
distance of at most half of the window, before it and after it.  Outputs are multiplied by dense_2 and dense_3, if the file
was converted with ``--sentence-transformers-dense-modules``.
"""

from dataclasses import replace

import numpy as np

from engine.models.architecture import Architecture
from engine.models.attention_config import AttentionConfig
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata
from engine.models.norm_first_encoder import NormFirstEncoder
from engine.models.rope_config import RopeConfig
from engine.ops.activation import GEGLU
from engine.ops.spans import MOST_CUT

DENSE = {"dense_2.weight": 0, "dense_3.weight": -1}
"""The matrices after the outputs, each with the axis of its shape that is the width between them."""

LACKING = (
    "the file lacks the matrices dense_2 and dense_3, so vectors are not those of sentence-transformers: take a file that "
    "was converted with --sentence-transformers-dense-modules."
)
"""The warning about a file without these matrices."""

NORMS = Norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    base = m.number("rope.freq_base_swa", 10000.0, 1.0, 1e12)
    rope = m.rope()
    near = RopeConfig(rope.n_rot, base, factors=rope.factors)
    windows = m.windows(6)
    # Gemma 3 27B scales queries by the width of the residual stream per head.
    wide = m.n_embd // m.counts("attention.head_count")[0] if m.n_layer == 62 else m.d_k

    def layer(il: int) -> LayerConfig:
        own = near if windows[il] else rope
        attention = m.attention(il, own, window=windows[il], norm="heads", scale=1.0 / wide**0.5)
        return LayerConfig(attention, m.dense(il, GEGLU), NORMS)

    return m.model(
        layer,
        embedding_scale=float(np.sqrt(np.float32(m.n_embd))),
        final_softcap=m.number("final_logit_softcapping", 0.0),
    )


def read_embedding(m: Metadata) -> ModelConfig:
    """The configuration of a file of EmbeddingGemma."""
    config, layers = read(m), []
    for layer in config.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        if layer.mixer.window // 2 > MOST_CUT or layer.mixer.window == 1:
            m.refuse("attention.sliding_window", f"is {layer.mixer.window}, and 2 to {2 * MOST_CUT + 1} is supported")
        layers.append(replace(layer, mixer=replace(layer.mixer, window=0, reach=layer.mixer.window // 2)))
    tensors = m.gguf.tensors
    n_dense = next((tensors[name].shape[at] for name, at in DENSE.items() if name in tensors), 0)
    warnings = () if n_dense else (LACKING,)
    return replace(config, layers=tuple(layers), causal=False, n_dense=n_dense, warnings=warnings)


ARCHITECTURES = (
    Architecture("gemma3", "Gemma 3", read, "transformers Gemma3ForCausalLM"),
    Architecture(
        "gemma-embedding", "EmbeddingGemma", read_embedding, "transformers Gemma3TextModel", model=NormFirstEncoder
    ),
)
