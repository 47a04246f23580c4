"""``GET /api/tags``, ``POST /api/show``, ``GET /api/ps`` and ``GET /api/version``: what models there are."""

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import EngineError
from engine.gguf.file import MetadataValue, read_gguf
from engine.serving.errors import Refusal
from engine.serving.models import Entry
from engine.serving.ollama.card import Card, card_of, path_of
from engine.serving.ollama.options import DEFAULTS
from engine.serving.ollama.shapes import read_body, written
from engine.serving.state import State
from engine.tools.formats import select
from engine.version import __version__

OLLAMA = "0.24.0"
"""The version of Ollama whose interface this is.  Clients refuse to talk to much older ones."""

NEVER = "9999-12-31T23:59:59Z"
"""When a model that is open will be closed: not after a time, but when its memory is wanted."""

MOST_SHOWN = 5
"""Entries of a list in the metadata of a model that are shown without ``verbose``."""


async def version(request: Request) -> Response:
    """The version of the interface, and that of the server."""
    return JSONResponse({"version": OLLAMA, "build_info": f"bitmirror {__version__}"})


async def tags(request: Request) -> Response:
    """The models of this server, whether they are open or not."""
    found = []
    for entry in State.of(request).models.entries.values():
        card = await card_of(entry)
        more = {"modified_at": _modified(entry), "capabilities": _capabilities(entry, card)}
        found.append(_named(entry, card) | more)
    return JSONResponse({"models": found})


async def ps(request: Request) -> Response:
    """The models that are open."""
    found = []
    for entry in State.of(request).models.entries.values():
        card = await card_of(entry)
        if entry.served is None:
            continue
        llm = entry.served.llm
        memory = {"size": llm.n_bytes, "size_vram": 0 if llm.n_threads else llm.n_bytes}
        found.append(_named(entry, card) | memory | {"expires_at": NEVER, "context_length": llm.n_ctx})
    return JSONResponse({"models": found})


async def show(request: Request) -> Response:
    """What a model is.  Reads the header of its file, but does not open it; ``verbose``: with its vocabulary and tensors."""
    state = State.of(request)
    fields = await read_body(request, state.limits)
    entry = state.models.find(fields.text("model") or fields.text("name"))
    verbose = fields.flag("verbose", False)
    card = await card_of(entry)
    template = _template(entry, card)
    found: dict[str, Any] = {
        "modelfile": f"FROM {entry.spec.name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in _parameters(entry, card).items()),
        "template": template,
        "details": card.details(),
        "model_info": {},
        "capabilities": _capabilities(entry, card),
        "modified_at": _modified(entry),
    }
    if path := path_of(entry):
        found |= await asyncio.to_thread(_contents, path, card, verbose)
    # Clients show it to their users.
    found["model_info"].setdefault("general.basename", entry.spec.name)
    return JSONResponse(found)


def _named(entry: Entry, card: Card) -> dict[str, Any]:
    """The fields of a model in every list."""
    name = entry.spec.name if ":" in entry.spec.name else f"{entry.spec.name}:latest"
    return {"name": name, "model": name, "size": card.n_bytes, "digest": card.digest, "details": card.details()}


def _modified(entry: Entry) -> str:
    return written(datetime.fromtimestamp(entry.spec.created, UTC))


def _template(entry: Entry, card: Card, tools: bool = False) -> str:
    """The chat template of a model, for requests with tools or for those without; flags of the server may have
    replaced that of its file."""
    if entry.served is None:
        return card.tool_template if tools else card.template
    template = entry.served.llm.chat_template
    return "" if template is None else template.source_for(tools)


def _capabilities(entry: Entry, card: Card) -> list[str]:
    if card.pooled:
        return ["embedding"]
    embeds = ["embedding"] if entry.served is not None and not entry.served.llm.why_no_vectors else []
    calls = ["tools"] if select.can_call(_template(entry, card, tools=True)) else []
    return ["completion", *calls, *(["thinking"] if select.can_think(_template(entry, card)) else []), *embeds]


def _parameters(entry: Entry, card: Card) -> Mapping[str, float]:
    """What a request need not say; clients read the context from here."""
    context = {} if entry.served is None else {"num_ctx": entry.served.llm.n_ctx}
    return {**context, **DEFAULTS, **card.sampling, **entry.spec.sampling}


def _contents(path: str, card: Card, verbose: bool) -> Mapping[str, Any]:
    """What the header of a file says.  Raises Refusal if it cannot be read."""
    try:
        file = read_gguf(path)
    except EngineError as error:
        raise Refusal(f"the model cannot be read: {error}", 503, retry_after=60) from error
    metadata = {key: _value(value, verbose) for key, value in file.metadata.items() if key != "tokenizer.chat_template"}
    found: dict[str, Any] = {"model_info": metadata | {"general.parameter_count": card.n_params}}
    if isinstance(license := file.metadata.get("general.license"), str):
        found["license"] = license
    if verbose:
        # Like a file, Ollama names the innermost dimension first.
        found["tensors"] = [
            {"name": tensor.name, "type": tensor.type.name, "shape": list(tensor.shape[::-1])}
            for tensor in file.tensors.values()
        ]
    return found


def _value(value: MetadataValue, verbose: bool) -> Any:
    """A value of the metadata as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, np.ndarray)):
        shown = value if verbose or len(value) <= MOST_SHOWN else []
        return [_value(each, verbose) for each in (shown.tolist() if isinstance(shown, np.ndarray) else shown)]
    return value
