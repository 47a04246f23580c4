"""Turns: how threads share one model."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from engine.errors import UsageError
from engine.forks import renew_in_children

S = TypeVar("S", bound="Shared")
P = ParamSpec("P")
R = TypeVar("R")


IN_USE = (
    "this process was forked while another thread used the model, and cannot use it: open it again in this process, or fork "
    "before threads use it."
)
"""What a forked process is told that uses what another thread had when it was forked."""


class Lock:
    """A re-entrant lock that knows whether its thread has entered it more than once.

    In a process that was forked while another thread held it, it is lost: nobody would release it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        #: Why nobody can enter any more.
        self._lost = ""
        renew_in_children(self)

    def lose(self, why: str) -> None:
        """Let nobody enter from now on; why: the message of the UsageError."""
        self._lost = why

    def renew(self) -> None:
        """Lose it if it is held by a thread that does not exist in this process."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.lose(IN_USE)

    def acquire(self, blocking: bool = True) -> bool:
        """Enter, after waiting for other threads if ``blocking``; returns whether it was entered.  Raises UsageError if
        ``blocking`` and it is lost."""
        if self._lost:
            if blocking:
                raise UsageError(self._lost)
            return False
        entered = self._lock.acquire(blocking)
        self._depth += entered
        return entered

    def release(self) -> None:
        """Leave."""
        self._depth -= 1
        self._lock.release()

    @property
    def nested(self) -> bool:
        """Whether the thread that asks, which must have entered, had already entered before."""
        return self._depth > 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Shared(Protocol):
    """An object that threads use one at a time."""

    @property
    def lock(self) -> Lock:
        """Held while a thread uses the object; re-entrant, because its methods call one another."""


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that holds the lock of its object from beginning to end."""

    @wraps(method)
    def locked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked
