"""Small random models as folders of Hugging Face: the configuration, weights in bfloat16, and a vocabulary, as they are
published.

``transformers`` writes both, with the names and shapes of weights that published models have, which differ from those in
memory.  It drops the layers that draft: they are added here, under the names that the published models of each kind have.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

from tests.oracle import bailing, make, tokens
from tests.oracle.models import Case, Family, checkpoint

_LLAMA = ("llama-bias", "ernie4_5", "ernie4_5-moe", "phi3", "phi3-long")
_SEEING = {"Qwen2_5_VLText": "Qwen2_5_VL", "Qwen3VLText": "Qwen3VL", "Qwen3VLMoeText": "Qwen3VLMoe"}
_PACKED = "gpt-oss-untruncated"
_QWEN_MTP = {
    "eh_proj.": "fc.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.",
}
_DEEPSEEK4 = {
    "embed_tokens.": "embed.",
    "lm_head.": "head.",
    "hc_head.hc_": "hc_head_",
    "shared_head.norm.": "norm.",
    "attn.norm.": "attn.kv_norm.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.kv_proj.": "attn.wkv.",
    "self_attn.kv_norm.": "attn.kv_norm.",
    "self_attn.q_a_proj.": "attn.wq_a.",
    "self_attn.q_a_norm.": "attn.q_norm.",
    "self_attn.q_b_proj.": "attn.wq_b.",
    "self_attn.o_a_proj.": "attn.wo_a.",
    "self_attn.o_b_proj.": "attn.wo_b.",
    "self_attn.sinks": "attn.attn_sink",
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
    "mlp.": "ffn.",
    "gate_proj.": "w1.",
    "down_proj.": "w2.",
    "up_proj.": "w3.",
    "gate.e_score_correction_bias": "gate.bias",
}
"""What ``transformers`` calls otherwise, in what it writes and in the layer that drafts."""
_STEP35 = {
    "mlp.shared_experts.": "share_expert.",
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.experts.gate_up_proj": "moe.gate_up",
    "mlp.experts.down_proj": "moe.down_proj.weight",
    "shared_head.norm": "transformer.shared_head.norm",
    "shared_head.head": "transformer.shared_head.output",
}
"""What ``transformers`` calls otherwise in a Step 3.5."""


def adapted(case: Case | Family) -> Case | Family:
    """The model as the converter takes it: a Gemma 3 whose sixth layers are global, a Hunyuan with a context of 32 768, a
    Granite or a Nemotron with Mamba-2 whose number of tokens is a multiple of 8, a Llama 4 with the usual frames and
    factors."""
    if isinstance(case, Case):
        return dataclasses.replace(case, pattern=6) if case.architecture == "gemma3" else case
    if case.architecture == "llama4":
        own = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
        return dataclasses.replace(case, config={**case.config, **own})
    if case.model in ("GraniteMoeHybrid", "NemotronH"):
        names = {"model.embed_tokens.weight", "model.embeddings.weight", "lm_head.weight"} & set(case.weights)
        rows = -(-case.config["vocab_size"] // 8) * 8
        weights = {**case.weights, **{name: (rows, case.weights[name][1]) for name in names}}
        metadata = {**case.metadata, "vocab_size": rows}
        return dataclasses.replace(case, config={**case.config, "vocab_size": rows}, weights=weights, metadata=metadata)
    if case.config.get("rope_parameters", {}).get("rope_type") == "dynamic":
        return dataclasses.replace(case, config={**case.config, "max_position_embeddings": 32768})
    return case


def rounded(case: Case | Family) -> dict[str, np.ndarray]:
    """The weights of the model's checkpoint, rounded to bfloat16: float32."""
    every = {name: torch.from_numpy(weight) for name, weight in checkpoint(case).items()}
    return {name: _rounded(case, name, weight).numpy() for name, weight in every.items()}


def _rounded(case: Case | Family, name: str, weight: Any) -> Any:
    if case.architecture == "deepseek4" and ".experts." in name:
        return _unpacked(*_packed(weight))
    if case.name == _PACKED and ".experts." in name and not name.endswith("bias"):
        return _unpacked(*_packed(weight.transpose(1, 2))).transpose(1, 2)
    return weight if name.endswith("tid2eid") else weight.to(torch.bfloat16).float()


