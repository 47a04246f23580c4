"""Runs the tests of ``tests/cuda/simulated`` in processes where Numba simulates a GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.tiers import Tier

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")

FILES = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/cuda/simulated").glob("test_*.py"))
PARTS = 4
"""The number of processes, which run one after the other in one worker or in parallel in several.  Few, because each needs
seconds to start."""


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.more
@pytest.mark.begin(-1)
@pytest.mark.parametrize("part", [pytest.param(k, marks=pytest.mark.together(f"simulated {k}")) for k in range(PARTS)])
def test_in_the_simulator(part: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *Tier.words(), *FILES[part::PARTS]],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
