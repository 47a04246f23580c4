"""On a real GPU: what is not finite, or overflows in a norm, shows in the result of its row (``tests/overflow.py``), and
whole models say so."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine.errors import ModelError
from engine.hub.resolve import resolve
from engine.speculative.params import SpeculationParams
from tests.cuda.test_device import gpu
from tests.ggufs import damaged
from tests.models.test_overflow import NAMED, PROMPT, SAID
from tests.overflow import NORMS, OTHERS, TOO_LARGE, Case, OnGpu

assert gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.together(f"overflow {case.name.split()[0]}"))
        for case in NORMS + OTHERS + TOO_LARGE
    ],
)
def test_it_shows_in_its_row(gpu: Any, case: Case) -> None:
    for bad in case.numbers:
        case.check(OnGpu(gpu), bad)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cache_type", ["f16", "i8", "q8_0"])
def test_no_answer_is_empty_without_a_word(cache_type: str, tmp_path: Path) -> None:
    bad = damaged(resolve(None), tmp_path / "bad.gguf", "blk.1.attn_norm.weight", 3, 1e20)
    with engine.load(bad, device="cuda", n_ctx=256, cache_type=cache_type) as llm:
        with pytest.raises(ModelError, match=NAMED):
            llm.logits(llm.tokenize(PROMPT))
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 0}):
            for prompt in (PROMPT, PROMPT * 40):
                with pytest.raises(ModelError, match=SAID):
                    llm.complete(prompt, max_tokens=4, **options)


@pytest.mark.usefixtures("gpu")
def test_a_draft_model_that_overflows_changes_no_text(tmp_path: Path) -> None:
    """Its drafts, which the GPU makes, are wrong, or there are none."""
    bad = damaged(resolve("pycoder-draft"), tmp_path / "draft.gguf", "blk.0.ffn_norm.weight", 3, 1e30)
    with engine.load(device="cuda", n_ctx=256, draft_model=bad) as llm:
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
            plain = llm.complete(PROMPT, max_tokens=40, speculation=SpeculationParams(enabled=False), **options)
            assert llm.complete(PROMPT, max_tokens=40, **options).ids == plain.ids
