"""``GET /`` and ``HEAD /``: a page for browsers, and what Ollama's clients expect there."""

from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from engine.serving.models import Entry
from engine.serving.state import State

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>bitmirror</title>
<h1>bitmirror</h1>
<p>This server has {models}.</p>
<ul>
<li>OpenAI's interface: <code>{base}/v1</code></li>
<li>those of Anthropic, Ollama and llama-server: <code>{base}</code></li>
<li><a href="/health">/health</a>, <a href="/v1/models">/v1/models</a>, <a href="/metrics">/metrics</a></li>
</ul>
</html>
"""

HEADERS = {"content-security-policy": "default-src 'none'", "x-content-type-options": "nosniff"}
"""The page has no scripts; no name of a model can become one."""


async def front(request: Request) -> Response:
    """A page that names the models, for whoever accepts HTML; for others the sentence by which Ollama's clients know a
    server."""
    state = State.of(request)
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Ollama is running")
    base = f"{request.scope['scheme']}://{request.headers.get('host', 'localhost')}"
    models = ", ".join(map(_named, state.models.entries.values()))
    return HTMLResponse(PAGE.format(models=models, base=escape(base)), headers=HEADERS)


def _named(entry: Entry) -> str:
    return f"<b>{escape(entry.spec.name)}</b> ({escape(entry.status.value)})"
