"""Available memory is what the system says, or less if the control group allows less."""

import sys
from pathlib import Path

import psutil
import pytest

from engine.machine import memory

MB = 10**6


def control_group(folder: Path, limit: str, used: int = 0, cached: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {cached}\ninactive_anon 9\n")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="the system's estimate is read from /proc")
def test_available_memory_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path / "missing")
    lines = Path("/proc/meminfo").read_text().splitlines()
    [estimate] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    # Other processes allocate and free memory between the two calls.
    assert abs(memory.available_memory() - estimate) < psutil.virtual_memory().total // 8


def test_a_control_group_limits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONTROL_GROUP", control_group(tmp_path, str(50 * MB), used=40 * MB, cached=3 * MB))
    assert (memory.available_memory(), memory.total_memory()) == (13 * MB, 50 * MB)
    control_group(tmp_path, str(50 * MB), used=60 * MB)
    assert memory.available_memory() == 1


@pytest.mark.parametrize("limit", ["max", str(1 << 60), "nonsense"])
def test_a_control_group_without_a_limit(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CONTROL_GROUP", control_group(tmp_path, limit, used=40 * MB))
    assert 50 * MB < memory.available_memory() <= memory.total_memory() == psutil.virtual_memory().total
