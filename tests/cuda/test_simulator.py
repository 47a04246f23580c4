"""Runs the tests of ``tests/cuda/simulated`` in processes where Numba simulates a GPU, beside all other tests."""

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
SIMULATED = REPOSITORY / "tests" / "cuda" / "simulated"
FILES = sorted(path.name for path in SIMULATED.glob("test_*.py"))

Run = Future[subprocess.CompletedProcess[str]]


def run(file: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/cuda/simulated/{file}"],
        cwd=REPOSITORY,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


RUNS: dict[str, Run] = {}
POOL = ThreadPoolExecutor(2)
OTHERS_DONE = Event()


def begin(files: Iterable[str]) -> None:
    """Have these files on their way, one after the other, since on two cores one is left for other tests until they are done."""
    POOL.submit(OTHERS_DONE.wait)
    RUNS.update({file: POOL.submit(run, file) for file in files})


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.parametrize("file", FILES)
def test_in_the_simulator(file: str) -> None:
    OTHERS_DONE.set()
    done = RUNS[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
