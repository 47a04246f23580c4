"""Writes the golden logits: ``python -m tests.oracle.make`` in the root of the repository (``... make NAME`` for one).

A development script: next to this package it needs ``torch`` and ``transformers``, which the tests do not
(``pip install torch transformers``).  Run it after a change to ``models.py``; it writes ``NAME.json`` beside itself.

The models are those of ``transformers``, unmodified, with eager attention, in float64.  They ask for float32 by name in
norms, softmax and rotations; ``Double`` answers with float64, so that the expected logits are right to more digits than
float32 has.  What this changes is printed, as a check that it is rounding and nothing else.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found]

from tests.oracle.models import CASES, EPS, N_CTX, N_VOCAB, POSITIONS, Case, checkpoint, fingerprint, prompts

DECIMALS = 7


class Double(TorchFunctionMode):  # type: ignore[misc]
    """Whatever asks for float32 gets float64."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def config(case: Case) -> Any:
    """The configuration in the words of ``transformers``."""
    rope = {"rope_type": "default", **case.rope_scaling, "rope_theta": case.rope_base}
    options: dict[str, Any] = {
        "vocab_size": N_VOCAB,
        "hidden_size": case.n_embd,
        "intermediate_size": case.n_ff,
        "num_hidden_layers": case.n_layer,
        "num_attention_heads": case.n_head,
        "num_key_value_heads": case.n_head_kv,
        "head_dim": case.head_dim,
        "max_position_embeddings": N_CTX,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": case.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": rope,
    }
    if case.architecture == "llama":
        return transformers.LlamaConfig(**options, attention_bias=case.bias)
    if case.architecture == "qwen2":
        return transformers.Qwen2Config(**options)
    if case.architecture == "qwen3":
        return transformers.Qwen3Config(**options)
    sliding = {"rope_type": "default", "rope_theta": case.rope_base_sliding}
    options["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    return transformers.Gemma3TextConfig(
        **options,
        query_pre_attn_scalar=case.head_dim,
        sliding_window=case.window,
        sliding_window_pattern=case.pattern,
        final_logit_softcapping=case.softcap or None,
    )


def logits(case: Case, dtype: torch.dtype) -> list[np.ndarray]:
    """Of every position of every prompt: float64 [n, n_vocab]."""
    torch.set_default_dtype(dtype)
    model = transformers.AutoModelForCausalLM.from_config(config(case), attn_implementation="eager").to(dtype).eval()
    weights = {name: torch.from_numpy(weight).to(dtype) for name, weight in checkpoint(case).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if case.tied else set()):
        raise SystemExit(f"{case.name}: missing weights {missing}, unexpected weights {unexpected}")
    with torch.no_grad():
        outputs = [model(torch.from_numpy(prompt)[None], use_cache=False).logits[0] for prompt in prompts(case)]
    return [output.double().numpy() for output in outputs]


def write(case: Case) -> None:
    """The golden file of one model."""
    single = logits(case, torch.float32)
    with Double():
        exact = logits(case, torch.float64)
    std = float(np.std(exact[-1]))
    rounding = max(float(np.abs(a - b).max()) for a, b in zip(single, exact, strict=True))
    print(f"{case.name:16} std {std:.3f}; float32 differs by at most {rounding / std:.1e} std")
    head = {
        "source": f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float64",
        "fingerprint": fingerprint(case),
        "float32_error": float(f"{rounding:.1e}"),
    }
    rows = [
        json.dumps({"prompt": prompt, "position": at, "logits": np.round(exact[prompt][at], DECIMALS).tolist()})
        for prompt, positions in enumerate(POSITIONS)
        for at in positions
    ]
    text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n"
    Path(__file__).with_name(f"{case.name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(CASES[name])
