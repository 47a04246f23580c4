"""Forward passes against an independent implementation: logits that ``transformers`` computed in float64.

``oracle/models.py`` makes the weights, ``oracle/make.py`` made the golden files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from tests.conftest import REPOSITORY
from tests.oracle.families.family import Family
from tests.oracle.models import CASES, LENGTHS, N_VOCAB, POSITIONS, Case, fingerprint, prompts, write_gguf

GOLDEN = REPOSITORY / "tests" / "oracle"
MODELS = {name: case for name, case in CASES.items() if not case.target}
HYBRIDS = {name: case for name, case in CASES.items() if case.n_mtp}
ASSISTANTS = {name: case for name, case in CASES.items() if case.target}

BOUND = 1e-5
"""Largest error of a logit, in standard deviations of the logits of its position.

Weights, activations and cache are float32, so what is left is the rounding of float32: at most 2.8e-6 was measured over
the models with attention only, and 5.0e-6 over those with recurrent layers (``transformers`` itself is up to 2.4e-5 off when
it computes in float32).  A mistake shows: the smallest one tried, an epsilon of 1e-6 for 1e-5, gives 1.6e-4, one in an L2
norm that counts for the mean and not for the sum 6.5e-4, an embedding scale rounded to bfloat16 2.9e-3, a window one too long
or too short more than 0.4.
"""


def _golden(case: Case | Family) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{case.name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_golden_logits_belong_to_the_model(case: Case | Family) -> None:
    golden = _golden(case)
    assert golden["fingerprint"] == fingerprint(case), "models.py has changed: run python -m tests.oracle.make"
    kept = [(prompt, at) for prompt, positions in enumerate(POSITIONS) for at in positions]
    steps = [0, 1, 2] if case.target else [0]  # of a chain of drafts, from a position that has one before it
    places = [(row["prompt"], row["position"], row.get("step", 0)) for row in golden["rows"]]
    assert places == [(prompt, at, i) for prompt, at in kept for i in steps if at or not case.target]
    if case.n_mtp:
        assert [(row["prompt"], row["position"]) for row in golden["mtp"]] == kept
        assert [row["position"] for row in golden["drafts"]] == [LENGTHS[-1] + i for i in range(len(golden["drafts"]))]
    rows = [row for part in ("rows", "mtp", "drafts") for row in golden.get(part, [])]
    assert all(len(row["logits"]) == N_VOCAB for row in rows)


@pytest.mark.whole
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(case: Case | Family, tmp_path: Path) -> None:
    llm = engine.load(write_gguf(case, tmp_path / f"{case.name}.gguf"), cache_type="f32")
    ours = [llm.logits(prompt.tolist()) for prompt in prompts(case)]
    for row in _golden(case)["rows"]:
        prompt, at = row["prompt"], row["position"]
        assert _error(ours[prompt][at], row) <= BOUND, f"prompt {prompt}, position {at}"


@pytest.mark.parametrize("case", HYBRIDS.values(), ids=HYBRIDS)
def test_drafts_are_those_of_the_layer_put_together_from_transformers(case: Case | Family, tmp_path: Path) -> None:
    """From the trunk's output at every kind of position, and a chain that goes on from its own."""
    path = write_gguf(case, tmp_path / f"{case.name}.gguf")
    llm: Any = engine.load(path, cache_type="f32", **(case.options(path) if isinstance(case, Family) else {}))
    golden = _golden(case)
    for row in golden["mtp"]:
        prompt, at = prompts(case)[row["prompt"]].tolist(), row["position"]
        llm.reset()
        if at:
            llm.logits(prompt[:at])
        assert _error(llm.model.drafter.forward(prompt[at], at, llm.model.sequence), row) <= BOUND, (
            f"prompt {row['prompt']}, position {at}"
        )
    llm.reset()
    llm.logits(prompts(case)[-1].tolist())
    for number, row in enumerate(golden["drafts"]):
        found = llm.model.drafter.forward(row["token"], row["position"], llm.model.sequence, number)
        assert _error(found, row) <= BOUND, f"draft {row['position']}"


@pytest.mark.parametrize("case", ASSISTANTS.values(), ids=ASSISTANTS)
def test_drafts_are_those_of_the_assistants_of_transformers(case: Case | Family, tmp_path: Path) -> None:
    """Chains of drafts: inside the window, at its edges and beyond."""
    target = write_gguf(CASES[case.target], tmp_path / "target.gguf")
    llm: Any = engine.load(target, draft_model=write_gguf(case, tmp_path / "assistant.gguf"), cache_type="f32")
    assistant = llm.model.drafter
    for row in _golden(case)["rows"]:
        at, step = row["position"], row["step"]
        if step == 0:
            llm.reset()
            llm.logits(prompts(case)[row["prompt"]][:at].tolist())
            assistant.stand(at)
        assert _error(assistant.forward(row["token"], at + step, llm.model.sequence), row) <= BOUND, (
            f"draft {step} from {at}"
        )


def _error(logits: np.ndarray, row: dict[str, Any]) -> float:
    """The largest error, in standard deviations."""
    expected = np.array(row["logits"])
    return float(np.abs(logits - expected).max() / expected.std())
