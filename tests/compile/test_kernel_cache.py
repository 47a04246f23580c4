"""Compiled kernels of one version of the sources are never used by another."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from engine.compile import cache as kernel_cache


def test_the_fingerprint_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "a.py").write_text("1")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "compile" / "cache.py"))
    first = kernel_cache.fingerprint()
    assert first == kernel_cache.fingerprint()
    (tmp_path / "cpu" / "backend.py").write_text("calls kernels and has none")
    assert kernel_cache.fingerprint() == first
    (tmp_path / "cpu" / "a.py").write_text("2")
    second = kernel_cache.fingerprint()
    assert second != first
    (tmp_path / "cpu" / "a.py").rename(tmp_path / "cpu" / "b.py")
    assert kernel_cache.fingerprint() != second


@pytest.mark.parametrize("name", ["numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"])
def test_the_fingerprint_follows_the_compilers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(changed: str, absent: str = "") -> Callable[[str], str]:
        def version(asked: str) -> str:
            if asked == absent:
                raise PackageNotFoundError(asked)
            return "2" if asked == changed else "1"

        return version

    seen = set()
    for version in (versions(""), versions(name), versions("", absent=name)):
        monkeypatch.setattr(kernel_cache, "version", version)
        seen.add(kernel_cache.fingerprint())
    assert len(seen) == 3


def test_files_without_kernels_are_named_as_they_are() -> None:
    root = Path(kernel_cache.__file__).parent.parent
    for name in kernel_cache.NO_KERNELS:
        text = (root / name).read_text(encoding="utf-8")
        assert "@cuda.jit" not in text and "@kernel" not in text and "@intrinsic" not in text


def test_old_folders_are_removed(tmp_path: Path) -> None:
    folders = [tmp_path / f"v{i}" for i in range(7)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (i, i))
    kernel_cache._prune(folders[0])
    assert {f.name for f in tmp_path.iterdir()} == {"v0", "v3", "v4", "v5", "v6"}


def used(variables: dict[str, str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("BITMIRROR_CACHE", "NUMBA_CACHE_DIR")} | variables
    code = "import os; from engine import kernel_cache as k; k.use(); k.use(); print(os.environ.get('NUMBA_CACHE_DIR'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_where_kernels_lie(tmp_path: Path) -> None:
    name = kernel_cache.fingerprint()
    assert used({"BITMIRROR_CACHE": str(tmp_path)}) == str(tmp_path / "kernels" / name)
    assert used({"NUMBA_CACHE_DIR": str(tmp_path / "own")}) == str(tmp_path / "own" / name)
    assert used({"BITMIRROR_CACHE": "/proc/nowhere"}) == "None"
