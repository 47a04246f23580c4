"""Folders and files whose contents are executed: who can have written them.

A stored kernel runs with the rights of the user who loads it.  So it is loaded only from a folder that nobody else but the
superuser can write to, and only if it belongs to one of the two.  What is written here is for this user only, whatever the
umask.  Systems without user ids, such as Windows, protect the user's folders by other means and are not checked.
"""

import os
import stat
import string
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHECKED = hasattr(os, "getuid")
"""Whether files have owners and modes on this system."""

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""The bits of a mode with which others than the owner can write."""

UNFINISHED = 12
"""Digits of the name of a file that is not finished."""

SECRET_BYTES = 32
"""Bytes of a key."""


def problem(folder: Path) -> str:
    """Why the contents of a folder that exists cannot be trusted, as the end of "a folder that ..."; "" if they can.

    Others must not be able to write to the folder, and must not be able to put another one in its place.  Raises OSError if
    it cannot be examined.
    """
    if not CHECKED:
        return ""
    status = folder.stat()
    if not _is_trusted(status.st_uid):
        return "belongs to another user"
    if status.st_mode & _others(status.st_gid):
        return "others can write to (chmod go-w makes it private)"
    nearest = folder.absolute().parent, folder.resolve().parent
    for parent in (*folder.absolute().parents, *folder.resolve().parents):
        status = parent.stat()
        # Groups may share folders further up, such as a project's; what they put in place of a folder belongs to them.
        writers = _others(status.st_gid) if parent in nearest else stat.S_IWOTH
        # In a folder with the sticky bit, such as /tmp, only the owner of an entry can replace it.
        replaceable = status.st_mode & writers and not status.st_mode & stat.S_ISVTX
        if replaceable or not _is_trusted(status.st_uid) or not _is_trusted(parent.lstat().st_uid):
            return f"others can replace through {parent}"
    return "" if _is_trusted(folder.lstat().st_uid) else "others can replace"


def _others(group: int) -> int:
    """The permissions with which others write to what belongs to a group."""
    return stat.S_IWOTH if _is_private(group) else OTHERS_WRITE


def _is_private(group: int) -> bool:
    """Whether a group is that of this user alone.  Many systems give each user one, and let it write."""
    import grp
    import pwd

    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group != 0 and entry.gr_name == name and {*entry.gr_mem} <= {name}


def _is_trusted(user: int) -> bool:
    return user in (os.getuid(), 0)


def make(folder: Path) -> None:
    """Make a folder, and those that it lies in, for this user only.  Raises OSError."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def read(path: Path) -> bytes | None:
    """The contents of a file; None if there is none, or if it is another user's."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if CHECKED and (not _is_trusted(status.st_uid) or status.st_mode & OTHERS_WRITE):
                return None
            return file.read()
    except OSError:
        return None


def write(path: Path, data: bytes) -> None:
    """Write a file for this user only, atomically, so that a concurrent run never reads half of it.  Raises OSError."""
    make(path.parent)
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file for this user only, which takes the place of ``path`` when the block ends without an error.  Raises
    OSError."""
    unfinished = path.with_name(f".{uuid.uuid4().hex[:UNFINISHED]}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_unfinished(name: str) -> bool:
    """Whether a file has the name of one that :func:`replacing` has not finished."""
    return len(name) == 1 + UNFINISHED and name.startswith(".") and set(name[1:]) <= set(string.hexdigits.lower())


def secret(path: Path) -> bytes:
    """A key of 32 random bytes in a file that only this user can read, which is made when it is first wanted, and again if
    others could have read or changed it.  Raises OSError."""
    return _secret(path) or _new_secret(path)


def _secret(path: Path) -> bytes:
    """The key in a file; empty if there is none, or if others can read it."""
    try:
        status = path.stat()
        private = not CHECKED or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
        found = read(path) if private else None
    except OSError:
        return b""
    return found if found is not None and len(found) == SECRET_BYTES else b""


def _new_secret(path: Path) -> bytes:
    write(path, os.urandom(SECRET_BYTES))
    # Another process may have written one at the same time.
    return path.read_bytes()
