"""Runs the tests of ``tests/simulated`` in processes where Numba simulates a GPU, two at a time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Run]]:
    """All files that this run of pytest wants, on their way: a simulation keeps one core busy."""
    items: list[Any] = request.session.items
    mine = test_in_the_simulator.__name__
    wanted = [item.callspec.params["file"] for item in items if getattr(item, "originalname", "") == mine]
    with ThreadPoolExecutor(2) as pool:
        yield {file: pool.submit(run, file) for file in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="already in the simulator")
@pytest.mark.parametrize("file", FILES)
def test_in_the_simulator(runs: dict[str, Run], file: str) -> None:
    done = runs[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
