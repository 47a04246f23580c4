"""Writes the golden logits: ``python -m tests.oracle.make`` in the root of the repository (``... make NAME`` for one).

A development script: next to this package it needs ``torch`` and ``transformers``, which the tests do not
(``pip install torch transformers``).  Run it after a change to ``models.py``; it writes ``NAME.json`` beside itself.

The models are those of ``transformers``, unmodified, with eager attention, in float64.  They ask for float32 by name in
norms, softmax and rotations; ``Double`` answers with float64, so that the expected logits are right to more digits than
float32 has.  What this changes is printed, as a check that it is rounding and nothing else.

``transformers`` drops the weights of MTP layers; ``Drafter`` puts such a layer together from its modules (DeepSeek-V3, Liu
et al. 2024, 2.2; the order of the halves and the hidden state that goes in are those of llama.cpp's ``qwen35.cpp``).
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found]

from tests.oracle.models import CASES, LENGTHS, N_CTX, N_VOCAB, POSITIONS, Case, checkpoint, fingerprint, prompts

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
        "rms_norm_eps": case.eps,
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
    if case.experts:
        options["num_experts"] = case.experts.n_expert
        options["num_experts_per_tok"] = case.experts.n_used
        options["moe_intermediate_size"] = case.experts.n_ff
    if case.architecture == "qwen3moe":
        return transformers.Qwen3MoeConfig(**options, norm_topk_prob=True)
    if case.delta_net:
        return hybrid(case, options)
    sliding = {"rope_type": "default", "rope_theta": case.rope_base_sliding}
    options["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    return transformers.Gemma3TextConfig(
        **options,
        query_pre_attn_scalar=case.head_dim,
        sliding_window=case.window,
        sliding_window_pattern=case.pattern,
        final_logit_softcapping=case.softcap or None,
    )


def hybrid(case: Case, options: dict[str, Any]) -> Any:
    """The configuration of qwen35 and qwen35moe."""
    net = case.delta_net
    assert net is not None
    options["rope_parameters"]["partial_rotary_factor"] = case.n_rot / case.head_dim
    options |= {
        "layer_types": ["linear_attention" if yes else "full_attention" for yes in case.recurrent[: case.n_layer]],
        "linear_conv_kernel_dim": net.n_conv,
        "linear_key_head_dim": net.state_size,
        "linear_value_head_dim": net.state_size,
        "linear_num_key_heads": net.n_k,
        "linear_num_value_heads": net.n_v,
    }
    if not case.experts:
        return transformers.Qwen3_5TextConfig(**options)
    del options["intermediate_size"]
    return transformers.Qwen3_5MoeTextConfig(**options, shared_expert_intermediate_size=case.experts.n_ff_shared)


class Drafter(torch.nn.Module):  # type: ignore[misc]
    """The MTP layer: for the token at position p and what the trunk has made of the one at p - 1, what comes at p + 1."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        options = trunk.config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        config = type(trunk.config)(**options)
        config._attn_implementation = trunk.config._attn_implementation
        config._experts_implementation = trunk.config._experts_implementation
        module = importlib.import_module(type(trunk).__module__)
        family = type(trunk).__name__.removesuffix("ForCausalLM")
        norm = getattr(module, f"{family}RMSNorm")
        e = config.hidden_size
        self.fc = torch.nn.Linear(2 * e, e, bias=False)
        self.pre_fc_norm_embedding = norm(e, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(e, eps=config.rms_norm_eps)
        self.layers = torch.nn.ModuleList([getattr(module, f"{family}DecoderLayer")(config, 0)])
        self.norm = norm(e, eps=config.rms_norm_eps)

    def forward(self, trunk: Any, tokens: Any, hidden: Any) -> Any:
        """Of tokens [n] and hidden states [n, e], each of the position before (0 at the first): [n, e], normalized."""
        e = self.pre_fc_norm_embedding(trunk.model.embed_tokens(tokens))
        x = self.fc(torch.cat([e, self.pre_fc_norm_hidden(hidden)], -1))[None]
        positions = torch.arange(tokens.numel())[None]
        mask = torch.full((tokens.numel(), tokens.numel()), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotation = trunk.model.rotary_emb(x, positions)
        x = self.layers[0](x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.norm(x)[0]


N_DRAFTS = 3


def drafts(trunk: Any, drafter: Drafter, tokens: Any, hidden: Any) -> tuple[Any, list[int], Any]:
    """Logits of the MTP layer at every position; then, of a chain of greedy drafts behind the prompt, the tokens that went in
    (the trunk's own first) and the logits that came out."""
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden])
    every = trunk.lm_head(drafter(trunk, tokens, before[:-1]))
    chain = [int(trunk.lm_head(hidden[-1]).argmax())]
    rows = []
    for _ in range(N_DRAFTS):
        out = drafter(trunk, torch.cat([tokens, torch.tensor(chain)]), before)[-1:]
        before = torch.cat([before, out])
        rows.append(trunk.lm_head(out))
        chain.append(int(rows[-1].argmax()))
    return every, chain[:-1], torch.cat(rows)


def logits(case: Case, dtype: torch.dtype) -> dict[str, list[Any]]:
    """Float64 [n, n_vocab] of every position of every prompt; the same by the MTP layer, and its chain of drafts."""
    torch.set_default_dtype(dtype)
    choice = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if case.experts else {})}
    model = transformers.AutoModelForCausalLM.from_config(config(case), **choice).to(dtype).eval()
    weights = {name: torch.from_numpy(weight).to(dtype) for name, weight in checkpoint(case).items()}
    extra = {name.removeprefix("mtp."): weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if case.tied else set()):
        raise SystemExit(f"{case.name}: missing weights {missing}, unexpected weights {unexpected}")
    drafter = Drafter(model).to(dtype).eval() if case.n_mtp else None
    if drafter:
        drafter.load_state_dict(extra)
    out: dict[str, list[Any]] = {"logits": [], "mtp": [], "tokens": [], "drafts": []}
    with torch.no_grad():
        for prompt in map(torch.from_numpy, prompts(case)):
            hidden = model.model(prompt[None], use_cache=False).last_hidden_state[0]
            out["logits"].append(model(prompt[None], use_cache=False).logits[0].double().numpy())
            if drafter:
                every, chain, rows = drafts(model, drafter, prompt, hidden)
                out["mtp"].append(every.double().numpy())
                out["tokens"].append(chain)
                out["drafts"].append(rows.double().numpy())
    return out


