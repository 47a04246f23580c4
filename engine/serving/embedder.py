"""Texts of requests that are turned into vectors or scores, read together by one thread per model."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.llm import LLM
from engine.loading import COMPANY
from engine.serving.errors import Refusal

log = logging.getLogger("bitmirror.serving")


class _Text(NamedTuple):
    """A text that waits: its token ids, and where its result goes."""

    ids: list[int]
    result: "Future[np.ndarray]"


class Embedder:
    """Reads the texts of all requests to a model in the order in which they come, as many together as a pass takes.

    A request that is cancelled costs no more than the pass in progress.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        """most: the most requests that wait."""
        self._llm = llm
        self._most = most
        self._n_requests = 0
        self._waiting: deque[_Text] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "embedder")

    async def pooled(self, texts: Sequence[list[int]]) -> np.ndarray:
        """The result of :meth:`engine.LLM.pooled`, in the event loop.  Raises Refusal if too many requests wait already."""
        if self._n_requests >= self._most:
            problem = f"{self._n_requests} requests wait and this server lets {self._most} wait (--queue); try later."
            raise Refusal(problem, 503, retry_after=2)
        self._n_requests += 1
        given = [_Text(ids, Future()) for ids in texts]
        try:
            with self._lock:
                self._waiting.extend(given)
            self._thread.submit(self._run)
            return np.stack(await asyncio.gather(*(asyncio.wrap_future(each.result) for each in given)))
        finally:
            self._n_requests -= 1
            for each in given:
                each.result.cancel()

    def _run(self) -> None:
        """Read all texts that wait."""
        while texts := self._next():
            try:
                for text, vector in zip(texts, self._llm.pooled([text.ids for text in texts]), strict=True):
                    text.result.set_result(vector)
            except Exception as error:
                if not isinstance(error, EngineError):
                    log.exception("texts could not be read")
                self._alone(texts, error)

    def _alone(self, texts: Sequence[_Text], error: Exception) -> None:
        """Read texts one by one, because one of them has made ``error``."""
        for text in texts:
            try:
                if len(texts) == 1:
                    raise error
                text.result.set_result(self._llm.pooled([text.ids])[0])
            except Exception as own:
                text.result.set_exception(own)

    def _next(self) -> list[_Text]:
        """The texts of the next pass."""
        found: list[_Text] = []
        with self._lock:
            while self._waiting and len(found) < COMPANY:
                text = self._waiting.popleft()
                if text.result.set_running_or_notify_cancel():
                    found.append(text)
        return found

    def close(self) -> None:
        """Refuse the texts that wait, and wait for the pass in progress."""
        with self._lock:
            ended, self._waiting = list(self._waiting), deque()
        for text in ended:
            if text.result.set_running_or_notify_cancel():
                problem = f"{self._llm.path.name} is being closed; send the request again later."
                text.result.set_exception(Refusal(problem, 503, retry_after=10))
        self._thread.shutdown()
