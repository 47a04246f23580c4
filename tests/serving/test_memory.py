"""The memory of the process of a server."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
if sys.argv[1] == "one":
    from engine.serving.memory import one_arena
    one_arena()
barrier = threading.Barrier(8)
def allocate():
    barrier.wait()
    kept = [bytearray(100_000) for _ in range(20)]
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sizes = []
for line in open("/proc/self/maps"):
    first, end = (int(x, 16) for x in line.split()[0].split("-"))
    sizes.append(end - first if line.split()[1] == "---p" else 0)
print(sum(size > 32 << 20 for size in sizes))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lists what a process has mapped")
def test_all_threads_allocate_from_the_same_memory() -> None:
    """An arena of glibc reserves 64 MiB for a thread; a server has none but the first."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}

    def reserved(how: str, **more: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True).stdout)

    if reserved("usual") == 0:
        pytest.skip("the C library is not glibc")
    assert reserved("one") == 0
    assert reserved("one", MALLOC_ARENA_MAX="4") > 0
