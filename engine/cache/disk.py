"""A folder of values: records in files of their own, which are kept up to a number of bytes.

Each file is a record (``engine/machine/records.py``), and its name is that of the record.  The files that were used least
recently are removed first.  A file that is damaged is removed when it is read; one that was written with another key is left
alone and not used, and one that the system cannot read is tried again.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UsageError
from engine.forks import renew_in_children
from engine.machine import records, trust

SUFFIX = ".value"

KEY_FILE = "key"
"""The file with the key of the MACs."""

LOCK_FILE = "lock"
"""The file that the process which uses the folder has locked."""


class ValueFolder:
    """Values in a folder, by name.  Threads may share it, but no other process can use it meanwhile, not even one that was
    forked from this one."""

    def __init__(self, folder: Path, limit: int) -> None:
        """limit: the most bytes of all files together.  Raises UsageError if the folder cannot be used."""
        self.limit = limit
        #: The bytes of all files.
        self.n_bytes = 0
        self._folder = folder
        self._lock = threading.Lock()
        #: The bytes of each file, the least recently used first.
        self._sizes: dict[bytes, int] = {}
        #: Files that were written with another key.
        self._foreign: set[bytes] = set()
        try:
            trust.make(folder)
            if problem := trust.problem(folder):
                raise UsageError(f"{_shown(folder)}, the folder for the cache on disk, is one that {problem}.")
            self._locked = _locked(folder)
            try:
                self._key = trust.secret(folder / KEY_FILE)
                self._scan()
            except BaseException:
                self._locked.close()
                raise
        except OSError as error:
            problem = f"the cache on disk cannot be stored in {_shown(folder)}: {error.strerror or error}"
            raise UsageError(f"{problem}; give another folder (cache_disk_path=...).") from None
        renew_in_children(self)

    def renew(self) -> None:
        """In a process that was forked: the folder belongs to the other process, whose lock this one must not keep."""
        self._locked.close()
        self._lock, self._sizes = threading.Lock(), {}
        self.n_bytes = self.limit = 0

    def _scan(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(ValueError):
                        name = bytes.fromhex(entry.name.removesuffix(SUFFIX))
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, name, status.st_size))
                elif trust.is_unfinished(entry.name):
                    Path(entry.path).unlink(missing_ok=True)
        self._sizes = {name: n_bytes for _, name, n_bytes in sorted(found)}
        self.n_bytes = sum(self._sizes.values())
        self._shrink()

    def __contains__(self, name: object) -> bool:
        """Whether there is a file for a name, which may be damaged."""
        return name in self._sizes and name not in self._foreign

    def __len__(self) -> int:
        """The number of files."""
        return len(self._sizes)

    def size(self, name: bytes) -> int:
        """The bytes of a file; 0 if there is none."""
        return self._sizes.get(name, 0)

    def fits(self, n_bytes: int) -> bool:
        """Whether a value of so many bytes is stored at all."""
        return records.HEAD + n_bytes <= self.limit

    def write(self, name: bytes, value: np.ndarray) -> None:
        """Store a value that :meth:`fits`, and remove those that were used least recently if there are too many.  Raises
        OSError."""
        n_bytes = records.HEAD + value.nbytes
        if n_bytes > self.limit:
            return
        with trust.replacing(self._path(name)) as file:
            records.write(file, name, value, self._key)
        with self._lock:
            self._foreign.discard(name)
            self.n_bytes += n_bytes - self._sizes.pop(name, 0)
            self._sizes[name] = n_bytes
            self._shrink()

    def read(self, names: Sequence[bytes]) -> Iterator[np.ndarray | None]:
        """The values of names, uint8 [n] each, in their order; None for one that is not there, is damaged, was written with
        another key, or cannot be read now."""
        places = [records.RecordPlace(self._path(name), 0, name) for name in names]
        n_bytes = sum(map(self.size, names)) // max(1, len(names))
        for name, record in zip(names, records.read_all(places, self._key, n_bytes), strict=True):
            contents = None
            if isinstance(record, records.ReadRecord):
                if record.ours:
                    self._use(name)
                    contents = record.contents
                else:
                    self._foreign.add(name)
            elif record is records.Unread.DAMAGED:
                self._remove(name)
            yield contents

    def _use(self, name: bytes) -> None:
        with self._lock:
            if (n_bytes := self._sizes.pop(name, None)) is not None:
                self._sizes[name] = n_bytes
        with contextlib.suppress(OSError):  # after a restart, it counts as older
            os.utime(self._path(name))

    def _remove(self, name: bytes) -> None:
        with self._lock:
            self._drop(name)

    def _shrink(self) -> None:
        while self.n_bytes > self.limit and self._sizes:
            self._drop(next(iter(self._sizes)))

    def _drop(self, name: bytes) -> None:
        self.n_bytes -= self._sizes.pop(name, 0)
        self._foreign.discard(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{SUFFIX}"


class _Folders:
    """The folders that this process uses."""

    def __init__(self) -> None:
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """In a process that was forked: none, and no thread is opening one."""
        #: By their real paths, since a folder may have several names.
        self.open: weakref.WeakValueDictionary[str, ValueFolder] = weakref.WeakValueDictionary()
        self.lock = threading.Lock()


_folders = _Folders()


def open_folder(folder: Path, limit: int) -> ValueFolder:
    """The values in a folder, which models of this process share; the limit is that of the latest one.  Raises UsageError if
    the folder cannot be used."""
    folder = folder.expanduser().absolute()
    name = os.path.realpath(folder)
    with _folders.lock:
        found = _folders.open.get(name)
        if found is None:
            found = _folders.open[name] = ValueFolder(folder, limit)
        found.limit = limit
        return found


def _locked(folder: Path) -> Any:
    """An open file that keeps other processes from using a folder.  Raises UsageError if one does, and OSError."""
    file = open(os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600), "rb")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except BlockingIOError:
        file.close()
        problem = f"another process uses the cache on disk in {_shown(folder)}"
        raise UsageError(f"{problem}: end it, or give another folder (cache_disk_path=...).") from None
    except OSError:  # a file system without locks
        file.close()
        raise
    return file


def _shown(folder: Path) -> str:
    """A path in a message: any terminal can show it, and it is not too long."""
    return str(folder)[:200].encode(errors="replace").decode()
