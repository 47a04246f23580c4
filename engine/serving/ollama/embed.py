"""``POST /api/embed`` and the older ``POST /api/embeddings``: texts as vectors."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.embeddings import finished
from engine.serving.exchange import computed
from engine.serving.fields import Fields
from engine.serving.ollama.loading import keeps_nothing, open_or_close
from engine.serving.ollama.shapes import error_body, model_name, read_body
from engine.serving.openai.embeddings import read_ids
from engine.serving.served import Served
from engine.serving.state import State


async def embed(request: Request) -> Response:
    """The vectors of one or several texts, each divided by its length.  Texts that are too long are cut, unless ``truncate``
    is false.  Without texts, only open or close the model."""
    came = time.monotonic_ns()

    async def answer(fields: Fields, served: Served) -> Mapping[str, Any]:
        opened = time.monotonic_ns()
        keeps_nothing(fields)  # refuses what is no duration; otherwise it means nothing here
        dimensions = fields.whole("dimensions", 0, 1, served.llm.config.n_embd)
        ids = await read_ids(request, fields, "input", served, fields.flag("truncate", True), with_ids=False)
        vectors = finished(await served.embedder.pooled(ids), True, dimensions)
        times = {"total_duration": time.monotonic_ns() - came, "load_duration": opened - came}
        counts = {"prompt_eval_count": sum(map(len, ids))}
        return {"model": model_name(fields, served.name), "embeddings": vectors.tolist(), **times, **counts}

    fields = await read_body(request, State.of(request).limits)
    if fields.values.get("input") in (None, "", []):
        return await open_or_close(request, fields, {"embeddings": []})
    return await computed(request, answer, error_body, fields)


async def embeddings(request: Request) -> Response:
    """The vector of one text, ``prompt``, as it is: not divided by its length.  Without a text, only open or close the
    model."""

    async def answer(fields: Fields, served: Served) -> Mapping[str, Any]:
        keeps_nothing(fields)
        ids = await read_ids(request, fields, "prompt", served, True, with_ids=False)
        return {"embedding": finished(await served.embedder.pooled(ids), False, 0)[0].tolist()}

    fields = await read_body(request, State.of(request).limits)
    if not fields.text("prompt"):
        return await open_or_close(request, fields, {"embedding": []})
    return await computed(request, answer, error_body, fields)
