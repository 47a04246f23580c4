"""Gemma 2: windows in every other layer, four norms, GeGLU, a scaled embedding, and a bound on scores and on logits.

Layer (llama.cpp, ``src/models/gemma2.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = a Wq, a Wk, a Wv
    q, k = rope(q), rope(k);  scores s are replaced by 50 tanh(s / 50)
    y = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = y + rms_norm(geglu(b Wgate, b Wup) Wdown, post_ffw_norm),  b = rms_norm(y, ffn_norm)

The first of two layers has a window.
"""

import numpy as np

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata
from engine.ops.activation import GEGLU

NORMS = Norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, windows = m.rope(), m.windows(2, 4096)
    # Gemma 2 27B scales queries by the width of the residual stream per head.
    wide = m.n_embd // m.counts("attention.head_count")[0] if m.n_layer == 46 else m.d_k
    how = {"scale": 1.0 / wide**0.5, "softcap": m.number("attn_logit_softcapping", 50.0)}

    def layer(il: int) -> LayerConfig:
        return LayerConfig(m.attention(il, rope, window=windows[il], **how), m.dense(il, GEGLU), NORMS)

    return m.model(
        layer,
        embedding_scale=float(np.sqrt(np.float32(m.n_embd))),
        final_softcap=m.number("final_logit_softcapping", 30.0),
    )


ARCHITECTURES = (Architecture("gemma2", "Gemma 2", read, "transformers Gemma2ForCausalLM"),)
