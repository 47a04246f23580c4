"""The fingerprint of a loaded model: everything that an answer depends on besides the request."""

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from engine.cache.kv import KVCache
from engine.errors import FetchError
from engine.generating_model import GeneratingModel
from engine.gguf.digest import model_digest
from engine.gguf.file import GGUF
from engine.hub.catalog import cache_dir
from engine.machine import trust
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.ops.memory import Progress
from engine.receipts.form import fingerprint_of
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.version import ARITHMETIC


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


class IdentifiedModel(GeneratingModel):
    """A model that generates tokens, and what identifies it."""

    #: The chat template of its file, if it has one.
    chat_template: ChatTemplate | None

    def __init__(self, model: Model, tokenizer: Tokenizer, snapshot_bytes: int) -> None:
        super().__init__(model, tokenizer, snapshot_bytes)
        self._forget()

    def renew(self) -> None:
        """In a process that was forked: a thread that was hashing does not exist."""
        super().renew()
        self._forget()

    def _forget(self) -> None:
        #: The digest of the weights, once it was wanted, and the lock of the thread that computes it.
        self._weights, self._hashing = "", threading.Lock()
        #: Whether it was computed by this process, and not remembered.
        self._computed = False

    @property
    def fingerprint(self) -> str:
        """See the attributes of the class."""
        return fingerprint_of(self.identity())

    def identity(self, *, remembered: bool = True, progress: Progress | None = None) -> dict[str, Any]:
        """The object whose hash is the fingerprint; see :func:`engine.fingerprint.described`.

        remembered: False: this process must have read all weights, whatever others remember of them; progress: called as
        ``progress("digest", done, total)`` with bytes.  Raises UsageError if the model is closed, and GGUFError if its file
        cannot be read.
        """
        self.check_open()
        gguf, config, cache = self.model.gguf, self.config, self.cache
        with self._hashing:  # and not that of the model: answers go on meanwhile
            if not self._weights or not (remembered or self._computed):
                self._weights = weights_digest(gguf, remembered=remembered, progress=progress)
                self._computed = not remembered
        return described(self._weights, config, cache, self.chat_template)
