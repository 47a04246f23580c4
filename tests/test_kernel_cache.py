"""Compiled kernels of one version of the sources are never used by another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import kernel_cache


def test_the_fingerprint_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "a.py").write_text("1")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    first = kernel_cache.fingerprint()
    assert first == kernel_cache.fingerprint()
    (tmp_path / "cpu" / "a.py").write_text("2")
    assert kernel_cache.fingerprint() != first


def test_old_folders_are_removed(tmp_path: Path) -> None:
    folders = [tmp_path / f"v{i}" for i in range(7)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (i, i))
    kernel_cache._prune(folders[0])
    assert {f.name for f in tmp_path.iterdir()} == {"v0", "v3", "v4", "v5", "v6"}


@pytest.mark.parametrize("variables", [{"BITMIRROR_CACHE": "/proc/nowhere"}, {"NUMBA_CACHE_DIR": "chosen"}])
def test_the_users_choice_and_unwritable_places(variables: dict[str, str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("BITMIRROR_CACHE", "NUMBA_CACHE_DIR")} | variables
    code = "import os; from engine import kernel_cache as k; k.use(); print(os.environ.get('NUMBA_CACHE_DIR'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == variables.get("NUMBA_CACHE_DIR", "None")
