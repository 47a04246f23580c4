"""Bodies of requests: bounded in bytes, time and nesting, and parsed away from the event loop if they are large."""

import asyncio
import json
from functools import partial
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from engine.serving.aside import aside
from engine.serving.budget import PER_BYTE, Claim
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.streams import Disconnected

SMALL = 16 << 10
"""Bytes of a body that is parsed in the event loop."""

BROWSER = ("origin", "sec-fetch-site", "sec-fetch-mode")
"""Headers that browsers send, whatever a page wants: ``Origin`` with every POST, the others with every request."""


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


# json.loads would make a decoder for each text.
_DECODER = json.JSONDecoder(parse_constant=_constant)


async def read_fields(request: Request, limits: Limits, *, declared: bool = True) -> Fields:
    """The body of a request, which must be a JSON object; declared: it must also be declared as JSON, which otherwise only
    browsers must do."""
    data = await read_body(request, limits, declared=declared)
    await Claim.of(request).grow(PER_BYTE * len(data))
    values = await aside(len(data), partial(parse, data, limits), SMALL)
    return Fields(values, size=len(data))


async def read_body(request: Request, limits: Limits, *, declared: bool = True) -> bytes:
    """The bytes of a body.  Raises Refusal if there are too many, if they take too long to arrive, if they must be declared
    as JSON and are not, or if other requests hold too much memory."""
    claim = Claim.of(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (declared or any(name in request.headers for name in BROWSER)):
        # A form of another web site can send any other type without asking first.
        raise Refusal("send JSON, with the header Content-Type: application/json.", 415)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                await claim.grow(size)
                parts.append(part)
    except TimeoutError:
        problem = f"the body did not arrive within {limits.body_seconds:g} seconds (--body-seconds); send it faster."
        raise Refusal(problem, 408) from None
    except ClientDisconnect:
        raise Disconnected from None
    return b"".join(parts)


def _too_large(limits: Limits) -> Refusal:
    return Refusal(f"the body exceeds {limits.body_bytes} bytes, the limit of this server (--body-bytes).", 413)


def parse(data: bytes, limits: Limits) -> Any:
    """The value of a JSON text.  Raises Refusal if it is none, nested too deeply, or of too many values."""
    n_openings = data.count(b"[") + data.count(b"{")
    n_items = n_openings + data.count(b",")
    if n_items > limits.json_items:
        # The parser lets no other thread run.
        problem = f"the body has {n_items} commas and opening brackets and this server accepts {limits.json_items}"
        raise Refusal(f"{problem} (--json-items).", 413)
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise Refusal("the body is not UTF-8; send JSON in UTF-8.") from None
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}.") from None
    if n_openings <= limits.json_depth:
        return value
    level = [value]
    for _ in range(limits.json_depth):
        level = [item for each in level for item in _within(each)]
        if not level:
            return value
    raise _too_deep(limits)


def _within(value: Any) -> list[Any]:
    """The lists and objects in a list or an object."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, (dict, list))]


def _too_deep(limits: Limits) -> Refusal:
    return Refusal(f"the body is nested more than {limits.json_depth} deep, the limit of this server (--json-depth).")
