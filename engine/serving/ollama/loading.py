"""Requests without a prompt: they open a model, or close it."""

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.fields import Fields
from engine.serving.ollama.shapes import error_body, model_name, now
from engine.serving.state import State
from engine.serving.streams import dump, whole

_DURATION = re.compile(r"[+-]?(?:0|(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+)")

MOST_CHARACTERS = 64
"""Characters of a duration; the longest of Go's has 24."""


async def open_or_close(request: Request, fields: Fields, nothing: Mapping[str, Any]) -> Response:
    """Open a model, or, with ``keep_alive: 0``, close it when nobody uses it any more.  nothing: the fields of the answer
    that hold what is said, here nothing."""
    models = State.of(request).models
    name = fields.text("model")
    closing = keeps_nothing(fields)
    entry = models.find(name, exact=closing)

    async def done() -> str:
        if closing:
            await models.release(entry)
        else:
            async with models.use(name):
                pass
        end = {"done": True, "done_reason": "unload" if closing else "load"}
        return dump({"model": model_name(fields, entry.spec.name), "created_at": now(), **nothing, **end})

    return await whole(request, done(), error_body)


def keeps_nothing(fields: Fields) -> bool:
    """Whether ``keep_alive`` is 0: a number of seconds, or a duration such as "0s" or "5m"."""
    value = fields.get("keep_alive")
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS or not _DURATION.fullmatch(value):
            raise fields.refuse("keep_alive", 'must be a number of seconds or a duration such as "5m"')
        return not any(digit in value for digit in "123456789")
    return fields.number("keep_alive") == 0
