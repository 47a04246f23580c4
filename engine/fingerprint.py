"""The fingerprint of a loaded model: everything that an answer depends on besides the request."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cache.kv import KVCache
from engine.errors import FetchError
from engine.gguf.digest import model_digest
from engine.gguf.file import GGUF
from engine.hub.catalog import cache_dir
from engine.machine import trust
from engine.models.config import ModelConfig
from engine.text.template.chat import ChatTemplate
from engine.version import ARITHMETIC

Progress = Callable[[str, int, int], None]


def weights_digest(gguf: GGUF, *, remembered: bool = True, progress: Progress | None = None) -> str:
    """The digest of the files of a model (:func:`engine.gguf.digest.model_digest`).

    It is remembered in the user's cache, by device, inode, size and times of the files: reading and hashing them again would
    take seconds.  A file that was changed without changing any of these is not noticed, which takes the superuser or a
    broken disk.  remembered: False: read the files, whatever is remembered.  progress: see there.

    Raises GGUFError if a file cannot be read.
    """
    memo = _memo(gguf)
    known = trust.read(memo) if remembered and memo is not None else None
    if known is not None and len(known) == 64:
        return known.decode("ascii", "replace")
    found = model_digest(gguf, progress=progress)
    if memo is not None and memo == _memo(gguf):  # nobody has written to the files meanwhile
        with contextlib.suppress(OSError):  # then it is computed again next time
            trust.write(memo, found.encode())
    return found


def _memo(gguf: GGUF) -> Path | None:
    """The file in which the digest of these files is remembered; None if there is no place for it."""
    try:
        folder = cache_dir() / "digests"
        trust.make(folder)
        if trust.problem(folder):
            return None
    except (OSError, FetchError):
        return None
    statuses = [os.fstat(file.descriptor) for file in gguf.files]
    facts = [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in statuses]
    return folder / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def described(weights: str, config: ModelConfig, cache: KVCache, template: ChatTemplate | None) -> dict[str, Any]:
    """What an answer depends on besides the request, as an object for JSON.

    weights: the digest of the files, which contain the weights with their formats, the tokenizer and the metadata; template:
    that of the conversations, which need not be the file's.
    """
    types = next((layer.types for layer in cache.layers if layer.types is not None), None)
    texts = [] if template is None else [text for text in (template.source, template.tool_source) if text]
    found: dict[str, Any] = {
        "architecture": config.architecture,
        "name": config.name,
        "weights": weights,
        "template": hashlib.sha256(json.dumps(texts).encode()).hexdigest() if texts else None,
        "cache": None if types is None else {"k": types.k.name, "v": types.v.name},
        "arithmetic": ARITHMETIC,
    }
    # What is off in most models is not named.
    options = {"rounding": config.rounding, "kv_budget": cache.budget}
    return found | {name: value for name, value in options.items() if value}
