"""The server as an ASGI application."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.serving.anthropic.count_tokens import count_tokens
from engine.serving.anthropic.messages import messages
from engine.serving.anthropic.shapes import ErrorResponse
from engine.serving.errors import Refusal, note, refusal_of
from engine.serving.front import greeting, page
from engine.serving.guard import Guard
from engine.serving.limits import Limits
from engine.serving.llama_server.completion import completion
from engine.serving.llama_server.health import health
from engine.serving.llama_server.loading import load, unload
from engine.serving.llama_server.metrics import metrics
from engine.serving.llama_server.props import props
from engine.serving.llama_server.saved_slots import act
from engine.serving.llama_server.shapes import error_response as llama_error
from engine.serving.llama_server.slots import slots
from engine.serving.llama_server.template import apply_template
from engine.serving.llama_server.tokens import detokenize, tokenize, tokenizer_info
from engine.serving.models import Models
from engine.serving.ollama import refused, shapes
from engine.serving.ollama.chat import chat
from engine.serving.ollama.embed import embed
from engine.serving.ollama.embed import embeddings as ollama_embeddings
from engine.serving.ollama.generate import generate
from engine.serving.ollama.models import ps, show, tags, version
from engine.serving.openai.chat import chat_completions
from engine.serving.openai.completions import completions
from engine.serving.openai.embeddings import embeddings
from engine.serving.openai.input_tokens import input_tokens as chat_input_tokens
from engine.serving.openai.models import list_models, show_model
from engine.serving.openai.shapes import error_response
from engine.serving.rerank import rerank
from engine.serving.responses.input_tokens import input_tokens
from engine.serving.responses.responses import responses
from engine.serving.responses.stored import stored
from engine.serving.scoring import score
from engine.serving.served import Spec
from engine.serving.state import State
from engine.serving.streams import Disconnected
from engine.serving.tracing import trace
from engine.serving.verification import verify

log = logging.getLogger("bitmirror.serving")

Handler = Callable[[Request], Awaitable[Response]]
Shape = Callable[[Refusal], Response]


def app(
    specs: Sequence[Spec],
    *,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    local: bool = True,
    origins: Sequence[str] = (),
    models_max: int = 4,
    preload: bool = True,
    webui: bool = True,
    slot_folder: Path | None = None,
) -> Guard:
    """The server as an ASGI application, for uvicorn or another program that serves one.

    Parameters
    ----------
    specs : sequence of Spec
        The models; the first one answers requests that name none.
    limits : Limits, optional
        The most that a client may ask for.
    keys : sequence of str
        API keys, one of which every request but those to ``/health`` and for the page must have; none: no key is needed.
        Requests with different keys share nothing that the cache holds.
    local : bool
        Answer only requests whose Host header stands for this machine. Give False if the server listens on an address that
        others reach.
    origins : sequence of str
        Origins of web sites whose pages may read answers, such as "https://chat.example"; "localhost": those of this machine,
        "*": all.
    models_max : int
        The most models that are open at the same time.
    preload : bool
        Open the first model when the application starts, instead of with the first request.
    webui : bool
        Offer a page at ``/``, in which a browser shows conversations.

    slot_folder : Path, optional
        An existing folder in which clients may save what slots hold.

    Returns
    -------
    Guard
        An ASGI application; its attribute ``state`` holds the models.
    """
    limits = limits or Limits()
    state = State(Models(specs, limits, models_max), limits, slot_folder=slot_folder)

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        if preload:
            await state.models.load(state.models.find(None))
        yield
        await state.models.close()

    # Refusals are answered by ``answered``, in the shape of their interface.
    handlers = {HTTPException: _http_error}
    front = page() if webui else [Route("/", greeting)]
    own = routes()
    inner = Starlette(routes=[*own, *front], lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]
    inner.state.server = state
    inner.router.redirect_slashes = False
    paths = [route.path for route in front] if webui else []
    return Guard(Direct(inner, own), state, keys, local, origins, paths)


class Direct:
    """An ASGI application around Starlette's: requests whose method and path are those of a route go to its handler at once.

    Starlette compares the path with one route after another, and passes each message of the answer through three functions.
    """

    def __init__(self, inner: Starlette, routes: Sequence[Route]) -> None:
        self._inner = inner
        plain = [route for route in routes if not route.param_convertors]
        self._handlers = {(method, route.path): route.endpoint for route in plain for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = (
            None if scope.get("root_path") else self._handlers.get((scope.get("method", ""), scope.get("path", "")))
        )
        if handler is None:
            await self._inner(scope, receive, send)
            return
        scope["app"] = self._inner
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


def routes() -> list[Route]:
    """All routes but those of the page."""
    return [
        *_openai("/chat/completions", chat_completions, "POST"),
        *_openai("/chat/completions/input_tokens", chat_input_tokens, "POST"),
        *_openai("/responses", responses, "POST"),
        *_openai("/responses/input_tokens", input_tokens, "POST"),
        *_openai("/responses/{id}", stored, "GET", "DELETE"),
        *_openai("/responses/{id}/cancel", stored, "POST"),
        *_openai("/responses/{id}/input_items", stored, "GET"),
        Route("/v1/messages", answered(messages, ErrorResponse), methods=["POST"]),
        Route("/v1/messages/count_tokens", answered(count_tokens, ErrorResponse), methods=["POST"]),
        *_openai("/completions", completions, "POST"),
        *_openai("/score", score, "POST"),
        *_openai("/verify", verify, "POST"),
        *_openai("/trace", trace, "POST"),
        *_openai("/embeddings", embeddings, "POST"),
        *(route for name in ("/rerank", "/reranking") for route in _openai(name, rerank, "POST")),
        *_openai("/models", list_models, "GET"),
        *_openai("/models/{name:path}", show_model, "GET"),
        *(_llama(path, health) for path in ("/health", "/v1/health")),
        _llama("/completion", completion, "POST"),
        _llama("/metrics", metrics),
        _llama("/models/load", load, "POST"),
        _llama("/models/unload", unload, "POST"),
        _llama("/props", props),
        _llama("/slots", slots),
        _llama("/slots/{id}", act, "POST"),
        _llama("/tokenizer_info", tokenizer_info),
        _llama("/tokenize", tokenize, "POST"),
        _llama("/detokenize", detokenize, "POST"),
        _llama("/apply-template", apply_template, "POST"),
        _ollama("chat", chat, "POST"),
        _ollama("generate", generate, "POST"),
        _ollama("tags", tags),
        _ollama("show", show, "POST"),
        _ollama("ps", ps),
        _ollama("version", version),
        _ollama("embed", embed, "POST"),
        _ollama("embeddings", ollama_embeddings, "POST"),
        *(_ollama(name, refused.refused, method) for name, method in refused.NAMES.items()),
    ]


def _openai(path: str, handler: Handler, *methods: str) -> list[Route]:
    """A route of OpenAI, and the same without ``/v1``, which many leave out of the base URL."""
    handle = answered(handler, error_response)
    return [Route(each, handle, methods=list(methods)) for each in ("/v1" + path, path)]


def _llama(path: str, handler: Handler, method: str = "GET") -> Route:
    """A route of llama-server."""
    return Route(path, answered(handler, llama_error), methods=[method])


def _ollama(name: str, handler: Handler, method: str = "GET") -> Route:
    """A route of Ollama."""
    return Route(shapes.PREFIX + name, answered(handler, shapes.error_response), methods=[method])


def answered(handler: Handler, shape: Shape) -> Handler:
    """A handler whose errors have the shape of its interface."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Disconnected:
            return Response(status_code=499)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                log.error("a request failed: %s", refusal, exc_info=not isinstance(error, EngineError))
            note(request.scope, refusal)
            return shape(refusal)

    return handle


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]
    shape, answering = error_response, "/v1/chat/completions"
    if path.startswith(shapes.PREFIX):
        shape, answering = shapes.error_response, "/api/chat"
    refusal = Refusal(f"there is no {path[:80]} here; {answering} answers conversations.", error.status_code)
    if error.status_code == 405:
        refusal = Refusal(f"{path[:80]} does not answer {request.method}.", 405)
    note(request.scope, refusal)
    return shape(refusal)
