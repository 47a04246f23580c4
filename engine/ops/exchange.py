"""The exchange of rows between a recorded pass of a device and the host, while the pass runs."""

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from engine.arrays import A_contra
from engine.compile.jobs import Job


class Exchange(Protocol[A_contra]):
    """Borders at which a device and the host hand the rows of a pass to each other, in turn.

    The pass of the device is recorded with :meth:`send` and :meth:`receive`.  While it runs, the host waits for rows with
    :meth:`take`, and answers with :meth:`give`.  The rows are always in the same memory, so one border follows another.
    """

    rows: np.ndarray
    """The rows at a border, float32 [rows, width], which the host reads after :meth:`take` and may write until
    :meth:`give`."""

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

    def take(self, border: int) -> None:
        """Wait for rows of the device.  Raises DeviceError if its pass fails."""

    def give(self, border: int) -> None:
        """Hand the rows to the device.  Raises DeviceError if it has waited for too long."""

    def jobs(self) -> list[Job]:
        """The compile jobs of what it uses."""
