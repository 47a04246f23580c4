"""Saved states: the tokens in a model's cache, what the answers that continue them depend on, and the cache itself.

A state is a file.  It begins with a line of JSON, which has the tokens and identifies the model.  Records follow
(``engine/machine/records.py``): the values of the pages that hold the tokens, and a snapshot (``engine/cache/values.py``).
They can be taken up by a model on any device.  If one of them is damaged, or if they come from elsewhere and are not trusted,
the tokens are read again, which gives the same bits.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.cache.kv import KVCache
from engine.checks import described
from engine.errors import ContextError, FetchError, UsageError
from engine.hub.catalog import cache_dir
from engine.machine import records, trust
from engine.machine.files import replaced
from engine.models.config import ModelConfig
from engine.version import ARITHMETIC, __version__

FORMAT = "bitmirror-state"
VERSION = 2

BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()
"""How every state begins."""

MOST_BYTES = 1 << 16
"""Bytes that the line of a file may have besides what is in proportion to its tokens."""

TOKEN_BYTES = 8
"""Bytes of the line for each token, besides its number: a part of those of its page."""


@dataclass(frozen=True)
class SavedState:
    """What a file holds.

    tokens: those that the cache held; salt: the key of the empty text with their salt, as hexadecimal digits, "" without one;
    layout: that of the values (:attr:`engine.cache.values.PageValues.layout`); pages: of each value of a page the span, the
    window and the chunk, in the order of the records; places: where the records are, the last one being the snapshot, none if
    the file has tokens only.
    """

    tokens: list[int]
    salt: str
    layout: str
    pages: list[tuple[int, int, int]]
    places: list[records.RecordPlace]


def installation_key() -> bytes:
    """The key of the MACs of this installation; if it cannot be stored, one that nobody else has."""
    try:
        folder = cache_dir()
        trust.make(folder)
        if not trust.problem(folder):
            return trust.secret(folder / "key")
    except (OSError, FetchError):
        pass
    return os.urandom(trust.SECRET_BYTES)


def identity(weights: str, n_bytes: int, config: ModelConfig, cache: KVCache) -> dict[str, Any]:
    """What must agree for a state to be continued: the model, the element types of its cache, how it is rounded,
    and the arithmetic.

    weights, n_bytes: the digest of all weights (``engine/fingerprint.py``), and their bytes.
    """
    types = next((layer.types for layer in cache.layers if layer.types is not None), None)
    rounding = {"rounding": config.rounding} if config.rounding else {}
    return {
        "model": {
            "architecture": config.architecture,
            "name": config.name,
            "n_bytes": n_bytes,
            "digest": weights,
        },
        "cache": {"k": types.k.name, "v": types.v.name} | rounding if types is not None else None,
        "arithmetic": ARITHMETIC,
    }


def write(
    path: str | os.PathLike[str],
    head: Mapping[str, Any],
    pages: Sequence[tuple[int, int, int]],
    values: Iterable[np.ndarray],
    key: bytes,
) -> int:
    """Write a state.  An existing file is replaced only when the new one is complete.

    head: what :func:`identity` returns, and ``fingerprint``, ``n_ctx``, ``salt``, ``layout`` and ``tokens``.
    pages: what the values of pages are (:attr:`SavedState.pages`).
    values: the values of the pages, and last the snapshot; none without a snapshot.
    key: that of the MACs.

    Returns the bytes of the file.  Raises UsageError if it cannot be written.
    """
    target = checked_path(path)
    state = {"format": FORMAT, "version": VERSION, "engine": __version__, **head, "pages": [*pages]}
    seal = sealed(state)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        with replaced(target) as file:
            n_bytes = file.write(json.dumps(state | {"sha256": seal}).encode() + b"\n")
            for i, value in enumerate(values):
                n_bytes += records.write(file, _name(seal, i), value, key)
    except (OSError, ValueError) as error:
        raise UsageError(f"the state cannot be saved to {_shown(target)}: {_reason(error)}.") from None
    return n_bytes


def sealed(state: Mapping[str, Any]) -> str:
    """The hash of the line of a state, which finds damage and names the records."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _name(seal: str, number: int) -> bytes:
    """The name of a record of a state."""
    return records.name_of(seal.encode(), number.to_bytes(8, "little"))


def read(
    path: str | os.PathLike[str],
    wanted: Mapping[str, Any],
    n_ctx: int,
    n_vocab: int,
    n_bytes: Mapping[tuple[int, int], int],
) -> SavedState:
    """Read the line of a state of the model that ``wanted`` identifies.

    n_bytes: the bytes of the values of pages, by span and window.

    Raises UsageError for a file that is not such a state, and ContextError if its tokens do not fit into ``n_ctx`` positions.
    """
    source = checked_path(path)

    def refuse(problem: str) -> NoReturn:
        raise UsageError(f"{_shown(source)} {problem}.")

    limit = MOST_BYTES + n_ctx * (len(str(n_vocab)) + TOKEN_BYTES)
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            refuse("is not a file")
        with open(source, "rb") as file:
            line = file.readline(limit + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"the state cannot be read from {_shown(source)}: {_reason(error)}.") from None
    broken = "is not a saved state of this engine, or is damaged; save it again with save_state()"
    try:
        state = json.loads(line)
    except (ValueError, RecursionError):
        # A state that was cut off by the limit is one of a longer context.
        if len(line) > limit and line.startswith(BEGINNING):
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
    seal, pages = state.pop("sha256", None), state.get("pages")
    if seal != sealed(state):
        refuse("is damaged: its first line has another hash than when it was written; save it again with save_state()")
    if not isinstance(pages, list) or not all(
        isinstance(page, list) and len(page) == 3 and all(type(number) is int for number in page) for page in pages
    ):
        refuse(broken)
    if not all(isinstance(state.get(name), str) for name in ("salt", "layout")):
        refuse(broken)
    places, at = list[records.RecordPlace](), len(line)
    for i, (span, window, _) in enumerate(pages):
        places.append(records.RecordPlace(source, at, _name(seal, i)))
        at += records.HEAD + n_bytes.get((span, window), 0)
    if pages:
        places.append(records.RecordPlace(source, at, _name(seal, len(pages))))
    return SavedState(ids, state["salt"], state["layout"], [(*page,) for page in pages], places)


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