def write(case: Case) -> None:
    """The golden file of one model."""
    single = logits(case, torch.float32)
    with Double():
        exact = logits(case, torch.float64)
    std = float(np.std(exact["logits"][-1]))
    parts = ("logits", "mtp", "drafts")
    rounding = max(float(np.abs(a - b).max()) for part in parts for a, b in zip(single[part], exact[part], strict=True))
    print(f"{case.name:16} std {std:.3f}; float32 differs by at most {rounding / std:.1e} std")
    head = {
        "source": f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float64",
        "fingerprint": fingerprint(case),
        "float32_error": float(f"{rounding:.1e}"),
    }
    places = [{"prompt": prompt, "position": at} for prompt, positions in enumerate(POSITIONS) for at in positions]

    def rows(name: str, values: list[dict[str, Any]], logits: list[np.ndarray]) -> str:
        lines = [
            json.dumps(v | {"logits": np.round(x, DECIMALS).tolist()}) for v, x in zip(values, logits, strict=True)
        ]
        return f', "{name}": [\n' + ",\n".join(lines) + "\n]"

    text = json.dumps(head)[:-1] + rows("rows", places, [exact["logits"][p["prompt"]][p["position"]] for p in places])
    if case.n_mtp:
        text += rows("mtp", places, [exact["mtp"][p["prompt"]][p["position"]] for p in places])
        chain = [{"token": token, "position": LENGTHS[-1] + i} for i, token in enumerate(exact["tokens"][-1])]
        text += rows("drafts", chain, list(exact["drafts"][-1]))
    Path(__file__).with_name(f"{case.name}.json").write_text(text + "}\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(CASES[name])
