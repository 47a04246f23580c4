"""Writes the golden logits: ``python -m tests.oracle.make`` in the root of the repository (``... make NAME`` for one).

A development script: next to this package it needs ``torch`` and ``transformers``, which the tests do not (``pip
install torch transformers``).  Run it after a change to ``models.py``; it writes ``NAME.json`` beside itself.

Architectures with a file in ``families`` need nothing here.

The models are those of ``transformers``, unmodified, with eager attention, in float64.  They ask for float32 by name in
norms, softmax and rotations; ``Double`` answers with float64, so that the expected logits are right to more digits than
float32 has.  What this changes is printed, as a check that it is rounding and nothing else.

``transformers`` drops the weights of MTP layers; ``Drafter`` puts such a layer together from its modules (DeepSeek-V3,
Liu et al. 2024, 2.2; the order of the halves and the hidden state that goes in are those of llama.cpp's
``qwen35.cpp``).

Gemma 4's assistants are those of ``transformers``.  Of sliding layers they are given the keys and values that the
target itself would look at from the drafted token's position, as llama.cpp does; ``transformers`` would show them two
more. ``sharing_modes`` takes the place of a property that in version 5.23 fails where all layers share (assistants) and
hands nothing on where none does (most targets).
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

from tests.oracle.models import (
    CASES,
    LENGTHS,
    N_CTX,
    N_VOCAB,
    POSITIONS,
    Case,
    Family,
    checkpoint,
    fingerprint,
    prompts,
)

DECIMALS = 7


class Double(TorchFunctionMode):  # type: ignore[misc]
    """Replaces every request for float32 by float64."""

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


def config(case: Case | Family) -> Any:
    """The configuration in the words of ``transformers``."""
    if isinstance(case, Family):
        return getattr(transformers, f"{case.model}Config")(**case.config)
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
    if case.gemma4:
        return gemma4(case, options)
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


def gemma4(case: Case, options: dict[str, Any]) -> Any:
    """The configuration of gemma4 or an assistant."""
    gemma, mix = case.gemma4, case.experts
    assert gemma is not None
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": case.rope_base}
    sliding = {"rope_type": "default", "rope_theta": case.rope_base_sliding}
    kinds = {True: "sliding_attention", False: "full_attention"}
    options |= {
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "layer_types": [kinds[slides] for slides in gemma.sliding(case.n_layer)],
        "head_dim": gemma.head_dim_sliding,
        "global_head_dim": case.head_dim,
        "num_key_value_heads": gemma.n_head_kv_sliding,
        "num_global_key_value_heads": case.n_head_kv,
        "attention_k_eq_v": gemma.k_is_v or bool(case.target),  # says that global layers have heads of their own number
        "num_kv_shared_layers": gemma.n_shared,
        "use_double_wide_mlp": gemma.wide_tail,
        "hidden_size_per_layer_input": gemma.n_per_layer,
        "vocab_size_per_layer_input": N_VOCAB if gemma.n_per_layer else 0,
        "sliding_window": case.window,
        "final_logit_softcapping": case.softcap or None,
        "enable_moe_block": mix is not None,
    }
    if mix:
        options["moe_intermediate_size"] = mix.n_ff
        options["top_k_experts"] = options.pop("num_experts_per_tok")
    text = transformers.Gemma4TextConfig(**options)
    if not case.target:
        return text
    return transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=gemma.n_embd_out)


def sharing_modes(text: Any) -> list[str | None]:
    """What each layer does with keys and values: the last owner of each kind passes its own on to all later layers."""
    n_owners = text.num_hidden_layers - text.num_kv_shared_layers
    modes: list[str | None] = [None] * n_owners + ["reuse"] * text.num_kv_shared_layers
    for il in {kind: il for il, kind in enumerate(text.layer_types[:n_owners])}.values():
        modes[il] = "store"
    return modes


transformers.Gemma4TextConfig.kv_sharing_modes = property(sharing_modes)


class Headed(torch.nn.Module):  # type: ignore[misc]
    """A text model of a model that also sees, with an output matrix."""

    def __init__(self, config: Any, **choice: Any) -> None:
        super().__init__()
        kind = type(config).__name__.removesuffix("Config")
        self.config = config
        self.model = getattr(transformers, f"{kind}Model")._from_config(config, **choice)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def _from_config(cls, config: Any, **choice: Any) -> "Headed":
        return cls(config, **choice)

    def forward(self, tokens: Any, **choice: Any) -> Any:
        out = self.model(tokens, **choice)
        out.logits = self.lm_head(out.last_hidden_state)
        return out


class Drafter(torch.nn.Module):  # type: ignore[misc]
    """The MTP layer: from the token at position p and the trunk's output at p - 1, it predicts position p + 1."""

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
        """The input for tokens [n] and hidden states [n, e], each of the position before (0 at the first): [n, e]."""
        e = self.pre_fc_norm_embedding(trunk.model.embed_tokens(tokens))
        x = self.fc(torch.cat([e, self.pre_fc_norm_hidden(hidden)], -1))[None]
        positions = torch.arange(tokens.numel())[None]
        mask = torch.full((tokens.numel(), tokens.numel()), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotation = trunk.model.rotary_emb(x, positions)
        x = self.layers[0](x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.norm(x)[0]

    def head(self, trunk: Any, hidden: Any) -> Any:
        """Logits of hidden states [n, e]."""
        return trunk.lm_head(hidden)


class NextN(torch.nn.Module):  # type: ignore[misc]
    """The MTP layer of a family, put together as in ``glm4-moe.cpp`` and ``qwen3next.cpp``: from the token at position
    p and the trunk's output at p - 1, it predicts position p + 1, perhaps with an embedding and an output matrix of its
    own."""

    def __init__(self, trunk: Any, own_head: bool) -> None:
        super().__init__()
        options = trunk.config.to_dict()
        options["num_hidden_layers"] += 1
        if options.get("layer_types"):
            options["layer_types"] = [*options["layer_types"], "full_attention"]
        if options.get("mlp_layer_types"):
            options["mlp_layer_types"] = [*options["mlp_layer_types"], "sparse"]
        if options.get("indexer_types"):
            options["indexer_types"] = [*options["indexer_types"], "full"]
        config = type(trunk.config)(**options)
        config._attn_implementation = trunk.config._attn_implementation
        config._experts_implementation = trunk.config._experts_implementation
        module = importlib.import_module(type(trunk).__module__)
        family = type(trunk).__name__.removesuffix("ForCausalLM")
        norm = getattr(module, f"{family}RMSNorm")
        e, n = config.hidden_size, config.vocab_size
        self.enorm = norm(e, eps=config.rms_norm_eps)
        self.hnorm = norm(e, eps=config.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * e, e, bias=False)
        self.layer = getattr(module, f"{family}DecoderLayer")(config, trunk.config.num_hidden_layers)
        self.shared_head = torch.nn.ModuleDict({"norm": norm(e, eps=config.rms_norm_eps)})
        self.embed_tokens = torch.nn.Embedding(n, e) if own_head else None
        if own_head:
            self.shared_head["head"] = torch.nn.Linear(e, n, bias=False)

    def forward(self, trunk: Any, tokens: Any, hidden: Any) -> Any:
        """The input for tokens [n] and hidden states [n, e], each of the position before (0 at the first): [n, e]."""
        e = self.enorm((self.embed_tokens or trunk.model.embed_tokens)(tokens))
        x = self.eh_proj(torch.cat([e, self.hnorm(hidden)], -1))[None]
        positions = torch.arange(tokens.numel())[None]
        mask = torch.full((tokens.numel(), tokens.numel()), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotation = trunk.model.rotary_emb(x, positions)
        x = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        # A layer of GLM-5 also returns the positions that its indexer has chosen.
        return self.shared_head["norm"](x[0] if isinstance(x, tuple) else x)[0]

    def head(self, trunk: Any, hidden: Any) -> Any:
        """Logits of hidden states [n, e]."""
        return (self.shared_head["head"] if self.embed_tokens else trunk.lm_head)(hidden)


class StreamsNextN(torch.nn.Module):  # type: ignore[misc]
    """The MTP layer of DeepSeek-V4, put together as in ``deepseek4.cpp``: from the token at position p and the streams of the
    trunk at p - 1, it predicts position p + 1.  It sees a window only, and joins its streams with weights of its own."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        options = trunk.config.to_dict()
        options["num_hidden_layers"] += 1
        options["layer_types"] = [*options["layer_types"], "sliding_attention"]
        options["mlp_layer_types"] = [*options["mlp_layer_types"], "moe"]
        config = type(trunk.config)(**options)
        config._attn_implementation = trunk.config._attn_implementation
        config._experts_implementation = trunk.config._experts_implementation
        module = importlib.import_module(type(trunk).__module__)
        e = config.hidden_size
        self.window = config.sliding_window
        self.enorm, self.hnorm = (module.DeepseekV4RMSNorm(e, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = torch.nn.Linear(2 * e, e, bias=False)
        self.layer = module.DeepseekV4DecoderLayer(config, trunk.config.num_hidden_layers)
        self.hc_head = module.DeepseekV4HyperHead(config)
        self.shared_head = torch.nn.ModuleDict({"norm": module.DeepseekV4RMSNorm(e, eps=config.rms_norm_eps)})

    def forward(self, trunk: Any, tokens: Any, hidden: Any) -> Any:
        """The streams for tokens [n] and streams [n, s, e], each of the position before (0 at the first): [n, s, e]."""
        e = self.enorm(trunk.model.embed_tokens(tokens))[:, None].expand_as(hidden)
        x = self.eh_proj(torch.cat([e, self.hnorm(hidden)], -1))[None]
        at = torch.arange(tokens.numel())
        hides = (at[None] > at[:, None]) | (at[None] <= at[:, None] - self.window)
        mask = torch.zeros(hides.shape, dtype=x.dtype).masked_fill(hides, -torch.inf)[None, None]
        rotations = {kind: trunk.model.rotary_emb(x, at[None], layer_type=kind) for kind in ("main", "compress")}
        options = {"position_embeddings": rotations, "position_ids": at[None], "attention_mask": mask}
        return self.layer(x, input_ids=tokens[None], **options)[0]

    def head(self, trunk: Any, hidden: Any) -> Any:
        """Logits of streams [n, s, e]."""
        return trunk.lm_head(self.shared_head["norm"](self.hc_head(hidden[None]))[0])


class ChainedNextN(torch.nn.Module):  # type: ignore[misc]
    """MTP layer ``number`` of Step 3.5, put together as in ``step35.cpp``: from the token at position p and the output of the
    trunk at p - 1, before its norm, it predicts position p + 1."""

    def __init__(self, trunk: Any, number: int, kinds: list[str], own_head: bool) -> None:
        super().__init__()
        options, n = trunk.config.to_dict(), len(kinds)
        options.pop("per_layer_config")
        for key in ("swiglu_limits", "swiglu_limits_shared"):
            options[key] = [*options[key], *[None] * n]
        options["layer_types"] = [*options["layer_types"], *kinds]
        options["mlp_layer_types"] = [*options["mlp_layer_types"], *["dense"] * n]
        il = trunk.config.num_hidden_layers + number
        config = type(trunk.config)(**(options | {"num_hidden_layers": il - number + n}))
        config._attn_implementation = trunk.config._attn_implementation
        module = importlib.import_module(type(trunk.model).__module__)
        e = config.hidden_size
        self.kind, self.window, self.own_head = kinds[number], config.sliding_window, own_head
        self.enorm, self.hnorm = (module.Step3p7RMSNorm(e, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = torch.nn.Linear(2 * e, e, bias=False)
        self.layer = module.Step3p7DecoderLayer(config, il)
        self.shared_head = torch.nn.ModuleDict({"norm": module.Step3p7RMSNorm(e, eps=config.rms_norm_eps)})
        if own_head:
            self.shared_head["head"] = torch.nn.Linear(e, config.vocab_size, bias=False)

    def forward(self, trunk: Any, tokens: Any, hidden: Any) -> Any:
        """The output for tokens [n] and hidden states [n, e], each of the position before (0 at the first): [n, e]."""
        x = self.eh_proj(torch.cat([self.enorm(trunk.model.embed_tokens(tokens)), self.hnorm(hidden)], -1))[None]
        at = torch.arange(tokens.numel())
        hides = at[None] > at[:, None]
        if self.kind == "sliding_attention":
            hides = hides | (at[None] <= at[:, None] - self.window)
        mask = torch.zeros(hides.shape, dtype=x.dtype).masked_fill(hides, -torch.inf)[None, None]
        rotation = trunk.model.rotary_emb(x, at[None], layer_type=self.kind)
        return self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=at[None])[0]

    def head(self, trunk: Any, hidden: Any) -> Any:
        """Logits of outputs [n, e]."""
        head = self.shared_head["head"] if self.own_head else trunk.lm_head
        return head(self.shared_head["norm"](hidden))


N_DRAFTS = 3

AnyDrafter = Drafter | NextN | StreamsNextN | ChainedNextN


def drafts(
    trunk: Any, drafters: Sequence[AnyDrafter], tokens: Any, hidden: Any, first: int
) -> tuple[Any, list[int], Any]:
    """Logits of the first MTP layer at every position; then, of a chain of greedy drafts after the prompt, its input tokens
    (``first``, the trunk's own, comes first) and the logits.

    A draft by a further layer reads all positions again by that layer, as in llama.cpp.  The last layer makes further drafts.
    """
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden])
    every = drafters[0].head(trunk, drafters[0](trunk, tokens, before[:-1]))
    chain = [first]
    rows = []
    for number in range(max(N_DRAFTS, len(drafters) + 1)):
        drafter = drafters[min(number, len(drafters) - 1)]
        out = drafter(trunk, torch.cat([tokens, torch.tensor(chain)]), before)[-1:]
        before = torch.cat([before, out])
        rows.append(drafter.head(trunk, out))
        chain.append(int(rows[-1].argmax()))
    return every, chain[:-1], torch.cat(rows)


def load(
    case: Case | Family, dtype: torch.dtype, weights: Mapping[str, np.ndarray] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model with these weights, or those of its checkpoint, and the weights of its MTP layer, which ``transformers``
    lacks."""
    torch.set_default_dtype(dtype)
    options = config(case)
    choice = {"attn_implementation": "eager"}
    if hasattr(options, "num_experts_per_tok") or (isinstance(case, Case) and case.experts):
        choice["experts_implementation"] = "eager"
    kind = transformers.AutoModelForCausalLM.from_config
    if isinstance(case, Family):
        headed = getattr(transformers, f"{case.model}LMHeadModel", Headed)
        name = case.model.removesuffix("Text") if case.architecture in ("gemma3n", "llama4") else case.model
        kind = getattr(transformers, f"{name}ForCausalLM", headed)._from_config
    elif case.target:
        kind = transformers.Gemma4AssistantForCausalLM._from_config
    model = kind(options, **choice).to(dtype).eval()
    given = checkpoint(case) if weights is None else weights
    tensors = {name: torch.from_numpy(weight).to(dtype) for name, weight in given.items()}
    first = options.num_hidden_layers
    behind = tuple(f"model.layers.{first + i}." for i in range(case.n_mtp)) if isinstance(case, Family) else ("mtp.",)
    extra = {name: tensors.pop(name) for name in list(tensors) if name.startswith(behind or "mtp.")}
    if len(behind) == 1:
        extra = {name.removeprefix(behind[0]): weight for name, weight in extra.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if case.tied else set()):
        raise SystemExit(f"{case.name}: missing weights {missing}, unexpected weights {unexpected}")
    return model, extra


def load_drafters(case: Case | Family, model: Any, weights: dict[str, Any], dtype: torch.dtype) -> list[AnyDrafter]:
    """The MTP layers with their weights."""
    if case.n_mtp == 1:
        return [_load_drafter(case, model, weights, dtype)]
    assert isinstance(case, Family)
    slides = case.metadata["attention.sliding_window_pattern"][-case.n_mtp :]
    kinds = ["sliding_attention" if flag else "full_attention" for flag in slides]
    layers: list[AnyDrafter] = []
    for number in range(case.n_mtp):
        behind = f"model.layers.{model.config.num_hidden_layers + number}."
        own = {name.removeprefix(behind): w for name, w in weights.items() if name.startswith(behind)}
        apart = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
        own = {name if name.startswith(apart) else f"layer.{name}": weight for name, weight in own.items()}
        layers.append(ChainedNextN(model, number, kinds, "shared_head.head.weight" in own).to(dtype).eval())
        layers[-1].load_state_dict(own)
    return layers


def _load_drafter(case: Case | Family, model: Any, weights: dict[str, Any], dtype: torch.dtype) -> AnyDrafter:
    if isinstance(case, Case):
        drafter: AnyDrafter = Drafter(model)
    elif case.model == "DeepseekV4":
        drafter = StreamsNextN(model)
        own = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "hc_head.")
        weights = {name if name.startswith(own) else f"layer.{name}": weight for name, weight in weights.items()}
    else:
        drafter = NextN(model, "embed_tokens.weight" in weights)
        own = ("enorm.", "hnorm.", "eh_proj.", "embed_tokens.", "shared_head.")
        weights = {name if name.startswith(own) else f"layer.{name}": weight for name, weight in weights.items()}
    drafter = drafter.to(dtype).eval()
    drafter.load_state_dict(weights)
    return drafter


def chains(
    case: Case, dtype: torch.dtype, weights_of: Callable[[Case | Family], Mapping[str, np.ndarray]] = checkpoint
) -> tuple[list[dict[str, int]], list[Any]]:
    """Drafts of an assistant: from every kept position that has one before it, the token there and N_DRAFTS - 1 greedy
    drafts after it, each with its position; and the logits after each of them, float64 [n_vocab]."""
    target, _ = load(CASES[case.target], dtype, weights_of(CASES[case.target]))
    assistant, _ = load(case, dtype, weights_of(case))
    places, rows = [], []
    for index, prompt in enumerate(map(torch.from_numpy, prompts(case))):
        with torch.no_grad():
            out = target.model(prompt[None], use_cache=False, return_shared_kv_states=True)
        for at in filter(None, POSITIONS[index]):
            first = {"full_attention": 0, "sliding_attention": max(0, at - case.window + 1)}
            shared = {kind: tuple(x[:, :, first[kind] : at] for x in out.shared_kv_states[kind]) for kind in first}
            token, h = int(prompt[at]), out.last_hidden_state[:, at - 1 : at]
            for step in range(N_DRAFTS):
                e = target.model.embed_tokens(torch.tensor([[token]]))
                x = torch.cat([e, h], -1)
                with torch.no_grad():
                    drafted = assistant(inputs_embeds=x, position_ids=torch.tensor([[at]]), shared_kv_states=shared)
                places.append({"prompt": index, "position": at, "step": step, "token": token})
                rows.append(drafted.logits[0, 0].double().numpy())
                token, h = int(drafted.logits[0, 0].argmax()), drafted.last_hidden_state
    return places, rows


def outputs(model: Any, prompt: Any, drafters: Sequence[AnyDrafter]) -> Any:
    """The outputs of the trunk that its MTP layers read, [n, e], or its streams after the last layer, [n, s, e]."""
    first = next(iter(drafters), None)
    if not isinstance(first, (StreamsNextN, ChainedNextN)):
        return model.model(prompt[None], use_cache=False).last_hidden_state[0]
    seen = []
    end = model.model.hc_head if isinstance(first, StreamsNextN) else model.model.norm
    hook = end.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    model.model(prompt[None], use_cache=False)
    hook.remove()
    return seen[0]


def logits(case: Case | Family, dtype: torch.dtype) -> dict[str, list[Any]]:
    """Float64 [n, n_vocab] of every position of every prompt; the same from the MTP layer, and its chain of drafts."""
    model, extra = load(case, dtype)
    drafters = load_drafters(case, model, extra, dtype) if case.n_mtp else []
    out: dict[str, list[Any]] = {"logits": [], "mtp": [], "tokens": [], "drafts": []}
    with torch.no_grad():
        for prompt in map(torch.from_numpy, prompts(case)):
            own = model(prompt[None], use_cache=False).logits[0]
            out["logits"].append(own.double().numpy())
            if drafters:
                hidden = outputs(model, prompt, drafters)
                every, chain, rows = drafts(model, drafters, prompt, hidden, int(own[-1].argmax()))
                out["mtp"].append(every.double().numpy())
                out["tokens"].append(chain)
                out["drafts"].append(rows.double().numpy())
    return out


def _rows(name: str, places: list[dict[str, Any]], logits: list[np.ndarray]) -> str:
    pairs = zip(places, logits, strict=True)
    lines = [json.dumps(place | {"logits": np.round(x, DECIMALS).tolist()}) for place, x in pairs]
    return f', "{name}": [\n' + ",\n".join(lines) + "\n]"


def _head(case: Case | Family, std: float, rounding: float) -> str:
    print(f"{case.name:18} std {std:.3f}; float32 differs by at most {rounding / std:.1e} std")
    head = {
        "source": f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float64",
        "fingerprint": fingerprint(case),
        "float32_error": float(f"{rounding:.1e}"),
    }
    return json.dumps(head)[:-1]


def write_assistant(case: Case) -> None:
    """The golden file of an assistant."""
    _, single = chains(case, torch.float32)
    with Double():
        places, exact = chains(case, torch.float64)
    rounding = max(float(np.abs(a - b).max()) for a, b in zip(single, exact, strict=True))
    text = _head(case, float(np.std(exact)), rounding) + _rows("rows", places, exact)
    Path(__file__).with_name(f"{case.name}.json").write_text(text + "}\n", encoding="utf-8")


def write(case: Case | Family) -> None:
    """The golden file of one model."""
    single = logits(case, torch.float32)
    with Double():
        exact = logits(case, torch.float64)
    std = float(np.std(exact["logits"][-1]))
    parts = ("logits", "mtp", "drafts")
    rounding = max(float(np.abs(a - b).max()) for part in parts for a, b in zip(single[part], exact[part], strict=True))
    places = [{"prompt": prompt, "position": at} for prompt, positions in enumerate(POSITIONS) for at in positions]
    text = _head(case, std, rounding)
    text += _rows("rows", places, [exact["logits"][p["prompt"]][p["position"]] for p in places])
    if case.n_mtp:
        text += _rows("mtp", places, [exact["mtp"][p["prompt"]][p["position"]] for p in places])
        chain = [{"token": token, "position": LENGTHS[-1] + i} for i, token in enumerate(exact["tokens"][-1])]
        text += _rows("drafts", chain, list(exact["drafts"][-1]))
    Path(__file__).with_name(f"{case.name}.json").write_text(text + "}\n", encoding="utf-8")


if __name__ == "__main__":
    for case in (CASES[name] for name in sys.argv[1:] or CASES):
        if isinstance(case, Case) and case.target:
            write_assistant(case)
        else:
            write(case)
