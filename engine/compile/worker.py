"""A worker process that compiles: it reads jobs one by one from standard input and writes a byte after each.

It ends when its input ends, even in the middle of a job, so it never outlives the main process.
"""

import os
import pickle
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "import bitmirror; from engine.compile.worker import main; main()"
)
"""The program of the worker; it first reads the folders that packages are imported from.  The package ``bitmirror`` finds
this ``engine`` even if the current folder has an ``engine.py``."""


def main() -> None:
    """Compile jobs until the input ends."""
    jobs: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()
    done = sys.stdout.buffer
    import gc
    import logging

    from engine.compile import inner

    logging.disable()  # the main process logs what matters
    inner.install()
    # A compiler makes many objects and few cycles: searches for them would take a tenth of the time.
    gc.freeze()
    gc.set_threshold(50_000)
    while True:
        try:
            pickle.loads(jobs.get()).compile()
        except Exception:
            pass  # the main process finds no result, compiles the kernel itself and reports the error
        done.write(b".")
        done.flush()


def _listen(source: BinaryIO, jobs: "SimpleQueue[Any]") -> None:
    try:
        while True:
            jobs.put(pickle.load(source))
    except BaseException:
        os._exit(0)
