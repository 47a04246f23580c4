"""Small random encoders, and their golden vectors: ``python -m tests.oracle.encoders`` in the root of the repository writes
``encoders.json`` beside this file.

``transformers``: BertModel, NomicBertModel and XLMRobertaModel in float64, for rerankers XLMRobertaForSequenceClassification,
or the same head after BertModel, which is the one that llama.cpp converts.  llama.cpp: src/models/bert.cpp; BertModel and
XLMRobertaModel of conversion/bert.py.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.oracle.shared import N_CTX, N_VOCAB, digest, finish, random_prompts, uniform

GOLDEN = Path(__file__).with_suffix(".json")

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
"""The names of tensors in files, by those in ``transformers`` without their layer."""


@dataclass(frozen=True)
class EncoderCase:
    """A model; ``labels``: the number of labels of a reranker, 0: it is none; ``padding``: the id of the token that fills
    texts in XLM-RoBERTa, whose positions begin after it, None: it is a BERT."""

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_ff: int
    n_types: int = 2
    labels: int = 0
    eps: float = 1e-12
    nomic: bool = False
    padding: int | None = None

    @property
    def first(self) -> int:
        """The position of the first token."""
        return 0 if self.padding is None else self.padding + 1

    def nomic_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of Nomic's BERT, which has rotations and no biases."""
        e, f = self.n_embd, self.n_ff
        found: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (N_VOCAB, e),
            "embeddings.token_type_embeddings.weight": (self.n_types, e),
        }
        norms = ["embeddings.LayerNorm"]
        for il in range(self.n_layer):
            layer = f"layers.{il}."
            found |= {f"{layer}self_attn.{name}_proj.weight": (e, e) for name in "qkvo"}
            found |= {f"{layer}mlp.{name}_proj.weight": (f, e) for name in ("gate", "up")}
            found[f"{layer}mlp.down_proj.weight"] = (e, f)
            norms += [f"{layer}post_attention_layernorm", f"{layer}post_mlp_layernorm"]
        return found | {f"{name}.{kind}": (e,) for name in norms for kind in ("weight", "bias")}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, by their names in ``transformers``."""
        if self.nomic:
            return self.nomic_shapes()
        e, f = self.n_embd, self.n_ff
        found: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (N_VOCAB, e),
            "embeddings.position_embeddings.weight": (N_CTX + self.first, e),
            "embeddings.token_type_embeddings.weight": (self.n_types, e),
        }
        linear: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (e,)}
        for il in range(self.n_layer):
            layer: dict[str, tuple[int, ...]] = {f"attention.self.{name}": (e, e) for name in ("query", "key", "value")}
            layer |= {"attention.output.dense": (e, e), "intermediate.dense": (f, e), "output.dense": (e, f)}
            layer |= {"attention.output.LayerNorm": (e,), "output.LayerNorm": (e,)}
            linear |= {f"encoder.layer.{il}.{name}": shape for name, shape in layer.items()}
        if self.labels:
            linear |= {"classifier.dense": (e, e), "classifier.out_proj": (self.labels, e)}
        for name, shape in linear.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return found

    def checkpoint(self) -> dict[str, np.ndarray]:
        """The weights by their names in ``transformers``, float32."""

        def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
            if name.endswith("bias"):
                return 0.3, 0.0
            return (0.3, 1.0) if "layernorm" in name.lower() else (1.5 / math.sqrt(shape[-1]), 0.0)

        return {name: uniform(self.name, name, shape, *spread(name, shape)) for name, shape in self.shapes().items()}

    @property
    def architecture(self) -> str:
        """The architecture of the file."""
        return "nomic-bert" if self.nomic else "bert"

    def prompts(self) -> list[list[int]]:
        """The token ids of each text, none of which is the one that fills texts."""
        kept = [np.where(prompt == self.padding, 0, prompt) for prompt in random_prompts(self.name)]
        return [prompt.tolist() for prompt in kept]

    def fingerprint(self) -> str:
        """Differs when golden values belong to other weights or texts."""
        return digest(self.checkpoint(), random_prompts(self.name))

    def write_gguf(self, path: Path, **more: Any) -> Path:
        """The model as a file of float32 tensors; more: further keys of the architecture."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(f"Random {self.name}")
        writer.add_context_length(N_CTX)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_head_count(self.n_head)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_layer_norm_eps(self.eps)
        writer.add_causal_attention(False)
        writer.add_token_type_count(self.n_types)
        pooling = 4 if self.labels else 1 if self.padding is None else 2
        # The converter writes none for a reranker that is an XLM-RoBERTa.
        keys: dict[str, Any] = {} if self.labels and self.padding is not None else {"pooling_type": pooling}
        keys |= more
        for key, value in keys.items():
            writer.add_uint32(f"{self.architecture}.{key}", value)
        if self.nomic:
            writer.add_rope_freq_base(1000.0)
        if self.labels:
            writer.add_array("bert.classifier.output_labels", [f"label {i}" for i in range(self.labels)])
        return finish(writer, self.tensors(), path)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights under their names in files."""
        found = {}
        for name, weight in self.checkpoint().items():
            block, part = "", name
            if name.startswith(("encoder.layer.", "layers.")):
                il, part = name.removeprefix("encoder.").split(".", 2)[1:]
                block = f"blk.{il}."
            stem, _, kind = part.rpartition(".")
            found[f"{block}{NAMES[stem]}.{kind}"] = (
                weight[self.first :] if stem.endswith("position_embeddings") else weight
            )
        return found


CASES = {
    case.name: case
    for case in (
        EncoderCase("bert", 3, 96, 3, 160),
        EncoderCase("nomic-bert", 2, 96, 3, 128, nomic=True),
        EncoderCase("bert-rank", 2, 64, 2, 96, n_types=1, labels=1, eps=1e-5),
        EncoderCase("xlm-r", 2, 96, 3, 128, n_types=1, eps=1e-5, padding=1),
        EncoderCase("xlm-r-rank", 2, 64, 2, 96, n_types=1, labels=1, eps=1e-5, padding=1),
    )
}


def golden() -> Mapping[str, Any]:
    """The golden values by the name of the case."""
    found: Mapping[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def make(case: EncoderCase) -> dict[str, Any]:
    """The values of ``transformers``: for each text the mean of the outputs and the first output, or the scores."""
    import torch  # type: ignore[import-not-found]
    import transformers
    from transformers.models.roberta.modeling_roberta import RobertaClassificationHead

    from tests.oracle.make import Double

    kind = "NomicBert" if case.nomic else "Bert" if case.padding is None else "XLMRoberta"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=N_VOCAB,
        hidden_size=case.n_embd,
        num_hidden_layers=case.n_layer,
        num_attention_heads=case.n_head,
        intermediate_size=case.n_ff,
        max_position_embeddings=N_CTX + case.first,
        pad_token_id=case.padding or 0,
        type_vocab_size=case.n_types,
        layer_norm_eps=case.eps,
        num_labels=case.labels or 2,
        attn_implementation="eager",
    )
    weights = {name: torch.from_numpy(value).double() for name, value in case.checkpoint().items()}
    found: dict[str, Any] = {"fingerprint": case.fingerprint(), "texts": []}
    with Double(), torch.no_grad():
        model = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False).double().eval()
        own = {name: value for name, value in weights.items() if not name.startswith("classifier.")}
        model.load_state_dict(own, strict=True)
        whole = (
            transformers.XLMRobertaForSequenceClassification(config).double().eval() if kind == "XLMRoberta" else None
        )
        if whole is not None and case.labels:
            names = {name: name if name.startswith("classifier.") else f"roberta.{name}" for name in weights}
            whole.load_state_dict({names[name]: value for name, value in weights.items()})
        head = RobertaClassificationHead(config).double().eval() if case.labels else None
        if head is not None:
            head.load_state_dict(
                {name.removeprefix("classifier."): weights[name] for name in weights.keys() - own.keys()}
            )
        for prompt in case.prompts():
            hidden = model(torch.tensor([prompt])).last_hidden_state
            values = {"mean": hidden[0].mean(0), "cls": hidden[0, 0]}
            if head is not None:
                values = {"scores": (head(hidden) if whole is None else whole(torch.tensor([prompt])).logits)[0]}
            found["texts"].append({name: [round(x, 9) for x in value.tolist()] for name, value in values.items()})
    return found


if __name__ == "__main__":
    made = {case.name: make(case) for case in CASES.values()}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes\n")
