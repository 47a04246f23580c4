"""Files of Step 3.5 beyond those of the oracle: with the layers that draft, and damaged ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError
from tests.oracle.families.family import Family
from tests.oracle.families.step35 import CASES

CASE, LIMITED, DRAFTING = CASES
PROMPT = list(range(40))


def load(case: Family, path: Path) -> Any:
    return engine.load(case.write_gguf(path), device="cpu", n_ctx=64, n_threads=1)


def changed(case: Family, metadata: dict[str, Any], tensors: Callable[[str], bool]) -> Family:
    """A model with other metadata, and without the tensors for which a function is false."""
    kept = {name: weight for name, weight in case.tensors().items() if tensors(name)}
    return replace(case, weights={}, tables={}, extra=kept, metadata=dict(case.metadata) | metadata)


def test_a_chain_of_layers_that_draft(tmp_path: Path) -> None:
    """Each has a cache of its own, also one with a window; without them the logits are the same."""
    n, cut = DRAFTING.config["num_hidden_layers"], {"block_count": 2, "nextn_predict_layers": 0}
    own = changed(DRAFTING, cut, lambda name: not name.startswith(("blk.2.", "blk.3.", "blk.4.")))
    alone, whole = load(own, tmp_path / "trunk.gguf"), load(DRAFTING, tmp_path / "whole.gguf")
    assert whole.config.layers == alone.config.layers and alone.draft is None and not whole.warnings
    assert [layer.mixer.window for layer in whole.config.mtp] == [0, 24, 0]
    assert whole.config.owners == tuple(range(n + 3)) and len(whole.model.drafter.passes) == 3
    assert np.array_equal(whole.logits(PROMPT), alone.logits(PROMPT))
    answers = [llm.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True) for llm in (alone, whole)]
    assert answers[0].ids == answers[1].ids


@pytest.mark.parametrize(
    ("metadata", "lost", "says"),
    [
        ({}, "blk.3.", "tensor blk.3.attn_q.weight is missing"),
        (
            {"nextn_predict_layers": 4, "block_count": 6},
            "",
            "nextn_predict_layers is 4, and drafts by up to 3 layers are supported",
        ),
        ({"block_count": 5}, "blk.4.attn_norm", "tensor blk.4.attn_norm.weight is missing"),
        ({}, ("blk.2.", "blk.3.", "blk.4."), "is 3, and the file has no tensors of a layer that drafts"),
        ({"nextn_predict_layers": 1}, "", "nextn_predict_layers is 1, and the file has 3 such layers"),
    ],
)
def test_damaged_chains(metadata: dict[str, Any], lost: Any, says: str, tmp_path: Path) -> None:
    """The trunk runs without drafts, and a sentence says why."""
    case = changed(DRAFTING, metadata, lambda name: not (lost and name.startswith(lost)))
    llm = load(case, tmp_path / "m.gguf")
    assert llm.draft is None and says in " ".join(llm.warnings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"swiglu_clamp_exp": [0.5]}, "swiglu_clamp_exp at byte [0-9]+: has 1 elements for 3 layers"),
        ({"swiglu_clamp_exp": [0.5, -1.0, 0.0]}, "swiglu_clamp_exp"),
        ({"rope.dimension_count": 30}, "half of it is an odd number"),
        ({"attention.sliding_window": 0}, "attention.sliding_window"),
    ],
)
def test_damaged_metadata(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=says):
        load(replace(LIMITED, metadata=dict(LIMITED.metadata) | change), tmp_path / "m.gguf")


def test_factors_beyond_what_is_rotated(tmp_path: Path) -> None:
    """They must be 1: layers with a window have no factors."""
    (name, factors), *_ = CASE.extra.items()
    assert factors.size == 8 and np.all(factors[4:] == 1)
    wrong = factors.copy()
    wrong[5] = 2
    with pytest.raises(EngineError, match=r"rope_freqs\.weight has 8 elements, and 4 are rotated"):
        load(replace(CASE, extra={name: wrong}), tmp_path / "m.gguf")
