"""Functions that are compiled as a part of others are not stored, and what is stored computes the same."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

WRITTEN = """
import numpy as np

from engine.compile import inner
from engine.compile.jobs import noted
from engine.compile.numba_cache import KernelCache
from engine.cpu import sample

saved = []
save = KernelCache.save_overload


def noting(self, signature, data):
    saved.append(self._name.rpartition(".")[2])
    save(self, signature, data)


KernelCache.save_overload = noting
values, ids = np.array([3, 5, 4, 5.5], np.float32), np.arange(4, dtype=np.int32)
"""

COMPILES = """
inner.install()
jobs = {}
with noted(jobs):
    # The second one is a part of the first one, too.
    sample.min_p(values, ids, 4, np.float32(-1), values.copy(), ids.copy())
    sample.argmax(values, 4)
for job in jobs:
    job.compile()
print([job.name for job in jobs], [job.kept() for job in jobs])
"""

RUNS = """
out = values.copy(), ids.copy()
n = sample.min_p(values, ids, 4, np.float32(-1), *out)
print(n, out[1][:n].tolist(), sample.argmax(values, 4), saved)
"""


def run(code: str, cache: Path) -> str:
    environment = os.environ | {"BITMIRROR_CACHE": str(cache)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", WRITTEN + code], capture_output=True, text=True, cwd=REPOSITORY, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_what_was_asked_for_is_stored(tmp_path: Path) -> None:
    """``min_p`` calls ``argmax``, and that ``_block_max``."""
    assert run(COMPILES, tmp_path) == "['min_p', 'argmax'] [True, True]"
    stored = {path.name.partition("-")[0].rpartition(".")[2] for path in tmp_path.glob("kernels/cpu-*/*")}
    assert stored == {"min_p", "argmax"}
    assert run(RUNS, tmp_path) == "2 [1, 3] 3 []"
