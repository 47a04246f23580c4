"""Files of Step 3.5 beyond those of the oracle: with the layers that draft, and damaged ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError
from tests.oracle.families.family import Family
from tests.oracle.families.step35 import CASES

CASE, LIMITED = CASES
PROMPT = list(range(40))


def load(case: Family, path: Path) -> Any:
    return engine.load(case.write_gguf(path), device="cpu", n_ctx=64, n_threads=1)


def with_drafting_layers(case: Family) -> Family:
    """The model with three layers after the trunk, as it is published: attention without a window, and limits of 0."""
    n, e = case.config["num_hidden_layers"], case.config["hidden_size"]
    last = {name: w for name, w in case.tensors().items() if name.startswith(f"blk.{n - 1}.")}
    extra = dict(case.extra)
    for il in range(n, n + 3):
        extra |= {name.replace(f"blk.{n - 1}.", f"blk.{il}."): w for name, w in last.items()}
        extra |= {f"blk.{il}.nextn.{name}.weight": np.ones(e, np.float32) for name in ("enorm", "hnorm")}
        extra[f"blk.{il}.nextn.eh_proj.weight"] = np.ones((e, 2 * e), np.float32)
    metadata = dict(case.metadata) | {"block_count": n + 3, "nextn_predict_layers": 3}
    for key, value in case.metadata.items():
        if isinstance(value, list):
            metadata[key] = [*value, *[type(value[0])(0) if "clamp" in key else value[-1]] * 3]
    return replace(case, extra=extra, metadata=metadata)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_that_draft_are_left_out(case: Family, tmp_path: Path) -> None:
    alone, whole = load(case, tmp_path / "trunk.gguf"), load(with_drafting_layers(case), tmp_path / "whole.gguf")
    assert whole.config.layers == alone.config.layers and whole.draft is None
    assert np.array_equal(whole.logits(PROMPT), alone.logits(PROMPT))
    assert "drafts by layers of step35 models are not supported" in " ".join(whole.warnings)


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
