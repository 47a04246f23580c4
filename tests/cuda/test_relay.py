"""Models whose layers are on two GPUs, or on two queues of one: they have the bits of one GPU, also without peer access."""

from pathlib import Path
from typing import Any

import pytest

from engine.cuda.intrinsics import SIMULATED

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine import loading
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.driver import list_devices
from tests.cuda.test_group import open_device
from tests.cuda.test_stages import stored
from tests.models.test_mixed_passes import KINDS, files
from tests.models.test_stages import N_SEQUENCES, facts
from tests.tiers import together

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", together("relayed", KINDS))
def test_two_queues_have_the_bits_of_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU, with the layers cut as they would be on two; nothing but events orders the work of both."""
    monkeypatch.setattr(loading, "open_device", open_device)
    compare(name, tmp_path)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", together("relayed by two", KINDS))
def test_two_gpus_have_the_bits_of_one(
    name: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(list_devices()) < 2:
        pytest.skip("needs two GPUs")
    if not direct:
        monkeypatch.setattr(Device, "access", lambda self, other: other is self)
    relay = compare(name, tmp_path)
    # Two GPUs without peer access have the slots in pinned memory.
    assert direct or not any(way.is_direct for way in relay.borders)


def compare(name: str, folder: Path) -> Any:
    """The relay of a model whose layers are on two devices, which has the bits of the model on one; that one stays loaded."""
    given = files(name, folder) | {"parallel": N_SEQUENCES, "device": "cuda:0"}
    one = engine.load(**given)
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    expected, ids = list(facts(one, stored)), one.complete(list(range(5, 35)), **options).ids
    llm = engine.load(**given | {"device": "cuda:0,cuda:1"})
    assert llm.model.relay is not None
    assert list(facts(llm, stored)) == expected
    assert llm.complete(list(range(5, 35)), **options).ids == ids
    return llm.model.relay
