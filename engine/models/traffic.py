"""The amount of memory that a generated token reads, and the bandwidth that an answer has used."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.spec import LayerMemory
from engine.gguf.file import GGUF, read_gguf
from engine.models.config import ModelConfig
from engine.models.registry import read_config
from engine.models.weights import bytes_read


class LoadedModel(Protocol):
    """The attributes of a loaded model that this module uses.  ``engine.llm.LLM`` has them."""

    config: ModelConfig
    cache: KVCache
    n_bytes_read: int


class AnswerTimings(Protocol):
    """The counts and times, in seconds, of an answer that this module uses.  ``engine.decode.timings.Timings`` has them."""

    cache_n: int
    prompt_n: int
    predicted_n: int
    predicted_s: float


def bytes_per_second(llm: LoadedModel, timings: AnswerTimings) -> float:
    """The number of bytes of weights, keys and values that an answer has read per second; 0 if the time was not measured.

    The pass that reads the prompt computes the first token, so n tokens take n - 1 further passes.
    """
    passes, first = timings.predicted_n - 1, timings.cache_n + timings.prompt_n
    if passes < 1 or timings.predicted_s <= 0:
        return 0.0
    read = llm.n_bytes_read + cache_bytes_per_token(memories(llm), first, passes)
    return read * passes / timings.predicted_s


def weight_bytes_per_token(model: GGUF | str | Path) -> int:
    """The size in bytes of the weights that one generated token reads.

    A token reads one row of each of these tables: an embedding that is not also the output matrix, per-layer embeddings, and
    tables of experts.  It reads only the experts that it uses.  It does not read a layer that drafts, or key and value
    matrices that a layer does not use.  It reads all other tensors in full.
    """
    file = model if isinstance(model, GGUF) else read_gguf(model)
    config, tensors = read_config(file), file.tensors
    idle = [*config.drafting]
    borrowing = (il for il, layer in enumerate(config.layers) if layer.mixer.memory_source is not None)
    idle += [f"blk.{il}.attn_{name}" for il in borrowing for name in ("k", "v")]
    total = bytes_read((tensor for tensor in tensors.values() if not tensor.name.startswith(tuple(idle))), config)
    tables = ["per_layer_token_embd.weight", *(name for name in tensors if name.endswith("tid2eid.weight"))]
    if "output.weight" in tensors:
        tables.append("token_embd.weight")
    for table in (tensors[name] for name in tables if name in tensors):
        total -= table.nbytes - table.nbytes // table.shape[0]
    return total


def memories(llm: LoadedModel) -> list[LayerMemory[Any]]:
    """The cache that each layer of the trunk with a mixer reads, which may belong to another layer."""
    mixing = (il for il, layer in enumerate(llm.config.layers) if layer.mixer.exists)
    return [llm.cache.layers[llm.config.memory(il)] for il in mixing]


def cache_bytes_per_token(layers: Iterable[LayerMemory[Any]], first: int, count: int) -> float:
    """The mean number of bytes that a token at positions [first, first + count) reads in the caches ``layers``, and writes in
    those of recurrent layers."""
    visible = np.arange(first, first + count) + 1
    return sum(layer.bytes_per_token(visible) for layer in layers)
