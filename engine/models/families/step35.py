"""Step 3.5 Flash and the text of Step 3.7: sliding windows with more heads than the other layers, a gate for each head, and
mixtures with limited activations.

Layer (llama.cpp, ``src/models/step35.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k))         norms per head; layers without a window rotate half of n_rot
    o = attention(q, k, v);  o_h = sigmoid((a Wgate)_h) o_h for each head h;  x = x + o Wo
    x = x + network(b),  b = rms_norm(x, ffn_norm)

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p = sigmoid(b Wrouter).
They are weighted by p, normalized over the chosen ones if the file says so, times expert_weights_scale.  The output of the
shared network is added.  In some layers the activation is min(silu(g), c) clamp(u, -c, c), with one limit c for the experts
and another one for the shared network or for a dense network.

Three layers after the trunk draft in a chain (``engine/models/mtp.py``).  They read the output of the trunk before its norm.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_CONTEXT, Metadata
from engine.models.rope_config import RopeConfig
from engine.ops.activation import SWIGLU, Activation

LEAST_LIMIT = 1e-6
"""A limit of an activation up to this means that there is none, as in llama.cpp."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    whole = m.rope()
    if whole.n_rot % 4:
        m.refuse("rope.dimension_count", f"is {whole.n_rot}, and half of it is an odd number")
    near = RopeConfig(whole.n_rot, m.number("rope.freq_base_swa", 10000.0, 1.0, 1e12))
    rope = replace(whole, n_rot=whole.n_rot // 2)
    window, slides = m.integer("attention.sliding_window", None, 1, MAX_CONTEXT), m.sliding(4, dense_first=True)
    limits, shared = _activations(m, "swiglu_clamp_exp"), _activations(m, "swiglu_clamp_shexp")
    tensors = m.gguf.tensors
    experts = None
    if m.mixture:
        experts = m.experts("sigmoid", normalized=False, shared_gated=False)
        experts = replace(experts, n_ff_shared=m.integer("expert_shared_feed_forward_length", experts.n_ff, 0))

    def layer(il: int) -> LayerConfig:
        attention = m.attention(
            il,
            near if slides[il] else rope,
            window=window if slides[il] else 0,
            norm="heads" if f"blk.{il}.attn_q_norm.weight" in tensors else "",
            head_gates=f"blk.{il}.attn_gate.weight" in tensors,
        )
        if experts is None or f"blk.{il}.ffn_gate_inp.weight" not in tensors:
            return LayerConfig(attention, m.dense(il, shared[il]))
        return LayerConfig(attention, replace(experts, activation=limits[il], shared_activation=shared[il]))

    return m.model(layer, mtp_normed=False)


def _activations(m: Metadata, name: str) -> list[Activation]:
    """The activation of each layer: SwiGLU, with a limit in layers for which the key ``name`` has one."""
    return [Activation("swiglu_limited", (c,)) if c > LEAST_LIMIT else SWIGLU for c in m.numbers(name)]


ARCHITECTURES = (
    Architecture("step35", "Step 3.5 Flash, Step 3.7 (text)", read, "transformers Step3p7TextModel", "MTP", chain=3),
)
