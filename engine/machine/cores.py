"""Available cores: the number of threads that compute by default."""

import math
import os
import sys
from pathlib import Path

from engine.machine.memory import CONTROL_GROUP


def available_cores() -> int:
    """The cores that this process may use, within the processor time that its control group may use; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(CONTROL_GROUP)))


def _quota(group: Path) -> int:
    """The cores that a control group's share of processor time keeps busy, rounded up; without a limit, a large number."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period)) if quota != "max" else sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize
