"""Parallel layers, which read one norm for both of their parts: they are divided between devices only as a whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine import loading
from engine.cpu.backend import Backend
from engine.errors import UsageError
from engine.gguf.file import read_gguf
from engine.models.division import Division, fitted, parse_overrides, weight_bytes
from engine.models.placement import Placement
from engine.models.registry import read_config
from engine.synthetic.model import make_model
from tests.families import write_quantized
from tests.models.test_stages import CPU, GPU
from tests.oracle.families.cohere import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_divided_model_has_the_same_bits(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "host_beside", lambda ops, n_threads=0: Backend(1, 24))
    path = write_quantized(case, tmp_path / "m.gguf")
    tokens = np.random.default_rng(2).integers(0, case.config["vocab_size"], 70).tolist()
    given: dict[str, Any] = {"device": "cpu", "n_ctx": 96, "n_threads": 1}
    whole = engine.load(path, **given).logits(tokens)
    for options in ({"n_gpu_layers": 1}, {"override_tensor": r"blk\.1\.=CPU"}):
        llm: Any = engine.load(path, **given, **options)
        assert llm.model.stages
        assert llm.logits(tokens).tobytes() == whole.tobytes()


def test_no_division_cuts_a_layer(tmp_path: Path) -> None:
    gguf = read_gguf(make_model(tmp_path / "m.gguf", "tiny-cohere2", "Q4_0"))
    config = read_config(gguf)
    with pytest.raises(UsageError) as caught:
        Division(overrides=parse_overrides("ffn_=CPU")).placement(config, gguf, GPU, CPU)
    assert "the tensors of layer 0 stay together, and blk.0.ffn_" in str(caught.value)
    found = set()
    for limit in range(0, gguf.n_bytes, gguf.n_bytes // 20):

        def fits(placement: Placement, limit: int = limit) -> bool:
            return weight_bytes(config, gguf, placement)[GPU] <= limit

        chosen = fitted(config, gguf, GPU, CPU, fits)
        if chosen is not None:
            assert chosen.mixers == chosen.networks
            found.add(chosen.mixers)
    assert len(found) > 3
