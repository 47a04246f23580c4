"""Models whose layers are divided between simulated GPUs: the bits of one GPU, with and without access to each other's
memory."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine import parity
from engine.cuda import backend
from engine.cuda.runtime.crossing import DeviceCrossing
from engine.decode.evaluate import evaluate
from engine.errors import DeviceError, UsageError
from engine.models import base, streaming
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import SimulatedDevice, use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.cuda.simulated.test_stages import PROMPT, facts


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def devices_of(llm: engine.LLM) -> list[Any]:
    """The simulated GPUs of a model."""
    backends: Any = llm.model.devices
    return [ops.device for ops in backends]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "links", "options"),
    [
        ("gemma3", True, {}),
        ("gemma3", False, {}),
        ("qwen35moe", True, {}),
        ("deepseek2", False, {"tensor_split": "1,3"}),
        ("glm-dsa", True, {}),
        ("gemma3n", True, {"tensor_split": "1,9"}),
        ("lfm2", False, {}),
        ("cohere2", True, {}),
        ("kimi-linear", True, {"tensor_split": "3,1"}),
        ("nemotron_h_moe", True, {"device": "cuda:0,cuda:2,cuda:1"}),
    ],
)
def test_layers_on_several_gpus(
    name: str, links: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedDevice, "links", links)
    # All layers of this model would share the keys of the first one.
    shape: Any = SHAPES[name]
    shape = replace(shape, n_shared=0) if name == "gemma3n" else shape
    path = make_model(tmp_path / "model.gguf", shape, "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "parallel": 2, "n_threads": 1}
    cpu = engine.load(path, device="cpu", **given)
    llm = engine.load(path, **({"device": "cuda:0,cuda:1"} | given | options))
    relay: Any = llm.model.relay
    assert relay is not None and len(relay.stages) == len(llm.model.devices) >= 2
    assert all(way.is_direct is links for way in relay.borders)
    assert facts(llm) == facts(cpu)
    ids = cpu.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).ids
    assert llm.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).ids == ids


def test_a_prompt_in_slices_and_tokens_of_the_last_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SLICE", 17)
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
    prompt = [(7 * i) % 50 for i in range(19)]
    options: dict[str, Any] = {"max_tokens": 3, "seed": 3, "temperature": 0.8, "ignore_eos": True}
    cpu = engine.load(path, device="cpu", **given)
    expected = cpu.complete(prompt, **options).ids
    llm = engine.load(path, device="cuda:0,cuda:1", **given)
    # Each slice overwrites the logits of the one before.
    tokens, positions = np.array(prompt, np.int32), np.arange(19, dtype=np.int32)
    logits = []
    for each in (cpu, llm):
        each.reset()
        logits.append(evaluate(each.model, tokens, positions, 19, each.sequence).tobytes())
        each.reset()
    assert logits[0] == logits[1]
    started: list[tuple[int, str]] = []
    for device in devices_of(llm):
        device.on_launch = lambda name, number=device.info.index: started.append((number, name))
    assert llm.complete(prompt, **options).ids == expected
    # The host chooses the first token, and kernels of the last GPU choose the others.
    chosen = [number for number, name in started if name.startswith("draw")]
    assert len(chosen) >= 2 and set(chosen) == {1}
    assert {number for number, _ in started} == {0, 1}


def test_a_gpu_that_fails_in_the_middle_of_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; another model on the same GPUs answers, and the memory is free when the model is closed."""
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "n_threads": 1}
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    expected = engine.load(path, device="cpu", **given).complete(PROMPT, **options).ids
    failing = engine.load(path, device="cuda:0,cuda:1", **given)
    other = engine.load(path, device="cuda:1,cuda:0", **given)
    devices = devices_of(failing)
    assert all(device.allocated for device in devices)

    def fail(*launch: Any, **options: Any) -> None:
        raise DeviceError("simulated GPU reported launch failed during the launch of add; run again.")

    with monkeypatch.context() as patch:
        patch.setattr(devices[1], "launch", fail)
        with pytest.raises(
            DeviceError, match=r"^simulated GPU reported launch failed during the launch of add; run again\.$"
        ):
            failing.complete(PROMPT, **options)
    assert other.complete(PROMPT, **options).ids == expected
    # The launch works again, and nothing that was sent is left over.
    assert failing.complete(PROMPT, **options).ids == expected
    relay: Any = failing.model.relay
    assert all(len(way._left) == len(way._full) for way in relay.borders)
    model = weakref.ref(failing.model)
    failing.close()
    del failing, relay
    gc.collect()
    assert model() is None and not any(device.allocated for device in devices)
    assert other.complete(PROMPT, **options).ids == expected


