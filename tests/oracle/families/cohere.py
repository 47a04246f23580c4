"""Command R and Command R7B: parallel layers, layer norms without biases, a factor of the logits; in cohere2, windows.

``transformers``: CohereForCausalLM, Cohere2ForCausalLM.  llama.cpp: src/models/command-r.cpp, src/models/cohere2.cpp;
CommandR2Model and Cohere2Model of conversion/command_r.py.

Rotations are of pairs in both layouts, so rows of q and k are not permuted.  Command R+ has layer
norms of heads of q and k, each with weights of its own.  In cohere2, only layers with a window rotate.
"""

from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, head_dim, keys, model, network, norms, sizes


def _family(name: str, architecture: str, kind: str, config: dict[str, Any], **more: Any) -> Family:
    parts = norms(config, "input_layernorm") | attention(config) | network(config)
    if config.get("use_qk_norm"):
        heads = {"q_norm": config["num_attention_heads"], "k_norm": config["num_key_value_heads"]}
        parts |= {f"self_attn.{part}.weight": (n, head_dim(config)) for part, n in heads.items()}
    weights = model(config, [parts] * config["num_hidden_layers"])
    metadata = keys(config, logit_scale=config["logit_scale"], rope__scaling__type="none", **more)
    epsilon = metadata["attention.layer_norm_epsilon"] = metadata.pop("attention.layer_norm_rms_epsilon")
    own = {word: value for word, value in config.items() if word != "rms_norm_eps"} | {"layer_norm_eps": epsilon}
    return Family(name, architecture, kind, own, weights, metadata)


_R7B = sizes(5, 72, (6, 2, 0), 104, {"rope_theta": 5e4}, sliding_window=24, sliding_window_pattern=4, logit_scale=0.25)

_PLUS = sizes(2, 96, (6, 2, 0), 72, {"rope_theta": 1e5}, logit_scale=0.8, use_qk_norm=True)

CASES = [
    _family("command-r", "command-r", "Cohere", sizes(3, 80, (5, 1, 0), 112, {"rope_theta": 1e4}, logit_scale=0.0625)),
    _family("command-r-plus", "command-r", "Cohere", _PLUS),
    _family(
        "cohere2", "cohere2", "Cohere2", _R7B,
        attention__sliding_window=24, rope__dimension_count=head_dim(_R7B), vocab_size=_R7B["vocab_size"],
    ),
]  # fmt: skip
