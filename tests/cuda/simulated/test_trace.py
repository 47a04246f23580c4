"""Traces on a simulated GPU: the rows of traced passes, bit for bit, and the logits, are those of the CPU."""

from pathlib import Path

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.models.network_config import ExpertsConfig
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_speculation import PROMPT, SHAPE

MIXTURE = Shape("qwen3moe", 1, 32, 1, 1, 32, 32, 289, 64, 1e4, 1e-6, experts=ExpertsConfig(4, 2, 32))


@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "experts"])
def test_a_trace_is_that_of_the_cpu(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    path = make_model(tmp_path / "a.gguf", shape, "Q8_0")
    cpu = engine.load(path, device="cpu", n_ctx=24)
    gpu = engine.load(path, device="cuda", n_ctx=24)
    for ids in (PROMPT, PROMPT[:1]):
        one, other = (llm.trace(ids, drafts=2, top=3) for llm in (cpu, gpu))
        assert np.array_equal(one.logits.view(np.uint32), other.logits.view(np.uint32))
        assert np.array_equal(other.logits, gpu.logits(ids)[-1])
        # Sums of the host are the same, too, since all that they read is.
        assert one.as_json(3) == other.as_json(3)
