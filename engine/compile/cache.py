"""The folders in which compiled kernels are stored between runs.

A folder is named after a hash of every definition that kernels depend on (``engine/compile/sources.py``) and of the
compilers' versions, so that a changed engine never runs an outdated kernel.  Machine code of CPU kernels has its own folder,
because it also depends on Python; that of GPU kernels works on every machine with the same sources and compilers.

If the folder is not writable, or others can write to it, kernels are stored in a private folder among the system's temporary
files.  If that cannot be used either, the next run compiles them again.
"""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from engine.errors import FetchError
from engine.machine import trust

Part = Literal["cpu", "gpu"]
"""Whose kernels."""

COMPILERS: dict[Part, tuple[str, ...]] = {
    "cpu": ("numba", "llvmlite", "numpy"),
    "gpu": ("numba", "llvmlite", "numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink"),
}
"""Distributions that compile sources to machine code; those for GPUs may not be installed."""

FORM = 3
"""A number that changes when files that earlier versions of ``engine/compile/numba_cache.py`` wrote must not be loaded.  1:
symbols of different functions could be equal; 2: they could be after a fork."""

KEPT = 4
"""The number of folders of other versions that are kept for each part, newest first."""

MEMOS = 64
"""The number of remembered hashes of sources."""

log = logging.getLogger("bitmirror.compile")


# --- which version ---------------------------------------------------------------------------------------------


def fingerprint(part: Part) -> str:
    """16 hexadecimal digits that depend on the definitions that kernels use and on the compilers; for CPU kernels also on
    Python."""
    digest = hashlib.sha256(_definitions(part).encode())
    if part == "cpu":
        digest.update(f"{FORM} {sys.version}".encode())
    for name in COMPILERS[part]:
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()[:16]


def _definitions(part: Part) -> str:
    """The digest of the definitions of kernels.  Finding them takes a third of a second, so the digest is stored together
    with a hash of the sources."""
    files, exact = _sources()
    memo = f"{part}-{exact}"
    parents = _parents()
    for parent in parents:
        known = trust.read(parent / "sources" / memo) or b""
        if len(known) == 64:
            return known.decode("ascii", "replace")
    from engine.compile.sources import Sources

    found = Sources({name: data.decode() for name, data in files.items()}).digest(part)
    for parent in parents:
        try:
            trust.write(parent / "sources" / memo, found.encode())
        except OSError:
            continue
        _prune(parent / "sources", "", MEMOS)
        break
    return found


@cache
def _sources() -> tuple[dict[str, bytes], str]:
    """The files of this package by module name (a package by its ``__init__``), and a hash of all of them."""
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


@cache
def _parents() -> list[Path]:
    """The folders that may contain folders of versions, in the order in which they are tried."""
    found: list[Path] = []
    chosen = os.environ.get("NUMBA_CACHE_DIR", "")
    try:
        if not chosen:
            from engine.hub.catalog import cache_dir

            found.append(cache_dir() / "kernels")
        else:
            found.append(Path(chosen))
    except FetchError:
        pass  # no home directory
    user = os.getuid() if trust.CHECKED else "kernels"
    found.append(Path(tempfile.gettempdir()) / f"bitmirror-{user}" / "kernels")
    return [folder for folder in found if _usable(folder)]


def _variable() -> str:
    """The environment variable that determines the first folder."""
    return "NUMBA_CACHE_DIR" if os.environ.get("NUMBA_CACHE_DIR") else "BITMIRROR_CACHE"


def _usable(folder: Path) -> bool:
    """Whether kernels may be loaded from a folder, which is made if it does not exist."""
    try:
        trust.make(folder)
        problem = trust.problem(folder)
    except OSError:
        return False
    if problem:
        log.warning(
            f"compiled kernels are neither loaded from nor kept in {folder}, a folder that {problem}; set {_variable()} "
            "to a folder of your own."
        )
    return not problem


@dataclass
class Places:
    """The folders from which kernels of one part are read, and the first that is writable (None if none is)."""

    read: list[Path]
    write: Path | None


@cache
def places(part: Part) -> Places:
    """The folders of kernels of this version; NUMBA_CACHE_DIR comes first if the user has set it, then the user's cache
    folder."""
    name = f"{part}-{fingerprint(part)}"
    found = Places([], None)
    for parent in _parents():
        folder = parent / name
        is_new = not folder.is_dir()
        if not _usable(folder):
            continue
        if is_new:
            _prune(parent, f"{part}-", KEPT + 1)
        found.read.append(folder)
        if os.access(folder, os.W_OK):
            found.write = folder
            break
    if found.write is None:
        log.warning(
            f"compiled kernels are not kept: no folder for them is writable; set {_variable()} to a writable one."
        )
    return found


def choose_again() -> None:
    """Forget which folders are used, after a change of the environment."""
    _parents.cache_clear()
    places.cache_clear()


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
        return  # another run may be removing the same entries


# --- one kernel ------------------------------------------------------------------------------------------------


def read(part: Part, name: str) -> bytes | None:
    """The data that ``write`` has stored under this name; None if there is none or it is damaged."""
    for folder in places(part).read:
        data = trust.read(folder / name)
        if data is not None and zlib.crc32(data[4:]).to_bytes(4, "little") == data[:4]:
            return data[4:]
    return None


def has(part: Part, name: str) -> bool:
    """Whether data is stored under this name."""
    return any((folder / name).exists() for folder in places(part).read)


def write(part: Part, name: str, data: bytes) -> None:
    """Store a kernel for later runs.  On a full disk it only warns: later runs compile again, and this one continues."""
    found = places(part)
    if found.write is None:
        return
    try:
        trust.write(found.write / name, zlib.crc32(data).to_bytes(4, "little") + data)
    except OSError as error:
        log.warning(f"compiled kernels are not kept in {found.write}: {error.strerror or error}.")
        found.write = None
