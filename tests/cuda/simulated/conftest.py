"""Tests of this folder run in Numba's CUDA simulator, which must be selected before Numba is imported: they run in a process
of their own (``tests/cuda/test_simulator.py``), or by hand with ``NUMBA_ENABLE_CUDASIM=1 pytest tests/cuda/simulated``."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    collect_ignore_glob = ["test_*.py"]
    if any(Path(argument.split("::")[0]).resolve().is_relative_to(HERE) for argument in sys.argv[1:]):
        raise pytest.UsageError("set NUMBA_ENABLE_CUDASIM=1 to run the tests of tests/cuda/simulated")
