"""The memory that a model needs besides its weights is at least what loading it and running its passes allocates."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.arrays import Role
from engine.cache.types import F16
from engine.cuda.runtime.pool import Pool
from engine.cuda.target import Target
from engine.decode.evaluate import evaluate
from engine.limits import MOST_TOGETHER
from engine.models.needs import batch_bytes, context_bytes, pass_bytes
from tests.families import FAMILIES, write_quantized
from tests.tiers import few

N_CTX = 1 << 16
"""So long that attention needs more memory for the chunks of a context than for everything else."""

ROWS = (17, 16, 5, 1)


def needs(llm: engine.LLM, rows: int) -> tuple[int, int]:
    """Bytes for what outlives a pass, and for the results of passes."""
    model = llm.model
    passes = pass_bytes(llm.config, model.ops, N_CTX, rows)
    types = F16
    return context_bytes(llm.config, model.ops, types, N_CTX, rows, model.rewind) - passes, passes


@pytest.mark.parametrize("name", few(["deepseek2-glm", "deepseek4", "deepseek32", "glm-dsa-shared"]))
def test_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[str] = Counter()

    def counting(n_bytes: int) -> np.ndarray:
        taken["results"] += n_bytes
        return np.empty(n_bytes, np.uint8)

    def zeros(self: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        taken["kept"] += array.nbytes
        return array

    monkeypatch.setattr("engine.cpu.runtime.pool.aligned", counting)
    monkeypatch.setattr("engine.cpu.operations.latent.aligned", counting)
    monkeypatch.setattr("engine.cpu.backend.Backend.zeros", zeros)
    path = write_quantized(FAMILIES[name], tmp_path / "m.gguf")
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1, **FAMILIES[name].options(path))
    model: Any = llm.model
    for rows in (128, *ROWS):
        llm.reset()
        evaluate(
            llm.model, np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), min(rows, 16), llm.model.sequence
        )
    model.drafter.forward(0, 1, model.sequence)
    kept, results = needs(llm, 128)
    # The slots of rows whose logits are wanted are few bytes, which a reserve covers.
    assert taken["kept"] - 4 * MOST_TOGETHER == kept and results / 2 < taken["results"] <= results


@pytest.mark.parametrize("name", few(["deepseek2-glm", "deepseek4", "deepseek32", "glm-dsa-shared"]))
def test_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[str] = Counter()
    allocate = Target.allocate

    def counting(self: Target, n_bytes: int, what: str) -> Any:
        taken[what] += n_bytes
        return allocate(self, n_bytes, what)

    monkeypatch.setattr(Target, "allocate", counting)
    path = write_quantized(FAMILIES[name], tmp_path / "m.gguf")
    llm = engine.load(path, n_ctx=N_CTX, device=Target("sm_90"), **FAMILIES[name].options(path))
    model: Any = llm.model
    ops: Any = model.ops
    # Loading has recorded passes, too.
    ops.recorder._pools = {role: Pool(ops.device) for role in Role}
    del taken["intermediate results"]
    for rows in (ops.max_rows, *ROWS):
        ops.record(partial(model.compute, ops._inputs.part(slice(rows)), min(rows, 16)))
    ops.record(partial(model.drafter.passes[0], ops._inputs.part(slice(1)), 1))
    kept, results = needs(llm, ops.max_rows)
    # Tokens and positions are few bytes, which a reserve covers.
    assert abs(taken["the key-value cache"] - kept) < 1 << 16
    assert results / 2 < taken["intermediate results"] <= results


@pytest.mark.parametrize("name", few(["deepseek2-glm", "deepseek4", "mixtral"]))
def test_batches_of_many_answers_on_a_gpu(name: str, tmp_path: Path) -> None:
    """The memory of the largest one, which smaller ones of large models share."""
    path = write_quantized(FAMILIES[name], tmp_path / "m.gguf")
    llm = engine.load(path, n_ctx=512, parallel=100, device=Target("sm_90"), **FAMILIES[name].options(path))
    model: Any = llm.model
    ops: Any = model.ops
    ops.recorder._pools = {role: Pool(ops.device) for role in Role}
    ops.plans.kept.clear()
    ops.plan(model.compute, 128, 128, None, True)
    used = ops.recorder._pools[Role.DECODE].n_bytes
    assert used <= batch_bytes(llm.config, ops, 512, 100) + pass_bytes(llm.config, ops, 512, 16)
    assert batch_bytes(llm.config, ops, 512, 1) == 0
    assert ops.product_bytes(16, 4096) == 0 < ops.product_bytes(17, 4096)
