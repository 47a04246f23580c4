"""Apertus: a network without a gate, down(xIELU(up)), and norms of each head of q and k.

``transformers``: ApertusForCausalLM.  llama.cpp: src/models/apertus.cpp; ApertusModel of conversion/llama.py, a
LlamaModel that leaves q and k as they are and writes llama 3's factors of frequencies.

xIELU's numbers are arrays in the file, one for each layer, under keys without the name of the architecture: alpha_p and
alpha_n as in the checkpoint, before softplus.
"""

import dataclasses

import numpy as np

from tests.oracle.families.family import Family, Weights
from tests.oracle.families.parts import LLAMA3, attention, head_dim, keys, model, network, norms, sizes
from tests.oracle.shared import llama3_factors

_BASE = 1e4
_ROPE = LLAMA3 | {"rope_theta": _BASE}
_CONFIG = sizes(3, 80, (5, 1, 0), 136, _ROPE, tie_word_embeddings=False)
_NAMES = {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"}
_XIELU = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {} if ".act_fn." in part else {part: weight}


def _family() -> Family:
    layer = norms(_CONFIG, *_NAMES) | attention(_CONFIG, norm="head") | network(_CONFIG, gate=False)
    layer |= {f"mlp.act_fn.{name}": shape for name, shape in _XIELU.items()}
    family = Family(
        "apertus",
        "apertus",
        "Apertus",
        _CONFIG,
        model(_CONFIG, [layer] * 3),
        keys(_CONFIG, vocab_size=_CONFIG["vocab_size"], rope__dimension_count=head_dim(_CONFIG)),
        names=_NAMES,
        convert=_convert,
        extra={"rope_freqs.weight": llama3_factors(_ROPE, _BASE, head_dim(_CONFIG))},
        spreads={"alpha_p": (0.5, 0.2), "alpha_n": (0.5, -1.0), "beta": (0.1, 0.5), "eps": (0.0, -1e-6)},
    )
    weights = family.checkpoint()
    values = {
        f"xielu.{name}": [float(weights[f"model.layers.{il}.mlp.act_fn.{name}"].item()) for il in range(3)]
        for name in _XIELU
    }
    return dataclasses.replace(family, metadata={**family.metadata, **values})


CASES = [_family()]
