"""A watchdog: it names in the log what has held the event loop, in which every connection waits meanwhile."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType

log = logging.getLogger("bitmirror.serving")

LATE_SECONDS = 0.2
"""Seconds without an answer after which the event loop counts as held."""

PAUSE_SECONDS = 0.3
"""Seconds between two questions to the event loop."""

PACKAGE = __name__.partition(".")[0]


class Watchdog:
    """Asks the event loop now and then whether it runs.  If it does not answer, a line of the log names the function that it
    is in; another one says for how long it was held, if that was more than a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called in the thread of the event loop."""
        self._loop = loop
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_SECONDS):
            answered = threading.Event()
            begun = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the event loop is closed
                return
            if answered.wait(LATE_SECONDS):
                continue
            place = _place(sys._current_frames().get(self._watched))
            if place:  # else it is about to answer
                log.warning("the event loop has been held for %g s: %s", LATE_SECONDS, place)
            while not answered.wait(PAUSE_SECONDS) and not self._ended.is_set():
                pass
            seconds = time.monotonic() - begun
            if place and seconds > 1:
                log.warning("the event loop was held for %.1f s: %s", seconds, place)


def _place(frame: FrameType | None) -> str:
    """The innermost function of this package, and the innermost function at all; "" if the event loop waits for events."""
    if frame is None or frame.f_code.co_name == "select":
        return ""
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if f"/{PACKAGE}/" in entry.filename.replace("\\", "/")]
    shown = (f"{entry.name} ({_short(entry.filename)}:{entry.lineno})" for entry in (*ours[-1:], stack[-1]))
    return " > ".join(dict.fromkeys(shown))


def _short(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])
