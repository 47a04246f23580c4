"""Threads that read parts of files into buffers, and hand each part to a function.

Reading through a descriptor copies the system's pages into a buffer that is used again and again.  Reading a mapping would
map each page first, which takes longer than the copy, and only one thread at a time can do much of it.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from engine.errors import GGUFError, ModelError
from engine.gguf.pages import MappedFile, file_of

PIECE = 4 << 20
"""The size of a buffer in bytes, if no piece needs more."""

INTERVAL = 0.05
"""Seconds between two reports of progress."""

SWITCH = 0.0005
"""Seconds for which one thread may run Python code while readers wait to do so.  With the 0.005 of the interpreter, a reader
may wait for longer than it reads a piece, after each of its calls that release the interpreter's lock."""


class PieceBuffer(Protocol):
    """Memory that a piece is read into: ``data``, uint8 [n]."""

    data: np.ndarray


B = TypeVar("B", bound=PieceBuffer)


class PieceBuffers(Protocol[B]):
    """Buffers that are used in turn, by several threads."""

    def take(self, n_bytes: int) -> B:
        """A buffer of at least ``n_bytes`` bytes that nothing reads any more.  Raises DeviceError or MemoryError."""

    def give(self, buffer: B) -> None:
        """Put a buffer back."""

    def wait(self) -> None:
        """Wait until nothing reads any of the buffers.  Raises DeviceError if what has read them has failed."""

    def close(self) -> None:
        """Free the buffers, as soon as nothing reads them."""


@dataclass
class HostBuffer:
    """An array in host memory."""

    data: np.ndarray


class HostBuffers:
    """Buffers in host memory, as many as are in use at once."""

    def __init__(self) -> None:
        self._free: deque[HostBuffer] = deque()

    def take(self, n_bytes: int) -> HostBuffer:
        try:
            buffer = self._free.pop()  # the one that was used last, which may be in a core's cache
        except IndexError:
            buffer = HostBuffer(np.empty(0, np.uint8))
        if buffer.data.size < n_bytes:
            buffer.data = np.empty(max(PIECE, n_bytes), np.uint8)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        self._free.append(buffer)

    def wait(self) -> None:
        """Return: nothing reads a buffer that was put back."""

    def close(self) -> None:
        self._free.clear()


@dataclass(frozen=True)
class FilePiece(Generic[B]):
    """A part of a file: ``runs`` are the bytes to be read, one after another, as contiguous arrays of bytes, usually views of
    a mapped file; ``use(buffer, n)`` is called when they are the first ``n`` bytes of a buffer, by the thread that has read
    them.  It must not take long to wait for other threads."""

    runs: Sequence[np.ndarray]
    use: Callable[[B, int], None]

    @property
    def n_bytes(self) -> int:
        """The number of bytes to be read."""
        return sum(run.nbytes for run in self.runs)


