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
from engine import loading, run
from engine.cache.shared import SharedLayer
from engine.cpu.backend import Backend
from engine.errors import UsageError
from engine.limits import MOST_OWNERS
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.model import make_model
from engine.synthetic.shape import Gemma4Shape
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


def gemma4(shape: str, sliding: int) -> Gemma4Shape:
    """The sizes of gemma4 of a shape, with so many heads of keys in layers that slide."""
    own = shapes()[shape].gemma4
    assert own is not None
    return replace(own, n_head_kv_sliding=sliding)


ASSISTED = {"n_head": 4, "n_head_kv": 2}

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
    # Owners of one and of two heads, and rows of which some owners have more.
    "five heads": ("tiny-llama", "Q4_K_M", {"n_head": 10, "n_head_kv": 5, "n_ff": 736}, "i8"),
    "four hybrid heads": (
        "tiny-qwen35",
        "Q4_K_M",
        {"n_head": 8, "n_head_kv": 4, "delta_net": DeltaNetConfig(5, 10, 32, 4)},
        "f16",
    ),
    # Fewer experts than owners, and matrices with too few rows for four, which every owner has.
    "few experts": (
        "tiny-qwen3moe",
        "Q4_K_M",
        {"n_head": 8, "n_head_kv": 4, "experts": ExpertsConfig(3, 2, 96, 0)},
        "f32",
    ),
    "gemma4": ("tiny-gemma4", "Q4_K_M", {"n_head": 8, "n_head_kv": 4, "gemma4": gemma4("tiny-gemma4", 8)}, "f16"),
    "gemma4 mixture": (
        "tiny-gemma4-moe",
        "Q4_K_M",
        {"n_head": 4, "n_head_kv": 4, "gemma4": gemma4("tiny-gemma4-moe", 4)},
        "f16",
    ),
    "eagle3": (
        "tiny-qwen35moe",
        "Q4_0",
        {"n_head": 8, "n_head_kv": 4, "n_mtp": 0, "delta_net": DeltaNetConfig(4, 8, 32, 4)},
        "f16",
    ),
    "dflash": ("tiny-gemma4", "Q4_0", {"n_head": 8, "n_head_kv": 4, "gemma4": gemma4("tiny-gemma4", 8)}, "f16"),
    "gemma4 assistant": ("tiny-gemma4-e", "Q4_K_M", ASSISTED | {"gemma4": gemma4("tiny-gemma4-e", 2)}, "f16"),
}
"""The shape, the format of the weights, other sizes, and the type of the cache.  The hybrids, and the mixture with shared
experts, have layers that draft."""


def files(name: str, folder: Path) -> dict[str, Any]:
    """The arguments of ``engine.load`` for a model."""
    shape, quant, sizes, cache_type = CASES[name]
    own = replace(shapes()[shape], **cast(Any, sizes))
    given: dict[str, Any] = {
        "path_or_name": make_model(folder / "m.gguf", own, quant, seed=5),
        "cache_type": cache_type,
    }
    if name in ("eagle3", "dflash"):
        network = replace(shapes()[f"tiny-{name}"], n_head=8, n_head_kv=4)
        given["draft_model"] = make_model(folder / "d.gguf", network, quant, seed=5)
    if name == "gemma4 assistant":
        shape += "-assistant"
        own = replace(shapes()[shape], **cast(Any, ASSISTED), gemma4=gemma4(shape, 2))
        given["draft_model"] = make_model(folder / "a.gguf", own, quant, seed=5)
    return given


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
        ("five heads", 4),
        pytest.param("four hybrid heads", 4, marks=pytest.mark.first),
        ("few experts", 4),
        ("gemma4", 4),
        ("gemma4 mixture", 4),
        pytest.param("gemma4 assistant", 2, marks=pytest.mark.first),
        ("eagle3", 4),
        ("dflash", 4),
    ],
)
def test_a_shared_model_has_the_bits_of_one_device(name: str, n: int, tmp_path: Path, isolated: None) -> None:
    given = files(name, tmp_path)

    def bits(options: dict[str, Any]) -> tuple[engine.LLM, list[bytes]]:
        llm = engine.load(**given, n_ctx=256, parallel=N_SEQUENCES, **options)
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


@pytest.mark.parametrize(
    ("name", "n"), [("four hybrid heads", 4), ("gemma4 assistant", 2), ("eagle3", 3), ("dflash", 4)]
)
def test_answers_with_drafts(name: str, n: int, tmp_path: Path) -> None:
    given, found = files(name, tmp_path), []
    for options in ({"device": "cpu", "n_threads": 1}, owners(n)):
        with engine.load(**given, n_ctx=256, **options) as llm:
            prompt = np.random.default_rng(5).integers(0, llm.config.n_vocab - 3, 30).tolist()
            for temperature in (0.0, 0.9):
                drafted = llm.complete(
                    prompt,
                    max_tokens=12,
                    temperature=temperature,
                    seed=4,
                    ignore_eos=True,
                    speculation=engine.SpeculationParams(draft_max=3),
                )
                assert drafted.speculation is not None and drafted.speculation.drafted > 0
                found.append((drafted.ids, drafted.speculation.accepted))
    assert found[:2] == found[2:]


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
        ({"device": "cpu,cuda:0", "split_mode": "tensor"}, "several devices are GPUs by number"),
        (owners(3), "3 devices cannot share the 2 heads of keys of a layer; use at most 2 devices"),
        (owners(MOST_OWNERS + 1), f"at most {MOST_OWNERS} devices share a model, not {MOST_OWNERS + 1}"),
        (owners(2) | {"tensor_split": "1,1"}, "devices that share layers have equal parts"),
        (owners(2) | {"kv_budget": 512}, "leave it out"),
        (owners(2) | {"n_gpu_layers": 1}, "devices that share layers have all of them: leave out n_gpu_layers"),
        (owners(2) | {"cache_disk": "1G"}, "a cache on disk is for one device"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.load("pycoder", n_ctx=256, **options)


@pytest.mark.parametrize(
    ("shape", "sizes", "reason"),
    [
        # The layers with attention have four heads of keys, and those with a delta net have three.
        ("tiny-qwen35", {"n_head": 8, "n_head_kv": 4}, "the 3 heads of keys of a layer; use at most 3 devices"),
        ("tiny-gemma3", {"n_head": 4, "n_head_kv": 4, "n_embd": 64}, "rows of 64 elements; use at most 2 devices"),
        ("tiny-gemma3", {}, "the one head of keys of a layer; use one device"),
    ],
    ids=["key heads", "rows", "one head"],
)
def test_models_that_four_devices_cannot_share(
    shape: str, sizes: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m.gguf", replace(shapes()[shape], **sizes), "Q8_0")
    sentence = f"m.gguf: 4 devices cannot share {reason}"
    with pytest.raises(UsageError) as caught:
        engine.load(path, n_ctx=64, **owners(4))
    assert str(caught.value) == f"{sentence}."
    flags = ["--device", "cpu,cpu,cpu,cpu", "--split-mode", "tensor"]
    assert run.main(["-m", str(path), "-c", "64", "-p", "x", *flags]) == 2
    assert capsys.readouterr().err == f"error: {sentence}.\n"
