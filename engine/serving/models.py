"""The models of a server: opened when they are asked for, closed when their memory is wanted."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from engine.errors import ContextError, DeviceError, EngineError
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.served import Served, Spec

if TYPE_CHECKING:
    from engine.llm import LLM

log = logging.getLogger("bitmirror.serving")

PATIENCE_SECONDS = 15.0
"""Seconds after which a request is refused that waits for a model and whose answer cannot begin before."""


class Status(StrEnum):
    """The state of a model, in llama-server's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


class Entry:
    """A model of the list: what opens it, and its state."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.status = Status.UNLOADED
        self.problem = ""
        self.served: Served | None = None
        self.users = 0
        self.used = 0.0
        #: Whether it is closed when nobody uses it any more.
        self.leaving = False
        self.lock = asyncio.Lock()
        #: What opens it, or has opened it last.
        self.opening: asyncio.Task[Served] | None = None


class Models:
    """The models of a server, by name.  The first one answers requests that name none."""

    def __init__(self, specs: Sequence[Spec], limits: Limits, most: int) -> None:
        """most: the number of models that are open at the same time."""
        self.entries = {spec.name: Entry(spec) for spec in specs}
        self._names = {name: spec.name for spec in specs for name in (*spec.aliases, spec.name)}
        self._limits = limits
        self._most = most
        #: Whether the server ends: no model is opened any more.
        self._stopped = False
        #: Threads that open models; the event loop does not wait for them when it ends.
        self._threads = ThreadPoolExecutor(len(self.entries), "opening")
        self._running: list[Future[LLM]] = []
        #: Called in a thread when a model has been opened or closed.
        self.changed: Callable[[], None] = lambda: None

    def find(self, name: str | None, *, exact: bool = False) -> Entry:
        """The model of a name, which may end in ``:latest`` as Ollama writes it; None or "": the first.  Raises Refusal.

        Many clients send the name of a model that they know, so the only model of a server answers to every name, unless
        the name must be ``exact``.
        """
        if not name or (len(self.entries) == 1 and not exact):
            return next(iter(self.entries.values()))
        if name not in self._names:
            name = name.removesuffix(":latest")
        if name not in self._names:
            known = ", ".join(self.entries)
            raise Refusal(f"there is no model {name!r:.80}; this server has {known}.", 404, "model", "model_not_found")
        return self.entries[self._names[name]]

    @asynccontextmanager
    async def use(self, name: str | None, patience: float | None = None) -> AsyncIterator[Served]:
        """A model, opened if necessary, and kept open meanwhile; patience: seconds after which the opening goes on without
        this request, which is refused."""
        entry = self.find(name)
        entry.users += 1
        entry.leaving = False
        try:
            try:
                served = await asyncio.wait_for(self.load(entry), patience)
            except TimeoutError:
                problem = f"the model {entry.spec.name} is being opened; send the request again later."
                raise Refusal(problem, 503, retry_after=5) from None
            yield served
        finally:
            entry.users -= 1
            entry.used = time.monotonic()
            if entry.leaving and not entry.users:
                await self.unload(entry)

    async def load(self, entry: Entry) -> Served:
        """Open a model, unless it is open; models that nobody uses are closed if there are too many, or too little memory."""
        if entry.served is not None:
            return entry.served
        if entry.opening is None or entry.opening.done():
            entry.opening = asyncio.ensure_future(self._load(entry))
            # Every client that waits for it may have left.
            entry.opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
        opening = entry.opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise _ending() from None
            raise

    async def _load(self, entry: Entry) -> Served:
        async with entry.lock:
            if entry.served is None:
                if self._stopped:
                    raise _ending()
                entry.status, entry.problem = Status.LOADING, ""
                try:
                    entry.served = await self._opened(entry)
                    entry.status = Status.LOADED
                except EngineError as error:
                    entry.status, entry.problem = Status.FAILED, str(error)
                    raise Refusal(
                        f"the model {entry.spec.name} cannot be opened: {error}", 503, retry_after=60
                    ) from error
                finally:
                    if entry.status is Status.LOADING:
                        entry.status = Status.UNLOADED
            return entry.served

    async def _opened(self, entry: Entry) -> Served:
        while sum(other.served is not None for other in self.entries.values()) >= self._most:
            if not await self._make_room(entry):
                problem = f"{self._most} models are in use and this server opens no more (--models-max); try later."
                raise Refusal(problem, 503, retry_after=10)
        while True:
            try:
                running = self._threads.submit(entry.spec.open)
                self._running = [each for each in (*self._running, running) if not each.done()]
                llm = await asyncio.wrap_future(running)
            except (DeviceError, ContextError):
                if not await self._make_room(entry):
                    raise
                continue
            served = Served(entry.spec, llm, asyncio.get_running_loop(), self._limits)
            await asyncio.to_thread(self.changed)
            where = f"on the CPU with {llm.n_threads} threads" if llm.n_threads else f"on {llm.model.ops.label}"
            slots = f"{len(llm.slots)} slots of {llm.n_ctx} tokens"
            log.info("%s is open %s: %s; %s", entry.spec.name, where, slots, llm.memory)
            for warning in llm.warnings:
                log.warning("%s: %s", entry.spec.name, warning)
            return served

    async def _make_room(self, wanting: Entry) -> bool:
        """Close the model that was used least recently, of those that nobody uses; returns whether there was one."""
        idle = [e for e in self.entries.values() if e is not wanting and e.served is not None and not e.users]
        if not idle:
            return False
        await self.unload(min(idle, key=lambda entry: entry.used))
        return True

    async def release(self, entry: Entry) -> None:
        """Close a model as soon as nobody uses it: answers in progress end first, and a request that comes before that keeps
        it open."""
        entry.leaving = entry.users > 0
        if not entry.users:
            await self.unload(entry)

    async def unload(self, entry: Entry) -> None:
        """Close a model; its answers end."""
        async with entry.lock:
            served, entry.served, entry.status = entry.served, None, Status.UNLOADED
            if served is not None:
                await asyncio.to_thread(served.close)
                log.info("%s is closed", entry.spec.name)
                del served
                await asyncio.to_thread(self.changed)

    @property
    def in_use(self) -> bool:
        """Whether a request needs a model: its answers may not have begun, or not have been read."""
        return any(entry.users for entry in self.entries.values())

    @property
    def n_answers(self) -> int:
        """The number of answers that are computed or wait."""
        return sum(entry.served.driver.n_answers for entry in self.entries.values() if entry.served is not None)

    def end_openings(self) -> list[str]:
        """Open no further model; returns the names of those that are being opened, for which nobody waits any more."""
        self._stopped = True
        ended = [entry for entry in self.entries.values() if entry.opening is not None and not entry.opening.done()]
        for entry in ended:
            assert entry.opening is not None
            entry.opening.cancel()
        return [entry.spec.name for entry in ended]

    @property
    def abandoned(self) -> bool:
        """Whether a thread goes on to open a model that nobody waits for: nothing can end it but the end of the process."""
        return self._stopped and not all(each.done() for each in self._running)

    def stop(self) -> None:
        """End all answers with an error, and open no further model."""
        self.end_openings()
        for entry in self.entries.values():
            if entry.served is not None:
                entry.served.driver.stop()

    async def close(self) -> None:
        """Close all models."""
        for entry in self.entries.values():
            await self.unload(entry)

    def described(self) -> list[Mapping[str, Any]]:
        """The models, as OpenAI lists them, with the fields that llama-server and vLLM add."""
        return [_described(entry) for entry in self.entries.values()]


def _ending() -> Refusal:
    return Refusal("the server is shutting down; send the request again later.", 503, retry_after=5)


def _described(entry: Entry) -> Mapping[str, Any]:
    spec, served = entry.spec, entry.served
    found: dict[str, Any] = {"id": spec.name, "object": "model", "created": spec.created, "owned_by": "bitmirror"}
    found |= {"aliases": list(spec.aliases), "status": {"value": entry.status.value, "failed": bool(entry.problem)}}
    if served is not None:
        llm = served.llm
        found |= {
            "max_model_len": llm.n_ctx,
            "meta": {
                "n_vocab": llm.config.n_vocab,
                "n_ctx_train": llm.config.n_ctx_train,
                "n_embd": llm.config.n_embd,
                "n_params": llm.n_params,
                "size": llm.n_bytes,
            },
        }
    return found
