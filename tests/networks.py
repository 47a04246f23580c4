"""Checks that the tests of networks that read several layers of a target share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.models.config import ModelConfig
from engine.speculative.params import SpeculationParams
from tests.families import write_quantized
from tests.oracle.models import CASES

PLAIN = SpeculationParams(enabled=False)


def check_answers_together(paths: tuple[Path, Path], name: str, drafted: SpeculationParams) -> None:
    """Eight answers at a time, with drafts that are often right: the texts of each alone, without drafts.

    paths: a target and a network; name: the name of this source of drafts.
    """
    llm: Any = engine.load(paths[0], draft_model=paths[1], n_ctx=128, parallel=8, device="cpu", n_threads=2)
    assert llm.draft.name == name
    rng = np.random.default_rng(3)
    common = rng.integers(0, llm.config.n_vocab, 70).tolist()
    prompts = [[*common[: 10 * i], *rng.integers(0, llm.config.n_vocab, 1 + i).tolist()] for i in range(8)]
    given: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    expected = [llm.complete(prompt, speculation=PLAIN, **given).ids for prompt in prompts]
    answers = llm.complete(prompts, speculation=drafted, **given)
    assert [answer.ids for answer in answers] == expected
    assert sum(answer.speculation.accepted for answer in answers) > 20
    assert llm.complete(prompts[0][:1], speculation=drafted, **given).ids == llm.complete(prompts[0][:1], **given).ids


def target_of_kind(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModelConfig]:
    """A random model, and its configuration; drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    path = write_quantized(CASES[kind], folder / "target.gguf")
    return path, engine.load(path, device="cpu", n_ctx=32).config


def check_drafts_of_target(path: Path, network: Path, folder: Path, drafted: SpeculationParams) -> None:
    """The text without drafts; drafts after another text has been read, in part or as a whole, and those of a saved state,
    are those of a model that has read nothing else."""
    given: dict[str, Any] = {"draft_model": network, "n_ctx": 128, "n_threads": 1, "device": "cpu"}
    llm, fresh = (engine.load(path, **given) for _ in range(2))
    draft: Any = llm.draft
    rng = np.random.default_rng(4)
    first = rng.integers(0, llm.config.n_vocab, 70).tolist()
    more: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    for prompt in (first, first[:66], [*first[:40], 5, 6], [*first, 3], first[:1], [first[0], 9], first):
        expected = fresh.complete(prompt, speculation=PLAIN, **more).ids
        for script in (None, 0, 1):
            draft.script = None if script is None else np.full(128, -1, np.int32)
            if script is not None:
                wanted = [(token + script) % llm.config.n_vocab for token in expected]
                draft.script[len(prompt) : len(prompt) + 10] = wanted
            found = llm.complete(prompt, speculation=drafted, **more)
            assert found.ids == expected and found.speculation is not None
            assert script is None or (found.speculation.accepted > 4) == (script == 0)
        fresh.reset()
        chains = []
        for each in (llm, fresh):
            drafter: Any = each.model.drafter
            each.read(prompt)
            n = len(prompt)
            chains.append([drafter.forward(7 + i, n + i, each.model.sequence, i, 3).tobytes() for i in range(3)])
        assert chains[0] == chains[1]
    draft.script = None
    llm.read(first)
    llm.save_state(folder / "state")
    fresh.reset()
    fresh.load_state(folder / "state")
    again = [each.complete([*first, 8], speculation=drafted, **more) for each in (llm, fresh)]
    assert again[0].ids == again[1].ids
    assert again[0].speculation.drafted_at == again[1].speculation.drafted_at
