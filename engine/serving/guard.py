"""What every request passes first: the host, the key, and a line in the log when it is done.

It looks at ``scope["path"]`` and the raw headers only.  The URL of a request is built from its Host header, which a client
chooses (CVE-2026-48710).
"""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable, Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.serving.budget import Claim
from engine.serving.cors import Cors
from engine.serving.errors import Refusal, note
from engine.serving.hosts import is_loopback
from engine.serving.ollama import shapes as ollama
from engine.serving.openai.shapes import error_body
from engine.serving.state import State

log = logging.getLogger("bitmirror.serving.access")

OPEN = ("/health", "/v1/health")
"""The paths that need no key, and are not logged."""

PART = 64 << 10
"""Bytes of a body that are sent at once."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_PORT = re.compile(r":\d{1,5}$")


class Guard:
    """An ASGI application around another one.

    keys: those that are accepted, none: no key is needed; local: only hosts that stand for this machine are accepted, which
    keeps the pages of other web sites out (DNS rebinding); origins: those whose pages may read answers; files: paths of files
    that are the same for everybody, which need no key either.
    """

    def __init__(
        self,
        inner: ASGIApp,
        state: State,
        keys: Sequence[str],
        local: bool,
        origins: Sequence[str] = (),
        files: Iterable[str] = (),
    ) -> None:
        self.state = state
        self._inner = inner
        self._keys = [key.encode() for key in keys]
        self._local = local
        self._open = frozenset((*OPEN, *files))
        self._outer: ASGIApp = Cors(self._guarded, origins) if origins else self._guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("this server speaks HTTP only")
        await self._outer(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.monotonic(), 499  # 499: the client left before the answer began
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        notes: dict[str, object] = scope.setdefault("state", {}).setdefault("notes", {})
        scope["state"]["request_id"] = request_id
        claim = scope["state"]["claim"] = Claim(self.state.budget)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            elif len(body := message.get("body", b"")) > PART:
                # Not at once: until the client has read it, the request is in work and holds its memory.
                claim.hold(claim.held + len(body))
                for at in range(0, len(body) - PART, PART):
                    await send({**message, "body": body[at : at + PART], "more_body": True})
                message["body"] = body[at + PART :]
            await send(message)

        try:
            key = self._key(headers)
            # Whose request it is: "" if that makes no difference.
            scope["state"]["owner"] = str(key) if len(self._keys) > 1 else ""
            refusal = self._refusal(scope, headers, key)
            if refusal is not None:
                note(scope, refusal)
                # Both OpenAI's and Anthropic's clients find what they look for.
                body = {"type": "error", **error_body(refusal), "request_id": request_id}
                if scope["path"].startswith(ollama.PREFIX):
                    body = dict(ollama.error_body(refusal))
                response = JSONResponse(body, refusal.status, refusal.headers())
                await response(scope, receive, answer)
            else:
                await self._inner(scope, receive, answer)
        finally:
            claim.hold(0)
            if scope["path"] not in self._open:
                more = "".join(f" {name}={value}" for name, value in notes.items())
                milliseconds = 1e3 * (time.monotonic() - begun)
                # A path may hold anything; what could end the line is written as an escape.
                path = scope["path"][:200].encode("unicode_escape").decode()
                # A stream that has begun with 200 may have ended in another way.
                status = scope["state"].get("ended", status)
                log.info("%s %s %d %.1f ms id=%s%s", scope["method"], path, status, milliseconds, request_id, more)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], key: int | None) -> Refusal | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # What stands between may believe the other one, and take the rest of the body for a request (smuggling).
            return Refusal("the request has both Content-Length and Transfer-Encoding; send one of them.", 400)
        host = headers.get(b"host", b"").decode("latin-1")
        if self._local and not is_loopback(_PORT.sub("", host)):
            return Refusal("this server answers requests to this machine only; use localhost as the host.", 403)
        if self._keys and scope["path"] not in self._open and key is None:
            problem = "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key."
            return Refusal(problem, 401, code="invalid_api_key")
        return None

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """The index of the key that a request has, None if it has none."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), bearer.strip() if scheme.lower() == b"bearer" else b""]
        # Each is compared, so that the time says nothing.
        equal = [hmac.compare_digest(key, one) for key in self._keys for one in given]
        return equal.index(True) // len(given) if True in equal else None
