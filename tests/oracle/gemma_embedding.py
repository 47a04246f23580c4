"""A small random EmbeddingGemma, and its golden vectors: ``python -m tests.oracle.gemma_embedding`` in the root of the
repository writes ``gemma_embedding.json`` beside this file.

``transformers``: Gemma3TextModel with ``use_bidirectional_attention`` in float64; then the modules of sentence-transformers:
the mean, two dense layers and the length.  llama.cpp: src/models/gemma-embedding.cpp; EmbeddingGemma of conversion/gemma.py.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.oracle.models import Case, checkpoint, prompts
from tests.oracle.models import write_gguf as write_decoder
from tests.oracle.shared import digest, uniform

GOLDEN = Path(__file__).with_suffix(".json")

CASE = Case("gemma-embedding", "gemma3", 8, 80, 5, 1, 32, 136, 1e5, window=24)
"""The network, of which all but every sixth layer have a window, so that a token sees 12 on each side."""

N_DENSE = 96
"""The width between the two dense layers."""


def dense(case: Case = CASE) -> dict[str, np.ndarray]:
    """The weights of the dense layers by their names in files."""
    shapes = {"dense_2.weight": (N_DENSE, case.n_embd), "dense_3.weight": (case.n_embd, N_DENSE)}
    return {name: uniform(case.name, name, shape, 1 / math.sqrt(shape[1])) for name, shape in shapes.items()}


def texts() -> list[list[int]]:
    """The token ids of each text."""
    return [prompt.tolist() for prompt in prompts(CASE)]


def fingerprint() -> str:
    """Differs when golden values belong to other weights or texts."""
    return digest(checkpoint(CASE) | dense(), prompts(CASE))


def write_gguf(path: Path, projected: bool = True, case: Case = CASE) -> Path:
    """The model, or another one, as a file of float32 tensors; projected: with the dense layers."""
    source = gguf.GGUFReader(write_decoder(case, path.with_suffix(".gemma3")))
    writer = gguf.GGUFWriter(path, "gemma-embedding")
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            name = field.name.replace("gemma3.", "gemma-embedding.")
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    tensors = {tensor.name: np.array(tensor.data) for tensor in source.tensors}
    for name, data in (tensors | (dense(case) if projected else {})).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden() -> Mapping[str, Any]:
    """The golden values: for each text the mean of the outputs, and the vector after the dense layers, of length 1."""
    found: Mapping[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def network(dtype: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """The model of ``transformers`` with these weights."""
    import torch  # type: ignore[import-not-found]
    import transformers

    from tests.oracle.make import config

    options = config(CASE).to_dict()
    options["use_bidirectional_attention"] = True
    given = transformers.Gemma3TextConfig(**options)
    given._attn_implementation = "eager"
    torch.set_default_dtype(dtype)
    model = transformers.Gemma3TextModel(given).to(dtype).eval()
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(w).to(dtype) for name, w in weights.items()})
    return model


def vectors(weights: Mapping[str, np.ndarray], matrices: Mapping[str, np.ndarray]) -> list[dict[str, list[float]]]:
    """The values of :func:`golden` for these weights."""
    import torch
    from sentence_transformers.sentence_transformer.modules import (  # type: ignore[import-not-found]
        Dense,
        Normalize,
        Pooling,
    )

    from tests.oracle.make import Double

    found = []
    with Double(), torch.no_grad():
        model = network(torch.float64, weights)
        layers = [Dense(80, N_DENSE, False, torch.nn.Identity()), Dense(N_DENSE, 80, False, torch.nn.Identity())]
        for layer, name in zip(layers, matrices, strict=True):
            layer.double().load_state_dict({"linear.weight": torch.from_numpy(matrices[name]).double()})
        for text in texts():
            ids = torch.tensor([text])
            features = {"token_embeddings": model(ids).last_hidden_state, "attention_mask": torch.ones_like(ids)}
            mean = Pooling(80, "mean")(features)["sentence_embedding"]
            out = {"sentence_embedding": mean}
            for module in (*layers, Normalize()):
                out = module(out)
            values = {"mean": mean, "vector": out["sentence_embedding"]}
            found.append({name: [float(f"{v:.10g}") for v in value[0].tolist()] for name, value in values.items()})
    return found


if __name__ == "__main__":
    made = {"fingerprint": fingerprint(), "texts": vectors(checkpoint(CASE), dense())}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes\n")
