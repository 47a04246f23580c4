"""Runs the tests of ``tests/simulated`` in a process where Numba simulates a GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
SIMULATED = REPOSITORY / "tests" / "simulated"


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.parametrize("file", sorted(path.name for path in SIMULATED.glob("test_*.py")))
def test_in_the_simulator(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/simulated/{file}"],
        cwd=REPOSITORY,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
