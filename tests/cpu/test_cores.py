"""The number of threads that compute by default."""

import os
from pathlib import Path

import pytest

from engine.machine import cores


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 2), ("max 100000", 8), ("nonsense", 8), (None, 8)],
)
def test_a_control_group_limits_the_cores(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with half a core gets one thread, whatever the number of cores of the machine."""
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(cores, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert cores.available_cores() == expected
