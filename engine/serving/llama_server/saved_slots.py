"""``POST /slots/{id}?action=save|restore|erase``: what a slot holds is saved to a file, taken up from one, or forgotten."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.checks import shown
from engine.decode.slot import Slot
from engine.errors import UsageError
from engine.serving.body import read_fields
from engine.serving.errors import Refusal
from engine.serving.exchange import computed, salt_of
from engine.serving.fields import Fields
from engine.serving.llama_server.shapes import error_body
from engine.serving.models import PATIENCE_SECONDS
from engine.serving.served import Served
from engine.serving.state import State

ACTIONS = ("save", "restore", "erase")

LONGEST_NAME = 255
"""The most bytes of the name of a file."""

POLL_SECONDS = 0.02
"""Seconds between two looks whether a slot is free."""


async def act(request: Request) -> Response:
    """Save, restore or erase a slot.  It must be free, which is waited for."""
    state = State.of(request)
    if state.slot_folder is None:
        raise Refusal("this server does not support slots action: start it with --slot-save-path FOLDER.", 501)
    action = request.query_params.get("action", "")
    if action not in ACTIONS:
        raise Refusal(f"action must be save, restore or erase, not {shown(action, 40)!r}: /slots/0?action=save.")
    empty = action == "erase" and request.headers.get("content-length", "0") == "0"
    fields = Fields({}) if empty else await read_fields(request, state.limits)
    path = None if action == "erase" else state.slot_folder / _name(fields)
    return await computed(request, partial(_act, request, action, path), error_body, fields)


async def _act(request: Request, action: str, path: Path | None, fields: Fields, served: Served) -> Mapping[str, Any]:
    number, slot = await _slot(request, served)
    salt, begun = salt_of(request, fields), time.perf_counter()
    foreign = slot.sequence.salt != salt and slot.sequence.length > 0
    if foreign and action != "restore":
        raise Refusal(f"slot {number} holds a text of another API key or cache_salt: {action} it with that one.")
    if path is None:
        return {"id_slot": number, "n_erased": await asyncio.to_thread(served.llm.erase_slot, slot)}
    try:
        if action == "save":
            saved = await asyncio.to_thread(served.llm.save_slot, slot, path)
            counts = {"n_saved": len(saved.ids), "n_written": saved.n_bytes}
        else:
            saved = await asyncio.to_thread(served.llm.restore_slot, slot, path, salt)
            counts = {"n_restored": len(saved.ids), "n_read": saved.n_bytes}
    except UsageError as error:
        # Where the folder is, is nobody's business.
        raise Refusal(str(error).replace(str(path), path.name), param="filename") from None
    seconds = time.perf_counter() - begun
    return {"id_slot": number, "filename": path.name, **counts, "timings": {f"{action}_ms": 1e3 * seconds}}


async def _slot(request: Request, served: Served) -> tuple[int, Slot]:
    """The slot that a request names, with its number, when it is free."""
    text, slots = request.path_params["id"], served.llm.slots
    number = int(text) if text.isdecimal() and len(text) < 10 else -1
    if not 0 <= number < len(slots):
        raise Refusal(f"there is no slot {shown(text, 20)!r}: this model has slots 0 to {len(slots) - 1}.")
    slot, until = slots[number], time.monotonic() + PATIENCE_SECONDS
    while slot.owner is not None:
        if time.monotonic() > until:
            raise Refusal(f"slot {number} computes an answer: send the request again later.", 503, retry_after=5)
        await asyncio.sleep(POLL_SECONDS)
    return number, slot


def _name(fields: Fields) -> str:
    """The name of a file in the folder of saved slots: no path leads out of it."""
    name = fields.required_text("filename")
    odd = any(character in '/\\:*?"<>|' or not character.isprintable() for character in name)
    if (
        odd
        or name.startswith(".")
        or name != name.strip()
        or not 0 < len(name.encode(errors="replace")) <= LONGEST_NAME
    ):
        problem = 'must be the name of a file, without a path, a dot at its beginning, or one of \\ : * ? " < > |'
        raise fields.refuse("filename", problem)
    return name
