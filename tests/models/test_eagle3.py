"""Networks of EAGLE-3: their drafts against float64, the text without them, and files that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cpu.taps import UNKNOWN
from engine.errors import EngineError
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.eagle3 import Network, Target, agreeing, drafts
from tests.networks import check_answers_together, check_drafts_of_target, target_of_kind
from tests.tiers import few

DRAFTED = SpeculationParams(draft_max=3, draft_min=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(make_model(tmp_path_factory.mktemp("target") / "target.gguf", "tiny-llama", "F32"))


def sizes(target: Target) -> Network:
    n_vocab, width = target.w["token_embd.weight"].shape
    return Network(width, n_vocab, width, 4, 2, 32, 96, (0, 1, target.n_layer))


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few-tokens": {"n_draft": 100, "llama3": True, "base": 5000.0},
    "own-factors": {"llama3": True, "scale": 3},
    "own-width": {"n_embd": 96, "own_embedding": True, "normed_sum": True},
    "normed": {"norm_before_fc": True, "lends_output": True, "taps": (1,)},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_drafts_are_those_of_the_definition(name: str, target: Target, tmp_path: Path) -> None:
    """Logits after the first draft at several positions, and of chains, within 1e-5 standard deviations."""
    net = replace(sizes(target), **NETWORKS[name])
    llm: Any = engine.load(target.path, draft_model=net.write(tmp_path / "net.gguf"), cache_type="f32", n_ctx=256)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, net.n_vocab, 140).tolist()
    for n in (2, 3, 64, 65, 66, 130):
        chain = rng.integers(0, net.n_vocab, 3).tolist()
        expected = drafts(target, net, tokens[:n], chain)
        llm.read(tokens[: n - 1])
        for i, token in enumerate([tokens[n - 1], *chain]):
            found = llm.model.drafter.forward(token, n - 1 + i, llm.model.sequence, i)
            known = np.isfinite(expected[i])
            assert (found[~known] == UNKNOWN).all()
            error = np.abs(found[known] - expected[i][known]).max() / expected[i][known].std()
            assert error < 1e-5, f"draft {i} after {n} tokens"


def test_answers_together(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers at a time, with drafts that are often right: the texts of each alone, without drafts."""
    check_answers_together(agreeing(target.path, tmp_path), "eagle3", DRAFTED)


@pytest.mark.parametrize(
    ("changes", "keys", "says"),
    [
        ({}, {"target_hidden_size": 128}, "drafts for models with embeddings of 128, and .* has 288"),
        ({}, {"target_layers": [0, 1, 99]}, r"drafts for models with the layers \[0, 1, 99\], and .* has [0-9] layers"),
        ({}, {"target_layers": [1, 1]}, r"the layers \[1, 1\]"),
        ({}, {"block_count": 2}, "block_count .*is 2, and networks of one layer are supported"),
        ({"n_embd": 96}, {}, "has no token_embd.weight, and its width is not that of"),
        ({"taps": (0, 1)}, {"target_layers": [0, 1, 2]}, "fc.weight"),
        ({"changes": {"extra.weight": np.zeros(3, np.float32)}}, {}, "extra.weight"),
        ({"n_draft": 9, "changes": {"d2t": np.arange(9) + 10**6}}, {}, "tensor d2t must hold numbers from 0 to"),
        ({"n_draft": 9, "changes": {"d2t": np.zeros(9, np.int64)}}, {}, "tensor d2t holds a number twice"),
    ],
)
def test_networks_that_do_not_fit(
    changes: dict[str, Any], keys: dict[str, Any], says: str, target: Target, tmp_path: Path
) -> None:
    network = replace(sizes(target), **changes).write(tmp_path / "net.gguf", **keys)
    with pytest.raises(EngineError, match=says):
        engine.load(target.path, draft_model=network, n_ctx=64, device="cpu", n_threads=1)


def test_other_models(target: Target, tmp_path: Path) -> None:
    network = sizes(target).write(tmp_path / "net.gguf")
    with pytest.raises(EngineError, match="only drafts for its model; give it as the draft model"):
        engine.load(network, device="cpu")
    with pytest.raises(EngineError, match="drafts for models of the architectures llama, .*, and .* is qwen2"):
        engine.load(make_model(tmp_path / "other.gguf", "tiny-qwen2", "F32"), draft_model=network, device="cpu")


KINDS = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gpt-oss", "gemma4", "gemma4-e")


@pytest.mark.parametrize("kind", few(list(KINDS), 3))
def test_every_kind_of_target(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text without drafts; drafts after another text has been read, in part or as a whole, and those of a saved state,
    are those of a model that has read nothing else."""
    path, config = target_of_kind(kind, tmp_path, monkeypatch)
    net = Network(config.n_embd, config.n_vocab, 64, 2, 1, 32, 96, (0, 2, config.n_layer), 100, own_embedding=True)
    check_drafts_of_target(path, net.write(tmp_path / "net.gguf"), tmp_path, DRAFTED)


def test_the_bundled_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps at least 60 % of three drafts of source code, and the text is that without it."""
    llm = engine.load("pycoder", draft_model="pycoder-eagle3", device="cpu", n_ctx=512)
    plain = engine.load("pycoder", device="cpu", n_ctx=512)
    drafted = accepted = 0
    for prompt in ("def fibonacci(n):\n", "import os\n\n\nclass Stack:\n    def __init__(self):\n", "for i in range("):
        options: dict[str, Any] = {"max_tokens": 64, "temperature": 0}
        found = llm.complete(prompt, speculation=DRAFTED, **options)
        assert found.ids == plain.complete(prompt, **options).ids and found.speculation is not None
        drafted, accepted = drafted + found.speculation.drafted, accepted + found.speculation.accepted
    assert accepted > 0.6 * drafted > 30
