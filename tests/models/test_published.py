"""Published models: the headers that llama.cpp's conversion writes for their configurations are read, with the published
numbers, and have the tensors that the engine loads.

``tests/published/configs.json`` has the configurations and where each came from, ``headers.json`` what the conversion made
of them.  Nothing of a model's size is read or allocated: matrices are views of one byte, and of layers that are alike, only
the first is built.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.cpu.backend import Backend
from engine.gguf.file import GGUF, GGUFTensor
from engine.models.attention_config import AttentionConfig
from engine.models.compressed_config import CompressedConfig
from engine.models.config import LayerConfig, ModelConfig
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.kda_config import KDAConfig
from engine.models.latent_config import LatentConfig
from engine.models.mamba_config import MambaConfig
from engine.models.network_config import DenseConfig, ExpertsConfig, NetworkConfig
from engine.models.pair_config import PairConfig
from engine.models.registry import ARCHITECTURES, build, read_config
from engine.models.rope_config import RopeConfig
from engine.models.short_conv_config import ShortConvConfig
from tests.conftest import REPOSITORY
from tests.published.headers import layers_of

FOLDER = REPOSITORY / "tests" / "published"
CONFIGS: dict[str, dict[str, Any]] = json.loads((FOLDER / "configs.json").read_text(encoding="utf-8"))
HEADERS: dict[str, dict[str, Any]] = json.loads((FOLDER / "headers.json").read_text(encoding="utf-8"))
ONES = np.ones(1 << 23, np.float32).view(np.uint8)
"""What all small tensors hold, in F32."""


def tensor(name: str, kind: str, shape: tuple[int, ...]) -> GGUFTensor:
    """A tensor that takes no memory of its own."""
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    n_bytes = math.prod(shape) // block * size
    if kind == "I32":  # a table of experts
        data = np.tile(np.arange(shape[-1], dtype=np.int32), shape[0]).view(np.uint8)
    elif n_bytes <= ONES.size:
        data = ONES[:n_bytes]
    else:
        data = np.broadcast_to(np.uint8(0), (n_bytes,))
    return GGUFTensor(name, number, shape, 0, n_bytes, Path("model.gguf"), data)


def file_of(name: str) -> GGUF:
    """The file that the conversion of a published model writes, without its tokenizer and its weights."""
    header = HEADERS[name]
    kinds = {"general.architecture": "str", "tokenizer.ggml.tokens": "str[]"}
    metadata: dict[str, Any] = {"general.architecture": header["architecture"]}
    for key, (kind, value) in header["keys"].items():
        kinds[key] = kind
        if kind == "f32":
            value = float(np.float32(value))
        metadata[key] = np.array(value) if kind.endswith("[]") else value
    tensors = {}
    for stem, (kind, *shape), *layers in header["tensors"]:
        for il in layers_of(layers[0]) if layers else [""]:
            full = stem.replace("*", str(il))
            tensors[full] = tensor(full, kind, tuple(shape))
    metadata["tokenizer.ggml.tokens"] = [""] * tensors["token_embd.weight"].shape[0]
    return GGUF(Path("model.gguf"), 3, 32, metadata, kinds, {}, tensors)


# --- the numbers -----------------------------------------------------------------------------------------------


GPT2_WORDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""The words of GPT-2 for sizes that later models name otherwise."""


SHARED = ("shared_expert", "shared", "moe_shared_expert")
"""What the words for the width of a shared network begin with."""

