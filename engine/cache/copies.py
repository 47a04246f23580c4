"""Copies from a device to host memory that the host need not wait for."""

from typing import Protocol


class Copies(Protocol):
    """Copies that have been started."""

    def wait(self) -> None:
        """Wait until all are made; at once if they are.  Raises DeviceError if the device has failed."""
