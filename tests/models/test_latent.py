"""Models with latent attention: what they store, which caches and files they take, conversations that are taken up again."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.latent import LatentCache
from engine.cache.types import CACHE_TYPES
from engine.errors import GGUFError, ModelError, UsageError
from engine.gguf.file import read_gguf
from engine.models.config import ModelConfig
from engine.models.latent_config import LatentConfig
from engine.models.network_config import ExpertsConfig
from engine.models.registry import read_config
from tests.families import FAMILIES, Tensors, rewritten, write_quantized
from tests.oracle.families.deepseek2 import CASES
from tests.oracle.families.deepseek32 import CASES as INDEXED_CASES
from tests.oracle.models import CASES as CASES_OF_ALL
from tests.oracle.models import write_gguf

MODELS = {case.name: case for case in CASES}
LITE = MODELS["deepseek2"]
INDEXED = {case.name: case for case in INDEXED_CASES}


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(LITE, tmp_path_factory.mktemp("latent") / "m.gguf")


def test_one_row_per_position(lite: Path) -> None:
    """A latent and the rotated part of its key, once for all heads."""
    llm = engine.load(lite, n_ctx=100, device="cpu", n_threads=1)
    layers: list[Any] = llm.cache.layers
    assert len(layers) == 3 and all(isinstance(layer, LatentCache) for layer in layers)
    assert layers[0].rows.shape == (2, 64, 64 + 16) and layers[0].rows.dtype == np.uint16
    assert llm.cache.n_bytes == sum(layer.rows.nbytes for layer in layers) == 3 * 128 * 80 * 2


def test_an_indexer_has_a_key_per_position(tmp_path: Path) -> None:
    """In the pages of latents; layers that share a choice have none.  What a token reads is bounded."""
    llm = engine.load(write_gguf(INDEXED["glm-dsa-shared"], tmp_path / "m.gguf"), n_ctx=128, device="cpu", n_threads=1)
    layers: list[Any] = llm.cache.layers
    assert [layer.keys is not None for layer in layers] == [True, False, True, False, False, True]
    assert layers[0].keys.rows.shape == (2, 24, 64) and layers[0].keys.table is layers[0].table
    latents, keys = 2 * (32 + 16), 2 * 24
    seen = np.array([17, 100])
    assert layers[1].bytes_per_token(seen) == 17 * latents
    assert layers[0].bytes_per_token(seen) == 17 * latents + 50 * keys


def test_a_choice_of_all_positions_does_not_show(tmp_path: Path) -> None:
    """A context in which nothing has to be chosen has the bits of a longer one, up to the positions that are chosen."""
    path = write_quantized(INDEXED["glm-dsa"], tmp_path / "m.gguf")
    ids = np.random.default_rng(2).integers(0, 289, 64).tolist()
    short, long = (engine.load(path, n_ctx=n, device="cpu", n_threads=1) for n in (64, 256))
    assert [llm.cache.layers[0].chooses for llm in (short, long)] == [False, True]
    assert short.logits(ids).tobytes() == long.logits(ids).tobytes()


def test_what_the_configuration_says(tmp_path: Path) -> None:
    """Of V3's flavour: YaRN by 8 with both multipliers 1."""

    def read(name: str) -> ModelConfig:
        return read_config(read_gguf(write_gguf(MODELS[name], tmp_path / f"{name}.gguf")))

    v3, v2, glm = (read(name) for name in ("deepseek2-v3", "deepseek2-groups", "deepseek2-glm"))
    mixer, network = v3.layers[-1].mixer, v3.layers[-1].network
    assert isinstance(mixer, LatentConfig) and isinstance(network, ExpertsConfig)
    m = 1 + 0.1 * np.log(8.0)
    assert mixer.rope is not None and mixer.rope.magnitude == 1.0 and not mixer.rope.neox
    assert abs(mixer.scale * 48**0.5 - m * m) < 1e-6
    assert (network.gating, network.n_group, network.n_group_used, network.group_best) == ("sigmoid", 4, 2, 2)
    of_v2 = v2.layers[-1].network
    assert isinstance(of_v2, ExpertsConfig) and (of_v2.gating, of_v2.group_best) == ("softmax", 1)
    assert not v3.mtp and isinstance(glm.mtp[0].mixer, LatentConfig)


