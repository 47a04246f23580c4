"""GPT-2: as many positions as have embeddings, wherever the parts of the model lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine import loading
from engine.cpu.backend import Backend
from engine.errors import ContextError
from tests.families import edited, write_quantized
from tests.oracle.families.gpt2 import CASES
from tests.oracle.shared import N_CTX


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_quantized(CASES[0], tmp_path / "m.gguf", "Q8_0")


def test_the_context_ends_with_the_positions(path: Path) -> None:
    with pytest.raises(ContextError, match=f"than the {N_CTX} positions .* choose a context of at most {N_CTX}"):
        engine.load(path, device="cpu", n_ctx=N_CTX + 1)
    assert engine.load(path, device="cpu").n_ctx == N_CTX


def test_another_embedding_of_a_position_changes_only_later_logits(path: Path, tmp_path: Path) -> None:
    def change(tensors: Any) -> Any:
        table, kind = tensors["position_embd.weight"]
        table = table.copy()
        table[5] = table[6]
        return {**tensors, "position_embd.weight": (table, kind)}

    tokens = np.random.default_rng(1).integers(0, CASES[0].config["vocab_size"], 12).tolist()
    rows = []
    for each in (path, edited(path, tmp_path / "other.gguf", change=change)):
        llm = engine.load(each, device="cpu", n_ctx=64, n_threads=1)
        rows.append([llm.logits(tokens[:n])[-1].tobytes() for n in (5, 6, 12)])
    assert [one == other for one, other in zip(*rows, strict=True)] == [True, False, False]


def test_a_divided_model_has_the_same_bits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "host_beside", lambda ops, n_threads=0: Backend(1, 24))
    tokens = np.random.default_rng(2).integers(0, CASES[0].config["vocab_size"], 40).tolist()
    given: dict[str, Any] = {"device": "cpu", "n_ctx": 64, "n_threads": 1}
    whole = engine.load(path, **given).logits(tokens)
    for options in ({"n_gpu_layers": 1}, {"override_tensor": "ffn_=CPU"}):
        llm: Any = engine.load(path, **given, **options)
        assert llm.model.stages
        assert llm.logits(tokens).tobytes() == whole.tobytes()
