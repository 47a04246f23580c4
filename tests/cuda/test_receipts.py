"""Receipts and scores of every mixer on a GPU: those of the CPU, and each device verifies those of the other."""

from pathlib import Path

import pytest

from engine.cuda.intrinsics import SIMULATED

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

from engine.devices import open_device
from engine.errors import DeviceError
from tests.receipts.mixers import MIXERS, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mixer", MIXERS)
def test_receipts_verify_on_the_other_device(tmp_path: Path, mixer: str) -> None:
    try:
        open_device("cuda")
    except DeviceError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    compare(tmp_path, mixer)
