"""The memory that a model needs on each of several devices that share it is what loading it and running its passes takes
there: exactly for matrices and vectors, and at least for the rest."""

from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import loading
from engine.arrays import Role
from engine.cache.types import F16
from engine.errors import ContextError, DeviceError
from engine.gguf.file import read_gguf
from engine.limits import MOST_TOGETHER
from engine.models.needs import batch_bytes, context_bytes, pass_bytes
from engine.rooms import owned_bytes
from tests.group.test_group import CASES, files, owners
from tests.tiers import few

pytest.importorskip("numba_cuda", reason="devices are absent GPUs")

from engine.cuda.backend import Backend
from engine.cuda.runtime.pool import Pool
from engine.cuda.target import Target

N_CTX = 1 << 14
ROWS = (17, 16, 5, 1)
SHARED = {"four heads": 4, "five heads": 4, "four hybrid heads": 4, "few experts": 4, "gemma4": 4, "gemma4 mixture": 4}
"""The numbers of devices that are not two."""


class Counted(Target):
    """A GPU that counts allocated bytes by what they are for."""

    def __init__(self) -> None:
        super().__init__("sm_90")
        self.taken: Counter[str] = Counter()

    def allocate(self, n_bytes: int, what: str) -> Any:
        buffer = super().allocate(n_bytes, what)
        self.taken[what] += buffer.n_bytes
        return buffer

    def allocate_host(self, n_bytes: int, what: str) -> Any:
        return super().allocate(n_bytes, what)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The devices of the next model."""
    opened: list[Counted] = []

    def open_device(name: str, n_threads: int, beside: Any, *rest: Any) -> Any:
        if beside is None:
            opened.append(Counted())
        return Backend(0, opened[-1] if beside is None else beside.device)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "open_device", open_device)
    return opened


def forget_results(group: Any) -> None:
    """Let passes that are recorded from now on take memory anew."""
    for ops in group.owners:
        ops.recorder._pools = {role: Pool(ops.device) for role in Role}


@pytest.mark.parametrize("name", few([*CASES]))
def test_what_each_device_holds(name: str, tmp_path: Path, gpus: list[Counted]) -> None:
    n, given = SHARED.get(name, 2), files(name, tmp_path) | {"cache_type": "f16"}
    # Devices share an assistant, too, but its weights are estimated.
    if name == "gemma4 assistant":
        del given["draft_model"]
    layer = read_gguf(given["draft_model"]) if "draft_model" in given else None
    devices = ",".join(f"cuda:{i}" for i in range(n))
    llm = engine.load(**given, n_ctx=N_CTX, device=devices, split_mode="tensor")
    model, config = llm.model, llm.config
    group: Any = model.ops
    owned = owned_bytes(config, read_gguf(llm.path), group, F16, layer)
    lead: Any = group.owners[0]
    drafts = [] if model.drafter is None else [forward for forward, _ in model.drafter.listed]
    before = [Counter(gpu.taken) for gpu in gpus]
    forget_results(group)
    for forward, rows in chain(
        ((model.compute, rows) for rows in (lead.max_rows, *ROWS)), ((each, 1) for each in drafts)
    ):
        lead.record(partial(group.of_all(forward), lead._inputs.part(slice(rows)), min(rows, 16)))
    for i, (gpu, earlier) in enumerate(zip(gpus, before, strict=True)):
        taken = gpu.taken
        matrices = sum(n_bytes for what, n_bytes in taken.items() if what.startswith("the weights ("))
        assert matrices + taken["the model's vectors"] == owned[i]
        passes = pass_bytes(config, group.owners[i], N_CTX, lead.max_rows, (i, n))
        kept = context_bytes(config, group, F16, N_CTX, lead.max_rows, model.rewind, placement=model.placement, owner=i)
        # Tokens and positions are few bytes, which a reserve covers, and so is the rest of a line of an allocation.
        inputs = 8 * lead.max_rows * 3 + 4 * MOST_TOGETHER
        assert 0 <= taken["the key-value cache"] - (kept - passes) < inputs + (1 << 16)
        results = taken["intermediate results"] - earlier["intermediate results"]
        assert results / 3 < passes and results <= passes


def test_a_device_that_is_too_small(tmp_path: Path, gpus: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = files("five heads", tmp_path) | {
        "n_ctx": 256,
        "device": "cuda:0,cuda:1",
        "split_mode": "tensor",
    }
    llm = engine.load(**given)
    owned = owned_bytes(llm.config, read_gguf(llm.path), llm.model.ops, F16, None)
    # Heads are divided by two and three.
    assert owned[0] < owned[1]
    room = {"free": owned[1]}
    monkeypatch.setattr(Backend, "free_memory", lambda self, weights: max(1, room["free"] - weights))
    with pytest.raises(
        DeviceError, match=r"^cuda:0 sm_90 has 0\.00 GB free and its part of every layer needs 0\.00 GB: name"
    ):
        engine.load(**given)
    room["free"] = owned[1] + 1000
    with pytest.raises(
        ContextError, match=r"^a context of 256 needs \d+ MiB and 0 MiB are free; choose a smaller context"
    ):
        engine.load(**given)
    room["free"] = owned[1] + (1 << 30)
    assert engine.load(**given).n_ctx == 256


def test_batches_of_many_answers(tmp_path: Path, gpus: list[Counted]) -> None:
    given: dict[str, Any] = files("five heads", tmp_path) | {
        "n_ctx": 512,
        "device": "cuda:0,cuda:1",
        "split_mode": "tensor",
    }
    llm = engine.load(**given, parallel=100)
    group: Any = llm.model.ops
    assert llm.model.n_sequences == 100
    forget_results(group)
    group.lead.plans.kept.clear()
    before = [gpu.taken["intermediate results"] for gpu in gpus]
    group.lead.plan(group.of_all(llm.model.compute), 128, 128, None, True)
    for i, (gpu, earlier) in enumerate(zip(gpus, before, strict=True)):
        own, share = group.owners[i], (i, 2)
        most = batch_bytes(llm.config, own, 512, 100, share) + pass_bytes(llm.config, own, 512, 16, share)
        assert 0 < gpu.taken["intermediate results"] - earlier <= most


def test_owners_on_the_cpu_need_the_memory_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the memory of one machine, whose free bytes are not counted for each of them."""
    from engine.cpu.backend import Backend as Host

    given = files("four heads", tmp_path) | {"n_ctx": 4096, "parallel": 1}
    one = engine.load(**given, device="cpu", n_threads=1)
    needs = context_bytes(one.config, one.model.ops, one.cache.types, 4096, 128, one.model.rewind)
    monkeypatch.setattr(Host, "free_memory", lambda self, weights: needs + needs // 2)
    assert engine.load(**given, device="cpu", n_threads=1).n_ctx == 4096
    # Each owner has all results of passes, and half of the keys and values.
    engine.load(**given, **owners(2))
    monkeypatch.setattr(Host, "free_memory", lambda self, weights: needs)
    with pytest.raises(ContextError, match=r"^a context of 4096 needs"):
        engine.load(**given, **owners(2), batch_size=128)
