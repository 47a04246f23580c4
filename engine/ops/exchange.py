"""The exchange of rows between a recorded pass of a device and the host, while the pass runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from engine.arrays import A_contra
from engine.compile.jobs import Job


class Host(Protocol):
    """What the recorded passes of the host do for an exchange.  ``waited_seconds``: how long the last pass has waited."""

    waited_seconds: float

    def take(self, words: np.ndarray, i: int, check: Callable[[], None]) -> None:
        """Record that a pass waits until words[i], int64, is not 0.  check: called while it waits for long; it raises an
        error if that will not happen."""

    def give(self, x: np.ndarray, rows: np.ndarray, words: np.ndarray, i: int) -> None:
        """Record that x, float32 [m, width], is copied to ``rows`` [n >= m, width], whose further rows become copies of the
        last one, and that words[i], int64, is then set."""


class Exchange(Protocol[A_contra]):
    """Borders at which a device and the host hand the rows of a pass to each other, in turn.

    The pass of the device is recorded with :meth:`send` and :meth:`receive`, and that of the host, which runs at the same
    time, with :meth:`take` and :meth:`give`.  The rows are always in the same memory, so one border follows another.
    """

    rows: np.ndarray
    """The rows at a border, float32 [rows, width], which the host's pass reads between :meth:`take` and :meth:`give`."""

    def chosen(self, rows: int, n_used: int) -> tuple[np.ndarray, np.ndarray]:
        """The experts of ``rows`` rows that the device has sent with them, int32 [rows, n_used], and their weights, float32
        [rows, n_used]."""

    def send(self, border: int, x: A_contra, chosen: tuple[A_contra, A_contra] | None = None) -> None:
        """Record that the device hands x, float32 [rows, width], to the host.

        chosen: the experts of the rows and their weights, int32 and float32 [rows, n_used], which go with them.
        """

    def receive(self, border: int, x: A_contra) -> None:
        """Record that the device waits for rows of the host, which become x, float32 [rows, width]."""

    def turns(self) -> AbstractContextManager[None]:
        """A context for one pass, entered before it is started.  If the host raises an error in it, the device waits no
        longer, and the pass has ended when the context ends.  Raises DeviceError if the device has waited for too long."""

    def take(self, host: Host, border: int) -> None:
        """Record that the pass of the host waits for rows of the device.  Running the pass raises DeviceError if the device
        fails."""

    def give(self, host: Host, border: int, x: np.ndarray, rows: int) -> None:
        """Record that the host hands x, float32 [m, width], to the device, followed by copies of its last row up to ``rows``
        rows."""

    def jobs(self) -> list[Job]:
        """The compile jobs of what it uses."""
