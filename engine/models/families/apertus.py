"""Apertus: normalized heads, and a network without a gate whose activation has trained parameters (Huang 2025, xIELU).

Layer (llama.cpp, ``src/models/apertus.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(rms_norm(a Wq)), rope(rms_norm(a Wk)), a Wv      norms per head
    x = x + attention(q, k, v) Wo
    x = x + xielu(b Wup) Wdown,  b = rms_norm(x, ffn_norm)

xielu(x) = p x^2 + beta x for x > 0, else n (expm1(min(x, eps)) - x) + beta x, with p = softplus(alpha_p) and n = beta +
softplus(alpha_n).  Each layer has its own parameters.
"""

import numpy as np

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata
from engine.ops.activation import Activation


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, beta, eps = m.rope(), _per_layer(m, "beta"), _per_layer(m, "eps")
    p = np.logaddexp(0.0, _per_layer(m, "alpha_p"))
    n = beta + np.logaddexp(0.0, _per_layer(m, "alpha_n"))

    def layer(il: int) -> LayerConfig:
        activation = Activation("xielu", (float(p[il]), float(n[il]), float(beta[il]), float(eps[il])))
        return LayerConfig(m.attention(il, rope, norm="heads"), m.dense(il, activation))

    return m.model(layer)


def _per_layer(m: Metadata, name: str) -> np.ndarray:
    """A parameter of every layer, float64 [n_layer].  Its key has no prefix.  The file may have one value for all layers."""
    key = f"xielu.{name}"
    if m.gguf.kinds.get(key, "").endswith("[]"):
        values = m.gguf.require(key, "f32[]", -1e6, 1e6, n=m.n_layer)
        return values.astype(np.float64)
    return np.full(m.n_layer, m.gguf.require(key, "f32", -1e6, 1e6))


ARCHITECTURES = (Architecture("apertus", "Apertus 8B and 70B", read, "transformers ApertusForCausalLM"),)
