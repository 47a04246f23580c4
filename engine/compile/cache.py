"""Where compiled kernels lie between runs.

Numba's own cache notices a change of the file a kernel is written in, but not of the files it takes functions from.
The folder used here is named after a hash of every source that kernels are made of and of the compiler's version, so
that a changed engine never runs a kernel of an older one.
"""

import hashlib
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.errors import FetchError

SOURCES = ("numerics.py", "limits.py", "gguf/quants.py", "cache/types.py", "cpu/*.py", "cuda/**/*.py")
"""Where kernels and the functions and constants in them are written."""

NO_KERNELS = frozenset(
    (
        "cpu/backend.py",
        "cpu/memory.py",
        "cuda/backend.py",
        "cuda/runtime/device.py",
        "cuda/runtime/ptx.py",
        "cuda/runtime/simulator.py",
    )
)
"""Files among them whose changes change no kernel: what they choose for one is part of its name."""

COMPILERS = ("numba", "llvmlite", "numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink")
"""Distributions that turn sources into machine code; those for GPUs are not everywhere."""

KEPT = 4
"""Folders of other versions that stay, newest first."""


def fingerprint() -> str:
    """16 hexadecimal digits that change with the sources of the kernels, with their compilers and with Python."""
    digest = hashlib.sha256(sys.version.encode())
    for name in COMPILERS:
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            continue
    root = Path(__file__).parent.parent
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if name not in NO_KERNELS:
                digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def use() -> None:
    """Point Numba at the folder of this version, inside NUMBA_CACHE_DIR if the user has set it."""
    from engine.hub.catalog import cache_dir

    try:
        name = fingerprint()
        chosen = os.environ.get("NUMBA_CACHE_DIR", "")
        parent = Path(chosen) if chosen else cache_dir() / "kernels"
        folder = parent if parent.name == name else parent / name
        if not folder.is_dir():
            folder.mkdir(parents=True)
            if not chosen:
                _prune(folder)
    except (OSError, FetchError):
        # No home directory, or one that cannot be written: kernels then lie where Numba itself finds a place.
        return
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(folder)


def _prune(current: Path) -> None:
    """Remove all but the newest few folders of other versions."""
    others = [path for path in current.parent.iterdir() if path.is_dir() and path != current]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
