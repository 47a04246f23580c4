"""engine/cuda/bandwidth.py in the simulator: every word is read once."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.bandwidth import LOADS, STEP, THREADS, read_sum
from engine.cuda.runtime.simulator import run


@pytest.mark.parametrize(("blocks", "steps"), [(1, 1), (2, 2)])
def test_every_word_is_read_once(blocks: int, steps: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, blocks * steps * STEP, dtype=np.uint32)
    sums = np.zeros(blocks * THREADS, np.uint32)
    run(read_sum(), blocks, THREADS, [words, steps, sums])
    # A thread's words: 16 bytes of each of LOADS rows of a step, which are as long as its block is wide.
    owned = words.reshape(blocks, steps, LOADS, THREADS, 4).sum(axis=(1, 2, 4), dtype=np.uint64)
    assert np.array_equal(sums, (owned.reshape(-1) % 2**32).astype(np.uint32))
