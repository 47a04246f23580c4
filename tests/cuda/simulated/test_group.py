"""Models whose layers simulated GPUs share have the bits of the CPU alone, with owners on one device or on several."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine import loading
from engine.cuda.backend import Backend
from engine.group.backend import DeviceGroup
from engine.ops.operations import Ops
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.cuda.simulated.device import SimulatedDevice, use_simulated
from tests.cuda.simulated.test_stages import facts


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def group(n: int, n_devices: int) -> Ops:
    devices: list[Any] = [SimulatedDevice(i) for i in range(n_devices)]
    owners = [Backend(0, devices[i % n_devices], 16) for i in range(n)]
    for one in owners:
        for other in owners:
            one.reach(other)
    return cast(Ops, DeviceGroup(cast(Any, owners)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes", "n", "n_devices"),
    [
        ("tiny-qwen3", {"n_head": 4, "n_head_kv": 2, "n_layer": 1}, 2, 1),
        ("tiny-qwen3", {"n_head": 4, "n_head_kv": 4, "n_layer": 2}, 4, 2),
        ("tiny-llama", {"n_layer": 2}, 3, 3),
        ("tiny-qwen35", {"n_head": 4, "n_head_kv": 2}, 2, 2),
        ("tiny-qwen35moe", {"n_head": 2, "n_head_kv": 2}, 2, 2),
    ],
)
def test_a_shared_model_has_the_bits_of_the_cpu(
    name: str, sizes: dict[str, Any], n: int, n_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "model.gguf", replace(shapes()[name], **sizes), "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "parallel": 2, "n_threads": 1}
    expected = facts(engine.load(path, device="cpu", **given))
    monkeypatch.setattr(loading, "open_device", lambda *_: group(n, n_devices))
    assert facts(engine.load(path, **given)) == expected
