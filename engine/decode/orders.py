"""Orders of other threads: a queue that is emptied when a round begins."""

from collections.abc import Iterator
from enum import Enum, auto
from queue import SimpleQueue

from engine.decode.request import Request


class Order(Enum):
    """A change of a request that a thread asks for."""

    SUBMIT = auto()
    """Schedule it without a call of ``next`` for each token."""
    CLOSE = auto()
    """End it: tokens that were not fetched are dropped, and its sequence is truncated to those that were."""
    PAUSE = auto()
    """Do not schedule it."""
    PROCEED = auto()
    """Schedule it again."""


class Orders:
    """Orders that have not been carried out, oldest first.

    Any thread may add one at any time, including the garbage collector in the middle of a round: a ``SimpleQueue`` is
    reentrant.  Only the thread that holds the lock of the model takes them.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Order, Request]] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._queue.empty()

    def give(self, order: Order, request: Request) -> None:
        """Add an order.  Neither waits nor raises an error."""
        self._queue.put((order, request))

    def take(self) -> Iterator[tuple[Order, Request]]:
        """Remove and yield orders until there is none."""
        while not self._queue.empty():
            yield self._queue.get_nowait()
