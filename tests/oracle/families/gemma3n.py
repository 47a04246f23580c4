"""Gemma 3n: four residual streams with alternating updates, low-rank residuals, sparse gates, per-layer embeddings, layers
that read the keys and values of earlier ones.

``transformers``: Gemma3nForCausalLM.  llama.cpp: src/models/gemma3n.cpp; Gemma3NModel of conversion/gemma.py.

The three projections of streams are one tensor in the file.  The shares of gates that are 0 are numbers of standard
deviations there.  ``transformers`` divides the sum of squares by the number of gates, and llama.cpp by one less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes
from tests.oracle.shared import N_VOCAB

_STACKED = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}

_NAMES = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    **{f"model.{word}.{i}": f"{name}.{i}" for name, word in _STACKED.items() for i in range(3)},
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "altup.correct_output_scale": "altup_correct_scale",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}


@dataclass(frozen=True)
class Gemma3n(Family):
    """A model whose projections of streams are stacked in the file."""

    def tensors(self) -> Weights:
        """The checkpoint under GGUF names and conventions."""
        out = super().tensors()
        for name in _STACKED:
            out[f"{name}.weight"] = np.stack([out.pop(f"{name}.{i}.weight") for i in range(3)])
        return out


def _layer(c: Mapping[str, Any], shared: bool) -> Shapes:
    e, rank, own = c["hidden_size"], c["laurel_rank"], c["hidden_size_per_layer_input"]
    every = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    parts = norms(c, *(f"{name}_layernorm" for name in every)) | attention(c, norm="head") | network(c)
    if shared:
        parts = {name: shape for name, shape in parts.items() if not name.startswith(("self_attn.k_", "self_attn.v_"))}
    return parts | {
        "altup.correct_output_scale": (e,),
        "altup.correction_coefs.weight": (4, 4),
        "altup.prediction_coefs.weight": (16, 4),
        "altup.modality_router.weight": (4, e),
        "altup.router_norm.weight": (e,),
        "laurel.linear_left.weight": (rank, e),
        "laurel.linear_right.weight": (e, rank),
        "laurel.post_laurel_norm.weight": (e,),
        "per_layer_input_gate.weight": (own, e),
        "per_layer_projection.weight": (e, own),
        "post_per_layer_input_norm.weight": (e,),
    }


def _family(name: str, c: dict[str, Any]) -> Family:
    n, e, own = c["num_hidden_layers"], c["hidden_size"], c["hidden_size_per_layer_input"]
    weights = model(c, [_layer(c, il >= n - c["num_kv_shared_layers"]) for il in range(n)])
    weights |= {
        "model.embed_tokens_per_layer.weight": (N_VOCAB, n * own),
        "model.per_layer_model_projection.weight": (n * own, e),
        "model.per_layer_projection_norm.weight": (own,),
        **{f"model.{word}.{i}.weight": (e, e) for word in _STACKED.values() for i in range(3)},
    }
    metadata = keys(
        c,
        attention__sliding_window=c["sliding_window"],
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in c["layer_types"]],
        attention__shared_kv_layers=c["num_kv_shared_layers"],
        final_logit_softcapping=c["final_logit_softcapping"],
        altup__active_idx=0,
        altup__num_inputs=4,
        embedding_length_per_layer_input=own,
        activation_sparsity_scale=[
            float(np.float32(NormalDist().inv_cdf(share))) if share else -np.inf
            for share in c["activation_sparsity_pattern"]
        ],
    )
    spreads = {
        # Scores have no other scale; inputs of the router are divided by the width, and each row of the table is a vector for
        # each layer.
        "q_norm.weight": (0.3 * c["head_dim"] ** -0.5, c["head_dim"] ** -0.5),
        "modality_router.weight": (e**0.5, 0.0),
        # Larger ones let streams cancel, which magnifies the rounding of float32.
        "prediction_coefs.weight": (0.1, 0.0),
        "correction_coefs.weight": (0.2, 0.0),
        "correct_output_scale": (0.3, 1.0),
        "embed_tokens_per_layer.weight": (own**-0.5, 0.0),
    }
    return Gemma3n(name, "gemma3n", "Gemma3nText", c, weights, metadata, _NAMES, spreads=spreads)


def _config(kinds: str, n_embd: int, heads: tuple[int, int, int], n_ff: int, **more: Any) -> dict[str, Any]:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layer_types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    return sizes(
        len(kinds), n_embd, heads, n_ff, rope, layer_types=layer_types, vocab_size_per_layer_input=N_VOCAB, **more
    )


CASES = [
    _family(
        "gemma3n",
        _config(
            "ssfssfssf", 80, (4, 2, 32), 136, num_kv_shared_layers=3, sliding_window=24, laurel_rank=12,
            hidden_size_per_layer_input=24, final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.9, 0.9, 0.75, 0.4] + [0.0] * 5,
        ),
    ),
    # No layer reads the keys of another; sparse gates in the last layer, too.
    _family(
        "gemma3n-own",
        _config(
            "sfsf", 72, (3, 1, 40), 264, num_kv_shared_layers=0, sliding_window=70, laurel_rank=8,
            hidden_size_per_layer_input=20, final_logit_softcapping=4.0,
            activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.6],
        ),
    ),
]  # fmt: skip
