"""The connections of a server: fewer than the system has descriptors."""

import logging
from collections.abc import Iterator
from typing import Protocol

log = logging.getLogger(__name__)

RESERVE = 64
"""Descriptors that are kept for files, pipes and models."""

LEAST = 8
"""Connections that are accepted even if few descriptors are left."""

USUAL = 1 << 16
"""Connections where the system has no limit of descriptors."""


class Connection(Protocol):
    """What is asked of a connection."""

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""

    def drop(self) -> None:
        """Close the connection at once."""


class Connections:
    """The open connections, those first from which nothing has arrived for the longest time.

    Attributes: ``most``: the most that may be open.  Only the event loop uses it.
    """

    def __init__(self, most: int = 0) -> None:
        """most: 0: as many as the system has descriptors for."""
        self.most = most or most_connections()
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._open)

    def add(self, connection: Connection) -> bool:
        """Take note of a new connection, and close the oldest idle one if there are too many.  Returns False if all others
        are busy: the new one must be refused."""
        self._open[connection] = None
        if len(self._open) <= self.most:
            return True
        oldest = next((each for each in self._open if each.idle and each is not connection), None)
        if oldest is None:
            log.warning("a connection is refused: all %d are busy", self.most)
            return False
        log.warning("an idle connection is closed: there are more than %d", self.most)
        del self._open[oldest]
        oldest.drop()
        return True

    def used(self, connection: Connection) -> None:
        """Take note that something has arrived."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def remove(self, connection: Connection) -> None:
        """Take note that a connection has ended."""
        self._open.pop(connection, None)


def most_connections() -> int:
    """The number of connections that this process has descriptors for, after its limit has been raised as far as it can."""
    try:
        import resource
    except ImportError:  # Windows
        return USUAL
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = USUAL if hard == resource.RLIM_INFINITY else min(hard, USUAL)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass
    if soft == resource.RLIM_INFINITY:
        return USUAL
    return max(LEAST, min(soft, USUAL) - _n_open() - RESERVE)


def _n_open() -> int:
    """The number of descriptors that are open."""
    import psutil

    try:
        return int(psutil.Process().num_fds())
    except (psutil.Error, AttributeError):
        return RESERVE
