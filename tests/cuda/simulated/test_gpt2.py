"""GPT-2 with a layer on the CPU and the others on a simulated GPU: the bits of the CPU."""

from pathlib import Path
from typing import Any

import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from tests.cuda.simulated.device import use_simulated
from tests.families import write_quantized
from tests.oracle.families.gpt2 import CASES

PROMPT = [3, 7, 11, 2, 9]


@pytest.mark.thorough
def test_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    path = write_quantized(CASES[0], tmp_path / "model.gguf", "Q8_0")
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
    cpu, gpu = engine.load(path, device="cpu", **given), engine.load(path, device="cuda", **given, n_gpu_layers=1)
    assert gpu.logits(PROMPT).tobytes() == cpu.logits(PROMPT).tobytes()
    more: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert gpu.complete(PROMPT, **more).ids == cpu.complete(PROMPT, **more).ids
