"""Where compiled kernels lie between runs.

A folder is named after a hash of every definition that kernels are made of (``engine/compile/sources.py``) and of the
compilers' versions, so that a changed engine never runs a kernel of an older one.  Machine code of CPU kernels has a folder
of its own, because it also depends on Python; that of GPU kernels serves every machine with the same sources and compilers.

Where the folder cannot be written, kernels are kept in a private folder among the system's temporary files; where that cannot
be either, they are compiled again by the next run.
"""

import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import uuid
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from engine.errors import FetchError

Part = Literal["cpu", "gpu"]
"""Whose kernels."""

COMPILERS: dict[Part, tuple[str, ...]] = {
    "cpu": ("numba", "llvmlite", "numpy"),
    "gpu": ("numba", "llvmlite", "numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink"),
}
"""Distributions that turn sources into machine code; those for GPUs are not everywhere."""

KEPT = 4
"""Folders of other versions that stay, newest first, for each part."""

MEMOS = 64
"""Hashes of sources that are remembered."""

log = logging.getLogger("bitmirror")


# --- which version ---------------------------------------------------------------------------------------------


def fingerprint(part: Part) -> str:
    """16 hexadecimal digits that change with the definitions that kernels are made of and with their compilers; those of
    CPU kernels also change with Python."""
    digest = hashlib.sha256(_definitions(part).encode())
    if part == "cpu":
        digest.update(sys.version.encode())
    for name in COMPILERS[part]:
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()[:16]


def _definitions(part: Part) -> str:
    """The digest of the definitions of kernels.  To find them takes a third of a second, so it is remembered for these very
    bytes of the sources."""
    files, exact = _sources()
    memo = f"{part}-{exact}"
    parents = _parents()
    for parent in parents:
        try:
            known = (parent / "sources" / memo).read_text()
        except OSError:
            continue
        if len(known) == 64:
            return known
    from engine.compile.sources import Sources

    found = Sources({name: data.decode() for name, data in files.items()}).digest(part)
    for parent in parents:
        try:
            _put(parent / "sources" / memo, found.encode())
        except OSError:
            continue
        _prune(parent / "sources", "", MEMOS)
        break
    return found


@cache
def _sources() -> tuple[dict[str, bytes], str]:
    """The files of this package by module, a package as its ``__init__``, and a hash of them."""
    root = Path(__file__).parent
    while (root.parent / "__init__.py").exists():
        root = root.parent
    files = {}
    exact = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name, data = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)), path.read_bytes()
        files[name] = data
        exact.update(f"{name} {len(data)}\n".encode() + data)
    return files, exact.hexdigest()[:32]


# --- which folder ----------------------------------------------------------------------------------------------


def _parents() -> list[Path]:
    """The folders that may hold folders of versions, in the order in which they are tried."""
    found = []
    chosen = os.environ.get("NUMBA_CACHE_DIR", "")
    try:
        if not chosen:
            from engine.hub.catalog import cache_dir

            found.append(cache_dir() / "kernels")
        else:
            found.append(Path(chosen))
    except FetchError:
        pass  # no home directory
    try:
        found.append(_temporary())
    except OSError:
        pass
    return found


def _temporary() -> Path:
    """A folder among the temporary files that nobody else can write to: what lies there is run."""
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir()) / f"bitmirror-{user if user is not None else 'kernels'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (user is not None and (status.st_uid != user or status.st_mode & 0o077)):
        raise PermissionError(f"{folder} belongs to someone else")
    return folder / "kernels"


@dataclass
class Places:
    """Where kernels of one part are read, and the first that can be written; None where none can."""

    read: list[Path]
    write: Path | None


@cache
def places(part: Part) -> Places:
    """Where kernels of this version lie, from NUMBA_CACHE_DIR, if the user has set it, or the user's folder for caches on."""
    name = f"{part}-{fingerprint(part)}"
    found = Places([], None)
    for parent in _parents():
        folder = parent / name
        found.read.append(folder)
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                _prune(parent, f"{part}-", KEPT + 1)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            found.write = folder
            break
    if found.write is None:
        log.warning("compiled kernels are not kept: no folder for them can be written; set BITMIRROR_CACHE to one.")
    return found


def _prune(parent: Path, prefix: str, kept: int) -> None:
    """Remove all but the newest entries whose names begin with ``prefix``."""
    try:
        entries = [(path.stat().st_mtime, path) for path in parent.iterdir() if path.name.startswith(prefix)]
        for _, path in sorted(entries, reverse=True)[kept:]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
    except OSError:
        return  # another run may do the same


# --- one kernel ------------------------------------------------------------------------------------------------


def read(part: Part, name: str) -> bytes | None:
    """What ``write`` has kept under this name; None where there is nothing, or where it is damaged."""
    for folder in places(part).read:
        try:
            data = (folder / name).read_bytes()
        except OSError:
            continue
        if zlib.crc32(data[4:]).to_bytes(4, "little") == data[:4]:
            return data[4:]
    return None


def has(part: Part, name: str) -> bool:
    """Whether there is something under this name."""
    return any((folder / name).exists() for folder in places(part).read)


def write(part: Part, name: str, data: bytes) -> None:
    """Keep a kernel for later runs.  A full disk costs them their time, not this one its answer."""
    found = places(part)
    if found.write is None:
        return
    try:
        _put(found.write / name, zlib.crc32(data).to_bytes(4, "little") + data)
    except OSError as error:
        log.warning(f"compiled kernels are not kept in {found.write}: {error.strerror or error}.")
        found.write = None


def _put(path: Path, data: bytes) -> None:
    """All or nothing, so that a run beside this one never reads half a kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not a file of tempfile's, which other users could not read: a folder may be made by one and used by another.
    unfinished = path.with_name(f".{uuid.uuid4().hex[:12]}")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
