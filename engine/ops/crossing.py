"""How arrays go from one device to another while both have work in their queues."""

from collections.abc import Sequence
from typing import Protocol

from engine.arrays import A_contra


class Crossing(Protocol[A_contra]):
    """The way of arrays from a source to a target, two backends of the same kind, which may be the same one.

    The host waits for neither: what is started on the target after :meth:`receive` begins when the arrays are there, and what
    is started on the source after :meth:`send` may change them.
    """

    def send(self, arrays: Sequence[A_contra]) -> int:
        """Copy contiguous arrays of the source after everything that was started there; returns a ticket for
        :meth:`receive`.  At most ``SLOTS`` tickets may be valid at a time."""

    def receive(self, ticket: int, arrays: Sequence[A_contra]) -> None:
        """Copy what was sent to arrays of the target with as many bytes, after everything that was started there.  The ticket
        is no longer valid."""

    def forget(self, ticket: int) -> None:
        """Give a ticket back whose arrays nobody wants."""


SLOTS = 4
"""The most tickets that are valid at a time: of a pass over a prompt and of a decode pass, and two more, so that the source
need not wait until the target has received what was sent before."""
