"""The team: the threads of this process that compute passes on the CPU.

There is one team per process, which runs one pass at a time.  The thread that runs a pass takes part in it.  It returns to
Python every few milliseconds, so that Ctrl-C works.  After a pass, the other threads wait for the next one in compiled code
for a short time and then block on a lock, so an idle team uses no core.
"""

import atexit
import os
import threading

import numpy as np
from numba import types

from engine.compile.jobs import CPUJob
from engine.cpu.runtime import walk
from engine.cpu.runtime.program import Program
from engine.errors import DeviceError

BUDGET = 4096
"""The number of tiles after which the thread that runs a pass checks for signals.  A long wait counts as several tiles."""

STOP_SECONDS = 1.0
"""The time, in seconds, that the exiting process waits for a pass, and for each thread."""

MOST_THREADS = 256
"""The maximum number of threads of a team."""


class Team:
    """Threads that compute the tiles of a pass together.  They are started when a pass needs them for the first time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._words = np.zeros(walk.PARKED + 8 * MOST_THREADS, np.int64)
        # The system allocates memory only for pages that are used.
        self._left, self._undone = (np.zeros(walk.MOST_OPERATIONS + 1, np.int64) for _ in range(2))
        self._timeout = np.array([0, 1_000_000], np.int64)  # 1 ms: a thread that runs a pass must see signals
        self._woken = np.zeros(MOST_THREADS, np.int64)
        self._order = 0
        #: The number and the program of the pass that has begun and not ended.  Threads may use the memory of the program.
        self._open: tuple[int, Program] | None = None
        self._locks: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def run(self, program: Program, n_threads: int) -> None:
        """Execute a program with ``n_threads`` threads, including the calling one.  Raises DeviceError if a kernel fails."""
        with self._turn:
            self._close()  # a second interrupt may have left a pass open
            while len(self._threads) < n_threads - 1:
                self._hire()
            self._order = self._order % (2**31 - 1) + 1
            n, k = len(program.operations), 0
            number = self._order << 32 | n_threads << walk.OPERATION_BITS | n
            shared, table = (self._words, self._left, self._undone, number), program.table.ctypes.data
            self._open = number, program
            self._words[walk.WAITED] = 0
            try:
                walk.begin(*shared, table, program.left, program.undone, self._woken[:n_threads])
                self._wake()
                while k < n:
                    k = walk.walk(*shared, k, BUDGET, self._timeout)
                    if k < n and program.check is not None:
                        program.check()
                program.waited_ns = int(self._words[walk.WAITED])
            finally:
                if k == n:
                    self._open = None
                self._close()
            if self._words[walk.FAILED] == self._order:
                raise DeviceError(
                    "a computation on the CPU failed; memory may be full: choose a smaller context (n_ctx=...)."
                )

    def _close(self) -> None:
        """End the open pass, if there is one, without computing its remaining tiles."""
        self._wake()
        if self._open is not None:
            walk.drain(self._words, self._left, self._undone, self._open[0], self._timeout)
            self._open = None

    def _wake(self) -> None:
        """Wake the threads that were parked when the pass began."""
        for i in np.flatnonzero(self._woken):
            # Release first: if an interrupt occurs in between, a thread is woken twice, which is harmless, and never left
            # asleep.
            if self._locks[i - 1].locked():
                self._locks[i - 1].release()
            self._woken[i] = 0

    def _hire(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        me = len(self._threads) + 1
        self._words[walk.PARKED + 8 * me] = 1
        thread = threading.Thread(target=self._work, args=(me, lock), name=f"bitmirror-{me}", daemon=True)
        self._locks.append(lock)
        self._threads.append(thread)
        thread.start()

    def _work(self, me: int, lock: threading.Lock) -> None:
        number = 0
        while True:
            lock.acquire()
            if self._stopping:
                return
            number = walk.serve(self._words, self._left, self._undone, me, number, self._timeout)

    def stop(self) -> None:
        """End the threads.  They are started again if another pass is run."""
        if not self._turn.acquire(timeout=STOP_SECONDS):
            return  # another thread is in a long pass; the process exits anyway
        try:
            self._stopping = True
            for thread, lock in zip(self._threads, self._locks, strict=True):
                # If it is still in compiled code, it returns to its lock within milliseconds.
                if lock.locked():
                    lock.release()
                thread.join(STOP_SECONDS)
            self._locks, self._threads = [], []
            self._stopping = False
        finally:
            self._turn.release()


def team_jobs() -> list[CPUJob]:
    """A compile job for each compiled function of ``walk`` that the team calls."""
    words, number = types.Array(types.int64, 1, "C"), types.int64
    shared = words, words, words, number
    signatures = {
        "begin": (*shared, number, words, words, words),
        "walk": (*shared, number, number, words),
        "drain": (*shared, words),
        "serve": (words, words, words, number, number, words),
    }
    return [CPUJob(walk.__name__, name, signature) for name, signature in signatures.items()]


_team = Team()


def team() -> Team:
    """The team of this process."""
    return _team


def _after_fork() -> None:
    # The child process has none of the threads.
    global _team
    _team = Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _team.stop())