BLOCKS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of Nemotron-H for blocks with a mixer and no network, and with a network and no mixer."""

MAMBA_WORDS = {
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    "granitemoehybrid": tuple(f"mamba_{name}" for name in ("n_heads", "d_head", "d_state", "n_groups", "d_conv")),
}
MAMBA_WORDS["falcon_h1"] = MAMBA_WORDS["granitemoehybrid"]
"""The words of models for the sizes of Mamba-2."""


@dataclass
class Published:
    """A published configuration, by whatever names its numbers have."""

    whole: dict[str, Any]

    def __post_init__(self) -> None:
        self.text: dict[str, Any] = self.whole.get("text_config", self.whole)
        if self.kind == "gpt2":
            own = {name: self.text[word] for name, word in GPT2_WORDS.items()}
            self.text = {**self.text, **own, "intermediate_size": 4 * self.text["n_embd"]}

    def first(self, *names: str) -> Any:
        """The first of some values that the configuration has; None: it has none."""
        return next((self.text[name] for name in names if self.text.get(name) is not None), None)

    @property
    def kind(self) -> str:
        """The type of the model."""
        kind = self.whole["model_type"]
        assert isinstance(kind, str)
        return kind

    @property
    def n_layer(self) -> int:
        """The number of layers that do not draft."""
        return int(self.text["num_hidden_layers"])

    def types(self) -> list[str]:
        """The type of each layer, as far as the configuration says so."""
        every, pattern = self.first("full_attention_interval"), self.first("sliding_window_pattern")
        if "hybrid_override_pattern" in self.text:
            return [BLOCKS[letter] for letter in self.text["hybrid_override_pattern"]]
        if "layer_types" in self.text:
            return list(self.text["layer_types"])
        if "linear_attn_config" in self.text:
            full = self.text["linear_attn_config"]["full_attn_layers"]
            return ["full_attention" if il + 1 in full else "linear_attention" for il in range(self.n_layer)]
        if every:
            return ["full_attention" if (il + 1) % every == 0 else "linear_attention" for il in range(self.n_layer)]
        if self.kind == "llama4":
            return ["full_attention" if (il + 1) % 4 == 0 else "chunked_attention" for il in range(self.n_layer)]
        if self.kind.startswith("gemma3"):
            pattern = 6
        if self.kind == "olmo3":
            pattern = 4
        if self.kind in ("gpt_oss", "gemma2"):
            return ["sliding_attention", "full_attention"] * (self.n_layer // 2)
        if pattern:
            return ["full_attention" if (il + 1) % pattern == 0 else "sliding_attention" for il in range(self.n_layer)]
        return ["full_attention"] * self.n_layer

    def rope(self, slides: bool) -> dict[str, Any]:
        """What is published about the rotation of layers with or without a window."""
        given = self.first("rope_parameters", "rope_scaling") or {}
        own = given.get("sliding_attention" if slides else "full_attention", given)
        base = {} if "rope_theta" in own or slides and self.kind.startswith(("gemma3", "gemma4")) else self.text
        if slides and "swa_rope_theta" in self.text:
            return {"rope_theta": self.text["swa_rope_theta"]}
        return {name: base[name] for name in ("rope_theta",) if name in base} | own


def check_rope(published: Published, rope: RopeConfig, d: int, slides: bool) -> None:
    given = published.rope(slides)
    if "rope_theta" in given and "alpha" not in given:
        assert rope.base == np.float32(given["rope_theta"])
    if "alpha" in given:
        assert rope.base == pytest.approx(given["rope_theta"] * given["alpha"] ** (d / (d - 2)), rel=1e-6)
    part = given.get("partial_rotary_factor", published.first("partial_rotary_factor") or 1.0)
    rotated = published.first("rotary_dim") or int(d * part)
    if given.get("rope_type") != "proportional":  # this one rotates all by divisors, most of which are infinite
        assert rope.n_rot == rotated
    kind = given.get("rope_type", given.get("type"))
    if kind == "yarn" and not (slides and published.kind == "olmo3"):
        assert rope.scale == pytest.approx(1 / given["factor"])
        assert rope.yarn_ctx == given["original_max_position_embeddings"]
        assert rope.beta_fast == given.get("beta_fast", 32)
    if kind == "longrope":
        assert rope.long_factors and rope.long_beyond == published.text["original_max_position_embeddings"]
    assert bool(rope.factors) == (kind in ("llama3", "longrope", "proportional"))


def check_mixer(published: Published, mixer: Any, kind: str) -> None:
    text, heads = published.text, published.text["num_attention_heads"]
    assert mixer.exists == (kind not in ("mlp", "moe"))
    if not mixer.exists:
        return
    if isinstance(mixer, PairConfig):
        second: Any = mixer.second
        check_mixer(published, mixer.first, kind)
        check_mixer(published, second, "mamba")
        assert second.normed == text["mamba_rms_norm"]
        return
    if isinstance(mixer, DeltaNetConfig):
        assert kind == "linear_attention"
        assert (mixer.n_k, mixer.n_v) == (text["linear_num_key_heads"], text["linear_num_value_heads"])
        assert mixer.state_size == text["linear_key_head_dim"] and mixer.n_conv == text["linear_conv_kernel_dim"]
        return
    if isinstance(mixer, KDAConfig):
        net = text["linear_attn_config"]
        assert kind == "linear_attention" and mixer.taps == net["short_conv_kernel_size"]
        assert (mixer.n_head, mixer.d) == (net["num_heads"], net["head_dim"])
        return
    if isinstance(mixer, MambaConfig):
        sizes = mixer.n_head, mixer.d, mixer.n, mixer.n_group, mixer.taps
        assert kind == "mamba" and sizes == tuple(text[name] for name in MAMBA_WORDS[published.kind])
        return
    if isinstance(mixer, ShortConvConfig):
        assert kind == "conv" and (mixer.n, mixer.taps) == (text["hidden_size"], text["conv_L_cache"])
        return
    if kind == "sliding_attention":
        heads = (published.first("attention_other_setting") or text)["num_attention_heads"]
    assert mixer.n_head == heads
    if isinstance(mixer, LatentConfig):
        sizes = (mixer.n_nope, mixer.n_rope, mixer.rank, mixer.d_v, mixer.q_rank)
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim", "q_lora_rank")
        assert sizes == tuple(text.get(name) or 0 for name in names)
        assert kind == "full_attention" and (mixer.rope is None) == bool(text.get("mla_use_nope"))
        own = mixer.indexer
        if mixer.shared:
            assert own is None and mixer.shared == text["index_topk"]
            return
        found = (own.n_head, own.d, own.top_k) if own is not None else (None,) * 3
        assert found == tuple(text.get(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
        return
    if isinstance(mixer, CompressedConfig):
        assert (mixer.d, mixer.n_q, mixer.n_group) == (text["head_dim"], text["q_lora_rank"], text["o_groups"])
        assert mixer.n_out == text["o_lora_rank"] and mixer.window == text["sliding_window"]
        return
    assert isinstance(mixer, AttentionConfig)
    slides = kind == "sliding_attention"
    wide = published.kind.startswith("gemma4") and not slides
    kv = (wide and published.first("num_global_key_value_heads")) or text.get("num_key_value_heads", heads)
    kv = (slides and published.first("swa_num_key_value_heads")) or kv
    d = text["global_head_dim"] if wide else published.first("head_dim") or text["hidden_size"] // heads
    assert (mixer.n_head_kv, mixer.d_k, mixer.d_v) == (kv, d, published.first("v_head_dim") or d)
    chunked = kind == "chunked_attention"
    window = text["attention_chunk_size"] if chunked else text["sliding_window"] if slides else 0
    reach = window // 2 if text.get("use_bidirectional_attention") else 0
    assert (mixer.window, mixer.reach) == (0 if reach else window, reach)
    assert mixer.framed == chunked
    if published.kind == "cohere":
        assert mixer.norm == ("centered heads" if text["use_qk_norm"] else "")
    if published.kind == "llama4":
        assert bool(mixer.norm) == (chunked and text["use_qk_norm"]) and (mixer.rope is not None) == chunked
        tuned = (pytest.approx(text["attn_scale"]), text["floor_scale"], 1)
        assert mixer.temperature == (None if chunked else tuned)
    assert mixer.softcap == (text.get("attn_logit_softcapping") or 0)
    if "query_pre_attn_scalar" in text:
        assert mixer.scale == pytest.approx(text["query_pre_attn_scalar"] ** -0.5)
    if "attention_multiplier" in text:
        assert mixer.scale == pytest.approx(text["attention_multiplier"])
    if mixer.rope is not None:
        check_rope(published, mixer.rope, d, slides)


def check_network(published: Published, il: int, network: NetworkConfig, kind: str) -> None:
    text = published.text
    assert network.exists == ("hybrid_override_pattern" not in text or kind in ("mlp", "moe"))
    if not network.exists:
        return
    count = published.first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    dense = published.first("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers") or 0
    dense = dense or list(published.first("moe_layer_freq") or []).count(0)
    if not count or il < dense or (il + 1) % text.get("interleave_moe_layer_step", 1):
        assert isinstance(network, DenseConfig)
        doubled = text.get("use_double_wide_mlp") and il >= published.n_layer - text["num_kv_shared_layers"]
        width = published.first("intermediate_size_mlp", "prefix_dense_intermediate_size", "intermediate_size")
        width = width[il] if isinstance(width, list) else width * (2 if doubled else 1)
        if text.get("block_auto_adjust_ff_dim"):
            width = -(-2 * width // 3 // text["block_multiple_of"]) * text["block_multiple_of"]
        assert network.n_ff == width
        share = (published.first("activation_sparsity_pattern") or [0.0] * published.n_layer)[il]
        expected = pytest.approx(NormalDist().inv_cdf(share), rel=1e-6) if share else None
        assert network.sparsity == expected
        return
    assert isinstance(network, ExpertsConfig)
    used = published.first("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
    width = published.first("moe_intermediate_size", "intermediate_size")
    used, width = (value[il] if isinstance(value, list) else value for value in (used, width))
    assert (network.n_expert, network.n_used, network.n_ff) == (count, used, width)
    shared = (
        published.first("n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts") or 0
    )
    shared = shared[il] if isinstance(shared, list) else shared
    shared = 1 if published.kind == "llama4" else shared
    assert network.weighs_inputs == (published.kind == "llama4")
    assert network.n_ff_shared == (published.first(*(f"{name}_intermediate_size" for name in SHARED)) or shared * width)
    assert network.n_latent == (text.get("moe_latent_size") or 0)
    scale = published.first("routed_scaling_factor", "moe_router_scaling_factor")
    assert network.weight_scale == pytest.approx(scale or 1.0)
    if "n_group" in text:
        assert (network.n_group, network.n_group_used) == (text["n_group"], text["topk_group"])
    assert (network.beside is not None) == bool(text.get("enable_moe_block"))


# --- the tensors -----------------------------------------------------------------------------------------------


def distinct(config: ModelConfig, gguf: GGUF) -> tuple[ModelConfig, GGUF]:
    """The model without layers that are described like an earlier one and whose tensors are alike."""
    shapes: dict[int, set[tuple[Any, ...]]] = {}
    rest = {}
    for name, each in gguf.tensors.items():
        if (found := re.fullmatch(r"blk\.(\d+)\.(.*)", name)) is None:
            rest[name] = each
        else:
            shapes.setdefault(int(found[1]), set()).add((found[2], each.type, each.shape))
    kept: dict[Any, int] = {}
    places: list[int] = []
    for il, layer in enumerate(config.layers):
        places.append(kept.setdefault((layer, frozenset(shapes[il])), len(kept)))

    def moved(layer: LayerConfig) -> LayerConfig:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.source is None:
            return layer
        return replace(layer, mixer=replace(mixer, source=places[mixer.source]))

    first = [places.index(i) for i in range(len(kept))]
    for il in sorted(set(shapes) - set(range(config.n_layer))):
        first.append(il)  # what drafts
    for i, il in enumerate(first):
        for suffix, _, _ in shapes[il]:
            rest[f"blk.{i}.{suffix}"] = gguf.tensors[f"blk.{il}.{suffix}"]
    if config.n_per_layer:
        # The parts of all layers are in one tensor.
        old, new = (n * config.n_per_layer for n in (config.n_layer, len(kept)))
        table, projection = (rest[f"per_layer_{name}.weight"] for name in ("token_embd", "model_proj"))
        assert table.shape == (config.n_vocab, old) and projection.shape == (old, config.n_embd)
        for each, shape in ((table, (config.n_vocab, new)), (projection, (new, config.n_embd))):
            rest[each.name] = tensor(each.name, each.type.name, shape)
    layers = tuple(moved(config.layers[il]) for il in first[: len(kept)])
    return replace(config, layers=layers), replace(gguf, tensors=rest)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model(name: str) -> None:
    published, gguf = Published(CONFIGS[name]["config"]), file_of(name)
    config, text = read_config(gguf), published.text
    assert (config.n_layer, config.n_embd) == (published.n_layer, text["hidden_size"])
    if published.kind in ("granitemoehybrid", "nemotron_h"):
        assert config.n_ctx_train == 1 << 20  # the conversion of models without rotations writes this
    elif "max_position_embeddings" in text and not published.kind.startswith("hunyuan"):
        first = text["pad_token_id"] + 1 if published.kind == "xlm-roberta" else 0
        assert config.n_ctx_train == published.first("model_max_length", "max_position_embeddings") - first
    if (eps := published.first("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")) is not None:
        assert config.norm_eps == pytest.approx(eps)
    factors = (config.embedding_scale, config.residual_scale, config.logit_scale)
    if published.kind.startswith("granite"):
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        assert factors == pytest.approx((text[names[0]], text[names[1]], 1 / text[names[2]]))
    if "logit_scale" in text:
        assert factors == (1.0, 1.0, np.float32(text["logit_scale"]))
    if "indexer_types" in text:
        mixers = [layer.mixer for layer in config.layers]
        found = [isinstance(mixer, LatentConfig) and mixer.indexer is not None for mixer in mixers]
        assert found == [kind == "full" for kind in text["indexer_types"]]
    types = published.types()
    for il, layer in enumerate(config.layers):
        check_mixer(published, layer.mixer, types[il])
        check_network(published, il, layer.network, types[il])
    ops: Any = Backend(1)
    ops.loading([], None)  # only reserve memory
    build(*distinct(config, gguf), ops, 64)


def test_every_architecture_is_published() -> None:
    covered: dict[str, list[str]] = {name: [] for name in ARCHITECTURES}
    for name, header in HEADERS.items():
        covered[header["architecture"]].append(name)
    # The configuration of Nomic Embed is written for code of its own, which transformers' model cannot stand in for.
    assert [name for name, models in covered.items() if not models] == ["nomic-bert"]
    text = (REPOSITORY / "docs" / "proof.md").read_text(encoding="utf-8").partition("## Published configurations")[2]
    for architecture, names in covered.items():
        if not names:
            continue
        assert f"| `{architecture}` | {', '.join(names)} |\n" in text
    assert f"{len(CONFIGS)} published models" in text
    assert set(HEADERS) == set(CONFIGS) and len(CONFIGS) >= 60
    assert all(len(each["source"]) > 20 for each in CONFIGS.values())
