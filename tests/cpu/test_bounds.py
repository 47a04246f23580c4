"""Kernels read and write only elements that exist.  Compiled code does not check that: it would read what follows an array.

Memory that LLVM code addresses itself, such as the records of quantized weights, is not checked here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TESTS = {
    "alternating updates": "tests/cpu/test_altup.py -k 'float64 or columns'",
    "attention": "tests/cpu/test_attention.py::test_against_float64",
    "compressed": "tests/cpu/test_compressed.py::test_attention_against_float64",
    "experts": "tests/cpu/test_experts.py -k 'join or group or scales'",
    "kda": "tests/cpu/test_kda.py -k 'heads or law or repeated'",
    "latents": "tests/cpu/test_latent_attention.py -k chosen",
    "mamba": "tests/cpu/test_mamba.py -k 'blocks or law or repeated'",
    "operations": "tests/cpu/test_operations.py",
    "quantized": "tests/cpu/test_quantized_cache.py::test_pages_that_are_used_again_while_drafts_are_verified",
    "recurrence": "tests/cpu/test_delta_net.py -k 'channels or gated'",
    "short convolution": "tests/cpu/test_short_conv.py -k 'blocks or law or repeated'",
}
"""Tests of sizes that are not multiples of anything."""

RUN = """
import shlex, sys
import numpy as np, pytest
from numba import njit

@njit
def beyond(x):
    return x[x.size]

with pytest.raises(IndexError):
    beyond(np.zeros(3))
sys.exit(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *shlex.split(sys.argv[1])]))
"""


@pytest.mark.parametrize("name", TESTS)
def test_no_element_outside_an_array_is_used(name: str, tmp_path: Path) -> None:
    """The kernels are compiled again, with a check of every index."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN, TESTS[name]]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