def write(case: Case | Family, weights: Mapping[str, np.ndarray], folder: Path) -> list[int]:
    """Write the folder of a model with these weights.  The ids of the text of ``tokens.py``."""
    folder.mkdir()
    model, extra = make.load(case, torch.float32, weights)
    kind, file = case.model if isinstance(case, Family) else "", folder / "model.safetensors"
    if kind == "Step3p7Text":
        every = {published_step35(name): weight for name, weight in model.state_dict().items()}
        every |= {
            f"{name.removesuffix('gate_up')}{half}.weight": rows
            for name in list(every)
            if name.endswith("moe.gate_up")
            for half, rows in zip(("gate_proj", "up_proj"), every.pop(name).chunk(2, dim=1), strict=True)
        }
    elif kind not in _SEEING:
        model.save_pretrained(folder)
        every = load_file(file)
    else:
        every = {k.replace("model.", "model.language_model.", 1): w for k, w in model.state_dict().items()}
        if case.tied:
            del every["lm_head.weight"]
        if kind == "Qwen3VLMoeText":
            every = {k: w.transpose(1, 2) if ".experts." in k else w for k, w in every.items()}
    n_layer = model.config.get_text_config().num_hidden_layers
    every |= drafting(case, n_layer, extra)
    if kind == "DeepseekV4":
        every = _deepseek4(every, n_layer)
    if case.name == _PACKED:
        every = _gpt_oss(every)
    if case.architecture == "bailingmoe2":
        every = bailing.published(every, torch.cat)
    if case.architecture == "bailingmoe":
        every = bailing.first_published(model.state_dict(), torch.cat)
    if kind == "KimiLinear":
        # ``transformers`` calls dense networks like mixtures.
        dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
        every = {dense.sub("mlp.", name): weight for name, weight in every.items()}
    own = (torch.int8, torch.uint8, torch.int64)
    wide = ("hc_", ".ape", ".attn_sink", ".gate.bias") if kind == "DeepseekV4" else ()
    every = {
        k: (w if w.dtype in own or any(part in k for part in wide) else w.to(torch.bfloat16)).contiguous().clone()
        for k, w in every.items()
    }
    save_file(every, file, {"format": "pt"})
    _write_config(case, model, folder)
    gemma = case.architecture.removesuffix("-assistant") if case.architecture.startswith("gemma") else ""
    vocabulary = ("gemma3" if gemma == "gemma3n" else gemma) or ("llama" if case.name in _LLAMA else "gpt2")
    ids = tokens.write(folder, vocabulary)
    if kind == "Phi3" and vocabulary == "gpt2":
        _change(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    if kind == "Phi3" and vocabulary == "llama":
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', encoding="utf-8")
    return ids


def published_step35(name: str) -> str:
    """The published name of a weight of Step 3.5."""
    for part, own in _STEP35.items():
        name = name.replace(part, own)
    return name


def _change(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; None takes one away."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}), encoding="utf-8")


def _write_config(case: Case | Family, model: Any, folder: Path) -> None:
    path = folder / "config.json"
    if isinstance(case, Family) and case.architecture == "step35":
        slides = case.metadata["attention.sliding_window_pattern"]
        kinds = ["sliding_attention" if flag else "full_attention" for flag in slides]
        path.write_text(json.dumps(_step35_config(case.config, kinds)), encoding="utf-8")
        return
    if isinstance(case, Case):
        if case.delta_net:
            _change(path, mtp_num_hidden_layers=case.n_mtp)
        return
    if case.model in _SEEING:
        kind = _SEEING[case.model]
        options = {"deepstack_visual_indexes": [0, 1, 2]} if kind != "Qwen2_5_VL" else {}
        config = getattr(transformers, f"{kind}Config")(
            text_config=model.config.to_dict(),
            vision_config={"depth": 3, **options},
            architectures=[f"{kind}ForConditionalGeneration"],
            tie_word_embeddings=case.tied,
        )
        config.save_pretrained(folder)
    if case.model == "Mistral4":
        # Published models of this kind see.
        text = json.loads(path.read_text(encoding="utf-8"))
        kind, text["architectures"] = "Mistral3ForConditionalGeneration", None
        path.write_text(json.dumps({"model_type": "mistral3", "architectures": [kind], "text_config": text}))
    if case.name == _PACKED:
        _change(path, quantization_config={"quant_method": "mxfp4"})
    if case.model == "GPT2":
        _change(path, n_ctx=case.config["n_positions"])
    if case.architecture == "bailingmoe2":
        _change(path, **_bailing_config(case.config))
    if case.architecture == "bailingmoe":
        _change(path, **_first_bailing_config(case.config))
    if case.model == "NemotronH":
        _change(path, **_nemotron_config(case.config))
    if case.model == "Cohere2":
        _change(path, rotary_pct=1.0)
    if case.model == "MiMoV2Flash":
        _change(path, **_mimo2_config(case.config))
    if case.model == "KimiLinear":
        _change(path, **_kimi_config(case.config))
    if case.model == "Glm4MoeLite":
        # ``transformers`` writes which layers are dense by another name.
        _change(path, first_k_dense_replace=1)
    if case.model == "GraniteMoeHybrid":
        # ``transformers`` writes the kinds of layers in other words.
        kinds = ["mamba" if kind == "linear_attention" else "attention" for kind in case.config["layer_types"]]
        _change(path, layer_types=kinds, layers_block_type=None)
    if case.architecture in ("glm4moe", "deepseek2", "deepseek32", "glm-dsa"):
        _change(path, num_nextn_predict_layers=case.n_mtp, num_mtp_layers=None)
    if case.architecture == "deepseek4":
        config = case.config
        rope = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
        _change(
            path,
            num_nextn_predict_layers=case.n_mtp,
            rope_scaling=rope | {"type": "yarn"},
            compress_ratios=[*case.metadata["attention.compress_ratios"], *[0] * case.n_mtp],
            num_hash_layers=case.metadata["hash_layer_count"],
            n_shared_experts=1,
            norm_topk_prob=True,
            compress_rope_theta=config["compress_rope_theta"],
        )


def _bailing_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """What the published configuration of Ling 2.0 has in other words than ``transformers``."""
    return {
        "model_type": "bailing_moe",
        "architectures": ["BailingMoeV2ForCausalLM"],
        "num_experts": c["n_routed_experts"],
        "num_shared_experts": c["n_shared_experts"],
        "score_function": "sigmoid",
        "rope_theta": c["rope_parameters"]["rope_theta"],
        "partial_rotary_factor": c["rope_parameters"]["partial_rotary_factor"],
    }


def _kimi_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """What the published configuration of Kimi Linear has in other words than ``transformers``."""
    layers = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
    net = {"head_dim": "head_dim", "num_heads": "num_heads", "short_conv_kernel_size": "conv_kernel_dim"}
    return {
        "linear_attn_config": {
            **{
                key: [il for il, kind in enumerate(c["layer_types"], 1) if kind == word] for key, word in layers.items()
            },
            **{key: c[f"linear_{word}"] for key, word in net.items()},
        },
        "num_experts": c["num_local_experts"],
        "num_experts_per_token": c["num_experts_per_tok"],
        "num_shared_experts": c["n_shared_experts"],
        "first_k_dense_replace": c["first_k_dense_replace"],
        "moe_renormalize": c["norm_topk_prob"],
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": c["n_group"],
        "rope_theta": 10000.0,
        "layer_types": None,
        "mlp_layer_types": None,
    }


def _first_bailing_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """What the published configuration of Ling 1 has in other words than ``transformers``."""
    return {
        "model_type": "bailing_moe",
        "architectures": ["BailingMoeForCausalLM"],
        "num_experts": c["num_local_experts"],
        "num_shared_experts": c["shared_intermediate_size"] // c["intermediate_size"],
        "moe_intermediate_size": c["intermediate_size"],
        "norm_topk_prob": True,
        "norm_head": False,
        "first_k_dense_replace": 0,
        "rope_theta": c["rope_parameters"]["rope_theta"],
        "rope_parameters": None,
    }


def _nemotron_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """What the published configuration of Nemotron-H has in other words than ``transformers``."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    mixed = (
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
    )
    dense: dict[str, Any] = {} if "n_routed_experts" in c else dict.fromkeys(mixed)
    return {
        "model_type": "nemotron_h_published",  # so that only these words are read
        "hybrid_override_pattern": "".join(letters[kind] for kind in c["layers_block_type"]),
        "layers_block_type": None,
        "num_hidden_layers": len(c["layers_block_type"]),
        "norm_eps": c["layer_norm_epsilon"],
        **dense,
    }


def _mimo2_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """What the published configuration of MiMo V2 has in other words than ``transformers``."""
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    whole, near = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    return {
        "model_type": "mimo_v2_flash_published",  # so that only these words are read
        "rope_parameters": None,
        "rope_theta": whole["rope_theta"],
        "swa_rope_theta": near["rope_theta"],
        "partial_rotary_factor": whole["partial_rotary_factor"],
        "hybrid_layer_pattern": [int(each) for each in slides],
        "swa_head_dim": c["head_dim"],
        "swa_v_head_dim": c["v_head_dim"],
        "swa_num_attention_heads": c["num_attention_heads"],
        "swa_num_key_value_heads": 2 * c["num_key_value_heads"],
        "layernorm_epsilon": c["rms_norm_eps"],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": [int(kind == "sparse") for kind in c["mlp_layer_types"]],
    }


def _step35_config(c: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The configuration of a Step 3.5 in its published words.  kinds: those of all layers, also of layers that draft."""
    rope, n_kv = c["rope_parameters"], c["num_key_value_heads"]
    thetas = [rope[kind]["rope_theta"] for kind in kinds]
    scaling = {k: v for k, v in rope["full_attention"].items() if k != "partial_rotary_factor"}
    return {
        "architectures": ["Step3p5ForCausalLM"],
        # A name that ``transformers`` does not know, so that the converter reads this file as it is.
        "model_type": "step3p5_published",
        **{k: v for k, v in c.items() if not k.startswith(("rope_", "num_key", "num_sliding", "mlp_", "n_routed"))},
        "layer_types": list(kinds),
        "num_attention_groups": n_kv,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": c["num_sliding_attention_heads"],
            "num_attention_groups": n_kv,
        },
        # The converter takes the first two.
        "rope_theta": [rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"], *thetas[2:]],
        "partial_rotary_factors": [1.0 if kind == "sliding_attention" else 0.5 for kind in kinds],
        **({"rope_parameters": {"full_attention": scaling}} if scaling["rope_type"] == "llama3" else {}),
        "moe_num_experts": c["n_routed_experts"],
        "moe_top_k": c["num_experts_per_tok"],
        "moe_layers_enum": ",".join(str(il) for il, kind in enumerate(c["mlp_layer_types"]) if kind == "sparse"),
        "norm_expert_weight": True,
        "num_nextn_predict_layers": len(kinds) - len(c["layer_types"]),
    }


def drafting(case: Case | Family, n_layer: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of the layer that drafts by their published names."""
    out: dict[str, Any] = {}
    for name, weight in extra.items():
        if isinstance(case, Case):
            out[f"mtp.{name}"] = weight
            continue
        for part, value in _experts(name, weight).items():
            own = next((end for end in _QWEN_MTP if part.startswith(end)), "")
            if case.architecture == "qwen3next":
                out["mtp." + (part.replace(own, _QWEN_MTP[own]) if own else f"layers.0.{part}")] = value
            else:
                out[f"model.layers.{n_layer}.{part}" if case.n_mtp == 1 else published_step35(part)] = value
    return out


def _experts(name: str, weight: Any) -> dict[str, Any]:
    """Experts that are one tensor, each alone."""
    base, dot, kind = name.partition(".experts.")
    if not dot:
        return {name: weight}
    parts = {"down_proj": weight}
    if kind == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
    return {f"{base}.experts.{i}.{k}.weight": w[i] for k, w in parts.items() for i in range(weight.shape[0])}


# --- gpt-oss and DeepSeek-V4 -----------------------------------------------------------------------------------

_MXFP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _packed(weight: Any) -> tuple[Any, Any]:
    """Weights [.., n] as MXFP4: int8 [.., n / 2] with the first of two values in the low bits, and exponents of blocks of
    32 values, uint8 [.., n / 32]."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - _MXFP4).abs().argmin(-1).to(torch.uint8)
    codes = (codes | ((scaled < 0).to(torch.uint8) << 3)).reshape(*weight.shape)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).view(torch.int8), (exponents + 127).to(torch.uint8)


def _unpacked(packed: Any, exponents: Any) -> Any:
    """float32 [.., n]."""
    bits = packed.view(torch.uint8)
    codes = torch.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1).long()
    values = _MXFP4[codes & 7] * (1 - 2 * (codes >> 3)).float()
    blocks = values.reshape(*values.shape[:-1], -1, 32) * torch.exp2(exponents.float() - 127)[..., None]
    return blocks.reshape(values.shape)


def _gpt_oss(every: Mapping[str, Any]) -> dict[str, Any]:
    """Weights with experts in MXFP4, as they are published: rows of blocks [.., n / 32, 16]."""
    out = {}
    for name, weight in every.items():
        if ".experts." in name and not name.endswith("bias"):
            packed, exponents = _packed(weight.float().transpose(1, 2))
            out[f"{name}_blocks"] = packed.view(torch.uint8).reshape(*exponents.shape, 16)
            out[f"{name}_scales"] = exponents
        else:
            out[name] = weight
    return out


def _deepseek4(every: Mapping[str, Any], n_layer: int) -> dict[str, Any]:
    """Weights by the names of DeepSeek's own checkpoints, experts in MXFP4."""
    out = {}
    for name, weight in every.items():
        name = name.replace(f"model.layers.{n_layer}.", "mtp.0.").removeprefix("model.")
        for part, own in _DEEPSEEK4.items():
            name = name.replace(part, own)
        if ".experts." in name:
            out[name], out[name.replace(".weight", ".scale")] = _packed(weight)
        elif name.endswith("eh_proj.weight"):
            halves = weight.chunk(2, dim=1)
            out |= {name.replace("eh_proj", half): w for half, w in zip(("e_proj", "h_proj"), halves, strict=True)}
        else:
            out[name] = weight
    return out