class _Switching:
    """The switch interval of the interpreter: ``SWITCH`` as long as there is a reader with threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._before = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._readers == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH, self._before))
            self._readers += 1

    def end(self) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                sys.setswitchinterval(self._before)


_SWITCHING = _Switching()


class Reader(Generic[B]):
    """Reads pieces with up to ``n_threads`` threads, which begin as soon as there are pieces.

    ``added``, ``done``: bytes of all pieces so far, and of those that were read and used.  A reader is used for one loading:
    after :meth:`finish` or :meth:`stop` no thread is left, and the buffers are freed.
    """

    def __init__(self, n_threads: int, buffers: PieceBuffers[B]) -> None:
        self.added = self.done = 0
        self._n_threads = n_threads
        self._buffers = buffers
        #: Pieces that no thread has taken, and the number of all.
        self._pieces: deque[FilePiece[B]] = deque()
        self._count = 0
        self._threads: list[threading.Thread] = []
        self._hurries = False
        #: Guards all fields; notified when there are pieces, when all are done, and at the end.
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def add(self, pieces: Iterable[FilePiece[B]]) -> None:
        """Read pieces, in any order, while the caller continues.  Raises the error of a piece before them."""
        given = list(pieces)
        with self._changed:
            failed = self._error is not None
            if not failed:
                self._count += len(given)
                self.added += sum(piece.n_bytes for piece in given)
                self._pieces += given
                self._changed.notify_all()
        if failed:
            self.finish()
        if not self._hurries:
            self._hurries = True
            _SWITCHING.begin()
        while len(self._threads) < min(self._n_threads, self._count):
            thread = threading.Thread(target=self._work, name="reader", daemon=True)
            self._threads.append(thread)  # first, in case Ctrl-C is pressed while it starts
            try:
                thread.start()
            except RuntimeError:
                self._threads.pop()
                if not self._threads:
                    raise ModelError(
                        "the system allows no thread that reads the model; close other programs."
                    ) from None
                break  # with fewer threads

    def finish(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until all pieces are read and used, calling ``progress(done, added)`` meanwhile.  Raises the first error of a
        piece: GGUFError if its file cannot be read."""
        try:
            while not self._is_done():
                if progress is not None:
                    progress(self.done, self.added)
            if self._error is None:
                self._buffers.wait()
        finally:
            self.stop()
        if self._error is not None:
            raise self._error

    def _is_done(self) -> bool:
        """Whether all pieces are done or one has failed, after waiting for it for ``INTERVAL`` seconds."""
        with self._changed:
            # With a time limit, so that Ctrl-C ends the wait on every system.
            return self._changed.wait_for(lambda: self.done == self.added or self._error is not None, INTERVAL)

    def stop(self) -> None:
        """End the threads after the pieces that they are reading, and free the buffers; further pieces are not read."""
        with self._changed:
            self._ended = True
            self._pieces.clear()
            self._changed.notify_all()
        for thread in self._threads:
            with contextlib.suppress(RuntimeError):  # it is only starting, and ends at once
                thread.join()
        self._threads.clear()
        if self._hurries:
            self._hurries = False
            _SWITCHING.end()
        self._buffers.close()

    def _work(self) -> None:
        try:
            while (piece := self._next()) is not None:
                n_bytes = piece.n_bytes
                buffer = self._buffers.take(n_bytes)
                try:
                    read_runs(piece.runs, buffer.data)
                    piece.use(buffer, n_bytes)
                finally:
                    self._buffers.give(buffer)
                with self._changed:
                    self.done += n_bytes
                    if self.done == self.added:
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._ended = True
                self._pieces.clear()
                self._changed.notify_all()

    def _next(self) -> FilePiece[B] | None:
        """The next piece, as soon as there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._ended)
            return self._pieces.popleft() if self._pieces else None


def read_runs(runs: Iterable[np.ndarray], target: np.ndarray) -> None:
    """Copy contiguous arrays of bytes to ``target``, uint8 [n], one after another: those of mapped files from their files.
    Raises GGUFError if a file cannot be read."""
    at = 0
    for run in runs:
        into, at = target[at : at + run.nbytes], at + run.nbytes
        found = file_of(run) if hasattr(os, "preadv") else None
        if found is None:
            into[:] = run.reshape(-1)
        else:
            _read(*found, into)


def _read(file: MappedFile, start: int, into: np.ndarray) -> None:
    """Fill an array with the bytes of a file from byte ``start`` on."""
    rest = into.data
    try:
        if hasattr(os, "posix_fadvise"):
            # The whole piece at once: on its own, the system reads ahead less than that.
            os.posix_fadvise(file.descriptor, start, len(rest), os.POSIX_FADV_WILLNEED)
        while rest:
            n = os.preadv(file.descriptor, [rest], start)
            if not n:
                raise GGUFError(
                    file.path, "file", start, "it ends here: it was cut off while it was read, fetch it again"
                )
            rest, start = rest[n:], start + n
    except OSError as error:
        raise GGUFError(file.path, "file", start, f"it cannot be read ({error.strerror}): check the disk") from None
