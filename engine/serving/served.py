"""A model that a server offers, and what answers with it once it is open."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.serving.answer import Answer, Ask
from engine.serving.aside import compiling
from engine.serving.driver import Driver
from engine.serving.embedder import Embedder
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.speculative.params import SpeculationParams

if TYPE_CHECKING:
    from engine.llm import LLM


@dataclass
class Spec:
    """A model that a server offers.

    name, aliases: what it is called; open: opens it; path: its file, and created: when that was written, in seconds since
    1970; speculation: how its answers use drafts; sampling: parameters of :class:`engine.SamplingParams` that replace what
    the file recommends.
    """

    name: str
    open: Callable[[], "LLM"]
    aliases: Sequence[str] = ()
    path: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    speculation: SpeculationParams = SpeculationParams()
    sampling: Mapping[str, float] = field(default_factory=dict)


class Served:
    """An open model with the thread that computes its answers."""

    def __init__(self, spec: Spec, llm: "LLM", loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        self.spec = spec
        self.name = spec.name
        self.llm = llm
        llm.sampling = MappingProxyType({**llm.sampling, **spec.sampling})
        self.driver = Driver(llm, loop)
        self.embedder = Embedder(llm, limits.queue)
        self.limits = limits
        #: Held while a receipt is replayed or a token is traced; how many requests do so or wait for that.
        self.replaying, self.n_replays = asyncio.Semaphore(1), 0
        self._closing = False
        self._fingerprint: Future[str] = Future()
        threading.Thread(target=self._identify, name="fingerprint", daemon=True).start()

    async def answers(self, ask: Ask) -> list[Answer]:
        """Begin the answers to what is asked.  Raises Refusal if too many wait already."""
        self._check_room(ask.n)
        ask.options = {"speculation": self.spec.speculation, **ask.options}
        if ask.options.get("grammar") is None and not ask.options.get("dry_multiplier"):
            generations = ask.generations(self.llm)
        else:
            # A grammar is compiled for each answer, and for DRY the vocabulary is searched; other answers go on meanwhile.
            generations = await compiling(lambda: ask.generations(self.llm))
            self._check_room(ask.n)
        backlog = self.limits.backlog
        return [Answer(self.llm, self.driver, ask, i, each, backlog) for i, each in enumerate(generations)]

    def _check_room(self, n: int) -> None:
        """Raise Refusal if the queue has no room for ``n`` more answers."""
        if self.driver.failed is not None:
            raise Refusal(str(self.driver.failed), 503, retry_after=60)
        if self.driver.n_answers + n > self.limits.queue + len(self.llm.slots):
            waiting, most = self.driver.n_waiting, self.limits.queue
            problem = f"{waiting} requests wait and this server lets {most} wait (--queue); try later."
            raise Refusal(problem, 503, retry_after=self.seconds_to_wait())

    def seconds_to_wait(self) -> int:
        """A guess of the time until a place in the queue is free."""
        return max(1, min(60, self.driver.n_waiting // max(1, len(self.llm.slots))))

    async def fingerprint(self) -> str:
        """:attr:`engine.LLM.fingerprint`, which a thread computes from the time on when the model is open."""
        if self._fingerprint.done():
            return self._fingerprint.result()
        return await asyncio.shield(asyncio.wrap_future(self._fingerprint))

    def _identify(self) -> None:
        try:
            self.llm.identity(progress=self._go_on)
            self._fingerprint.set_result(self.llm.fingerprint)
        except Exception as error:
            self._fingerprint.set_exception(error)

    def _go_on(self, stage: str, done: int, total: int) -> None:
        """Raise Refusal, which ends the thread, if the model is being closed."""
        if self._closing:
            raise Refusal(f"the model {self.name} is being closed; send the request again later.", 503, retry_after=5)

    def close(self) -> None:
        """End its answers and free its memory."""
        self._closing = True
        self.embedder.close()
        self.driver.close()
        self.llm.close()
