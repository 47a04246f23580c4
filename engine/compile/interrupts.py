"""Ctrl-C while machine code is loaded."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """A context in which Ctrl-C has no effect; it is handled at the end.

    LLVM calls back into Python while it loads machine code. An exception there, also KeyboardInterrupt, is printed and
    dropped, and LLVM then reads the result that is missing.
    """
    # Python handles signals in the main thread only. A shell makes a background job ignore the signal.
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(signal.SIGINT, pressed[0])
