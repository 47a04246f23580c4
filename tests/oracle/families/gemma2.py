"""Gemma 2: windows in even layers, four norms, and bounds on scores of attention and on logits, which many of them reach.

``transformers``: Gemma2ForCausalLM.  llama.cpp: src/models/gemma2.cpp; Gemma2Model of conversion/gemma.py, which adds 1 to
norms and writes neither the frequency base nor the factor of the queries: llama.cpp and this engine know those of the
published sizes.
"""

import numpy as np

from tests.oracle.families.family import Family, Weights
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes

_CONFIG = sizes(
    4, 72, (6, 2, 24), 112, {"rope_theta": 1e4}, sliding_window=24, query_pre_attn_scalar=24, attn_logit_softcapping=1.5,
    final_logit_softcapping=4.0, hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_NORMS = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
_LAYER = norms(_CONFIG, *_NORMS) | attention(_CONFIG) | network(_CONFIG)
_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KEYS = keys(
    _CONFIG, attention__sliding_window=24, attn_logit_softcapping=1.5, final_logit_softcapping=4.0
)  # fmt: skip
del _KEYS["rope.freq_base"]


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {part: weight + np.float32(1) if part.endswith("norm.weight") else weight}


CASES = [
    Family(
        "gemma2",
        "gemma2",
        "Gemma2",
        _CONFIG,
        model(_CONFIG, [_LAYER] * 4),
        _KEYS,
        _NAMES,
        convert=_convert,
        spreads={"norm.weight": (0.3, 0.0)},
    )
]
