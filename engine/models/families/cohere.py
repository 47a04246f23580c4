"""Command R, Command R+ and Aya of Cohere: parallel layers, layer norms without biases, and a factor of the logits.  In later
models (cohere2), three of four layers have a window, and only these layers rotate queries and keys.  The mixtures among them
(cohere2moe) begin with dense layers, which rotate, too, and some have RMS norms.

Layer (llama.cpp, ``src/models/command-r.cpp``, ``cohere2.cpp`` and ``cohere2moe.cpp``)::

    n = layer_norm(x, attn_norm);  q, k, v = n Wq, n Wk, n Wv
    q, k = layer_norm(q), layer_norm(k)                 only in Command R+: per head, with weights of its own
    q, k = rope(q), rope(k)                             in cohere2, only in layers with a window
    x = x + attention(q, k, v) Wo + swiglu(n Wgate, n Wup) Wdown, or in mixtures experts(n), or (experts(n) + shared(n)) / 2
    logits = logit_scale * layer_norm(x, output_norm) Whead       after the last layer; Whead is the embedding
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import MAX_CONTEXT, MAX_LAYERS, Metadata

NORMS = Norms(before_network="")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file of command-r."""
    rope, norm = m.rope(neox=False), "centered heads" if "blk.0.attn_q_norm.weight" in m.gguf.tensors else ""
    return m.model(
        lambda il: LayerConfig(m.attention(il, rope, norm=norm), m.dense(il), NORMS, parallel=True),
        norm="layer",
        logit_scale=m.number("logit_scale", 0.0) or 1.0,
    )


def read_cohere2(m: Metadata) -> ModelConfig:
    """The configuration of a file of cohere2."""
    m.integer("attention.sliding_window", most=MAX_CONTEXT)  # without a window, no layer would rotate
    rope, windows = m.rope(neox=False), m.windows(4)

    def layer(il: int) -> LayerConfig:
        attention = m.attention(il, rope if windows[il] else None, window=windows[il])
        return LayerConfig(attention, m.dense(il), NORMS, parallel=True)

    return m.model(layer, norm="layer", logit_scale=m.number("logit_scale") or 1.0)


def read_cohere2moe(m: Metadata) -> ModelConfig:
    """The configuration of a file of cohere2moe."""
    rope, window = m.rope(neox=False), m.integer("attention.sliding_window", most=MAX_CONTEXT)
    slides, n_dense = m.sliding(4, dense_first=True), m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    experts = m.experts("sigmoid", False)
    if count := m.integer("expert_shared_count", 0, 0):
        width = m.integer("expert_shared_feed_forward_length", count * experts.n_ff)
        experts = replace(experts, n_ff_shared=width, averaged=True)

    def layer(il: int) -> LayerConfig:
        rotates = slides[il] or il < n_dense
        attention = m.attention(il, rope if rotates else None, window=window if slides[il] else 0)
        return LayerConfig(attention, m.dense(il) if il < n_dense else experts, NORMS, parallel=True)

    # Files have both epsilons.
    norm = "rms" if m.number("attention.layer_norm_rms_epsilon", 0.0) else "layer"
    return m.model(layer, norm=norm, logit_scale=m.number("logit_scale") or 1.0)


ARCHITECTURES = (
    Architecture("command-r", "Command R and R+, Aya 23, Aya Expanse", read, "transformers CohereForCausalLM"),
    Architecture("cohere2", "Command R7B, Command A", read_cohere2, "transformers Cohere2ForCausalLM"),
    Architecture("cohere2moe", "North Mini Code", read_cohere2moe, "transformers Cohere2MoeForCausalLM"),
)
