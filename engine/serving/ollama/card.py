"""What a model is, as its file says, without opening it."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf

from engine.errors import EngineError
from engine.gguf.digest import sampled_digest
from engine.gguf.file import GGUF, read_gguf
from engine.sampling.defaults import sampling_defaults
from engine.serving.models import Entry
from engine.text.template import named

SCALES = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
"""How numbers of parameters are shown: unit, letter, decimals."""


class Card(NamedTuple):
    """A model: its architecture, number of parameters, format of most weights, bytes of weights, greatest context, width,
    chat template, that for requests with tools, digest (:func:`engine.gguf.digest.sampled_digest`), recommended parameters of
    sampling, and whether it is made for embeddings or a reranker; all empty if the file is not known or cannot be read."""

    family: str = ""
    n_params: int = 0
    quantization: str = ""
    n_bytes: int = 0
    n_ctx_train: int = 0
    n_embd: int = 0
    template: str = ""
    tool_template: str = ""
    digest: str = "0" * 64
    sampling: Mapping[str, float] = MappingProxyType({})
    pooled: bool = False

    def details(self) -> Mapping[str, Any]:
        """The field ``details``."""
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": human(self.n_params),
            "quantization_level": self.quantization or "unknown",
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
        }


def path_of(entry: Entry) -> str:
    """The file of a model, "" if it is not known."""
    return entry.spec.path or ("" if entry.served is None else str(entry.served.llm.path))


async def card_of(entry: Entry) -> Card:
    """What a model is.  Takes a while for each file, but once only."""
    path = path_of(entry)
    try:
        return await asyncio.to_thread(_read, path, entry.spec.created) if path else Card()
    except EngineError:
        return Card()


@lru_cache(maxsize=1024)
def _read(path: str, created: int) -> Card:
    """The card of a file; created: when it was written."""
    file = read_gguf(path)
    family = file.get("general.architecture", "str", "")
    found = named.sources(file)
    return Card(
        family,
        n_params(file),
        quantization(file),
        file.n_bytes,
        file.get(f"{family}.context_length", "int", 0),
        file.get(f"{family}.embedding_length", "int", 0),
        "" if found is None else found.plain,
        "" if found is None else found.with_tools or found.plain,
        sampled_digest(file),
        MappingProxyType(sampling_defaults(file)[0]),
        file.get(f"{family}.pooling_type", "int", 0) > 0,
    )


def n_params(file: GGUF) -> int:
    """The number of parameters."""
    total = 0
    for tensor in file.tensors.values():
        count = 1
        for size in tensor.shape:
            count *= size
        total += count
    return total


def quantization(file: GGUF) -> str:
    """The format of most weights, such as "Q4_K_M"."""
    number = file.get("general.file_type", "int", -1)
    try:
        return gguf.LlamaFileType(number).name.partition("_")[2]
    except ValueError:
        sizes: Counter[str] = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
        return sizes.most_common(1)[0][0] if sizes else ""


def human(number: int) -> str:
    """A number of parameters as Ollama shows it: "7.6B", "134.52M", "8B"."""
    for unit, letter, decimals in SCALES:
        if number >= unit:
            return f"{number / unit:.{0 if number % unit == 0 else decimals}f}{letter}"
    return str(number)
