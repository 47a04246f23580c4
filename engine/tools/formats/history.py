"""Earlier calls and their results, as the template of a format wants them."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def adapted(format: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the ids of calls in the form that the templates of ``format`` take.

    Those of Mistral raise an error unless an id has nine letters and digits.  Those of Kimi K2 write the id for the call, and
    nothing else says what was called.
    """
    own = [dict(message) for message in messages]
    if format not in ("mistral", "kimi"):
        return own
    ids: dict[str, str] = {}
    count = 0
    for message in own:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [dict(call) for call in calls]
            for call in message["tool_calls"]:
                given = call.get("id") or f"call {count}"
                ids[given] = short_id(given) if format == "mistral" else f"functions.{call['function']['name']}:{count}"
                call["id"] = ids[given]
                count += 1
        if given := message.get("tool_call_id"):
            message["tool_call_id"] = ids.get(given) or (short_id(given) if format == "mistral" else given)
    return own


def short_id(id: str) -> str:
    """An id of nine letters and digits: ``id`` itself if it is one."""
    if _SHORT_ID.fullmatch(id):
        return id
    digest = hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=10).digest()
    return base64.b32encode(digest).decode()[:9]
