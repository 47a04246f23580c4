"""The team: the threads of this process that compute passes on the CPU.

There is one team per process, and passes take turns.  The thread that runs a pass takes part in it, and returns to Python
every few milliseconds, so that Ctrl-C works.  The others wait for the next pass in compiled code for a moment, and then at a
lock: they use no core while there is nothing to do.
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
"""Tiles after which the thread that runs a pass looks for signals; a long wait counts as several tiles."""

STOP_SECONDS = 1.0
"""How long the end of the process waits for a pass and for each thread."""

MOST_THREADS = 256
"""The most threads of a team."""


class Team:
    """Threads that compute the tiles of a pass together.  They are started when a pass first needs them."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._words = np.zeros(walk.PARKED + 8 * MOST_THREADS, np.int64)
        # Pages that are not used take no memory.
        self._left, self._undone = (np.zeros(walk.MOST_OPERATIONS + 1, np.int64) for _ in range(2))
        self._timeout = np.array([0, 1_000_000], np.int64)  # 1 ms: a thread that runs a pass must see signals
        self._woken = np.zeros(MOST_THREADS, np.int64)
        self._order = 0
        #: The pass that has begun and not ended, and its program, whose memory threads may use.
        self._open: tuple[int, Program] | None = None
        self._locks: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def run(self, program: Program, n_threads: int) -> None:
        """Compute all operations of a program with ``n_threads`` threads, including this one.  Raises DeviceError if a kernel
        fails."""
        with self._turn:
            self._close()  # a pass that a second interrupt has left open
            while len(self._threads) < n_threads - 1:
                self._hire()
            self._order = self._order % (2**31 - 1) + 1
            n, k = len(program), 0
            number = self._order << 32 | n_threads << walk.OPERATION_BITS | n
            shared, table = (self._words, self._left, self._undone, number), program.table.ctypes.data
            self._open = number, program
            try:
                walk.begin(*shared, table, program.left, program.undone, self._woken[:n_threads])
                self._wake()
                while k < n:
                    k = walk.walk(*shared, k, BUDGET, self._timeout)
            finally:
                if k == n:
                    self._open = None
                self._close()
            if self._words[walk.FAILED] == self._order:
                raise DeviceError(
                    "a computation on the CPU failed; memory may be full: choose a smaller context (n_ctx=...)."
                )

    def _close(self) -> None:
        """End the open pass, if there is one, before all of its tiles are computed."""
        self._wake()
        if self._open is not None:
            walk.drain(self._words, self._left, self._undone, self._open[0], self._timeout)
            self._open = None

    def _wake(self) -> None:
        """Wake the threads that were parked when the pass began."""
        for i in np.flatnonzero(self._woken):
            # In this order, an interrupt in between wakes a thread twice, which does no harm, and never leaves one asleep.
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
            return  # another thread is in the middle of a long pass; the process ends all the same
        try:
            self._stopping = True
            for thread, lock in zip(self._threads, self._locks, strict=True):
                # It may be about to park: then it returns to its lock within milliseconds.
                if lock.locked():
                    lock.release()
                thread.join(STOP_SECONDS)
            self._locks, self._threads = [], []
            self._stopping = False
        finally:
            self._turn.release()


def team_jobs() -> list[CPUJob]:
    """A compile job for each function that runs passes."""
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
    # The child has none of the threads.
    global _team
    _team = Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _team.stop())
