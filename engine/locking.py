"""Turns: how threads share one model."""

import threading
from collections.abc import Callable, Generator
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

S = TypeVar("S", bound="Shared")
P = ParamSpec("P")
R = TypeVar("R")


class Shared(Protocol):
    """An object that threads use one at a time."""

    @property
    def lock(self) -> "threading.RLock":
        """Held while a thread uses the object; re-entrant, because its methods call one another."""


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that holds the lock of its object from beginning to end."""

    @wraps(method)
    def locked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


def step_in_turn(
    method: Callable[Concatenate[S, P], Generator[R, None, None]],
) -> Callable[Concatenate[S, P], Generator[R, None, None]]:
    """A generator method that holds the lock of its object during each step, and not while it is suspended.

    The garbage collector may close the generator in any thread, even in one that holds other locks, so closing must not
    wait: the ``finally`` of ``method`` runs without the lock unless the thread that closes the generator holds it.
    """

    @wraps(method)
    def stepwise(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        items = method(self, *args, **kwargs)
        try:
            while True:
                with self.lock:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            items.close()

    return stepwise
