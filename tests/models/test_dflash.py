"""Networks of DFlash and DSpark: their drafts against float64, the text without them, and files that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cpu.taps import UNKNOWN
from engine.errors import EngineError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.dflash import Network, agreeing, block
from tests.eagle3 import Target
from tests.networks import check_answers_together, check_drafts_of_target, target_of_kind
from tests.tiers import few

DRAFTED = SpeculationParams(draft_max=5, draft_min=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(make_model(tmp_path_factory.mktemp("target") / "target.gguf", "tiny-llama", "F32"))


def sizes(target: Target) -> Network:
    n_vocab, width = target.w["token_embd.weight"].shape
    return Network(n_vocab, width, 4, 2, 32, 96, (0, 1, target.n_layer))


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"n_layer": 3},
    "causal": {"causal": True, "size": 16},
    "windows": {"windows": (24, 0), "sinks": True, "value_scale": 0.7},
    "few-tokens": {"n_draft": 100, "lends_output": False, "rank": 32, "own_embedding": True},
    "dspark": {"rank": 32, "judged": True, "embedding_scale": 2.0},
    "bonus": {"rank": 64, "judged": True, "from_anchor": False, "own_embedding": True},
    "gemma4": {
        **{"keys_are_values": True, "normed": True, "gelu": True, "scales": (0.5, 1.5), "attention_scale": 0.5},
        **{"rank": 32, "lends_output": False, "embedding_scale": 12.0, "partial": 4},
    },
}


@pytest.mark.parametrize("name", NETWORKS)
def test_drafts_are_those_of_the_definition(name: str, target: Target, tmp_path: Path) -> None:
    """Logits of blocks of several sizes after several tokens, within 1e-5 standard deviations."""
    net = replace(sizes(target), **NETWORKS[name])
    llm: Any = engine.load(target.path, draft_model=net.write(tmp_path / "net.gguf"), cache_type="f32", n_ctx=256)
    drafter = llm.model.drafter
    assert llm.draft.most == min(net.size - net.first, 15)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, net.n_vocab, 140).tolist()
    for n, count in ((2, 7), (3, 3), (61, 5), (65, 7), (130, 1), (128, 4)):
        chain = [tokens[n - 1], *rng.integers(0, net.n_vocab, count - 1).tolist()]
        expected = block(target, net, tokens[:n], count)
        llm.read(tokens[: n - 1])
        for i, token in enumerate(chain):
            found = drafter.forward(token, n - 1 + i, llm.model.sequence, i, count)
            logits = expected.draft(i, token)
            known = np.isfinite(logits)
            assert (found[~known] == UNKNOWN).all()
            error = np.abs(found[known] - logits[known]).max() / logits[known].std()
            assert error < 1e-5, f"draft {i} of {count} after {n} tokens"
            if net.judged:
                confidence = drafter.confidence(token, n - 1 + i, llm.model.sequence, i)
                assert abs(confidence - expected.confidence(i, token)) < 1e-5


def test_answers_together(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers at a time, with drafts that are often right: the texts of each alone, without drafts."""
    check_answers_together(agreeing(target.path, tmp_path), "dflash", DRAFTED)


def test_confidence_ends_a_block(target: Target, tmp_path: Path) -> None:
    """Drafts in which the confidence head has less confidence than ``draft_p_min`` are not verified."""
    net = replace(sizes(target), rank=32, judged=True)
    rng = np.random.default_rng(1)
    llm: Any = engine.load(target.path, draft_model=net.write(tmp_path / "net.gguf"), cache_type="f32", n_ctx=256)
    sampler = Sampler(SamplerParams(temperature=0.0, seed=1), net.n_vocab)
    lengths = set()
    for _ in range(12):
        tokens = rng.integers(0, net.n_vocab, 20).tolist()
        expected = block(target, net, tokens, 7)
        wanted: list[int] = []
        for i in range(7):
            before = [*tokens, *wanted][-1]
            if expected.confidence(i, before) < 0.5:
                break
            wanted.append(int(np.argmax(expected.draft(i, before))))
        llm.read(tokens[:-1])
        found = llm.draft.propose(tokens, 7, sampler, 0.5, False, llm.model.sequence)
        assert found.tokens == wanted
        lengths.add(len(wanted))
    assert len(lengths) > 2


@pytest.mark.parametrize(
    ("changes", "keys", "says"),
    [
        ({"n_embd": 96}, {}, "drafts for models with embeddings of 96, and .* has 288"),
        ({}, {"target_layers": [0, 1, 99]}, r"drafts for models with the layers \[0, 1, 99\], and .* has [0-9] layers"),
        ({}, {"target_layers": None}, "dflash.target_layers"),
        ({}, {"block_size": 1}, "dflash.block_size .*is 1, outside 2"),
        ({}, {"hidden_activation": "relu"}, "the activation 'relu' .* is not supported"),
        ({}, {"hyper_connection_count": 4}, "networks of DeepSeek-V4 that draft blocks are not supported"),
        ({"changes": {"selector_hidden.weight": np.zeros((8, 288), np.float32)}}, {}, "networks of DFlash2"),
        ({"taps": (0, 1)}, {"target_layers": [0, 1, 2]}, "fc.weight"),
        ({"changes": {"extra.weight": np.zeros(3, np.float32)}}, {}, "extra.weight"),
        ({"n_draft": 9, "changes": {"d2t": np.arange(9) + 10**6}}, {}, "tensor d2t must hold numbers from 0 to"),
        ({"rank": 32, "changes": {"markov_w2.weight": np.zeros((5, 32), np.float32)}}, {}, "markov_w2.weight"),
    ],
)
def test_networks_that_do_not_fit(
    changes: dict[str, Any], keys: dict[str, Any], says: str, target: Target, tmp_path: Path
) -> None:
    network = replace(sizes(target), **changes).write(tmp_path / "net.gguf", **keys)
    with pytest.raises(EngineError, match=says):
        engine.load(target.path, draft_model=network, n_ctx=64, device="cpu", n_threads=1)


def test_it_is_no_model(target: Target, tmp_path: Path) -> None:
    network = sizes(target).write(tmp_path / "net.gguf")
    with pytest.raises(EngineError, match="only drafts for its model; give it as the draft model"):
        engine.load(network, device="cpu")


KINDS = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gpt-oss", "gemma4", "gemma4-e", "gemma3")


@pytest.mark.parametrize("kind", few(list(KINDS), 3))
def test_every_kind_of_target(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text without drafts; drafts after another text has been read, in part or as a whole, and those of a saved state,
    are those of a model that has read nothing else."""
    path, config = target_of_kind(kind, tmp_path, monkeypatch)
    net = Network(config.n_vocab, config.n_embd, 2, 1, 32, 96, (0, 2, config.n_layer), windows=(40, 0), rank=32)
    check_drafts_of_target(path, net.write(tmp_path / "net.gguf"), tmp_path, DRAFTED)
