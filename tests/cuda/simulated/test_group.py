"""Models whose layers simulated GPUs share have the bits of the CPU alone, with owners on one device or on several."""

import gc
import weakref
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine import loading
from engine.cuda import sample
from engine.cuda.backend import Backend
from engine.cuda.runtime import gathering
from engine.decode.group_operations import graph_operations
from engine.errors import DeviceError
from engine.group.backend import DeviceGroup
from engine.group.values import Divided
from engine.models.config import DFLASH
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig
from engine.shares import even_cut
from engine.speculative import passes
from engine.synthetic.dflash import DFlashShape
from engine.synthetic.model import make_model
from engine.synthetic.shape import Gemma4Shape, Shape
from engine.synthetic.shapes import shapes
from tests.cuda.simulated.device import SimulatedDevice, WaitingDevice, use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.cuda.simulated.test_stages import PROMPT, facts

SHAPE = Shape("qwen3", 1, 64, 2, 2, 32, 64, 289, 64, 1e4, 1e-6)

GEMMA4 = Shape("gemma4", 2, 64, 2, 2, 32, 64, 289, 64, 1e4, 1e-6, window=4, gemma4=Gemma4Shape(2, 32, 2, k_is_v=True))

SMALL = {"n_embd": 128, "n_head": 4, "n_head_kv": 4, "head_dim": 32, "n_ff": 128}
"""Sizes that four owners divide."""

