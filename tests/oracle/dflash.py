"""What llama.cpp's ``convert_hf_to_gguf.py`` makes of DFlash and DSpark networks: the files that ``tests/dflash.py`` writes.

    python -m tests.oracle.dflash FOLDER

``FOLDER`` is llama.cpp's.  Random networks are written under the names and conventions of published ones, and converted.
Their tensors and keys must be equal to ours, and they must load with a target that has been converted, too.  Needs ``torch``
and ``transformers``.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

import engine
from engine.gguf.file import read_gguf
from tests.dflash import Network
from tests.oracle import folders
from tests.oracle.convert import check_same, run_converter
from tests.oracle.models import CASES
from tests.oracle.shared import N_VOCAB

TARGET, WIDTH = "llama", 144

NAMES = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Published names of tensors, without the prefix of their layer."""

GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale": "layer_scalar",
}
"""Other names in networks for Gemma 4."""

NETWORKS: dict[str, tuple[Network, dict[str, Any]]] = {
    "DFlashDraftModel": (
        Network(N_VOCAB, WIDTH, 4, 2, 32, 96, (1, 2, 3), windows=(24, 0)),
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3DSparkModel": (Network(N_VOCAB, WIDTH, 4, 2, 32, 96, (1, 3), rank=32, judged=True), {}),
    "DSparkSpeculator": (
        Network(N_VOCAB, WIDTH, 4, 2, 32, 96, (2,), rank=32, from_anchor=False, n_draft=100, lends_output=False),
        {"draft_vocab_size": 100, "aux_hidden_state_layer_ids": [2]},
    ),
    "Gemma4DSparkModel": (
        Network(
            *(N_VOCAB, WIDTH, 4, 2, 32, 96, (1, 2)),
            keys_are_values=True,
            normed=True,
            gelu=True,
            scales=(0.5, 1.5),
            attention_scale=1.0,
            rank=32,
            lends_output=False,
            embedding_scale=12.0,
            partial=4,
        ),
        {
            "attention_k_eq_v": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["full_attention"] * 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
            },
        },
    ),
}
"""A network for each class of published ones, and what its configuration has in addition."""


def published(net: Network) -> dict[str, np.ndarray]:
    """The weights by their published names; tokens are offsets."""
    found: dict[str, np.ndarray] = {}
    for name, weight in net.tensors().items():
        if name == "d2t":
            found[name] = weight - np.arange(weight.size)
        if name in ("d2t", "rope_freqs.weight"):
            continue
        stem, _, kind = name.rpartition(".")
        layer = ""
        if stem.startswith("blk."):
            _, il, stem = stem.split(".", 2)
            layer = f"layers.{il}."
        names = NAMES | GEMMA4 if net.normed else NAMES
        found[f"{layer}{names[stem]}.{kind}".replace("layer_scalar.weight", "layer_scalar")] = np.ascontiguousarray(
            weight
        )
    return found


def config(net: Network, kind: str, more: dict[str, Any]) -> dict[str, object]:
    """The published configuration."""
    return {
        "architectures": [kind],
        "model_type": "qwen3",
        "num_hidden_layers": net.n_layer,
        "vocab_size": net.n_vocab,
        "hidden_size": net.n_embd,
        "intermediate_size": net.n_ff,
        "num_attention_heads": net.n_head,
        "num_key_value_heads": net.n_head_kv,
        "head_dim": net.head_dim,
        "rms_norm_eps": net.eps,
        "rope_theta": net.base,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": net.size,
        "mask_token_id": net.mask,
        "dflash_config": {"mask_token_id": net.mask, "target_layer_ids": [il - 1 for il in net.taps]},
        **more,
    }


def check(kind: str, net: Network, more: dict[str, Any], folder: Path) -> None:
    """Convert one network, and compare it with the file that the tests write."""
    (folder / kind).mkdir()
    weights = {name: torch.from_numpy(weight) for name, weight in published(net).items()}
    save_file(weights, folder / kind / "model.safetensors", {"format": "pt"})
    (folder / kind / "config.json").write_text(json.dumps(config(net, kind, more)), encoding="utf-8")
    file, log = folder / f"{kind}.gguf", folder / "log.txt"
    options = ["--target-model-dir", str(folder / "target"), "--outtype", "f32", "--outfile", str(file)]
    if any(ends := run_converter(Path(sys.argv[1]), [[str(folder / kind), *options]], log)):
        raise SystemExit(f"converter: {ends}\n{log.read_text(encoding='utf-8')[-2000:]}")
    found, own = read_gguf(file), read_gguf(net.write(folder / "own.gguf"))
    check_same(found, own, ("dflash.", "tokenizer.ggml.mask_token_id"))
    with engine.load(folder / "target.gguf", draft_model=file, device="cpu", n_ctx=64) as llm:
        assert llm.complete([1, 2, 3], max_tokens=8, ignore_eos=True).speculation is not None
    print(f"{kind}: {len(own.tensors)} tensors and all keys are equal, and it drafts")


def main() -> None:
    """The command line."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folders.write(CASES[TARGET], folders.rounded(CASES[TARGET]), folder / "target")
        call = [str(folder / "target"), "--outtype", "f32", "--outfile", str(folder / "target.gguf")]
        if any(ends := run_converter(Path(sys.argv[1]), [call], folder / "log.txt")):
            raise SystemExit(f"converter: {ends}\n{(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")
        for kind, (net, more) in NETWORKS.items():
            check(kind, net, more, folder)


if __name__ == "__main__":
    main()
