"""What a network that reads several layers of another model needs, in the simulator: the bits of the mirror."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cpu.taps import UNKNOWN
from engine.cuda import backend
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from tests.batches import one_sequence
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_operations import F, activations, computed, cpu, gpu, same
from tests.eagle3 import agreeing
from tests.families import in_bytes

assert gpu


@pytest.mark.parametrize(("rows", "first"), [(1, 1), (3, 4), (3, 0)])
def test_rows_of_the_position_before(gpu: backend.Backend, rows: int, first: int) -> None:
    ring, positions = activations(5, 24)[None], np.arange(first, first + rows, dtype=np.int32)
    a, batch = gpu.upload(ring), one_sequence(positions, gpu)
    (ours,) = computed(gpu, lambda: gpu.rows_before(a, batch))
    same(ours, cpu.rows_before(ring, one_sequence(positions)))
    same(ours, np.array([ring[0][(p - 1) % 5] if p else np.zeros(24, F) for p in positions]))


@pytest.mark.parametrize("rows", [1, 3])
def test_columns_and_logits(gpu: backend.Backend, rows: int) -> None:
    """More columns than a block has threads."""
    parts = [activations(rows, n) for n in (40, 300, 7)]
    index = np.full(600, -1, np.int32)
    index[np.random.default_rng(0).permutation(600)[:300]] = np.arange(300, dtype=np.int32)
    a, table = [gpu.upload(part) for part in parts], gpu.upload(index)
    joined, spread = computed(gpu, lambda: [gpu.join_columns(a), gpu.spread_logits(a[1], table)])
    same(joined, cpu.join_columns(parts))
    same(joined, np.hstack(parts))
    same(spread, cpu.spread_logits(parts[1], index))
    same(spread, np.where(index >= 0, parts[1][:, index], UNKNOWN))


@pytest.mark.thorough
def test_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of drafts are those of the CPU, also from position 1 on, where only one position is visible; drafts on the GPU
    do not change the text, and as many are kept as a script has right."""
    use_simulated(monkeypatch)
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    shape = Shape("llama", 2, 64, 2, 1, 32, 96, 289, 96, 1e4, 1e-5)
    paths = in_bytes(agreeing(make_model(tmp_path / "llama.gguf", shape, "F32"), tmp_path), tmp_path)
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "draft_model": paths[1]}
    cpu_llm, gpu_llm = (engine.load(paths[0], device=device, **given) for device in ("cpu", "cuda"))
    prompt = [3, 7, 11, 2, 9]
    for n in (1, 5):
        drafted: list[Any] = []
        for llm in (cpu_llm, gpu_llm):
            llm.read(prompt[:n])
            drafter: Any = llm.model.drafter
            drafted.append([drafter.forward(9 + i, n + i, llm.model.sequence, i).tobytes() for i in range(2)])
        assert drafted[0] == drafted[1]
    more: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "top_k": 20, "seed": 1, "ignore_eos": True}
    expected = cpu_llm.complete(prompt, speculation=SpeculationParams(enabled=False), **more).ids
    draft: Any = gpu_llm.draft
    draft.script = np.full(64, -1, np.int32)
    draft.script[5:8] = expected[:3]
    draft.script[8] = (expected[3] + 1) % cpu_llm.config.n_vocab
    found = gpu_llm.complete(prompt, speculation=SpeculationParams(draft_max=3, draft_min=3), **more)
    assert found.ids == expected and found.speculation is not None
    assert found.speculation.accepted == 2


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"n_gpu_layers": 1}, {"n_cpu_moe": 0, "override_tensor": "ffn=cpu,attn=gpu"}])
def test_a_target_on_two_devices(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that the network reads are on the CPU and on the GPU, or all mixers are on the GPU, whose parts are one
    recording with those of the CPU: drafts after a prompt of one pass and after a step."""
    use_simulated(monkeypatch)
    shape = Shape("llama", 2, 64, 2, 1, 32, 96, 289, 96, 1e4, 1e-5)
    paths = in_bytes(agreeing(make_model(tmp_path / "llama.gguf", shape, "F32"), tmp_path), tmp_path)
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "draft_model": paths[1]}
    whole = engine.load(paths[0], device="cpu", **given)
    divided = engine.load(paths[0], device="cuda", **given, **options)
    assert divided.model.stages and (divided.model.joint is None) == ("n_gpu_layers" in options)
    found: list[Any] = []
    for llm in (whole, divided):
        llm.read([3, 7, 11, 2])
        drafter: Any = llm.model.drafter
        found.append([drafter.forward(9, 4, llm.model.sequence).tobytes(), llm.step(9).tobytes()])
        found[-1].append(drafter.forward(8, 5, llm.model.sequence).tobytes())
    assert found[0] == found[1]
