"""ds4's rounding of a deepseek4 model: what is rounded, that nothing else changes, and what it cannot be combined with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cpu.backend import Backend
from engine.decode.evaluate import evaluate
from engine.errors import ModelError, UsageError
from engine.speculative.params import SpeculationParams
from tests.families import FAMILIES, write_quantized
from tests.models.test_models import in_batches
from tests.oracle.families.deepseek4 import CASES, DeepSeek4, family

N_ROT = 16
GIVEN: dict[str, Any] = {"n_ctx": 320, "device": "cpu", "n_threads": 1, "cache_type": "f32"}


def loaded(case: DeepSeek4, folder: Path, **more: Any) -> list[Any]:
    """The model without rounding and with it."""
    path = write_quantized(case, folder / "m.gguf")
    given = GIVEN | case.options(path) | more
    return [engine.load(path, ds4_rounding=on, **given) for on in (False, True)]


@pytest.mark.parametrize("ratio", [4, 8])
def test_what_is_rounded(ratio: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first layer, whose input is that of the plain model: latents, compressed rows, keys and queries of the indexer,
    and nothing else that is stored."""
    plain, rounded = loaded(family("deepseek4-first", [ratio], 0, CASES[0].config), tmp_path)
    queries: list[np.ndarray] = []
    choose = Backend.choose_rows

    def noting(self: Backend, q: np.ndarray, *rest: Any) -> np.ndarray:
        self.flush()
        queries.append(q.copy())
        return choose(self, q, *rest)

    monkeypatch.setattr(Backend, "choose_rows", noting)
    tokens = np.random.default_rng(7).integers(0, 289, 100).astype(np.int32)
    for llm in (plain, rounded):
        in_batches(llm, tokens, [100])
    law = Backend(1)
    (a,), (b,) = plain.cache.layers, rounded.cache.layers
    expected = law.round_latents(a.latents.reshape(-1, 64)[:100], N_ROT)
    assert b.latents.reshape(-1, 64)[:100].tobytes() == expected.tobytes()
    expected = law.round_latents(a.compressed.rows.reshape(-1, 64)[: 100 // ratio], N_ROT)
    found = b.compressed.rows.reshape(-1, 64)
    assert found[: 100 // ratio].tobytes() == expected.tobytes() and not found[100 // ratio :].any()
    assert a.compressed.pending.tobytes() == b.compressed.pending.tobytes()
    if ratio == 4:
        keys = [layer.keys.rows.swapaxes(1, 2).reshape(-1, 32) for layer in (a, b)]
        assert keys[1][:25].tobytes() == law.round_queries(keys[0][:25].copy(), 1).tobytes()
        assert a.keys.pending.tobytes() == b.keys.pending.tobytes()
        assert queries[1].tobytes() == law.round_queries(queries[0], 8).tobytes()


def test_the_contract_with_rounding(tmp_path: Path) -> None:
    """Any division of a prompt, rolling back, drafts, which are rounded, too, and a saved conversation."""
    plain, llm = loaded(CASES[0], tmp_path)
    tokens = np.random.default_rng(7).integers(0, llm.config.n_vocab, 140).astype(np.int32)
    expected = in_batches(llm, tokens, [1] * tokens.size)
    other = in_batches(plain, tokens, [128, 12])
    assert not np.array_equal(other, expected)
    assert np.corrcoef(other.ravel(), expected.ravel())[0, 1] > 0.98
    assert in_batches(llm, tokens, [126, 1, 1, 9, 3]).tobytes() == expected.tobytes()
    llm.sequence.truncate(137)
    again = evaluate(llm.model, tokens[137:], np.arange(137, 140, dtype=np.int32), 3, llm.model.sequence)
    assert again.tobytes() == expected[137:].tobytes()
    latents = llm.cache.layers[-1].latents.reshape(-1, 64)[:100]
    assert latents.any() and latents.tobytes() == Backend(1).round_latents(latents, N_ROT).tobytes()
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    prompt = tokens[:120].tolist()
    ids = llm.complete(prompt, speculation=SpeculationParams(enabled=False), **given).ids
    found = llm.complete(prompt, speculation=SpeculationParams(draft_max=4), **given)
    assert found.ids == ids and found.speculation.drafted > 0
    llm.save_state(tmp_path / "state")
    with pytest.raises(UsageError, match=r"'f32', 'f32', 'ds4' rounding\) than the model has \('f32', 'f32'\)"):
        plain.load_state(tmp_path / "state")
    held = list(llm.sequence.tokens)
    llm.reset()
    assert llm.load_state(tmp_path / "state") == held


def test_what_it_cannot_be_combined_with(tmp_path: Path) -> None:
    path = FAMILIES["deepseek4"].write_gguf(tmp_path / "m.gguf")
    for name in ("f16", "q8_0"):
        refusal = r"ds4_rounding=True\) needs the cache type f32.*use cache_type=.f32.|use f16 or f32 for both"
        with pytest.raises(ModelError, match=refusal):
            engine.load(path, **GIVEN | {"cache_type": name}, ds4_rounding=True)
    other = FAMILIES["deepseek2"].write_gguf(tmp_path / "other.gguf")
    refusal = r"ds4's rounding \(ds4_rounding=True\) is defined for deepseek4 models only, and this is deepseek2\."
    with pytest.raises(ModelError, match=refusal):
        engine.load(other, **GIVEN, ds4_rounding=True)
    # Only the model is rounded, not a model that drafts for it.
    llm: Any = engine.load(path, draft_model=other, ds4_rounding=True, **GIVEN)
    assert llm.config.rounding == "ds4" and llm.draft.name == "model"
    config = dict(CASES[0].config) | {"index_head_dim": 48}
    odd = family("deepseek4-odd", [4], 0, config).write_gguf(tmp_path / "odd.gguf")
    with pytest.raises(ModelError, match="an indexer whose keys have a power of two of elements, not 48"):
        engine.load(odd, **GIVEN, ds4_rounding=True)
