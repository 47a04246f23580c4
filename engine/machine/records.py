"""Records: bytes in files that are checked when they are read.

A record is a head of 112 bytes and its contents.  The head has

- 8 bytes: ``BMVALUE1``;
- 32 bytes: the name of the record, a hash of what its contents are;
- 8 bytes: the number of bytes of the contents, little-endian;
- 32 bytes: the SHA-256 of the contents;
- 32 bytes: the MAC of all that precedes it, BLAKE2b with a secret key.

The hash finds damage.  The MAC tells whether the record was written with the same key (:func:`engine.machine.trust.secret`):
contents with another one may be anything that somebody made up, with a hash that agrees.
"""

import enum
import hashlib
import hmac
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from engine.machine.cores import available_cores

MAGIC = b"BMVALUE1"
NAME = 32
"""Bytes of a name."""

HEAD = len(MAGIC) + NAME + 8 + 32 + 32
"""Bytes of the head of a record."""

MOST_READERS = 8
"""The most threads that read and hash records."""

TASK = 1 << 20
"""Bytes that a thread reads in a row."""

AHEAD = 6
"""The number of tasks for each thread that are read ahead, of small records: who uses them takes many at once."""


class Damaged(Exception):
    """A record that is not there, is cut off, or has other contents than when it was written."""


class Unread(enum.Enum):
    """Why the contents of a record are not known: it is damaged (:class:`Damaged`), or the system could not read it, which
    says nothing about the file: there may be too many open files, or no permission."""

    DAMAGED = 0
    UNREADABLE = 1


class RecordPlace(NamedTuple):
    """Where a record is: the file, and the position of its head in bytes; and its name."""

    path: Path
    offset: int
    name: bytes


class ReadRecord(NamedTuple):
    """The contents of a record, uint8 [n], and whether it has the MAC of the key with which it was read."""

    contents: np.ndarray
    ours: bool


def name_of(*parts: bytes) -> bytes:
    """The name of a record: a hash of what identifies it."""
    found = hashlib.blake2b(digest_size=NAME, person=b"record")
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def write(file: IO[bytes], name: bytes, contents: np.ndarray, key: bytes) -> int:
    """Write a record whose contents are a contiguous array; returns its bytes.  Raises OSError."""
    data = contents.reshape(-1).view(np.uint8).data
    head = MAGIC + name + data.nbytes.to_bytes(8, "little") + hashlib.sha256(data).digest()
    file.write(head + _mac(head, key))
    file.write(data)
    return HEAD + data.nbytes


def read(place: RecordPlace, key: bytes) -> ReadRecord:
    """Read a record.  Raises Damaged, and OSError if the system cannot read a file that is there."""
    try:
        with open(place.path, "rb", buffering=0) as file:
            file.seek(place.offset)
            head = file.read(HEAD)
            signed = head[: -len(_mac(b"", key))]
            n_bytes = int.from_bytes(head[len(MAGIC) + NAME : len(MAGIC) + NAME + 8], "little")
            left = os.fstat(file.fileno()).st_size - place.offset - HEAD
            if len(head) < HEAD or not head.startswith(MAGIC + place.name) or n_bytes > left:
                raise Damaged
            contents = np.empty(n_bytes, np.uint8)
            at = 0
            while at < n_bytes:
                count = file.readinto(contents[at:].data)
                if not count:
                    raise Damaged
                at += count
    except FileNotFoundError as error:
        raise Damaged from error
    if hashlib.sha256(contents.data).digest() != signed[-32:]:
        raise Damaged
    return ReadRecord(contents, hmac.compare_digest(_mac(signed, key), head[len(signed) :]))


def read_all(places: Sequence[RecordPlace], key: bytes, n_bytes: int = 0) -> Iterator[ReadRecord | Unread]:
    """Read records with several threads, in their order, or why one cannot be read.  Some are read ahead.

    n_bytes: about how many bytes a record has; 0: many.
    """
    # To hand a task to a thread takes as long as reading a small record, so it reads several in a row.
    each = max(1, TASK // n_bytes) if n_bytes else 1
    tasks = iter([places[first : first + each] for first in range(0, len(places), each)])
    n_threads = min(MOST_READERS, available_cores(), max(1, -(-len(places) // each)))
    ahead = n_threads * (AHEAD if each > 1 else 2)
    with ThreadPoolExecutor(n_threads, "records") as threads:
        coming: deque[Future[list[ReadRecord | Unread]]] = deque()
        try:
            while True:
                while len(coming) < ahead and (task := next(tasks, None)) is not None:
                    coming.append(threads.submit(_read_task, task, key))
                if not coming:
                    return
                yield from coming.popleft().result()
        finally:
            for waiting in coming:
                waiting.cancel()


def _read_task(places: Sequence[RecordPlace], key: bytes) -> list[ReadRecord | Unread]:
    """Read records, or find out why one cannot be read."""
    found: list[ReadRecord | Unread] = []
    for place in places:
        try:
            found.append(read(place, key))
        except Damaged:
            found.append(Unread.DAMAGED)
        except OSError:
            found.append(Unread.UNREADABLE)
    return found


def _mac(head: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(head, key=key, digest_size=32).digest()
