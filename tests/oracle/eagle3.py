"""What llama.cpp's ``convert_hf_to_gguf.py`` makes of a network of EAGLE-3: the file that ``tests/eagle3.py`` writes.

    python -m tests.oracle.eagle3 FOLDER

``FOLDER`` is llama.cpp's.  A random network with every option is written under the names and conventions of published ones,
and converted.  Its tensors and keys must be equal to ours, and it must load with a target that has been converted, too.
Needs ``torch`` and ``transformers``.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

import engine
from engine.gguf.file import read_gguf
from tests.eagle3 import Network
from tests.oracle import folders
from tests.oracle.convert import check_same, run_converter
from tests.oracle.models import CASES
from tests.oracle.shared import N_VOCAB

TARGET, WIDTH = "llama", 144

NAMES = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.0.attn_norm": "midlayer.input_layernorm",
    "blk.0.attn_norm_2": "midlayer.hidden_norm",
    "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
    **{f"blk.0.attn_{name}": f"midlayer.self_attn.{name}_proj" for name in "qkv"},
    "blk.0.attn_output": "midlayer.self_attn.o_proj",
    **{f"blk.0.ffn_{name}": f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Published names of tensors."""


def published(net: Network) -> dict[str, np.ndarray]:
    """The weights by their published names: pairs of a rotation are halves of a head, and tokens are offsets."""
    found: dict[str, np.ndarray] = {"t2d": np.zeros(net.n_vocab, bool)}
    for name, weight in net.tensors().items():
        if name == "d2t":
            found[name] = weight - np.arange(weight.size)
        elif name != "rope_freqs.weight":
            stem = name.removesuffix(".weight")
            if stem in ("blk.0.attn_q", "blk.0.attn_k"):
                heads = weight.reshape(-1, net.head_dim // 2, 2, weight.shape[1])
                weight = heads.swapaxes(1, 2).reshape(weight.shape)
            found[NAMES[stem] + ".weight"] = np.ascontiguousarray(weight)
    return found


def config(net: Network) -> dict[str, object]:
    """The published configuration."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": net.n_draft,
        "vocab_size": net.n_vocab,
        "hidden_size": net.n_embd,
        "intermediate_size": net.n_ff,
        "num_attention_heads": net.n_head,
        "num_key_value_heads": net.n_head_kv,
        "head_dim": net.head_dim,
        "rms_norm_eps": net.eps,
        "rope_theta": net.base,
        "rope_scaling": {"rope_type": "llama3", "rope_theta": net.base, **net.scaling},
        "max_position_embeddings": 512,
        "norm_before_residual": net.normed_sum,
        "norm_before_fc": net.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(net.taps),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def main() -> None:
    """The command line."""
    net = Network(
        *(WIDTH, N_VOCAB, WIDTH, 4, 2, 32, 96, (1, 2, 3)),
        n_draft=100,
        own_embedding=True,
        normed_sum=True,
        norm_before_fc=True,
        llama3=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folders.write(CASES[TARGET], folders.rounded(CASES[TARGET]), folder / "target")
        (folder / "network").mkdir()
        weights = {name: torch.from_numpy(weight) for name, weight in published(net).items()}
        save_file(weights, folder / "network" / "model.safetensors", {"format": "pt"})
        (folder / "network" / "config.json").write_text(json.dumps(config(net)), encoding="utf-8")
        files = [folder / "target.gguf", folder / "network.gguf"]
        options = ["--outtype", "f32", "--outfile"]
        calls = [
            [str(folder / "target"), *options, str(files[0])],
            [str(folder / "network"), "--target-model-dir", str(folder / "target"), *options, str(files[1])],
        ]
        if any(ends := run_converter(Path(sys.argv[1]), calls, folder / "log.txt")):
            raise SystemExit(f"converter: {ends}\n{(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")
        found, own = read_gguf(files[1]), read_gguf(net.write(folder / "own.gguf"))
        check_same(found, own, ("eagle3.",))
        with engine.load(files[0], draft_model=files[1], device="cpu", n_ctx=64) as llm:
            assert llm.complete([1, 2, 3], max_tokens=8, ignore_eos=True).speculation is not None
    print(f"{len(own.tensors)} tensors and all keys are equal")


if __name__ == "__main__":
    main()
