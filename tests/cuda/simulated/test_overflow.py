"""What is not finite, or overflows in a norm, shows in the result of its row on a GPU (``tests/overflow.py``), and whole
models say so, in the simulator."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cuda import backend
from engine.errors import ModelError
from engine.speculative import passes
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_operations import gpu
from tests.ggufs import damaged
from tests.models.test_overflow import NAMED, SAID
from tests.overflow import NORMS, OTHERS, TOO_LARGE, Case, OnGpu

assert gpu

FIRST = {
    ("rms_norm", 1e20),
    ("rms_norm and a product", 1e20),
    ("attention i8 i8, v", math.nan),
    ("attention i12 i12, k", 1e10),
}
"""Those that the first tier runs."""

CASES = [
    pytest.param(case, x, id=f"{case.name}-{x:g}", marks=[] if (case.name, x) in FIRST else pytest.mark.thorough)
    for case in NORMS + OTHERS + TOO_LARGE
    for x in case.numbers
]


@pytest.mark.parametrize(("case", "bad"), CASES)
def test_it_shows_in_its_row(gpu: backend.Backend, case: Case, bad: Any) -> None:
    case.check(OnGpu(gpu), bad)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m.gguf", Shape("qwen3", 1, 32, 1, 1, 32, 32, 289, 64, 1e4, 1e-6), "Q8_0")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    monkeypatch.setattr(passes, "MEASURED", 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("simulated")
def test_no_answer_is_empty_without_a_word(model: Path, tmp_path: Path) -> None:
    bad = damaged(model, tmp_path / "bad.gguf", "blk.0.ffn_norm.weight", 3, 1e30)
    with engine.load(bad, device="cuda", n_ctx=24) as llm:
        with pytest.raises(ModelError, match=NAMED):
            llm.logits([3, 7])
        with pytest.raises(ModelError, match=SAID):
            llm.complete([3, 7], max_tokens=2, temperature=0)


@pytest.mark.thorough
@pytest.mark.usefixtures("simulated")
def test_a_draft_model_that_overflows_changes_no_text(model: Path, tmp_path: Path) -> None:
    """Its drafts, which the GPU makes, are token 0, or there are none."""
    bad = damaged(model, tmp_path / "draft.gguf", "blk.0.ffn_norm.weight", 3, 1e30)
    with engine.load(model, device="cuda", n_ctx=24, draft_model=bad) as llm:
        options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        plain = llm.complete([3, 7], speculation=SpeculationParams(enabled=False), **options)
        assert llm.complete([3, 7], speculation=SpeculationParams(draft_max=1), **options).ids == plain.ids