def test_memory_of_each_gpu_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    room = {0: 1 << 30, 1: 1 << 30}

    def free(self: Any, weights: int) -> int:
        return max(1, room[self.device.info.index] - weights)

    monkeypatch.setattr(backend.Backend, "free_memory", free)
    given: dict[str, Any] = {"device": "cuda:0,cuda:1", "n_ctx": 16}
    llm = engine.load(path, **given)
    assert [len(stage.parts) for stage in llm.model.stages] == [2, 2]
    room[1] = 1000
    with pytest.raises(
        DeviceError, match=r"^cuda:1 simulated GPU has 0\.00 GB free and its layers need 0\.00 GB: give it a"
    ):
        engine.load(path, **given, tensor_split="1,1")
    assert not engine.load(path, **given, tensor_split="1,0").model.stages
    assert not engine.load(path, **given, split_mode="none").model.stages
    with pytest.raises(UsageError, match="at most 2 parts, and 3 devices are named"):
        engine.load(path, device="cuda:0,cuda:1,cuda:2", n_ctx=16, tensor_split="1,1,1")


@pytest.mark.thorough
def test_parity_of_several_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "gemma.gguf", SHAPES["gemma3"], "Q8_0")
    flags = [str(path), "--device", "cuda:0,cuda:1", "-p", "3", "-n", "2", "-t", "1", "-ct", "f32"]
    assert parity.main(flags) == 0
    out = capsys.readouterr().out
    assert "layer 0 on cuda:0 simulated GPU; layer 1 and the output on cuda:1 simulated GPU" in out.splitlines()[1]
    receive = DeviceCrossing.receive

    def damaged(self: DeviceCrossing, ticket: int, arrays: Any) -> None:
        receive(self, ticket, arrays)
        for array in arrays:
            self._target.clear(array.address, 4 * array.size)

    monkeypatch.setattr(DeviceCrossing, "receive", damaged)
    assert parity.main([*flags, "-n", "0"]) == 1
    assert "so a copy between two devices is at fault" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "stages"),
    [
        # There is one layer for two GPUs.
        ("lfm2", {"n_gpu_layers": 1, "tensor_split": "1,9"}, ["cpu", "cuda:1"]),
        ("gemma3", {"override_tensor": "ffn=cpu"}, ["cpu", "cuda:0", "cpu", "cuda:1", "cpu", "cuda:1"]),
        ("qwen35moe", {"n_cpu_moe": 2}, ["cpu", "cuda:0", "cpu", "cuda:1", "cpu", "cuda:1"]),
    ],
    ids=["a layer", "networks", "mixtures"],
)
def test_layers_on_the_cpu_and_on_two_gpus(
    name: str, options: dict[str, Any], stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FEWEST_ROWS", 17)
    path = make_model(tmp_path / "model.gguf", SHAPES[name], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 48, "parallel": 2, "n_threads": 1}
    cpu = engine.load(path, device="cpu", **given)
    llm = engine.load(path, device="cuda:0,cuda:1", **given, **options)
    assert [stage.ops.label.split()[0] for stage in llm.model.stages] == stages
    # The host and a single GPU compute a step at the same time.
    assert llm.model.relay is None and (llm.model.joint is None) == ("cuda:0" in stages)
    assert facts(llm) == facts(cpu)
    # A prompt whose weights are copied to the first GPU.
    prompt = [(7 * i) % 50 for i in range(20)]
    answers = [each.complete(prompt, max_tokens=3, temperature=0.8, seed=3, ignore_eos=True).ids for each in (cpu, llm)]
    assert answers[0] == answers[1]
    assert llm.model.streaming is not None and llm.model.streaming.passes > 0
