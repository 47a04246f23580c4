"""Llama 4 Scout and Maverick: mixtures whose experts get weighted inputs, layers that see frames, and layers that do not
rotate.

Layer (llama.cpp, ``src/models/llama4.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    three of four layers: q, k = rms_norm(rope(q)), rms_norm(rope(k))    norms per head without weights, not in Maverick;
                                                                         a row sees its own frame of n positions
    every fourth layer: q = q * (1 + s ln(1 + (position + 1) // m))      it sees all positions
    x = x + attention(q, k, v) Wo
    b = rms_norm(x, ffn_norm);  x = x + swiglu(b Wgate, b Wup) Wdown, or in mixtures
    x = x + sum over the chosen experts e of expert_e(w_e b) + shared(b),  w = sigmoid(b Wrouter)

Frames of n positions, a power of two, begin at multiples of n.  The published name of this is chunked attention.  n and m
are 8192, and s is 0.1; converted files contain none of them.  A file may have others: n as ``attention.sliding_window``,
which is 0 if all layers see all positions and rotate, m as ``attention.temperature_length``, s as
``attention.temperature_scale``.  One of every ``interleave_moe_layer_step`` layers is a mixture.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_CONTEXT, MAX_LAYERS, Metadata

FRAME = 8192
"""The number of positions of a frame, and between two steps of the factor of queries."""

WITHOUT_NORMS = 128
"""The number of experts of Maverick, whose queries and keys are not normalized.  No key says so."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, frames = m.rope(neox=False), m.windows(4, FRAME)
    if (n := max(frames)) & (n - 1):
        m.refuse("attention.sliding_window", f"is {n}, and frames of a power of two positions are supported")
    s = m.number("attention.temperature_scale", 0.1, 0.0, 1e3)
    temperature = (s, m.integer("attention.temperature_length", FRAME, 1, MAX_CONTEXT), 1) if s else None
    n_expert = m.integer("expert_count", 0, 0)
    step = m.integer("interleave_moe_layer_step", 1, 0, MAX_LAYERS)
    norm = "" if n_expert == WITHOUT_NORMS else "rotated heads"

    def layer(il: int) -> LayerConfig:
        size = frames[il]
        if size or not any(frames):
            attention = m.attention(il, rope, window=size, framed=size > 0, norm=norm, norm_weights=False)
        else:
            attention = m.attention(il, None, temperature=temperature)
        if not n_expert or not step or (il + 1) % step:
            return LayerConfig(attention, m.dense(il))
        n_ff = m.counts("expert_feed_forward_length")[il]
        experts = m.experts("sigmoid", False, n_ff, n_ff_shared=n_ff, shared_gated=False, weighs_inputs=True)
        return LayerConfig(attention, experts)

    return m.model(layer)


ARCHITECTURES = (Architecture("llama4", "Llama 4 Scout and Maverick (text)", read, "transformers Llama4ForCausalLM"),)
