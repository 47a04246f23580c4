"""Inputs of all layers, and tables in host memory, in the simulator: the bits of the mirrors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED
from engine.cuda.runtime import memory

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda import backend
from engine.cuda.products import repack
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, activations, computed, cpu, gpu, same, weight

assert gpu


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "n"), [(3, 256), (2, 32), (2, 96), (1, 288)])
@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_layers(gpu: backend.Backend, layers: int, n: int, rows: int) -> None:
    m, norm = activations(rows, layers * n), activations(1, n)[0]
    e = activations(rows, layers * n)[:, ::-1].copy()
    e[0, :4] = [0.0, -0.0, -m[0, 0], 1e-30]
    m[0, :2] = -0.0
    theirs = cpu.per_layer_inputs(m, e, norm, 0.03, 1e-6)
    a, b, w = gpu.upload(m), gpu.upload(e), gpu.upload(norm)
    plan: Any = gpu.record(lambda: gpu.per_layer_inputs(a, b, w, 0.03, 1e-6))
    gpu.start(plan)
    same(gpu.download(plan.result), theirs)
    for il in range(layers):
        same(gpu.download(plan.result[il : il + 1].reshape(rows, n)), theirs[il])


@pytest.mark.parametrize("name", ["Q6_K", "Q8_0", "F16"])
def test_a_table_in_host_memory(gpu: backend.Backend, name: str) -> None:
    """A table in host memory takes no memory of the device, and its rows are those of any other table."""
    entry = FORMATS_BY_NAME[name]
    table, tokens = weight(entry, 37, 2 * (entry.block if entry.quantized else 8)), np.array([36, 0, 17], np.int32)
    gpu.weight(table)
    given, before = gpu.upload(tokens), (gpu.device.allocated, gpu._memory.weight_bytes)
    on_host = gpu.weight(table, host=True)
    assert (gpu.device.allocated, gpu._memory.weight_bytes) == before
    same(computed(gpu, lambda: gpu.embed(on_host, given, 16.0))[0], cpu.embed(table, tokens, 16.0))


@pytest.mark.parametrize(("name", "n_ff"), [("Q4_K", 24), ("Q8_0", 16), ("BF16", 8)])
def test_gate_and_up_of_one_tensor(gpu: backend.Backend, name: str, n_ff: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are copied piece by piece, whatever the boundaries of experts."""
    entry, columns = FORMATS_BY_NAME[name], 256
    both = weight(entry, 5 * 2 * n_ff, columns)
    monkeypatch.setattr(memory, "PIECE", 3 * 16 * both.data.shape[1])
    rows = both.data.reshape(5, 2, n_ff, -1)
    for half, part in enumerate(both.halves(2 * n_ff)):
        alone = replace(both, data=np.ascontiguousarray(rows[:, half]).reshape(5 * n_ff, -1))
        law = repack.repack_rows(entry, alone.data) if entry.quantized else alone.data
        ours = gpu.weight(part)
        assert ours.rows == 5 * n_ff
        same(gpu.device.read(ours.address, law.shape, np.uint8), law)
