"""The lines of a server's log: a message is one line, whatever its values contain."""

import logging

from engine.checks import shown

MOST = 4000
"""Characters of a message, of which the rest is left out."""


class Lines(logging.Formatter):
    """Formats a record with its time and its level.

    Values of a message may be names of files, or come from requests.  Characters that end a line or control a terminal are
    written as escapes, so that no value looks like a line of its own.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line of a record."""
        record.message = shown(record.message, MOST)
        return super().formatMessage(record)
