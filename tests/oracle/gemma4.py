"""Gemma 4 and its assistants under two sets of names: those of ``transformers``, and those of llama.cpp's conversion."""

import math
from typing import TYPE_CHECKING

import gguf
import numpy as np

from engine.synthetic.model import proportional_rope

if TYPE_CHECKING:
    from tests.oracle.models import Case

Shapes = dict[str, tuple[int, ...]]


def shapes(case: "Case", n_vocab: int) -> Shapes:
    """Every weight of the checkpoint, by its name in ``transformers``."""
    gemma, e = case.gemma4, case.n_embd
    assert gemma is not None
    every: Shapes = {"model.embed_tokens.weight": (n_vocab, e), "model.norm.weight": (e,)}
    if gemma.n_embd_out:
        every |= {"pre_projection.weight": (e, 2 * gemma.n_embd_out), "post_projection.weight": (gemma.n_embd_out, e)}
    if gemma.n_per_layer:
        every["model.embed_tokens_per_layer.weight"] = (n_vocab, case.n_layer * gemma.n_per_layer)
        every["model.per_layer_model_projection.weight"] = (case.n_layer * gemma.n_per_layer, e)
        every["model.per_layer_projection_norm.weight"] = (gemma.n_per_layer,)
    for il in range(case.n_layer):
        parts = _attention(case, il) | _feed_forward(case, il)
        if gemma.n_per_layer:
            parts |= {"per_layer_input_gate.weight": (gemma.n_per_layer, e)}
            parts |= {"per_layer_projection.weight": (e, gemma.n_per_layer), "post_per_layer_input_norm.weight": (e,)}
        parts["layer_scalar"] = (1,)
        every |= {f"model.layers.{il}.{name}": shape for name, shape in parts.items()}
    return every


def _attention(case: "Case", il: int) -> Shapes:
    gemma, e = case.gemma4, case.n_embd
    assert gemma is not None
    slides = gemma.sliding(case.n_layer)[il]
    d = gemma.head_dim_sliding if slides else case.head_dim
    kv = d * (gemma.n_head_kv_sliding if slides else case.n_head_kv)
    parts: Shapes = {
        "input_layernorm.weight": (e,),
        "self_attn.q_proj.weight": (case.n_head * d, e),
        "self_attn.q_norm.weight": (d,),
        "self_attn.o_proj.weight": (e, case.n_head * d),
        "post_attention_layernorm.weight": (e,),
    }
    if il < case.n_layer - gemma.n_shared:
        parts |= {"self_attn.k_proj.weight": (kv, e), "self_attn.k_norm.weight": (d,)}
    if gemma.owns_values(case.n_layer)[il]:
        parts["self_attn.v_proj.weight"] = (kv, e)
    return parts


def _feed_forward(case: "Case", il: int) -> Shapes:
    gemma, e, mix = case.gemma4, case.n_embd, case.experts
    assert gemma is not None
    n_ff = gemma.widths(case.n_layer, case.n_ff)[il]
    parts: Shapes = {
        "pre_feedforward_layernorm.weight": (e,),
        "mlp.gate_proj.weight": (n_ff, e),
        "mlp.up_proj.weight": (n_ff, e),
        "mlp.down_proj.weight": (e, n_ff),
        "post_feedforward_layernorm.weight": (e,),
    }
    if mix:
        parts |= {
            "router.proj.weight": (mix.n_expert, e),
            "router.scale": (e,),
            "router.per_expert_scale": (mix.n_expert,),
            "experts.gate_up_proj": (mix.n_expert, 2 * mix.n_ff, e),
            "experts.down_proj": (mix.n_expert, e, mix.n_ff),
        }
        norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        parts |= {f"{name}.weight": (e,) for name in norms}
    return parts


def spread(case: "Case", name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Standard deviation and mean of a weight: norms around 1, but those of queries so that scores, which have no other
    scale, have a variance of 1; routers and the embeddings of layers scaled for what is done to them."""
    if name.endswith("q_norm.weight"):
        return 0.3 / math.sqrt(shape[0]), 1 / math.sqrt(shape[0])
    if name.endswith("router.scale"):
        return 0.3 * math.sqrt(shape[0]), math.sqrt(shape[0])
    if name.endswith("layer_scalar"):
        return 0.1, 0.9
    if "norm" in name or name.endswith("per_expert_scale"):
        return 0.3, 1.0
    if name.endswith("embed_tokens_per_layer.weight"):
        assert case.gemma4 is not None
        return 1 / math.sqrt(case.gemma4.n_per_layer), 0.0
    return 1 / math.sqrt(shape[-1]), 0.0


_OWN = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}


def tensors(case: "Case", checkpoint: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The checkpoint under GGUF names: norms as they are, experts' gates and rows that go up in one tensor."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, case.n_layer)
    out = {"rope_freqs.weight": proportional_rope(case.head_dim // 2)}
    for name, weight in checkpoint.items():
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if name.endswith("router.scale"):
            converted: str | None = block + "ffn_gate_inp.scale"
        elif name.endswith("router.per_expert_scale"):
            converted = block + "ffn_down_exps.scale"
        else:
            whole = name if name.endswith(".weight") else name + ".weight"
            converted = _OWN.get(name) or names.get_name(whole, try_suffixes=(".weight",))
        assert converted is not None, f"gguf-py has no name for {name}"
        out[converted] = weight
    return out
