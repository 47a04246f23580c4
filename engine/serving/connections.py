"""The open connections of a server, fewer than the system has descriptors for."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from heapq import nsmallest
from typing import NamedTuple, Protocol

try:
    import resource
except ImportError:  # not a system with limits of this kind
    resource = None  # type: ignore[assignment]

MOST = 4096
"""Connections at the same time, if the system does not permit fewer: each takes some kilobytes."""

RESERVE = 48
"""Descriptors that connections leave for files, models and other processes."""

REQUEST, BODY, UNREAD = range(3)
"""What a connection waits for: a request, the rest of a body, or that its client reads."""

AT_ONCE = 16
"""When no more connections fit, one in this many is closed, so that they are seldom searched."""

log = logging.getLogger("bitmirror.serving")


class Wait(NamedTuple):
    """For what a connection waits, and since when, of ``time.monotonic``: those with the least value are closed first."""

    kind: int
    since: float


class Connection(Protocol):
    """What is known of a connection."""

    @property
    def waits(self) -> Wait | None:
        """What it waits for; None if its client waits for the server."""

    def drop(self) -> None:
        """Close it, whatever has not been sent."""


class Connections:
    """The open connections of a server.

    The system gives each the lowest free descriptor, so a high one says that nearly all are in use, by whatever.  Then the
    connections that have waited longest for their clients are closed, those that wait for a request first.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: set[Connection] = set()

    def add(self, connection: Connection, descriptor: int) -> None:
        """A client has connected.  Closes other connections if no more fit, or this one if all others are in use."""
        self._open.add(connection)
        if len(self._open) <= self._most and descriptor < highest_descriptor():
            return
        waiting = nsmallest(max(1, len(self._open) // AT_ONCE), self._waiting(), key=lambda found: found[0])
        log.warning(
            "%d connections are open and no more fit (ulimit -n): the %d that waited longest for their clients are closed",
            len(self._open),
            len(waiting),
        )
        for _, each in waiting:
            each.drop()

    def remove(self, connection: Connection) -> None:
        """A connection has ended."""
        self._open.discard(connection)

    def drop(self) -> None:
        """Close the connections that wait for their clients."""
        for _, each in list(self._waiting()):
            each.drop()

    def _waiting(self) -> Iterable[tuple[Wait, Connection]]:
        return ((wait, each) for each in self._open if (wait := each.waits) is not None)


def raise_limit() -> None:
    """Raise this process's limit of descriptors, as far as it may, to what all connections need."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def highest_descriptor() -> float:
    """The descriptor from which on a connection is one too many."""
    if resource is None:
        return float("inf")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft - min(RESERVE, soft // 4)
