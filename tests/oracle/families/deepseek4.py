"""DeepSeek-V4: hyper-connections of four streams, a window and compressed rows as keys, an indexer that chooses among them,
sinks, a grouped low-rank output, and experts that a table gives in the first layers.

``transformers``: DeepseekV4ForCausalLM.  llama.cpp: src/models/deepseek4.cpp; conversion/deepseek.py.

Layers with a ratio of 0 see only the window; those with 4 choose ``top_k`` of their compressed rows by an indexer, which has
shorter keys; others see all compressed rows.  A block of 4 is weighed together with the block before it.  llama.cpp knows
ratios of 0, 4 and 128; ``transformers`` takes any, so "deepseek4-short" has more rows in a short text.

The layer that drafts has a file of its own, in one of two layouts: with the names of a layer after the last one, as llama.cpp
writes it, or with the names of ds4 (``write_layer``).  It is put together from the modules of ``transformers`` by
``oracle/make.py``.

``transformers`` adds 1e-20 to the sum of the chosen probabilities, llama.cpp takes it to be 6.1e-5 at least; the sums here
are larger.  YaRN's magnitude is 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import experts, network, norms
from tests.oracle.shared import N_CTX, N_VOCAB, finish, uniform

_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_proj": "attn_kv",
    "self_attn.kv_norm": "attn_kv_a_norm",
    "self_attn.o_a_proj": "attn_output_a",
    "self_attn.o_b_proj": "attn_output_b",
    "self_attn.sinks": "attn_sinks",
    "self_attn.compressor.kv_proj": "attn_compressor_kv",
    "self_attn.compressor.gate_proj": "attn_compressor_gate",
    "self_attn.compressor.position_bias": "attn_compressor_ape",
    "self_attn.compressor.kv_norm": "attn_compressor_norm",
    "self_attn.compressor.indexer.kv_proj": "indexer_compressor_kv",
    "self_attn.compressor.indexer.gate_proj": "indexer_compressor_gate",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape",
    "self_attn.compressor.indexer.kv_norm": "indexer_compressor_norm",
    "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "model.hc_head.hc_fn": "output_hc_fn",
    "model.hc_head.hc_base": "output_hc_base",
    "model.hc_head.hc_scale": "output_hc_scale",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid",
    "mlp.gate.correction": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}

_SPREADS = {"sinks": (1.0, 1.0), "hc.base": (0.5, 0.0), "hc_base": (0.5, 0.0), "scale": (0.3, 1.0)}

_KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
}


_MTP_NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}


@dataclass(frozen=True)
class DeepSeek4(Family):
    """A model whose layer that drafts, if it has one, is written to a file of its own."""

    @property
    def _last(self) -> str:
        return f"blk.{self.config['num_hidden_layers']}."

    def tensors(self) -> Weights:
        """Those of the model, without the layer that drafts."""
        return {name: weight for name, weight in super().tensors().items() if not name.startswith(self._last)}

    def layer_tensors(self, layout: str) -> Weights:
        """Those of the layer that drafts, in the layout of "llama.cpp" or "ds4"."""
        every = super().tensors()
        own = {name.removeprefix(self._last): w for name, w in every.items() if name.startswith(self._last)}
        if layout == "ds4":
            eh = own.pop("nextn.eh_proj.weight")
            own["e_proj.weight"], own["h_proj.weight"] = np.split(eh, 2, axis=1)
            norm = own.pop("nextn.shared_head_norm.weight")
            return {"mtp.0." + name.removeprefix("nextn."): w for name, w in own.items()} | {"mtp.0.norm.weight": norm}
        heads = {name: own.pop(name) for name in list(own) if name.startswith("hc_head_")}
        lent = {name: every[name] for name in ("token_embd.weight", "output.weight", "output_norm.weight")}
        return (
            {self._last + name: w for name, w in own.items()}
            | lent
            | {f"output_{k}".replace("_head_", "_"): w for k, w in heads.items()}
        )

    def write_layer(self, path: Path, layout: str) -> Path:
        """The file of the layer that drafts.  Only that of llama.cpp repeats the keys of the model."""
        writer = gguf.GGUFWriter(path, self.architecture)
        if layout == "ds4":
            return finish(writer, self.layer_tensors(layout), path)
        n = self.config["num_hidden_layers"] + 1
        changed = {"block_count": n, "nextn_predict_layers": 1}
        changed["attention.compress_ratios"] = [*self.metadata["attention.compress_ratios"], 0]
        changed["swiglu_clamp_exp"] = [*self.metadata["swiglu_clamp_exp"], self.config["swiglu_limit"]]
        self.write_metadata(writer, {**self.metadata, **changed})
        return finish(writer, self.layer_tensors(layout), path)

    def options(self, path: Path) -> dict[str, Any]:
        """The file of the layer that drafts, in llama.cpp's layout."""
        if not self.n_mtp:
            return {}
        return {"draft_model": self.write_layer(path.with_suffix(".mtp.gguf"), "llama.cpp")}


