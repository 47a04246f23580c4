"""GPT-2: layer norms with biases, learned positions, one matrix for queries, keys and values, a network without a gate.

``transformers``: GPT2LMHeadModel, whose matrices are transposed.  llama.cpp: src/models/gpt2.cpp; GPT2Model of
conversion/gpt2.py.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.shared import N_CTX, N_VOCAB

_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NORMS = dict.fromkeys(("ln_1.weight", "ln_2.weight", "ln_f.weight"), (0.3, 1.0))
_MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _transposed(part: str, weight: np.ndarray) -> Weights:
    return {part: np.ascontiguousarray(weight.T) if part.endswith(_MATRICES) else weight}


def _family(name: str, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> Family:
    config: dict[str, Any] = {
        "vocab_size": N_VOCAB,
        "n_positions": N_CTX,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_inner": n_ff,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    weights: Shapes = {"transformer.wte.weight": (N_VOCAB, n_embd), "transformer.wpe.weight": (N_CTX, n_embd)}
    matrices = {"attn.c_attn": (n_embd, 3 * n_embd), "attn.c_proj": (n_embd, n_embd)}
    matrices |= {"mlp.c_fc": (n_embd, n_ff), "mlp.c_proj": (n_ff, n_embd)}
    for il in range(n_layer):
        for part, shape in matrices.items():
            weights |= {f"transformer.h.{il}.{part}.weight": shape, f"transformer.h.{il}.{part}.bias": shape[1:]}
    norms = [f"transformer.h.{il}.ln_{k}" for il in range(n_layer) for k in (1, 2)]
    for norm in (*norms, "transformer.ln_f"):
        weights |= {f"{norm}.weight": (n_embd,), f"{norm}.bias": (n_embd,)}
    metadata = {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.layer_norm_epsilon": 1e-5,
    }
    options: dict[str, Any] = {"names": _NAMES, "convert": _transposed, "spreads": _NORMS, "prefix": "transformer.h."}
    return Family(name, "gpt2", "GPT2", config, weights, metadata, **options)


CASES = [_family("gpt2", 3, 80, 5, 320)]
