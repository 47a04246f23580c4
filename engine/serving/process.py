"""The process of a server: it listens, and ends when its answers are complete."""

import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from engine.errors import UsageError
from engine.serving.app import app
from engine.serving.connections import Connections, raise_limit
from engine.serving.errors import Refusal
from engine.serving.guard import Guard
from engine.serving.hosts import is_loopback
from engine.serving.limits import Limits
from engine.serving.memory import freeze, give_back, one_arena, search_rarely
from engine.serving.protocol import protocol
from engine.serving.served import Served, Spec
from engine.serving.state import State
from engine.serving.watchdog import Watchdog

log = logging.getLogger("bitmirror.serving")

TIDY_TICKS = 50
"""Tenths of a second after which a server without an answer in progress gives memory back."""

BACKLOG = 2048
"""Clients that wait until their connections are accepted."""

POLL_SECONDS = 0.05
"""The time between two looks at whether all answers are complete."""

GRACE_SECONDS = 5
"""The time in which clients must read the ends of their answers when the server ends."""


class Server(uvicorn.Server):
    """A server that answers what it has begun before it ends.

    The first signal lets it drain: new requests are refused with status 503, ``/health`` says so, and it ends when no answer
    is left or the time is over; a model that is being opened is given up.  The second one ends it at once.
    """

    def __init__(self, config: uvicorn.Config, state: State, connections: Connections, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._connections = connections
        self._drain_seconds = drain_seconds
        #: The opening of the first model.
        self._opening: asyncio.Task[Served] | None = None
        #: Why the first model could not be opened, if that is why the server has ended.
        self.problem: BaseException | None = None
        #: The exit status: 0 if the server has ended as it should.
        self.status = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: Watchdog | None = None
        self._draining: asyncio.Task[None] | None = None
        #: The requests that had been answered when memory was given back.
        self._tidied = 0
        self._tidying: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when the event loop runs: listens, and begins to open the first model in another thread.

        Meanwhile ``/health`` says so, what needs no model is answered, and requests for answers wait.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_failed)
        models = self._state.models
        models.changed = freeze
        first = models.find(None)
        address = self._address(sockets)
        log.info("loading %s: %s/health answers when it is open", first.spec.name, address)
        # It begins before the first client is accepted, so that none is told that the server is ready.
        self._opening = asyncio.ensure_future(models.load(first))
        await super().startup(sockets)
        self._opening.add_done_callback(lambda opening: self._opened(opening, address))

    def _opened(self, opening: "asyncio.Task[Served]", address: str) -> None:
        """Called when the first model has been opened, or could not be."""
        problem = None if opening.cancelled() else opening.exception()
        if self._state.draining:
            return
        if opening.cancelled() or problem is not None:
            self.problem = problem
            self._state.models.stop()
            self.should_exit = True
            return
        assert self._loop is not None
        self._watchdog = Watchdog(self._loop)
        log.info("OpenAI's interface is at %s/v1, those of Anthropic, Ollama and llama-server at %s", address, address)
        print(f"listening on {address}", file=sys.stderr, flush=True)

    def _address(self, sockets: list[socket.socket] | None) -> str:
        host, port = self.config.host, sockets[0].getsockname()[1] if sockets else self.config.port
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.config.is_ssl else 'http'}://{shown}:{port}"

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        served = self.server_state.total_requests
        if served > self._tidied and counter % TIDY_TICKS == 0 and not self._state.models.n_answers:
            self._tidied = served
            self._tidying = asyncio.ensure_future(asyncio.to_thread(give_back))
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on SIGINT and SIGTERM."""
        if self._state.draining:
            log.warning("ended by a second signal, with %d answers in progress", self._state.models.n_answers)
            # Ending every task would print what each of them was doing.
            os._exit(128 + sig)
        self._state.draining = True
        if self._opening is None or not self._opening.done():
            self.status = 128 + sig  # nothing has been served
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when no answer is left."""
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._connections.drop)
        await super().shutdown(sockets)
        if self._watchdog is not None:
            self._watchdog.close()

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        ended = self._state.models.end_openings()
        if ended:
            log.info("the server ends before %s is open", " and ".join(ended))
        if self._state.models.n_answers or not ended:
            log.info("draining: %d answers are in progress", self._state.models.n_answers)
        deadline = asyncio.get_running_loop().time() + self._drain_seconds
        while self._state.models.in_use and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        # Whatever is left ends with an error event.
        self._state.models.stop()
        await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Called with an error that no task has caught."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.warning("connections wait: the system has no further descriptors for them (ulimit -n)")
    else:
        loop.default_exception_handler(context)