def test_a_lite_model_that_names_the_rank_of_a_larger_one(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it for a copy that ``transformers`` saved without its null."""
    named = replace(LITE, metadata=dict(LITE.metadata) | {"attention.q_lora_rank": 1536})
    plain, other = (read_config(read_gguf(write_gguf(c, tmp_path / "m.gguf"))) for c in (LITE, named))
    assert other == plain and isinstance(plain.layers[0].mixer, LatentConfig) and plain.layers[0].mixer.q_rank == 0


def test_routers_with_a_bias_are_sigmoids(tmp_path: Path) -> None:
    """As in files of GLM-4.7-Flash and of copies of V3 that ``transformers`` saved, which name no gating."""
    for name, gating in (("deepseek2-v3", "sigmoid"), ("deepseek2-glm", "sigmoid"), ("deepseek2-groups", "softmax")):
        case = MODELS[name]
        unnamed = {key: value for key, value in case.metadata.items() if key != "expert_gating_func"}
        config = read_config(read_gguf(write_gguf(replace(case, metadata=unnamed), tmp_path / "m.gguf")))
        network = config.layers[-1].network
        assert isinstance(network, ExpertsConfig) and network.gating == gating


@pytest.mark.parametrize("architecture", ["deepseek2", "deepseek4"])
def test_options_that_latents_cannot_have_are_refused(architecture: str, tmp_path: Path) -> None:
    """Every pair of cache types but two; drafts of another architecture's assistant, or on another device."""
    case = FAMILIES[architecture]
    path = case.write_gguf(tmp_path / "m.gguf")
    for k, v in itertools.product(CACHE_TYPES, CACHE_TYPES):
        given: dict[str, Any] = {"n_ctx": 64, "device": "cpu", "cache_type_k": k, "cache_type_v": v}
        if k == v and k in ("f16", "f32"):
            assert {(layer.k_type.name, layer.v_type.name) for layer in engine.load(path, **given).cache.layers} == {
                (k, v)
            }
            continue
        names = k if k == v else f"{k} and {v}"
        told = (
            f"cache type {names} is not supported for the latents of {architecture}, which are keys and values at once; "
            "use f16 or f32 for both (cache_type=...)."
        )
        whole = [name for name in (k, v) if CACHE_TYPES[name].whole]
        if k != v and whole:
            told = f"cache type {whole[0]} is for keys and values alike, not for {k} and {v}: use {whole[0]} for both."
        with pytest.raises((ModelError, UsageError)) as refused:
            engine.load(path, **given)
        assert str(refused.value).endswith(told) and "\n" not in str(refused.value)
    assistant = write_gguf(CASES_OF_ALL["gemma4-assistant"], tmp_path / "a.gguf")
    with pytest.raises(
        ModelError, match=f"drafts for gemma4 models of 80 dimensions .* is {architecture} of .*use that"
    ):
        engine.load(path, n_ctx=64, device="cpu", draft_model=assistant)
    with pytest.raises(UsageError, match="device_draft says where a draft model runs; give one with draft_model"):
        engine.load(path, n_ctx=64, device="cpu", device_draft="cpu")


@pytest.mark.parametrize("name", ["deepseek2", "deepseek32"])
def test_a_saved_conversation_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Keys of an indexer are saved, too."""
    lite = write_quantized((MODELS | INDEXED)[name], tmp_path / "m.gguf")
    ids = np.random.default_rng(2).integers(0, 289, 90).tolist()
    llm = engine.load(lite, n_ctx=128, device="cpu", n_threads=2)
    llm.prefill(ids[:80])
    llm.save_state(tmp_path / "state")
    expected = llm.complete(ids, max_tokens=12, temperature=0.8, seed=3, ignore_eos=True).ids
    again = engine.load(lite, n_ctx=128, device="cpu", n_threads=1)
    assert again.load_state(tmp_path / "state") == ids[:80] and again.sequence.length == 80
    assert again.complete(ids, max_tokens=12, temperature=0.8, seed=3, ignore_eos=True).ids == expected
    with pytest.raises(UsageError, match="f32"):
        engine.load(lite, n_ctx=128, device="cpu", cache_type="f32").load_state(tmp_path / "state")


def test_older_files_have_both_matrices_in_one(tmp_path: Path) -> None:
    """A quantized attn_kv_b: its rows of values are used as they are, the others as floats."""
    llm = engine.load(write_quantized(MODELS["deepseek2-joined"], tmp_path / "m.gguf"), n_ctx=128, device="cpu")
    latent: Any = llm.model.layers[0].mixer.latent
    assert latent.k_b.format.name == "F32" and latent.v_b.format.name == "Q8_0"
    ids = np.random.default_rng(2).integers(0, 289, 70).astype(np.int32)
    exact = engine.load(tmp_path / "m.f32", n_ctx=128, device="cpu").logits(ids.tolist())
    found = llm.logits(ids.tolist())
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99


def changed(path: Path, change: Any) -> Path:
    return rewritten(write_gguf(LITE, path.with_suffix(".f32")), path, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if not k.endswith("attn_v_b.weight")},
            "tensor blk.0.attn_v_b.weight is missing",
        ),
        (
            lambda t: t | {"blk.1.attn_k_b.scale": np.ones(1, np.float32)},
            "the scale blk.1.attn_k_b.scale is not supported",
        ),
        (lambda t: t | {"blk.0.attn_k_b.weight": t["blk.0.attn_k_b.weight"][:2]}, "attn_k_b.weight has shape"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    def tensors(t: Tensors) -> Tensors:
        return change(t)

    with pytest.raises(ModelError, match=message):
        engine.load(changed(tmp_path / "m.gguf", tensors), n_ctx=64, device="cpu")


def test_a_head_that_is_all_rotated_is_refused(tmp_path: Path) -> None:
    case = replace(LITE, metadata=dict(LITE.metadata) | {"attention.key_length_mla": 16})
    with pytest.raises(
        GGUFError, match="key_length_mla at byte .*: is 16, of which 16 are rotated, so nothing is left"
    ):
        engine.load(write_gguf(case, tmp_path / "m.gguf"), n_ctx=64, device="cpu")
