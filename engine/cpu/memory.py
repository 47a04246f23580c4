"""Available memory: the most that a context may take before it is refused."""

import os
import sys


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as the system estimates it; 0 if it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return min(int(line.split()[1]) * 1024, _group_limit())
    except OSError:
        pass
    if sys.platform == "win32":
        return _windows_available()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _group_limit() -> int:
    """Bytes that the control group of this process (a container, a batch job) still allows."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:
            # Cached pages of files count as used but are freed when memory is needed.
            cached = sum(int(line.split()[1]) for line in file if line.startswith("inactive_file "))
        return max(1, int(limit) - used + cached) if limit != "max" else sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize


def _windows_available() -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong) for name in ("total", "available", "a", "b", "c", "d", "e")
        ]

    status = MemoryStatus()
    status.length = ctypes.sizeof(status)
    getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # noqa: B009
    return int(status.available)