def _convert(part: str, weight: np.ndarray) -> Weights:
    if part == "mlp.gate.tid2eid":
        return {part: weight.astype(np.int32)}
    return {part.replace("gate.e_score_correction_bias", "gate.correction.bias"): weight}


def _compressor(config: dict[str, Any], name: str, ratio: int, width: int, overlap: int) -> Shapes:
    e = config["hidden_size"]
    return {
        f"{name}.kv_proj.weight": (overlap * width, e),
        f"{name}.gate_proj.weight": (overlap * width, e),
        f"{name}.position_bias": (ratio, overlap * width),
        f"{name}.kv_norm.weight": (width,),
    }


def _attention(config: dict[str, Any], ratio: int) -> Shapes:
    e, d, h, q = (config[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank"))
    groups, rank = config["o_groups"], config["o_lora_rank"]
    parts: Shapes = {
        "q_a_proj.weight": (q, e),
        "q_a_norm.weight": (q,),
        "q_b_proj.weight": (h * d, q),
        "kv_proj.weight": (d, e),
        "kv_norm.weight": (d,),
        "o_a_proj.weight": (groups * rank, h * d // groups),
        "o_b_proj.weight": (e, groups * rank),
        "sinks": (h,),
    }
    if ratio:
        parts |= _compressor(config, "compressor", ratio, d, 2 if ratio == 4 else 1)
    if ratio == 4:
        n, width = config["index_n_heads"], config["index_head_dim"]
        parts |= _compressor(config, "compressor.indexer", ratio, width, 2)
        parts["compressor.indexer.q_b_proj.weight"] = (n * width, q)
        parts["compressor.indexer.scorer.weights_proj.weight"] = (n, e)
    return {f"self_attn.{name}": shape for name, shape in parts.items()}


def _hyper_connection(config: dict[str, Any], name: str) -> Shapes:
    n = config["hc_mult"]
    return {
        f"{name}.fn": ((2 + n) * n, n * config["hidden_size"]),
        f"{name}.base": ((2 + n) * n,),
        f"{name}.scale": (3,),
    }


def _layer(config: dict[str, Any], ratio: int, hashed: bool) -> Shapes:
    n, f = config["n_routed_experts"], config["moe_intermediate_size"]
    parts = norms(config) | _attention(config, ratio)
    parts |= _hyper_connection(config, "attn_hc") | _hyper_connection(config, "ffn_hc")
    parts |= experts(config, n, f) | network(config, f, "mlp.shared_experts")
    if hashed:
        parts["mlp.gate.tid2eid"] = (N_VOCAB, config["num_experts_per_tok"])
    else:
        parts["mlp.gate.e_score_correction_bias"] = (n,)
    return parts


def _table(name: str, label: str, n: int, used: int) -> np.ndarray:
    """Different experts for each token: float32 [N_VOCAB, used]."""
    return np.argsort(uniform(name, label, (N_VOCAB, n), 1.0), axis=1)[:, :used].astype(np.float32)


def family(name: str, ratios: list[int], n_hash: int, config: Mapping[str, Any], n_mtp: int = 0) -> DeepSeek4:
    """A model with layers of these ratios, of which the first ``n_hash`` have a table of experts."""
    large = max(ratios)
    kinds = [_KINDS.get(ratio, "heavily_compressed_attention") for ratio in ratios]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": large}
    full = dict(config) | {
        "num_hidden_layers": len(ratios),
        "layer_types": kinds,
        "compress_rates": rates,
        "mlp_layer_types": ["hash_moe"] * n_hash + ["moe"] * (len(ratios) - n_hash),
    }
    e, hc, n, used = (full[key] for key in ("hidden_size", "hc_mult", "n_routed_experts", "num_experts_per_tok"))
    weights: Shapes = {
        "model.embed_tokens.weight": (N_VOCAB, e),
        "model.norm.weight": (e,),
        "lm_head.weight": (N_VOCAB, e),
        "model.hc_head.hc_fn": (hc, hc * e),
        "model.hc_head.hc_base": (hc,),
        "model.hc_head.hc_scale": (1,),
    }
    for il, ratio in enumerate(ratios):
        weights |= {f"model.layers.{il}.{k}": shape for k, shape in _layer(full, ratio, il < n_hash).items()}
    for il in range(len(ratios), len(ratios) + n_mtp):
        parts = _layer(full, 0, False) | norms(full, "enorm", "hnorm", "shared_head.norm")
        parts |= {"eh_proj.weight": (e, 2 * e), "hc_head.hc_fn": (hc, hc * e), "hc_head.hc_base": (hc,)}
        parts |= {"hc_head.hc_scale": (1,)}
        weights |= {f"model.layers.{il}.{k}": shape for k, shape in parts.items()}
    rope = full["rope_parameters"]
    metadata = {
        "block_count": len(ratios),
        "context_length": full["max_position_embeddings"],
        "embedding_length": e,
        "embedding_length_out": hc * e,
        "vocab_size": N_VOCAB,
        "attention.head_count": full["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.layer_norm_rms_epsilon": full["rms_norm_eps"],
        "attention.q_lora_rank": full["q_lora_rank"],
        "attention.output_group_count": full["o_groups"],
        "attention.output_lora_rank": full["o_lora_rank"],
        "attention.sliding_window": full["sliding_window"],
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": full["compress_rope_theta"],
        "attention.indexer.head_count": full["index_n_heads"],
        "attention.indexer.key_length": full["index_head_dim"],
        "attention.indexer.top_k": full["index_topk"],
        "rope.dimension_count": full["qk_rope_head_dim"],
        "rope.freq_base": full["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "expert_count": n,
        "expert_used_count": used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": full["moe_intermediate_size"],
        "expert_weights_scale": full["routed_scaling_factor"],
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": n_hash,
        "swiglu_clamp_exp": [full["swiglu_limit"]] * len(ratios),
        "hyper_connection.count": hc,
        "hyper_connection.sinkhorn_iterations": full["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": full["hc_eps"],
    }
    labels = [f"model.layers.{il}.mlp.gate.tid2eid" for il in range(n_hash)]
    tables = {label: _table(name, label, n, used) for label in labels}
    return DeepSeek4(
        name,
        "deepseek4",
        "DeepseekV4",
        full,
        weights,
        metadata,
        names=_NAMES | _MTP_NAMES,
        convert=_convert,
        spreads=_SPREADS,
        tables=tables,
        n_mtp=n_mtp,
    )


_COMMON = {
    "vocab_size": N_VOCAB,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": N_CTX,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
}


def _rope(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "rope_theta": 10000.0,
    }


CASES = [
    # As V4-Flash: two layers that only see the window, then both kinds in turn; three layers of given experts.
    family(
        "deepseek4", [0, 0, 4, 128, 4], 3,
        _COMMON | {
            "hidden_size": 96, "num_attention_heads": 6, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64,
            "o_groups": 3,
            "o_lora_rank": 32, "sliding_window": 40, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 9,
            "hc_sinkhorn_iters": 20,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5,
            "swiglu_limit": 0.7, "rope_parameters": _rope(4.0, 128),
        },
        n_mtp=1,
    ),
    # Compressed layers from the first on, the large ratio so small that a text has many rows.
    family(
        "deepseek4-short", [8, 8, 4], 1,
        _COMMON | {
            "hidden_size": 64, "num_attention_heads": 4, "head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 48,
            "o_groups": 2,
            "o_lora_rank": 48, "sliding_window": 16, "index_n_heads": 7, "index_head_dim": 64, "index_topk": 20,
            "hc_sinkhorn_iters": 3,
            "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
            "swiglu_limit": 10.0, "rope_parameters": _rope(8.0, 64),
        },
    ),
    # As V4-Pro: compressed layers from the first on, which have given experts, and more groups of heads.
    family(
        "deepseek4-pro", [128, 128, 4, 128, 4], 3,
        _COMMON | {
            "hidden_size": 64, "num_attention_heads": 8, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 48,
            "o_groups": 8,
            "o_lora_rank": 32, "sliding_window": 24, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 20,
            "hc_sinkhorn_iters": 20,
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
            "swiglu_limit": 10.0, "rope_parameters": _rope(8.0, 64),
        },
    ),
]  # fmt: skip
