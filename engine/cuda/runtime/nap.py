"""How long the host sleeps while it waits for the device."""

POLL_SECONDS = 5e-5
"""The time, in seconds, of a short sleep, after which the host looks again."""

SHARE = 0.75
"""The part of the time between two results that is slept at once."""

GROWTH = 1.1
"""The most that a result which comes late lengthens the expected time by: the host may have missed one, or been away."""


class Nap:
    """The expected time of the next of a series of results that come at nearly equal intervals.

    A thread that looks every 50 µs keeps taking the interpreter's lock from other threads, such as those of a server.  So it
    sleeps for most of the interval first.  If that was too long, the expected interval becomes shorter; work that is queued
    keeps the device busy meanwhile.
    """

    def __init__(self) -> None:
        self._seen = self._interval = 0.0

    def seconds(self, now: float) -> float:
        """How long to sleep, in seconds, before looking for the next result; now: the time, in seconds of any clock."""
        return max(POLL_SECONDS, SHARE * self._interval - (now - self._seen))

    def came(self, now: float) -> None:
        """Record that a result that was waited for has come."""
        self._interval = min(now - self._seen, GROWTH * self._interval + POLL_SECONDS)
        self._seen = now
