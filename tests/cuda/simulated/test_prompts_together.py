"""Prompts of several sequences that one pass of a simulated GPU reads: the bits of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cuda import backend
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.models.test_prompts_together import read_together

PASSES = [[(1, 9), (0, 8)], [(0, 7), (2, 3), (1, 8)], [(2, 2)]]
"""Slots and numbers of tokens: rows for wide kernels, that begin and end within the 16 tokens of a segment."""

KERNELS = {"llama": "attend_tiles", "qwen35moe": "delta_rule", "deepseek2": "attend_tiles"}


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def contents(model: Any) -> list[bytes]:
    """What the snapshots of all sequences contain, and the logits after one more token of each."""
    found = [array.tobytes() for sequence in model.sequences for array in model.save(sequence).arrays]
    return found + [logits.tobytes() for logits in model.step([(sequence, [7]) for sequence in model.sequences])]


@pytest.mark.parametrize("shape", ["llama", "gemma3", "qwen35moe", "deepseek2", "lfm2", "kimi-linear", "granitehybrid"])
def test_prompts_together(tmp_path: Path, shape: str) -> None:
    path = make_model(tmp_path / "a.gguf", SHAPES[shape], "Q4_K_M" if shape == "llama" else "Q4_0")
    cpu, gpu = (engine.load(path, device=device, n_ctx=64, n_threads=1, parallel=3) for device in ("cpu", "cuda"))
    rng = np.random.default_rng(3)
    texts = [
        rng.integers(0, 200, sum(n for part in PASSES for i, n in part if i == slot)).astype(np.int32)
        for slot in range(3)
    ]
    models: list[Any] = [cpu.model, gpu.model]
    found = [read_together(model, texts, PASSES) for model in models]
    assert found[0].keys() == found[1].keys() == {0, 1, 2}
    for slot in range(3):
        assert found[0][slot].tobytes() == found[1][slot].tobytes()
    assert contents(models[0]) == contents(models[1])
