"""Saved states: the tokens in a model's cache, and what the answers that continue them depend on.

A state is a small JSON file. It holds tokens rather than keys and values: reading the same tokens again gives the same
bits, on any device.
"""

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.cache.kv import KVCache
from engine.checks import described
from engine.errors import ContextError, UsageError
from engine.gguf.file import GGUF
from engine.machine.files import replaced
from engine.models.config import ModelConfig
from engine.version import ARITHMETIC, __version__

FORMAT = "bitmirror-state"
VERSION = 1

BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()
"""How every state begins."""

SAMPLE = 64
"""Bytes of each tensor that count for the digest of a model: fine-tuned models may differ in their weights only."""

MOST_BYTES = 1 << 16
"""Bytes that a file may have besides its tokens."""


def digest(gguf: GGUF) -> str:
    """SHA-256, as hexadecimal digits, of the metadata of a model, the table of its tensors, and the first bytes of
    each. It does not depend on the file's name, or on how the model is split into files."""
    sha = hashlib.sha256()

    def add(*values: object) -> None:
        sha.update(json.dumps(values).encode() + b"\n")

    for key in sorted(key for key in gguf.metadata if not key.startswith("split.")):
        value = gguf.metadata[key]
        if isinstance(value, np.ndarray):
            add(key, gguf.kinds[key], value.size)
            sha.update(np.ascontiguousarray(value).tobytes())
        else:
            add(key, gguf.kinds[key], value)
    for name in sorted(gguf.tensors):
        tensor = gguf.tensors[name]
        add(name, int(tensor.type), tensor.shape, tensor.nbytes)
        sha.update(tensor.data[:SAMPLE].tobytes())
    return sha.hexdigest()


def identity(gguf: GGUF, config: ModelConfig, cache: KVCache) -> dict[str, Any]:
    """What must agree for a state to be continued: the model, the element types of its cache, how it is rounded,
    and the arithmetic."""
    types = next((layer.types for layer in cache.layers if layer.types is not None), None)
    rounding = {"rounding": config.rounding} if config.rounding else {}
    return {
        "model": {
            "architecture": config.architecture,
            "name": config.name,
            "n_bytes": gguf.n_bytes,
            "digest": digest(gguf),
        },
        "cache": {"k": types.k.name, "v": types.v.name} | rounding if types is not None else None,
        "arithmetic": ARITHMETIC,
    }


def write(path: str | os.PathLike[str], ids: Sequence[int], wanted: dict[str, Any], n_ctx: int) -> None:
    """Write a state of the model that ``wanted`` identifies. An existing file is replaced only when the new one is
    complete. Raises UsageError if it cannot be written."""
    target = checked_path(path)
    state = {"format": FORMAT, "version": VERSION, "engine": __version__, **wanted, "n_ctx": n_ctx, "tokens": [*ids]}
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        with replaced(target) as file:
            json.dump(state, file)
            file.write("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"the state cannot be saved to {_shown(target)}: {_reason(error)}.") from None


def read(path: str | os.PathLike[str], wanted: dict[str, Any], n_ctx: int, n_vocab: int) -> list[int]:
    """The tokens of a state of the model that ``wanted`` identifies. Raises UsageError for a file that is not such a
    state, and ContextError if its tokens do not fit into ``n_ctx`` positions."""
    source = checked_path(path)

    def refuse(problem: str) -> NoReturn:
        raise UsageError(f"{_shown(source)} {problem}.")

    limit = MOST_BYTES + n_ctx * (len(str(n_vocab)) + 2)
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            refuse("is not a file")
        with open(source, "rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"the state cannot be read from {_shown(source)}: {_reason(error)}.") from None
    broken = "is not a saved state of this engine, or is damaged; save it again with save_state()"
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        # A state that was cut off by the limit is one of a longer context.
        if len(data) > limit and data.startswith(BEGINNING):
            raise ContextError(
                f"{_shown(source)} holds more tokens than the context, {n_ctx}; "
                "load the model with a larger context (n_ctx=...)."
            ) from None
        refuse(broken)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        refuse(broken)
    if state.get("version") != VERSION:
        refuse(f"is a state of another version of this engine ({state.get('engine')!r:.40}); this is {__version__}")
    if state.get("arithmetic") != wanted["arithmetic"]:
        engine = f"{state.get('engine')!r:.40}"
        refuse(f"was saved with another arithmetic (by engine {engine}), whose bits differ; read the text again")
    model = state.get("model")
    if model != wanted["model"]:
        name = model.get("name") if isinstance(model, dict) else None
        refuse(f"is a state of another model ({name!r:.80}); load the model that it was saved from")
    if state.get("cache") != wanted["cache"]:
        refuse(
            f"was saved with another type of cache ({_types(state.get('cache'))}) than the model has "
            f"({_types(wanted['cache'])}); load the model with cache_type_k, cache_type_v and ds4_rounding of the state"
        )
    ids = state.get("tokens")
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < n_vocab for id in ids):
        refuse(f"is damaged: its tokens are not a list of ids from 0 to {n_vocab - 1}")
    if len(ids) > n_ctx:
        raise ContextError(
            f"{_shown(source)} holds {len(ids)} tokens and the context {n_ctx}; "
            "load the model with a larger context (n_ctx=...)."
        )
    return ids


def checked_path(path: object) -> Path:
    """The path of a state.  Raises UsageError if it is not a path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise UsageError(f"the path of a state must be a text or a path, not {described(text)}.")
    return Path(os.path.expanduser(text))


def _shown(path: Path) -> str:
    """A path in a message: any terminal can show it, and it is not too long."""
    return str(path)[:200].encode(errors="replace").decode()


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _types(cache: object) -> str:
    if not isinstance(cache, dict):
        return "none"
    rounding = f", {cache['rounding']!r:.20} rounding" if "rounding" in cache else ""
    return f"{cache.get('k')!r:.20}, {cache.get('v')!r:.20}{rounding}"
