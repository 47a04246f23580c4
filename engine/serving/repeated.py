"""A filter of the log: a message that is repeated is a line a second, not thousands."""

import logging
import time
from collections.abc import Hashable

SECONDS = 1.0
"""The least time between two lines of the same message."""

KEPT = 256
"""Messages that are remembered."""


class Repeated(logging.Filter):
    """Lets a message pass once in ``SECONDS``, and counts in the next line how often it was left out.

    Messages are the same if they come from the same logger and have the same text before values are filled in, and if their
    tracebacks end with the same type of error at the same place.  ``exempt``: loggers whose lines are all different.
    """

    def __init__(self, *exempt: str) -> None:
        super().__init__()
        self._exempt = exempt
        #: By message: when it passed, and how often it has been left out since.
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.name in self._exempt:
            return True
        key, now = (record.name, str(record.msg)[:200], _place(record)), time.monotonic()
        latest, left_out = self._seen.pop(key, (-SECONDS, 0))
        if now - latest < SECONDS:
            self._seen[key] = latest, left_out + 1
            return False
        self._seen[key] = now, 0
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this)", None
        return True


def _place(record: logging.LogRecord) -> Hashable:
    """The type of the error of a record, and where it was raised; None if it has none."""
    kind, _, trace = record.exc_info if isinstance(record.exc_info, tuple) else (None, None, None)
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return kind, trace.tb_frame.f_code.co_filename, trace.tb_lineno