def config_of(
    application: Guard,
    limits: Limits,
    host: str,
    port: int,
    connections: Connections | None = None,
    certificate: tuple[str, str] | None = None,
) -> uvicorn.Config:
    """How uvicorn serves the application; connections: where the open ones are kept; certificate: its file and that of its
    key, if the server speaks HTTPS."""
    return uvicorn.Config(
        application,
        host=host,
        port=port,
        # uvloop would give the backlog below to the system: then a single client waits, and others are refused.
        loop="asyncio",
        http=protocol(limits, connections or Connections()),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_SECONDS + 1,
        # The event loop accepts as many connections at once, before any of them can be closed again.
        backlog=1,
        h11_max_incomplete_event_size=64 << 10,
        ssl_certfile=None if certificate is None else certificate[0],
        ssl_keyfile=None if certificate is None else certificate[1],
    )


class Listener(socket.socket):
    """A socket that listens; how many clients the system lets wait does not depend on how many are accepted at once."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Listen; ``backlog`` is ignored."""
        super().listen(BACKLOG)


def listening(host: str, port: int) -> Listener:
    """A socket that listens; port 0: a free one.  Raises UsageError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol asyncio sets TCP_NODELAY; without it each answer waits 40 ms for an acknowledgement.
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, UnicodeError) as error:
        listener.close()
        problem = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the server cannot listen on {host}:{port} ({problem}): choose another --port or --host"
        ) from None
    return listener


def serve(
    specs: Sequence[Spec],
    *,
    limits: Limits,
    host: str,
    port: int,
    keys: Sequence[str],
    origins: Sequence[str],
    certificate: tuple[str, str] | None,
    models_max: int,
    drain_seconds: float,
    webui: bool,
    slot_folder: Path | None,
) -> int:
    """Serve models until a signal comes; returns the exit status.  Raises UsageError if the address or the certificate cannot
    be used, or if the first model cannot be opened."""
    one_arena()
    search_rarely()
    local = is_loopback(host)
    application = app(
        specs,
        limits=limits,
        keys=keys,
        local=local,
        origins=origins,
        models_max=models_max,
        preload=False,
        webui=webui,
        slot_folder=slot_folder,
    )
    raise_limit()
    connections = Connections()
    config = config_of(application, limits, host, port, connections, certificate)
    try:
        config.load()
    except OSError as error:  # an SSLError is one, too
        problem = error.strerror or error
        raise UsageError(
            f"the certificate cannot be used ({problem}): give PEM files that belong together with --ssl-cert-file and "
            "--ssl-key-file"
        ) from None
    listener = listening(host, port)
    # A thread that computes gives up the lock of the interpreter whenever it calls the driver of a GPU, and waits this long
    # to get it back while this thread works.  The default is 5 ms.
    sys.setswitchinterval(1e-4)
    server = Server(config, application.state, connections, drain_seconds)
    server.run(sockets=[listener])
    if isinstance(server.problem, Refusal):
        raise UsageError(server.problem.message)
    if server.problem is not None:
        raise server.problem
    status = server.status if server.started else 1
    if application.state.models.abandoned:
        # The interpreter would wait for the thread that opens a model.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status
