"""Models whose layers several owners share, on one GPU with a queue for each, or on two GPUs: the bits of the CPU."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.driver import list_devices
from engine.decode.device import device_steps
from engine.decode.generation import request_of
from engine.decode.orders import Order
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.group.test_group import files
from tests.models.test_mixed_passes import read
from tests.models.test_stages import N_SEQUENCES, facts
from tests.tiers import few, together

pytestmark = pytest.mark.gpu


N_USERS = 48
"""Sequences of a step of many rows: a block of 64, part of which is padding."""


def open_device(name: str, n_threads: int, beside: Any, max_rows: int, limit: int) -> Backend:
    """A backend with a queue of its own, unless it shares that of another model."""
    return Backend(0, Device(0) if beside is None else beside.device, max_rows)


class InTurn(Device):
    """A queue whose kernels wait for those of other queues of the same GPU, and begin when the one before has ended.  So a
    GPU has at most one kernel of each owner that waits, and those of these models leave multiprocessors to what they wait
    for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._overlap = False

    def runs_beside(self, other: Device) -> bool:
        return True


def open_in_turn(name: str, n_threads: int, beside: Any, max_rows: int, limit: int) -> Backend:
    """As ``open_device``, for owners that wait for each other."""
    return Backend(0, InTurn(0) if beside is None else beside.device, max_rows)


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


@pytest.mark.parametrize("name", few(["four heads", "hybrid", "gemma4", "biases"], 2))
def test_owners_on_one_gpu_that_wait(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 to 16 rows."""
    given: dict[str, Any] = files(name, tmp_path) | {"n_ctx": 256, "parallel": N_SEQUENCES}
    cpu = engine.load(**given, device="cpu")
    compare(cpu, on_one_gpu(given, True, monkeypatch))


@pytest.mark.parametrize("on", ["one GPU, waits", "one GPU, events", "two GPUs"])
@pytest.mark.parametrize("name", few(["whole units", "hybrid", "four heads", "mixture"], 2))
def test_many_users(name: str, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than 16 rows: units of 256 activations of one owner, and of two."""
    waits = on != "one GPU, events"
    if on == "two GPUs" and len(list_devices()) < 2:
        pytest.skip("needs two GPUs")
    if name == "whole units":
        shape = replace(shapes()["tiny-qwen3"], n_embd=512, n_head=4, n_head_kv=2, n_ff=1024)
        given: dict[str, Any] = {"path_or_name": make_model(tmp_path / "m.gguf", shape, "Q4_K_M", seed=5)}
    else:
        given = files(name, tmp_path)
    given |= {"n_ctx": 64, "parallel": N_USERS}
    cpu = engine.load(**given, device="cpu")
    expected, answers = list(steps(cpu)), greedy(cpu)
    llm = load_pair(given) if on == "two GPUs" else on_one_gpu(given, waits, monkeypatch)
    assert list(steps(llm)) == expected
    assert greedy(llm) == answers
    # Where warpgroups do not multiply most of the weights, several steps of 16 rows are faster than one of 48.
    assert launched(llm, N_USERS if llm.model.many_answers <= N_USERS else 16, "maxima")
    assert launched(llm, N_USERS, "wide_gather_norm_quantize") is waits
    # Those of layers without experts also add the chains of products.
    of_chains = any(kernel.constants[5:] for kernel in kernels_of(llm, N_USERS, "wide_gather_norm_quantize"))
    assert not waits or name == "mixture" or of_chains
    if name == "whole units":
        assert all(launched(llm, N_USERS, f"wide_gather_{kind}quantize") is waits for kind in ("", "combine_"))


def on_one_gpu(given: dict[str, Any], waits: bool, monkeypatch: pytest.MonkeyPatch) -> engine.LLM:
    """A model that two owners on one GPU share; waits: whether their kernels wait for each other."""
    monkeypatch.setattr(loading, "open_device", open_in_turn if waits else open_device)
    return load_pair(given, waits)


def load_pair(given: dict[str, Any], waits: bool = True) -> engine.LLM:
    """A model that two owners share; waits: whether their kernels wait for each other."""
    llm = engine.load(**given, device="cuda:0,cuda:1", split_mode="tensor")
    group: Any = llm.model.ops
    assert group._gathering.waits is waits
    return llm


def steps(llm: engine.LLM, lengths: Sequence[int] = range(1, 6)) -> Iterator[bytes]:
    """The logits of steps of all sequences, which are at different positions.  lengths: of their texts before, in turn."""
    model: Any = llm.model
    count = len(model.sequences)
    text = np.random.default_rng(3).integers(0, llm.config.n_vocab - 3, count + max(lengths)).astype(np.int32)
    for i, sequence in enumerate(model.sequences):
        read(model, sequence, text[i : i + lengths[i % len(lengths)]])
    for step in range(3):
        given = [[int(token)] for token in text[step:]]
        pairs = list(zip(model.sequences, given, strict=False))
        yield from (rows.tobytes() for rows in model.step(pairs))
        for sequence, tokens in pairs:
            sequence.commit(tokens)


def greedy(llm: engine.LLM) -> list[list[int]]:
    """Answers to all users, in whose steps each owner finds the largest of its own logits.  An answer pauses after its first
    tokens, until all have begun, so that later steps have all of them."""
    core = llm.core
    requests = [request_of(llm.generate([1 + i, 2], max_tokens=24, temperature=0.0)) for i in range(N_USERS)]
    for request in requests:
        core.submit(request)
        while not request.items:
            core.step()
        core.order(Order.PAUSE, request)
    for request in requests:
        core.order(Order.PROCEED, request)
    while not all(request.done for request in requests):
        core.step()
    return [[token for token, _ in request.items] for request in requests]


def launched(llm: engine.LLM, rows: int, name: str) -> bool:
    """Whether a pass of at least so many rows launches a kernel."""
    return bool(kernels_of(llm, rows, name))


def kernels_of(llm: engine.LLM, rows: int, name: str) -> list[Specialization]:
    """The kernels with a name in passes of at least so many rows."""
    ops: Any = llm.model.ops
    plans = [plan for key, plan in ops.lead.plans.kept.items() if key[1] >= rows]
    kernels = [launch.kernel for plan in plans for launch in plan.launches]
    return [kernel for kernel in kernels if kernel.kernel.name == name]


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
    compare(cpu, load_pair(given, waits))


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
