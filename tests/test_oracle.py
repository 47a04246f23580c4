"""Forward passes against an implementation that is not ours: logits that ``transformers`` computed in float64.

``oracle/models.py`` makes the weights, ``oracle/make.py`` made the golden files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from tests.oracle.models import CASES, N_VOCAB, POSITIONS, Case, fingerprint, prompts, write_gguf

GOLDEN = Path(__file__).parent / "oracle"

BOUND = 1e-5
"""Largest error of a logit, in standard deviations of the logits of its position.

Weights, activations and cache are float32, so what is left is the rounding of float32: at most 2.8e-6 was measured over
all models (``transformers`` itself is up to 1.6e-5 off when it computes in float32).  A mistake shows: the smallest one
tried, an epsilon of 1e-6 for 1e-5, gives 1.6e-4, an embedding scale rounded to bfloat16 2.9e-3, a window one too long
or too short more than 0.4.
"""


def _golden(case: Case) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{case.name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_golden_logits_belong_to_the_model(case: Case) -> None:
    golden = _golden(case)
    assert golden["fingerprint"] == fingerprint(case), "models.py has changed: run python -m tests.oracle.make"
    kept = [(prompt, at) for prompt, positions in enumerate(POSITIONS) for at in positions]
    assert [(row["prompt"], row["position"]) for row in golden["rows"]] == kept
    assert all(len(row["logits"]) == N_VOCAB for row in golden["rows"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    llm = engine.load(write_gguf(case, tmp_path / f"{case.name}.gguf"), cache_type="f32")
    ours = [llm.logits(prompt.tolist()) for prompt in prompts(case)]
    for row in _golden(case)["rows"]:
        prompt, at = row["prompt"], row["position"]
        expected = np.array(row["logits"])
        error = np.abs(ours[prompt][at] - expected).max() / expected.std()
        assert error <= BOUND, f"prompt {prompt}, position {at}: {error:.1e}"
