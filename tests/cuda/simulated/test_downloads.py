"""Copies of arrays of a simulated GPU, and of the CPU, to host memory that nobody waits for."""

import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.devices import open_device
from tests import downloads
from tests.cuda.simulated.device import use_simulated


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_that_nobody_waits_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    downloads.check(open_device(device, 1))
