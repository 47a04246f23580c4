"""Writes ``headers.json``: ``python -m tests.published.make LLAMA.CPP [MODEL ...]`` in the root of the repository.

A development script: next to this package it needs a source tree of llama.cpp, ``torch`` and ``transformers``, which the
tests do not.  llama.cpp's own conversion reads each configuration of ``configs.json`` and converts a checkpoint whose
tensors have shapes and no data; the names and shapes are those of the model of ``transformers``, in the layout in which
checkpoints are published.  What it would write is recorded: every key of the architecture with its type, and every tensor.

Layers that draft are not part of the models of ``transformers``; ``drafting`` adds their tensors.  Tokenizers are left out.
"""

import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers

from tests.oracle import bailing
from tests.published.headers import text_of

GEMMA = 262144
"""The tokens of Gemma 3 and 4; rows of the embedding beyond them are not written."""
V4_FLOATS = r"hc_|\.gate\.bias$|\.ape$|\.attn_sink$"
"""Tensors that DeepSeek V4 publishes as float32."""
HERE = Path(__file__).resolve().parent
Shapes = dict[str, tuple[int, ...]]


def checkpoint(config: dict[str, Any]) -> Shapes:
    """The tensors of a published checkpoint by name."""
    from transformers.core_model_loading import revert_weight_conversion

    if config["model_type"] == "step3p5":
        return step35(config)
    if config["architectures"] == ["BailingMoeForCausalLM"]:
        made = transformers.GraniteMoeSharedConfig(**bailing.first_config_of(config))
        with torch.device("meta"):
            state = transformers.GraniteMoeSharedForCausalLM._from_config(made).state_dict()
        return {name: tuple(value.shape) for name, value in bailing.first_published(state, torch.cat).items()}
    # Kimi K2 brings its own code, which is that of DeepSeek V3.
    own = {**config, "model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else config
    if config["model_type"] == "mimo_v2_flash":
        own = {key: value for key, value in config.items() if not key.startswith(("swa_", "rope_"))}
    ling = config["model_type"] == "bailing_moe"
    made = transformers.AutoConfig.for_model(**(bailing.config_of(config) if ling else own))
    kind = getattr(transformers, "Glm4MoeForCausalLM" if ling else config["architectures"][0])
    with torch.device("meta"):
        model = kind._from_config(made)
    tied = {**config.get("text_config", {}), **config}.get("tie_word_embeddings", False)
    tied = tied or config["model_type"].startswith("gemma")
    state = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    stacked = config.get("text_config", {}).get("model_type") == "mistral4"  # experts are published as stacks
    published = state if stacked else revert_weight_conversion(model, state)
    shapes = {name: tuple(value.shape) for name, value in published.items()}
    if ling:
        return bailing.published(shapes, lambda parts: (sum(rows for rows, _ in parts), parts[0][1]))
    if config["model_type"] == "kimi_linear":
        # ``transformers`` calls dense networks like mixtures.
        dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
        return {dense.sub("mlp.", name): shape for name, shape in shapes.items()}
    if config["model_type"] == "deepseek_v4":
        return {v4_name(name): shape for name, shape in shapes.items()}
    if config["model_type"] == "qwen3_vl_moe":
        # Published experts are the transposes of those of ``transformers``.
        turned = {name: (n, inputs, outputs) for name, (n, outputs, inputs) in experts(shapes).items()}
        return shapes | turned
    return shapes if config["model_type"] == "gpt2" else shapes | drafting(config, shapes)


def step35(config: dict[str, Any]) -> Shapes:
    """The tensors of Step 3.5 by their published names, three layers that draft among them."""
    from tests.oracle.folders import published_step35  # which imports gguf, of llama.cpp here

    given = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    made = transformers.Step3p7TextConfig(**{**given, "n_routed_experts": config["moe_num_experts"], "pad_token_id": 0})
    with torch.device("meta"):
        state = transformers.Step3p7TextModel._from_config(made).state_dict()
    n, d, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"lm_head.weight": (vocab, d)}
    for name, value in state.items():
        name = published_step35(f"model.{name}")
        if not name.endswith("moe.gate_up"):
            shapes[name] = tuple(value.shape)
            continue
        count, both, inputs = value.shape
        halves = {f"{name.removesuffix('gate_up')}{half}.weight" for half in ("gate_proj", "up_proj")}
        shapes |= dict.fromkeys(halves, (count, both // 2, inputs))
    first = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
    for il in range(n, n + config["num_nextn_predict_layers"]):
        blk = f"model.layers.{il}."
        shapes |= {name.replace("model.layers.0.", blk): shape for name, shape in first.items()}
        norms = ("enorm", "hnorm", "transformer.shared_head.norm")
        shapes |= {f"{blk}{name}.weight": (d,) for name in norms} | {f"{blk}eh_proj.weight": (d, 2 * d)}
        shapes[f"{blk}transformer.shared_head.output.weight"] = (vocab, d)
    return shapes


def experts(shapes: Shapes) -> Shapes:
    """The tensors of stacked experts."""
    return {name: shape for name, shape in shapes.items() if ".mlp.experts." in name and len(shape) == 3}


def v4_name(name: str) -> str:
    """The published name of a tensor of DeepSeek V4."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
    return re.sub(r"attn\.norm\.", "attn.kv_norm.", name)


def drafting(config: dict[str, Any], shapes: Shapes) -> Shapes:
    """The tensors of the layer that drafts, as it is published."""
    text = config.get("text_config", config)
    n, d = text["num_hidden_layers"], text["hidden_size"]
    if text.get("mtp_num_hidden_layers") or config["model_type"] == "qwen3_next":
        full = max(il for il in range(n) if any(f"layers.{il}.self_attn." in name for name in shapes))
        own = {re.sub(r".*layers\.\d+", "mtp.layers.0", k): v for k, v in shapes.items() if f"layers.{full}." in k}
        norms = {f"mtp.{name}.weight": (d,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        return own | norms | {"mtp.fc.weight": (d, 2 * d)}
    if config["model_type"] == "nemotron_h" and config.get("num_nextn_predict_layers"):
        kinds = [f"backbone.layers.{config['hybrid_override_pattern'].index(letter)}." for letter in "*E"]
        both = {
            k.replace(blk, f"mtp.layers.{i}."): v for i, blk in enumerate(kinds) for k, v in shapes.items() if blk in k
        }
        names = ("0.enorm", "0.hnorm", "1.final_layernorm")
        return (
            both | {f"mtp.layers.{name}.weight": (d,) for name in names} | {"mtp.layers.0.eh_proj.weight": (d, 2 * d)}
        )
    if text.get("num_nextn_predict_layers"):
        last, blk = f"model.layers.{n - 1}.", f"model.layers.{n}."
        layer = {k.replace(last, blk): v for k, v in shapes.items() if k.startswith(last)}
        norms = {f"{blk}{name}.weight": (d,) for name in ("enorm", "hnorm", "shared_head.norm")}
        tables = {f"{blk}{name}.weight": (text["vocab_size"], d) for name in ("embed_tokens", "shared_head.head")}
        return layer | norms | tables | {f"{blk}eh_proj.weight": (d, 2 * d)}
    return {}


def header(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's conversion writes for a configuration."""
    import conversion  # type: ignore[import-not-found]
    import gguf

    shapes = checkpoint(config)

    def tensor(name: str, shape: tuple[int, ...]) -> Callable[[], Any]:
        if "alpha_" in name or name.endswith((".beta", ".eps", "tid2eid")):  # what becomes a key or integers is read
            return lambda: torch.ones(shape, dtype=torch.bfloat16)
        wide = torch.float32 if re.search(V4_FLOATS, name) else torch.bfloat16
        whole = torch.empty(shape, dtype=wide, device="meta")
        return lambda: conversion.LazyTorchTensor(meta=whole, args=(), func=lambda: whole)

    def index_tensors(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Callable[[], Any]]:
        found = (self.filter_tensors((name, tensor(name, shape))) for name, shape in shapes.items())
        return {item[0]: item[1] for item in found if item is not None}

    def write_experts(self: Any, bid: int, proj: str, key: Any) -> list[str]:
        """Experts are packed in MXFP4; their shapes are those of one, stacked."""
        names = [f"layers.{bid}.ffn.experts.{e}.{proj}.weight" for e in range(self.hparams["n_routed_experts"])]
        shape = (len(names), *shapes[names[0]])
        size = gguf.quant_shape_to_byte_shape(shape, gguf.GGMLQuantizationType.MXFP4)
        data = np.broadcast_to(np.uint8(0), size)
        self.gguf_writer.add_tensor(self.format_tensor_name(key, bid), data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        return names

    kind = conversion.get_model_class(config["architectures"][0])
    conversion.ModelBase.index_tensors = index_tensors
    if config["model_type"] == "gemma3n_text":
        # It copies some tensors to the CPU, which those without data do not allow.
        wrapped = conversion.LazyTorchTensor.__getattr__
        conversion.LazyTorchTensor.to = lambda self, *args, **options: (
            self if options == {"device": "cpu"} else wrapped(self, "to")(*args, **options)
        )
    if config["model_type"] == "deepseek_v4":
        kind._write_mxfp4_expert_tensor = write_experts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        # What ``transformers`` knows, the conversion reads in the words of ``transformers``.
        own = config["model_type"] in ("step3p5", "mimo_v2_flash", "nemotron_h")
        known = {"model_type": config["model_type"] + "_published"} if own else {}
        path.write_text(json.dumps(config | known), encoding="utf-8")
        vocabulary: dict[str, Any] = {"model": {"vocab": dict.fromkeys(map(str, range(GEMMA)))}, "added_tokens": []}
        path.with_name("tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        made = kind(path.parent, gguf.LlamaFileType.MOSTLY_BF16, path.parent / "out.gguf", dry_run=True)
        made.prepare_tensors()
        made.set_gguf_parameters()
    writer = getattr(made, "impl", made).gguf_writer
    tensors = {name: [info.dtype.name, *info.shape] for part in writer.tensors for name, info in part.items()}
    entries = {key: kinded(entry) for part in writer.kv_data for key, entry in part.items()}
    keys = {key: entry for key, entry in entries.items() if not key.startswith(("general.", "tokenizer."))}
    return {"architecture": writer.arch, "keys": keys, "tensors": folded(tensors)}


def kinded(entry: Any) -> list[Any]:
    """A value of the metadata after its type, in the words of ``GGUF.kinds``."""
    import gguf

    kinds = {"UINT": "u", "INT": "i", "FLOAT": "f", "STRING": "str", "BOOL": "bool"}

    def word(kind: Any) -> str:
        name, width = re.fullmatch(r"([A-Z]+)([0-9]*)", kind.name).groups()  # type: ignore[union-attr]
        return kinds[name] + width

    if entry.type != gguf.GGUFValueType.ARRAY:
        return [word(entry.type), entry.value]
    sub = entry.sub_type or gguf.GGUFValueType.get_type(entry.value[0])
    return [word(sub) + "[]", list(entry.value)]


def folded(tensors: dict[str, list[Any]]) -> list[list[Any]]:
    """Tensors by their names with ``*`` for the layer: the name, the type and the shape, and the layers that have it."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, shape in tensors.items():
        stem = re.sub(r"^blk\.[0-9]+\.", "blk.*.", name)
        found.setdefault((stem, json.dumps(shape)), []).extend(int(name.split(".")[1]) for _ in range(stem != name))
    return [
        [stem, json.loads(shape), *([text_of(layers)] if layers else [])] for (stem, shape), layers in found.items()
    ]


def main(llama_cpp: str, names: list[str]) -> None:
    """Make the headers of some models, by default of all, and write them beside the others."""
    sys.path[:0] = [llama_cpp, str(Path(llama_cpp, "gguf-py"))]
    logging.disable(logging.WARNING)
    configs = json.loads((HERE / "configs.json").read_text(encoding="utf-8"))
    path = HERE / "headers.json"
    headers = json.loads(path.read_text(encoding="utf-8")) if names and path.exists() else {}
    for name in names or configs:
        print(name, flush=True)
        headers[name] = header(configs[name]["config"])
        lines = (f"{json.dumps(each)}: {json.dumps(headers[each])}" for each in configs if each in headers)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
