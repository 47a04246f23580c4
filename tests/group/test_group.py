"""Models whose layers several devices share have the bits of one device: logits, drafts and answers, of one sequence and of
sixteen.  Here every owner is a backend of the CPU, with memory of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import engine
from engine import loading
from engine.cache.shared import SharedLayer
from engine.cpu.backend import Backend
from engine.group.backend import DeviceGroup
from engine.ops.operations import Ops
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.models.test_stages import N_SEQUENCES, facts


class Isolated(Backend):
    """A backend of the CPU that copies what it is given, so that no owner reads the memory of another one."""

    def upload(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)


def share(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Let n owners share the next models."""
    owners = [cast(Ops, Isolated(1, 24)) for _ in range(n)]
    monkeypatch.setattr(loading, "open_device", lambda *given: cast(Ops, DeviceGroup(owners)))


CASES = {
    "dense": ("tiny-llama", "Q4_1", {}, "q8_0"),
    "four heads": ("tiny-qwen3", "Q4_K_M", {"n_head": 8, "n_head_kv": 4}, "f16"),
    "biases": ("tiny-qwen2", "Q5_0", {"n_head": 8, "n_head_kv": 4}, "f32"),
    "windows": ("tiny-gemma3", "Q8_0", {"n_head": 6, "n_head_kv": 3}, "f16"),
    "parallel": ("tiny-cohere2", "Q4_K_M", {"n_head": 6, "n_head_kv": 3}, "f16"),
    "hybrid": ("tiny-qwen35", "Q4_K_M", {"n_head": 6, "n_head_kv": 3}, "f16"),
    "mixture": ("tiny-qwen3moe", "Q4_K_M", {"n_head": 6, "n_head_kv": 3}, "f32"),
    "hybrid mixture": ("tiny-qwen35moe", "Q4_0", {"n_head": 4, "n_head_kv": 2}, "f16"),
    "sinks": ("tiny-gpt-oss", "Q4_K_M", {}, "f16"),
    "shared experts": ("tiny-glm4moe", "Q4_K_M", {}, "f16"),
}
"""The shape, the format of the weights, other sizes, and the type of the cache.  Both hybrids, and the mixture with shared
experts, have layers that draft."""


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("dense", 2),
        ("dense", 3),
        ("four heads", 4),
        ("biases", 3),
        ("windows", 2),
        ("parallel", 3),
        ("hybrid", 2),
        ("hybrid", 3),
        ("mixture", 3),
        ("hybrid mixture", 2),
        ("sinks", 3),
        ("shared experts", 2),
    ],
)
def test_a_shared_model_has_the_bits_of_one_device(
    name: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, quant, sizes, cache_type = CASES[name]
    path = make_model(tmp_path / "m.gguf", replace(shapes()[shape], **cast(Any, sizes)), quant, seed=5)

    def bits() -> tuple[engine.LLM, list[bytes]]:
        options: dict[str, Any] = {"device": "cpu", "n_ctx": 256, "cache_type": cache_type, "n_threads": 1}
        llm = engine.load(path, **options, parallel=N_SEQUENCES)
        return llm, list(facts(llm, lambda model, sequence: []))

    expected = bits()[1]
    share(monkeypatch, n)
    llm, found = bits()
    assert found == expected
    for layer in llm.cache.layers:
        assert isinstance(layer, SharedLayer) and len(layer.parts) == n