DRAFTED: dict[str, tuple[Shape, Shape | None]] = {
    "none": (SHAPE, None),
    "a model": (SHAPE, SHAPE),
    "a layer": (replace(SHAPES["qwen35moe"], n_head_kv=2, delta_net=DeltaNetConfig(2, 4, 32, 4)), None),
    "an assistant": (
        GEMMA4,
        replace(GEMMA4, architecture="gemma4-assistant", gemma4=Gemma4Shape(2, 32, 2, n_shared=2, n_embd_out=64)),
    ),
    "blocks": (SHAPE, DFlashShape(DFLASH, 1, 64, 2, 2, 32, 64, 289, 64, 1e4, 1e-6, tied=False, taps=(0,), rank=32)),
}
"""A model that two GPUs share, and the model that drafts for it, by what drafts."""


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def group(n: int, n_devices: int, kind: type[SimulatedDevice] = SimulatedDevice) -> Any:
    devices: list[Any] = [kind(i) for i in range(n_devices)]
    owners = [Backend(0, devices[i % n_devices], 16) for i in range(n)]
    for one in owners:
        for other in owners:
            one.reach(other)
    return DeviceGroup(cast(Any, owners))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes", "n", "n_devices"),
    [
        ("tiny-qwen3", {"n_head": 4, "n_head_kv": 2, "n_layer": 1}, 2, 1),
        ("tiny-qwen3", {"n_head": 4, "n_head_kv": 4, "n_layer": 2}, 4, 2),
        ("tiny-llama", {"n_layer": 2}, 3, 3),
        ("tiny-qwen35", {"n_head": 4, "n_head_kv": 2}, 2, 2),
        ("tiny-qwen35moe", {"n_head": 2, "n_head_kv": 2}, 2, 2),
        ("tiny-qwen35", SMALL | {"n_layer": 2, "interval": 2, "delta_net": DeltaNetConfig(4, 8, 32, 4)}, 4, 4),
        ("tiny-qwen3moe", SMALL | {"n_layer": 1, "n_ff": 0, "experts": ExpertsConfig(3, 2, 96, 0)}, 4, 4),
        ("tiny-gemma4", SMALL | {"n_layer": 2, "gemma4": Gemma4Shape(2, 32, 4, k_is_v=True)}, 4, 4),
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


def devices_of(llm: engine.LLM) -> list[Any]:
    """The simulated GPUs of a model."""
    return [ops.device for ops in llm.model.ops.owners]


@pytest.mark.parametrize(
    "drafts", ["none", *(pytest.param(name, marks=pytest.mark.thorough) for name in [*DRAFTED][1:])]
)
def test_the_lead_chooses_tokens(drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of the first GPU chooses tokens, also drafts, in the graph of a step, which both GPUs compute."""
    target, source = DRAFTED[drafts]
    given: dict[str, Any] = {
        "path_or_name": make_model(tmp_path / "m.gguf", target, "Q4_0"),
        "n_ctx": 24,
        "n_threads": 1,
    }
    if source is not None:
        given["draft_model"] = make_model(tmp_path / "d.gguf", source, "Q8_0")
    options: dict[str, Any] = {"max_tokens": 4, "seed": 3, "temperature": 0.8, "ignore_eos": True}
    monkeypatch.setattr(passes, "MEASURED", 0)
    expected = engine.load(**given, device="cpu").complete(PROMPT, **options)
    llm = engine.load(**given, device="cuda:0,cuda:1", split_mode="tensor")
    started: list[tuple[int, str]] = []
    for device in devices_of(llm):
        device.on_launch = lambda name, number=device.info.index: started.append((number, name))
    params = engine.SpeculationParams(draft_max=2, enabled=drafts != "none")
    found = llm.complete(PROMPT, **options, speculation=params)
    assert found.ids == expected.ids
    assert drafts == "none" or (found.speculation is not None and found.speculation.drafted > 0)
    assert {number for number, _ in started} == {0, 1}
    for kernels in (("draw",), ("begin_draft",) if drafts != "none" else ("accept",)):
        assert {number for number, name in started if name.startswith(kernels)} == {0}, kernels
    assert {number for number, name in started if name.startswith("matmul_give")} == {0, 1}


@pytest.mark.parametrize(
    ("n", "kind", "rows"), [(3, WaitingDevice, 17), (2, WaitingDevice, 8), (2, SimulatedDevice, 8)]
)
def test_owners_find_the_largest_of_their_own_logits(
    n: int, kind: type[SimulatedDevice], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all, and of equal ones that of the lowest token, whoever has it; no logits are exchanged."""
    monkeypatch.setattr(SimulatedDevice, "multiprocessors", 8)
    monkeypatch.setattr(gathering, "TRIAL", 1)
    cut = even_cut(289, n)
    assert cut is not None
    (_, border), last = cut.runs[0][0], 288
    logits = np.random.default_rng(n).standard_normal((rows, 289)).astype(np.float32)
    logits[0, [border - 1, border]] = 9.0
    logits[1, [border, last]] = 9.0
    logits[2] = 0.5
    logits[3] = -1.0
    logits[3, border - 1], logits[3, last] = -0.0, 0.0
    logits[4] = -np.inf
    logits[5] = -np.inf
    logits[5, last] = -3.0
    logits[6, last] = np.inf
    logits[7, 0], logits[7, last] = np.inf, np.nan
    owners = group(n, n, kind)
    ops = graph_operations(owners)
    assert ops is not None
    parts = []
    for owner, ((first, end),) in zip(owners.owners, cut.runs, strict=True):
        parts.append(owner.upload(np.ascontiguousarray(logits[:, first:end])))

    def forward(batch: Any, n_logits: int) -> Any:
        return Divided(cut, parts, owners.gathered)

    plan = ops.plan_maxima(forward, rows, rows)
    assert plan is not None and plan.result is not None
    ops.whole(plan, cast(Any, plan.graph)).launch()
    device, groups = ops.device, plan.result.shape[1]
    found = ops.zeros((rows,), np.int32)
    device.launch(sample.argmax(groups), rows, groups, [plan.result.address, found.address])
    expected = logits.argmax(axis=1)
    expected[[4, 6, 7]] = sample.BANNED, sample.INFINITE, sample.NAN
    assert device.read(found.address, (rows,), np.int32).tolist() == expected.tolist()
    assert all(launch.kernel.kernel.name != "place_columns" for launch in plan.launches) or kind is SimulatedDevice


def test_a_gpu_that_fails_in_the_middle_of_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; another model on the same GPUs answers, and the memory is free when the model is closed."""
    path = make_model(tmp_path / "model.gguf", SHAPE, "Q4_0")
    given: dict[str, Any] = {"path_or_name": path, "n_ctx": 16, "n_threads": 1}
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    expected = engine.load(**given, device="cpu").complete(PROMPT, **options).ids
    failing = engine.load(**given, device="cuda:0,cuda:1", split_mode="tensor")
    other = engine.load(**given, device="cuda:1,cuda:0", split_mode="tensor")
    devices, launches = devices_of(failing), count()
    launch = devices[1].launch

    def fail(*arguments: Any, **named: Any) -> None:
        if next(launches) == 5:
            raise DeviceError("simulated GPU reported launch failed during the launch of add; run again.")
        launch(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(devices[1], "launch", fail)
        with pytest.raises(
            DeviceError, match=r"^simulated GPU reported launch failed during the launch of add; run again\.$"
        ):
            failing.complete(PROMPT, **options)
    assert next(launches) == 6
    assert other.complete(PROMPT, **options).ids == expected
    # The launch works again, and nothing of the failed pass is left over.
    assert failing.complete(PROMPT, **options).ids == expected
    model = weakref.ref(failing.model)
    failing.close()
    del failing
    gc.collect()
    assert model() is None and not any(device.allocated for device in devices)
    assert other.complete(PROMPT, **options).ids == expected
