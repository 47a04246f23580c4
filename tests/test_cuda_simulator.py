"""Runs the tests of ``tests/simulated`` in processes where Numba simulates a GPU, beside all other tests."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from threading import Thread

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
SIMULATED = REPOSITORY / "tests" / "simulated"
FILES = sorted(path.name for path in SIMULATED.glob("test_*.py"))

Run = Future[subprocess.CompletedProcess[str]]


def run(file: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/simulated/{file}"],
        cwd=REPOSITORY,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


RUNS: dict[str, Run] = {}
QUEUE: deque[str] = deque()


def work() -> None:
    """Run one file after the other until there is none left."""
    with suppress(IndexError):
        while file := QUEUE.popleft():
            try:
                RUNS[file].set_result(run(file))
            except OSError as error:
                RUNS[file].set_exception(error)


def begin(files: Iterable[str]) -> None:
    """Have these files on their way, one after the other: on two cores, one is left for all other tests."""
    RUNS.update({file: Future() for file in files})
    QUEUE.extend(RUNS)
    Thread(target=work).start()


@cache
def help_out() -> None:
    """All other tests have been run, so there is a core for a second one."""
    Thread(target=work).start()


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.parametrize("file", FILES)
def test_in_the_simulator(file: str) -> None:
    help_out()
    done = RUNS[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
