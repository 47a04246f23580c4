"""Step 3.5 on a simulated GPU: the bits of the CPU, also with the experts of its mixtures on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.speculative.params import SpeculationParams
from tests.cuda.simulated.device import use_simulated
from tests.families import write_quantized
from tests.oracle.families.step35 import CASES

PROMPT = [3, 7, 11, 2, 9]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"n_cpu_moe": 99}], ids=["whole", "divided"])
def test_logits(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    path = write_quantized(CASES[1], tmp_path / "model.gguf", "Q8_0")
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
    cpu, gpu = engine.load(path, device="cpu", **given), engine.load(path, device="cuda", **given, **options)
    assert gpu.logits(PROMPT).tobytes() == cpu.logits(PROMPT).tobytes()
    more: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert gpu.complete(PROMPT, **more).ids == cpu.complete(PROMPT, **more).ids


@pytest.mark.thorough
def test_a_chain_of_layers_that_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts by all three layers, and by the last one again, as part of the steps on the GPU: the text without drafts, and as
    many drafts kept as a script has right."""
    use_simulated(monkeypatch)
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    path = write_quantized(CASES[2], tmp_path / "model.gguf", "Q8_0")
    given: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
    cpu, gpu = engine.load(path, device="cpu", **given), engine.load(path, device="cuda", **given)
    ids: list[Any] = []
    for llm in (cpu, gpu):
        llm.logits(PROMPT)
        drafter: Any = llm.model.drafter
        ids.append([drafter.forward(4 + i, len(PROMPT) + i, llm.model.sequence, i).tobytes() for i in range(4)])
    assert ids[0] == ids[1]
    more: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "top_k": 20, "seed": 1, "ignore_eos": True}
    expected = cpu.complete(PROMPT, speculation=SpeculationParams(enabled=False), **more).ids
    draft: Any = gpu.draft
    draft.script = np.full(64, -1, np.int32)
    draft.script[len(PROMPT) : len(PROMPT) + 4] = expected[:4]
    draft.script[len(PROMPT) + 4] = (expected[4] + 1) % cpu.config.n_vocab
    found = gpu.complete(PROMPT, speculation=SpeculationParams(draft_max=4, draft_min=4), **more)
    assert found.ids == expected and found.speculation is not None
    assert found.speculation.accepted == 3
