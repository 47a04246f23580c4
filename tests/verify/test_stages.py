"""``engine/verify/stages.py``: a divided model is compared with the whole one after each stage, and the stage at fault is
named.  Here every device is a backend of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.models.stage import Stage
from tests.models.test_mixed_passes import files
from tests.models.test_stages import cut
from tests.tiers import few

pytest.importorskip("numba_cuda", reason="the comparison reads arrays of GPUs")


@pytest.fixture
def verify() -> Any:
    """The modules, which import the kernels of the GPU."""
    from engine.verify import stages, tally

    return stages.StageComparison, tally.Tally


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model, and the same model on three backends."""
    given = files(request.param, tmp_path) | {"draft_model": None, "n_threads": 1}
    cpu = engine.load(**given)
    cut(monkeypatch, [0, 0, 1], [1, 2, 2], 1)
    return cpu, engine.load(**given)


@pytest.mark.parametrize("both", few(["hybrid", "windows", "latents", "gemma4"]), indirect=True)
def test_equal_models(both: Any, verify: Any) -> None:
    comparison, tally = verify
    cpu, divided = both
    counted = tally()
    found = comparison(cpu, divided, list(range(5, 70)), 3, counted)
    found.prompt()
    found.answers(12)
    rows = {row[0]: row for row in counted.rows()}
    assert set(rows) == {"stages on cpu", "cache", "answer of LLM.generate"}
    n_stages, width = len(divided.model.stages), divided.config.n_embd
    # Each of 65 rows after each stage but the last one, in passes of few and of many rows.
    assert int(rows["stages on cpu"][-2]) > 2 * 65 * (n_stages - 1) * width
    assert all(int(row[-1]) == 0 for row in rows.values())


@pytest.mark.parametrize("both", ["hybrid"], indirect=True)
@pytest.mark.parametrize("wrong", [0, 2, -1])
def test_the_stage_at_fault_is_named(both: Any, verify: Any, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.verify.check import Difference

    comparison, tally = verify
    cpu, divided = both
    at_fault = divided.model.stages[wrong]
    run = Stage.run

    def damaged(stage: Stage, *given: Any) -> Any:
        found = run(stage, *given)
        if stage is at_fault and found is not None:
            found[-1, 3] = np.nextafter(found[-1, 3], np.float32(np.inf))
        return found

    monkeypatch.setattr(Stage, "run", damaged)
    with pytest.raises(Difference, match="differs, as do 1 of") as raised:
        comparison(cpu, divided, list(range(5, 70)), 3, tally()).prompt()
    assert raised.value.verdict == f"The stage at fault: {at_fault}."
    names = {0: "the embedding to the mixer of layer 0", 2: "the mixer of layer 1", -1: "the output"}
    assert str(at_fault) == f"{names[wrong]} on cpu"
