"""Prompts of several sequences that one pass of a simulated GPU reads: the bits of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.arrays import Role
from engine.cuda.backend import Backend
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.models.test_prompts_together import read_together

PASSES = [[(1, 9), (0, 8)], [(0, 7), (2, 3), (1, 8)], [(2, 2)]]
"""Slots and numbers of tokens: rows for wide kernels, that begin and end within the 16 tokens of a segment."""


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def contents(model: Any) -> list[bytes]:
    """What the snapshots of all sequences contain, and the logits after one more token of each."""
    found = [array.tobytes() for sequence in model.sequences for array in model.save(sequence).arrays]
    return found + [logits.tobytes() for logits in model.step([(sequence, [7]) for sequence in model.sequences])]


CASES = [
    ("attend_integers", "qwen3", "i8"),
    ("attend_tiles", "llama", "f16"),
    ("attend_tiles", "gemma3", "f16"),
    ("attend_latents", "deepseek2", "f16"),
    ("delta_rule", "qwen35moe", "f16"),
    ("short_conv", "lfm2", "f16"),
    ("kda_scan", "kimi-linear", "f16"),
    ("mamba_scan", "granitehybrid", "f16"),
]
"""A kernel that has rows of several prompts, and the shapes and types of the cache of models with it."""


@pytest.mark.thorough
@pytest.mark.parametrize(("kernel", "shape", "cache_type"), CASES)
def test_prompts_together(tmp_path: Path, kernel: str, shape: str, cache_type: str) -> None:
    path = make_model(tmp_path / "a.gguf", SHAPES[shape], "Q4_K_M" if shape == "llama" else "Q4_0")
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "parallel": 3, "cache_type": cache_type}
    models: list[Any] = [engine.load(path, device=device, **given).model for device in ("cpu", "cuda")]
    cpu, gpu = models
    rng = np.random.default_rng(3)
    sizes = [sum(n for part in PASSES for i, n in part if i == slot) for slot in range(3)]
    texts = [rng.integers(0, 200, n).astype(np.int32) for n in sizes]
    expected, found = (read_together(model, texts, PASSES) for model in (cpu, gpu))
    assert expected.keys() == found.keys() == {0, 1, 2}
    for slot in range(3):
        assert expected[slot].tobytes() == found[slot].tobytes()
    assert contents(cpu) == contents(gpu)
    assert isinstance(gpu.ops, Backend)
    plans = {**gpu.ops.plans.kept, **gpu.ops.plans.latest}
    own = [plan for (_, _, _, _, mixed, role), plan in plans.items() if mixed and role is Role.PREFILL]
    assert len(own) == 2
    assert all(kernel in {launch.kernel.kernel.name for launch in plan.launches} for plan in own)
