"""The contract for every architecture: rows, chunks of a prompt, roll back and drafts do not show in any bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.evaluate import evaluate
from engine.speculative.params import SpeculationParams
from tests.families import FAMILIES, ONE_OF_EACH, write_quantized
from tests.models.test_models import in_batches
from tests.oracle.families.family import Family
from tests.tiers import few

DRAFTING = {name: case for name, case in FAMILIES.items() if case.n_mtp and not name.startswith("deepseek")}
"""Models with layers that draft; ``tests/speculative/test_deepseek.py`` has the others."""
PLAIN = SpeculationParams(enabled=False)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_rows_chunks_and_roll_back_do_not_show(case: Family, tmp_path: Path) -> None:
    """Past windows, chunks of attention and the original context of scaled rotations; on one thread and on two."""
    path = write_quantized(case, tmp_path / "m.gguf")
    one, two = (engine.load(path, n_ctx=256, device="cpu", n_threads=n) for n in (1, 2))
    tokens = np.random.default_rng(3).integers(0, one.config.n_vocab, 150).astype(np.int32)
    expected = in_batches(one, tokens, [1] * tokens.size)
    assert in_batches(two, tokens, [70, 1, 5, 16, 58]).tobytes() == expected.tobytes()
    two.model.sequence.truncate(148)
    wrong = (tokens[148:150] + 1) % one.config.n_vocab
    evaluate(two.model, wrong, np.array([148, 149], np.int32), 1, two.model.sequence)
    two.model.sequence.truncate(148)
    again = evaluate(two.model, tokens[148:150], np.array([148, 149], np.int32), 2, two.model.sequence)
    assert again.tobytes() == expected[148:].tobytes()


@pytest.mark.parametrize("name", few(list(DRAFTING), 1))
def test_drafts_do_not_show(name: str, tmp_path: Path) -> None:
    """Drafts of the model's own layer, drafts that are always wrong, and drafts that are always right, over 20 prompts."""
    path = write_quantized(DRAFTING[name], tmp_path / "m.gguf")
    llm = engine.load(path, n_ctx=96, device="cpu", n_threads=1, **DRAFTING[name].options(path))
    draft: Any = llm.draft
    assert draft is not None and draft.name == "mtp"
    rng, kept, n_vocab = np.random.default_rng(5), {0: 0, 1: 0, -1: 0}, llm.config.n_vocab
    for seed in range(20):
        prompt = rng.integers(0, n_vocab, 1 + seed).tolist()
        temperature = 0.8 * (seed % 2)
        given: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": seed, "ignore_eos": True}
        expected = llm.complete(prompt, speculation=PLAIN, **given).ids
        for offset in kept:
            draft.script = np.full(96, -1, np.int32)
            if offset >= 0:
                draft.script[len(prompt) : len(prompt) + 16] = [(token + offset) % n_vocab for token in expected]
            found = llm.complete(prompt, speculation=SpeculationParams(draft_max=4), **given)
            assert found.ids == expected and found.speculation is not None and found.speculation.drafted > 0
            kept[offset] += found.speculation.accepted
    assert kept[1] == 0 and kept[0] > 150


def test_every_architecture_is_compared_with_an_oracle() -> None:
    from engine.models.registry import ARCHITECTURES
    from tests.oracle.encoders import CASES as ENCODERS
    from tests.oracle.models import CASES

    compared = {case.architecture for case in (*CASES.values(), *ENCODERS.values())}
    # tests/models/test_gemma_embedding.py compares the one that is written from the weights of a Gemma 3.
    assert set(ARCHITECTURES) == (compared | {"gemma-embedding"}) - {"gemma4-assistant"}
