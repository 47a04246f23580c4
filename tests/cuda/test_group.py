"""Models whose layers several owners share, on one GPU with a queue for each, or on two GPUs: the bits of the CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine import loading
from engine.cuda.backend import Backend
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.driver import list_devices
from engine.decode.device import device_steps
from tests.group.test_group import files
from tests.models.test_stages import N_SEQUENCES, facts
from tests.tiers import together

pytestmark = pytest.mark.gpu


def open_device(name: str, n_threads: int, beside: Any, max_rows: int, limit: int) -> Backend:
    """A backend with a queue of its own, unless it shares that of another model."""
    return Backend(0, Device(0) if beside is None else beside.device, max_rows)


@pytest.mark.parametrize(
    ("name", "n"),
    together(
        "shared",
        [
            ("four heads", 4),
            ("hybrid", 3),
            ("four hybrid heads", 4),
            ("few experts", 4),
            ("hybrid mixture", 2),
            ("gemma4", 4),
            ("gemma4 mixture", 4),
            ("gemma4 assistant", 2),
            ("eagle3", 3),
            ("dflash", 4),
            ("sinks", 3),
        ],
    ),
)
def test_owners_on_one_gpu(name: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = files(name, tmp_path) | {"n_ctx": 256, "parallel": N_SEQUENCES}
    cpu = engine.load(**given, device="cpu")
    monkeypatch.setattr(loading, "open_device", open_device)
    llm = engine.load(**given, device=",".join(f"cuda:{i}" for i in range(n)), split_mode="tensor")
    compare(cpu, llm)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "events"])
@pytest.mark.parametrize(
    "name",
    together(
        "shared by two",
        ["four heads", "hybrid", "hybrid mixture", "gemma4", "gemma4 assistant", "dflash", "biases", "sinks"],
    ),
)
def test_two_gpus(name: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both wait for each other, or events order them."""
    if len(list_devices()) < 2:
        pytest.skip("needs two GPUs")
    given: dict[str, Any] = files(name, tmp_path) | {"n_ctx": 256, "parallel": N_SEQUENCES}
    cpu = engine.load(**given, device="cpu")
    if not waits:
        monkeypatch.setattr(Device, "runs_beside", lambda self, other: False)
    llm = engine.load(**given, device="cuda:0,cuda:1", split_mode="tensor")
    group: Any = llm.model.ops
    assert group._gathering.waits is waits
    compare(cpu, llm)


def test_two_models_on_the_same_gpus(tmp_path: Path) -> None:
    """Threads that answer at the same time: kernels of one model do not keep away what those of the other one wait for."""
    if len(list_devices()) < 2:
        pytest.skip("needs two GPUs")
    given: dict[str, Any] = files("four heads", tmp_path) | {"n_ctx": 256}
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    expected = engine.load(**given, device="cpu").complete([1, 2, 3], **options).ids
    orders = ("cuda:0,cuda:1", "cuda:1,cuda:0")
    models = [engine.load(**given, device=order, split_mode="tensor") for order in orders]
    with ThreadPoolExecutor() as threads:
        found = [threads.submit(lambda llm: llm.complete([1, 2, 3], **options).ids, llm) for llm in models * 4]
        assert all(each.result() == expected for each in found)


def compare(cpu: engine.LLM, llm: engine.LLM) -> None:
    """Passes, answers and drafts of a model that owners share have the bits of the same model on the CPU."""
    llm.compile()
    assert device_steps(llm.model) is not None  # the first owner chooses tokens
    expected, found = (list(facts(each, lambda model, sequence: [])) for each in (cpu, llm))
    assert found == expected
    prompt = np.random.default_rng(5).integers(0, llm.config.n_vocab - 3, 30).tolist()
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 4, "ignore_eos": True}
        ids = cpu.complete(prompt, **options, speculation=engine.SpeculationParams(enabled=False)).ids
        assert llm.complete(prompt, **options, speculation=engine.SpeculationParams(draft_max=3)).ids == ids
