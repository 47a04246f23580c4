"""Available memory: the most that a context may take before it is refused."""

import sys
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The control group of this process (a container, a batch job), if there is one."""


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as the system estimates it, within the limit of the control group; at
    least 1."""
    import psutil  # not at the top: it takes 15 ms, and most commands that import this module do not ask

    return min(psutil.virtual_memory().available, _group_limit())


def total_memory() -> int:
    """Bytes of memory that this machine has, or that the control group may use if they are fewer."""
    import psutil

    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no group, or "max"
        limit = sys.maxsize
    return min(psutil.virtual_memory().total, limit)


def _group_limit() -> int:
    """Bytes that the control group still allows."""
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
        # Cached pages of files count as used but are freed when memory is needed.
        lines = (CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(1, int(limit) - used + cached) if limit != "max" else sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize
