"""``GET /``: the page for browsers with its files, and what Ollama's clients expect there."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "webui"

INDEX = "index.html"

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The media type of each kind of file of the page."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may do: run its own files and ask its own server.  No text can become HTML or a script (Trusted Types)."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class File(NamedTuple):
    """A file of the page, with the headers of its answers."""

    content: bytes
    headers: Mapping[str, str]

    def response(self, request: Request) -> Response:
        """The file; status 304 without it if the browser has it already."""
        held = request.headers.get("if-none-match", "")
        tags = [tag.strip().removeprefix("W/") for tag in held.split(",")]
        if self.headers["etag"] in tags or tags == ["*"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def page() -> list[Route]:
    """The routes of the page: itself, for whoever accepts HTML at ``/``, and its files."""
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    index = files.pop(INDEX)

    async def begin(request: Request) -> Response:
        response = (
            index.response(request) if "text/html" in request.headers.get("accept", "") else await greeting(request)
        )
        response.headers["vary"] = "Accept"
        return response

    def route(name: str, file: File) -> Route:
        async def send(request: Request) -> Response:
            return file.response(request)

        return Route(f"/webui/{name}", send)

    # A route that answers GET answers HEAD, too; Ollama's program asks in this way whether there is a server.
    return [Route("/", begin), *(route(name, file) for name, file in files.items())]


async def greeting(request: Request) -> Response:
    """The sentence by which Ollama's clients know a server."""
    return PlainTextResponse("Ollama is running")


def _read(path: Path) -> File:
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:32]
    kind = f"{TYPES[path.suffix]}; charset=utf-8"
    return File(content, {**HEADERS, "content-type": kind, "etag": f'"{tag}"'})
