"""What threads want of requests, handed over to the rounds of a scheduler."""

from collections.abc import Iterator
from enum import Enum, auto
from queue import SimpleQueue

from engine.decode.request import Request


class Order(Enum):
    """What a thread wants of a request."""

    SUBMIT = auto()
    """Compute it, without being asked for each token."""
    CLOSE = auto()
    """End it: what nobody has fetched is forgotten, and its sequence ends where its reader does."""
    PAUSE = auto()
    """Compute no token of it."""
    PROCEED = auto()
    """Go on after a pause."""


class Orders:
    """The orders that have not been carried out, in the order in which they were given.

    Any thread may give one at any time, also the collector of garbage in the middle of a round: a ``SimpleQueue`` permits
    that.  Only the thread that holds the lock of the model takes them.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Order, Request]] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._queue.empty()

    def give(self, order: Order, request: Request) -> None:
        """Add an order.  Neither waits nor raises an error."""
        self._queue.put((order, request))

    def take(self) -> Iterator[tuple[Order, Request]]:
        """The orders, each of which is removed, until there is none."""
        while not self._queue.empty():
            yield self._queue.get_nowait()
