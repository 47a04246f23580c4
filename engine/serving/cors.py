"""Which pages of other web sites may read answers: CORS."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from engine.serving.hosts import LOCAL, is_loopback, is_origin


class Cors(CORSMiddleware):
    """An ASGI application around another one, whose answers the pages of ``origins`` may read.

    Before a page sends a request with a key, its browser asks for permission, in a request that has none; it is answered
    here.
    """

    def __init__(self, inner: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            inner,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
        self._local = LOCAL in origins

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether a page may read answers."""
        if super().is_allowed_origin(origin):
            return True
        return self._local and is_origin(origin) and is_loopback(urlsplit(origin).hostname or "")
