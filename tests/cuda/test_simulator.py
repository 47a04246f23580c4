"""Runs the tests of ``tests/cuda/simulated`` in processes where Numba simulates a GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.tiers import Tier, parts, recorded

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")

N_PARTS = 2 if Tier.words() else 1
"""The number of processes, which run one after the other in one worker or in parallel in several.  Few, because each needs
seconds to start."""

USUAL_SECONDS = 2.0
"""CPU seconds of the tests of a file that are not recorded."""


def files() -> list[set[str]]:
    """The files of the tests, in ``N_PARTS`` parts of about equal duration."""
    folder = REPOSITORY / "tests/cuda/simulated"
    costs = {str(path.relative_to(REPOSITORY)): USUAL_SECONDS for path in folder.glob("test_*.py")}
    for name, seconds in recorded().items():
        file = name.partition("::")[0]
        if file in costs and Tier.words():
            costs[file] += seconds
    return parts(costs, N_PARTS)


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.both
@pytest.mark.first
@pytest.mark.begin(-1)
@pytest.mark.parametrize(
    "part", [pytest.param(k, marks=pytest.mark.together(f"simulated {k}")) for k in range(N_PARTS)]
)
def test_in_the_simulator(part: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *Tier.words(), *sorted(files()[part])],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
