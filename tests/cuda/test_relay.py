"""Models whose layers are on two GPUs: the bits of one GPU, through peer access and through pinned memory."""

from pathlib import Path
from typing import Any

import pytest

from engine.cuda.intrinsics import SIMULATED

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.driver import list_devices
from engine.errors import DeviceError
from tests.cuda.test_stages import stored
from tests.models.test_mixed_passes import KINDS, files
from tests.models.test_stages import N_SEQUENCES, facts
from tests.tiers import together

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    """Skips without two GPUs."""
    try:
        n = len(list_devices())
    except DeviceError as error:
        pytest.skip(str(error))
    if n < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", together("relayed", KINDS))
def test_two_gpus_have_the_bits_of_one(
    name: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(Device, "access", lambda self, other: other is self)
    given = files(name, tmp_path) | {"parallel": N_SEQUENCES, "device": "cuda:0"}
    one = engine.load(**given)
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    expected, ids = list(facts(one, stored)), one.complete(list(range(5, 35)), **options).ids
    llm = engine.load(**given | {"device": "cuda:0,cuda:1"})
    relay: Any = llm.model.relay
    # Two GPUs without peer access have the slots in pinned memory.
    assert relay is not None and (direct or not any(way.is_direct for way in relay.borders))
    assert list(facts(llm, stored)) == expected
    assert llm.complete(list(range(5, 35)), **options).ids == ids
