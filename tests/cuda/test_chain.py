"""Drafts of a chain of layers, and of networks of EAGLE-3 and DSpark, on a GPU: the text without drafts, and the drafts of
the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.speculative.params import SpeculationParams
from tests.speculative.test_deepseek import N_CTX, load

pytestmark = pytest.mark.gpu

PLAIN = SpeculationParams(enabled=False)
DRAFTED = SpeculationParams(draft_max=4, draft_min=4)


@pytest.mark.parametrize("source", ["step35", "eagle3", "dflash"])
def test_drafts_do_not_show(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 prompts at four temperatures, one by one and eight together; prompts that begin alike, so that what was read is used
    again; drafts that are often right."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    cpu, network = load(source, tmp_path), tmp_path / "network.gguf"
    given: dict[str, Any] = {"draft_model": network} if network.exists() else {}
    gpu = engine.load(cpu.path, device="cuda", n_ctx=N_CTX, parallel=8, draft_max=4, **given)
    drafted = accepted = 0
    rng = np.random.default_rng(1)
    common = rng.integers(0, cpu.config.n_vocab, 70).tolist()
    prompts = [
        [*common[: 10 * (seed % 8)], *rng.integers(0, cpu.config.n_vocab, 1 + seed).tolist()] for seed in range(20)
    ]
    for seed, prompt in enumerate(prompts):
        given = {"max_tokens": 40, "temperature": 0.4 * (seed % 4), "seed": seed, "ignore_eos": True}
        expected = cpu.complete(prompt, speculation=PLAIN, **given).ids
        found = [llm.complete(prompt, speculation=DRAFTED, **given) for llm in (cpu, gpu)]
        assert [each.ids for each in found] == [expected, expected]
        counts = [(each.speculation.drafted_at, each.speculation.accepted_at) for each in found if each.speculation]
        assert counts[0] == counts[1]
        drafted, accepted = drafted + sum(counts[1][0].values()), accepted + sum(counts[1][1].values())
    assert 0.3 < accepted / drafted < 0.95
    for first in range(0, 16, 8):
        given = {"max_tokens": 40, "temperature": 0.8, "seed": first, "ignore_eos": True}
        expected = [cpu.complete(prompt, speculation=PLAIN, **given).ids for prompt in prompts[first : first + 8]]
        answers = gpu.complete(prompts[first : first + 8], speculation=DRAFTED, **given)
        assert [answer.ids for answer in answers] == expected
        assert sum(answer.speculation.accepted for answer in answers if answer.speculation) > 20
