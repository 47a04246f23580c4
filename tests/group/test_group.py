"""Models whose layers several devices share have the bits of one device: logits, drafts and answers, of one sequence and of
sixteen.  Here every owner is a backend of the CPU, with memory of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine import loading
from engine.cache.shared import SharedLayer
from engine.cpu.backend import Backend
from engine.errors import UsageError
from engine.limits import MOST_OWNERS
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.models.test_mixed_passes import read
from tests.models.test_stages import N_SEQUENCES, facts
from tests.tiers import examples


class Isolated(Backend):
    """A backend of the CPU that copies what it is given, so that no owner reads the memory of another one."""

    def upload(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend is one of these, and reads few rows at a time."""
    monkeypatch.setattr(loading, "open_device", lambda *given: Isolated(1, 24))


def owners(n: int) -> dict[str, Any]:
    """The arguments of ``engine.load`` for n owners on the CPU."""
    return {"device": ",".join(["cpu"] * n), "split_mode": "tensor", "n_threads": 1}


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
        pytest.param("dense", 3, marks=pytest.mark.first),
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
def test_a_shared_model_has_the_bits_of_one_device(name: str, n: int, tmp_path: Path, isolated: None) -> None:
    shape, quant, sizes, cache_type = CASES[name]
    path = make_model(tmp_path / "m.gguf", replace(shapes()[shape], **cast(Any, sizes)), quant, seed=5)

    def bits(options: dict[str, Any]) -> tuple[engine.LLM, list[bytes]]:
        llm = engine.load(path, n_ctx=256, cache_type=cache_type, parallel=N_SEQUENCES, **options)
        return llm, list(facts(llm, lambda model, sequence: []))

    _, expected = bits({"device": "cpu", "n_threads": 1})
    llm, found = bits(owners(n))
    assert found == expected
    for layer in llm.cache.layers:
        assert isinstance(layer, SharedLayer) and len(layer.parts) == n


@examples(30)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8), n=st.sampled_from([2, 3, 4]))
def test_any_division_of_a_prompt(cuts: list[int], n: int, models: dict[int, engine.LLM]) -> None:
    text = np.random.default_rng(sum(cuts)).integers(0, 280, sum(cuts)).astype(np.int32)
    found = []
    for i, ends in ((1, []), (n, np.cumsum(cuts)[:-1])):
        model: Any = models[i].model
        model.sequence.truncate(0)
        found.append([read(model, model.sequence, part) for part in np.split(text, ends)])
    assert np.concatenate(found[0]).tobytes() == np.concatenate(found[1]).tobytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, engine.LLM]:
    """A model by its number of owners."""
    shape = replace(shapes()["tiny-qwen3"], n_head=8, n_head_kv=4)
    path = make_model(tmp_path_factory.mktemp("m") / "m.gguf", shape, "Q4_K_M", seed=5)
    options = {n: owners(n) if n > 1 else {"device": "cpu", "n_threads": 1} for n in (1, 2, 3, 4)}
    return {n: engine.load(path, n_ctx=512, **given) for n, given in options.items()}


@pytest.mark.parametrize("drafts", [None, "pycoder-draft"])
def test_answers(drafts: str | None) -> None:
    def answer(options: dict[str, Any]) -> tuple[str, ...]:
        with engine.load("pycoder", n_ctx=256, draft_model=drafts, **options) as llm:
            prompts = ["import ", "def main(", "class "]
            return tuple(llm.complete(prompt, max_tokens=24, seed=3, temperature=0.8).text for prompt in prompts)

    assert answer(owners(2)) == answer({"device": "cpu", "n_threads": 1})


def test_saved_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken up by as many owners, and read again by another number."""
    path, text = tmp_path / "state", "import os" + "\nimport sys" * 40
    one: dict[str, Any] = {"device": "cpu", "n_threads": 1}
    continued = []
    for i, options in enumerate((owners(2), owners(2), one)):
        with engine.load("pycoder", n_ctx=512, **options) as llm:
            if i:
                again = Mock(wraps=llm.prefill)
                monkeypatch.setattr(llm, "prefill", again)
                llm.load_state(path)
                assert again.called == (options is one)
            else:
                llm.complete(text, max_tokens=1, temperature=0)
                llm.save_state(path)
            continued.append(llm.complete(text, max_tokens=16, temperature=0).text)
    assert continued[0] == continued[1] == continued[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu,cpu"}, "names the CPU several times"),
        ({"device": "cpu,cuda:0", "split_mode": "tensor"}, "several devices are GPUs by number"),
        (owners(3), "3 devices cannot share the 2 heads of keys of a layer; use at most 2 devices"),
        (owners(MOST_OWNERS + 1), f"at most {MOST_OWNERS} devices share a model, not {MOST_OWNERS + 1}"),
        (owners(2) | {"tensor_split": "1,1"}, "devices that share layers have equal parts"),
        (owners(2) | {"kv_budget": 512}, "leave it out"),
        (owners(2) | {"n_gpu_layers": 1}, "layers on the CPU are for one GPU"),
        (owners(2) | {"cache_disk": "1G"}, "a cache on disk is for one device"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.load("pycoder", n_ctx=256, **options)
