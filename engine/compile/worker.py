"""A process that compiles: it is told of jobs one by one on its standard input, and says so when one is kept.

It ends when its input does, in the middle of a job as well, so none outlives the run that it works for.
"""

import os
import pickle
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from engine.compile.worker import main; main()"
)
"""What Python is started with; the first thing that it reads is where packages are imported from."""


def main() -> None:
    """Compile until there is no more."""
    jobs: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()
    done = sys.stdout.buffer
    import logging

    logging.disable()  # what is worth saying is said by the run itself
    while True:
        try:
            pickle.loads(jobs.get()).compile()
        except Exception:
            pass  # the run, which finds nothing, compiles it itself and says what is wrong
        done.write(b".")
        done.flush()


def _listen(source: BinaryIO, jobs: "SimpleQueue[Any]") -> None:
    try:
        while True:
            jobs.put(pickle.load(source))
    except BaseException:
        os._exit(0)
