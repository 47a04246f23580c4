"""Random models against what is published or measured elsewhere: parameter counts, real files, gguf.quants."""

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import jinja2.sandbox
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import engine
from engine.cli import synthetic as command
from engine.errors import UsageError
from engine.gguf.file import GGUF, read_gguf
from engine.gguf.quants import FORMATS
from engine.hub.resolve import resolve
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic import model as synthetic
from engine.synthetic import shapes as sizes
from engine.synthetic.model import make_model, random_blocks
from engine.synthetic.shape import Gemma4Shape, Shape
from engine.synthetic.shapes import parse_shape, shapes
from tests.conftest import model_path, shared_model
from tests.cpu.blocks import reference

# Parameters as the models' cards count them (safetensors headers of the original repositories).
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama4-scout": 107_769_861_120,  # the text model alone, as built by ``transformers``
}

# As their cards round them, in billions (the smaller ones count the parts that see and hear).
PUBLISHED_ROUNDED = {"gemma4-31b": 30.7, "gemma4-26b-a4b": 25.2, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8}
PUBLISHED_ROUNDED |= {"deepseek-v2-lite": 15.7, "lfm2-1.2b": 1.2, "lfm2-8b-a1b": 8.3, "command-r7b": 8.0}
PUBLISHED_ROUNDED |= {"granite-4.0-h-micro": 3.2, "granite-4.0-h-tiny": 6.9, "granite-4.0-h-small": 32.2}
PUBLISHED_ROUNDED |= {"kimi-linear-48b-a3b": 49.1}

# These come with a vision tower (27 layers of width 1152), which is not in the file of the text model: billions of
# parameters of both, and the parameters of the tower as built by ``transformers``.
PUBLISHED_WITH_VISION = {
    "qwen3.6-27b": (27.78, 460_730_096),
    "qwen3.6-35b-a3b": (35.95, 446_571_248),
}

HYBRID = ("qwen35", "qwen35moe")
MIXTURE = (
    "qwen3moe",
    "qwen35moe",
    "gpt-oss",
    "glm4moe",
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "deepseek4",
    "step35",
    "lfm2moe",
    "nemotron_h_moe",
    "kimi-linear",
    "llama4",
)
MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")

TINY = [name for name in shapes() if name.startswith("tiny-") and not name.endswith(("-mtp", "-eagle3", "-dflash"))]


def layout(gguf_file: GGUF) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Format and shape of every tensor."""
    return {name: (tensor.type.name, tensor.shape) for name, tensor in gguf_file.tensors.items()}


def weights(gguf_file: GGUF, name: str) -> np.ndarray:
    """A tensor as gguf.quants decodes it."""
    tensor = gguf_file.tensors[name]
    rows = tensor.data.reshape(tensor.shape[0], -1) if len(tensor.shape) > 1 else tensor.data
    return reference(FORMATS[tensor.type], rows).reshape(tensor.shape)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert shapes()[name].n_params == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_ROUNDED)
def test_parameter_counts_round_to_the_published_ones(name: str) -> None:
    assert round(shapes()[name].n_params / 1e9, 1) == PUBLISHED_ROUNDED[name]


@pytest.mark.parametrize("name", PUBLISHED_WITH_VISION)
def test_parameter_counts_of_models_that_see(name: str) -> None:
    both, vision = PUBLISHED_WITH_VISION[name]
    assert round((shapes()[name].n_params + vision) / 1e9, 2) == both
    assert shapes()[name].n_block == shapes()[name].n_layer + 1


@pytest.mark.parametrize(("name", "quant"), [("gemma3-270m", "Q4_K_M"), ("smollm2-135m", "Q4_1")])
def test_tensors_are_those_of_the_real_file(name: str, quant: str, tmp_path: Path) -> None:
    real = read_gguf(model_path(name))
    made = read_gguf(make_model(tmp_path / "m.gguf", name, quant))
    assert layout(made) == layout(real)
    arch = real.metadata["general.architecture"]
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        assert made.metadata[f"{arch}.{key}"] == real.metadata[f"{arch}.{key}"]
    assert made.metadata[f"{arch}.rope.freq_base"] == real.metadata[f"{arch}.rope.freq_base"]
    assert made.metadata.get("gemma3.attention.sliding_window") == real.metadata.get("gemma3.attention.sliding_window")


def test_layout_is_that_of_the_bundled_model(tmp_path: Path) -> None:
    real = read_gguf(resolve("pycoder"))
    shape = Shape("qwen3", 6, 512, 4, 2, 128, 1024, 8192, 1024, 1e5, 1e-6)
    made = read_gguf(make_model(tmp_path / "m.gguf", shape, "Q4_K_M"))
    assert layout(made) == layout(real)
    assert made.metadata["general.file_type"] == real.metadata["general.file_type"]


# fmt: off
TRAINED = {
    "pycoder-hybrid-mtp-Q4_K_M.gguf": Shape(
        "qwen35", 8, 512, 4, 2, 256, 1024, 8192, 1024, 1e5, 1e-6, n_rot=64, n_mtp=1,
        delta_net=DeltaNetConfig(2, 4, 128, 4),
    ),
    "pycoder-moe-mtp-Q4_K_M.gguf": Shape(
        "qwen35moe", 4, 512, 4, 2, 256, 0, 8192, 1024, 1e5, 1e-6, n_rot=64, n_mtp=1,
        delta_net=DeltaNetConfig(2, 4, 128, 4), experts=ExpertsConfig(8, 2, 256, 256),
    ),
    "pycoder-gemma4-Q4_K_M.gguf": Shape(
        "gemma4", 6, 512, 4, 2, 256, 1024, 8192, 1024, 1e6, 1e-6, window=256, gemma4=Gemma4Shape(3, 128, 2),
    ),
    "pycoder-gemma4-assistant-Q4_K_M.gguf": Shape(
        "gemma4-assistant", 2, 256, 4, 2, 256, 768, 8192, 1024, 1e6, 1e-6, window=256,
        gemma4=Gemma4Shape(2, 128, 2, n_shared=2, n_embd_out=512),
    ),
}
# fmt: on


@pytest.mark.parametrize("name", TRAINED)
def test_files_are_those_that_llama_cpp_converts(name: str, tmp_path: Path) -> None:
    """Tensors, shapes, formats, and all metadata about the architecture."""
    real = read_gguf(shared_model(name))
    made = read_gguf(make_model(tmp_path / "m.gguf", TRAINED[name], "Q4_K_M"))
    assert layout(made) == layout(real)
    arch = f"{TRAINED[name].architecture}."
    ours, theirs = ({k: v for k, v in f.metadata.items() if k.startswith(arch)} for f in (made, real))
    assert ours.pop(f"{arch}vocab_size") == TRAINED[name].n_vocab
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.array_equal(ours[key], value), key
        assert made.kinds[key] == real.kinds[key]
    if TRAINED[name].gemma4:
        assert np.array_equal(weights(made, "rope_freqs.weight"), weights(real, "rope_freqs.weight"))


def test_formats_of_mixtures() -> None:
    """The rules of llama-quant.cpp: eight experts make attention cheap enough for more bits, other numbers do not."""
    shape = Shape("qwen3moe", 8, 512, 4, 2, 128, 0, 300, 512, 1e6, 1e-6, experts=ExpertsConfig(8, 2, 256, 0))

    def kinds(shape: Shape, quant: str, *names: str) -> list[str]:
        return [sizes.tensor_type(shape, quant, f"blk.3.{name}.weight", 512).name for name in names]

    attention = ("attn_q", "attn_k", "attn_v", "attn_output")
    assert kinds(shape, "Q4_K_M", *attention) == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]
    assert kinds(shape, "Q4_0", *attention) == ["Q4_0", "Q8_0", "Q8_0", "Q4_0"]
    assert kinds(shape, "Q6_K", *attention) == ["Q6_K"] * 4
    many = replace(shape, experts=ExpertsConfig(128, 8, 256, 0))
    assert kinds(many, "Q4_K_M", *attention, "ffn_down_exps") == ["Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q6_K"]
    for quant in sizes.quants():
        assert kinds(many, quant, "ffn_gate_inp", "ssm_conv1d") == ["F32", "F32"]


def test_more_bits_go_where_llama_cpp_puts_them() -> None:
    """The layers whose attn_v and ffn_down are Q6_K or Q8_0 in the published gemma3-270m Q4_K_M file."""
    assert [i for i in range(18) if sizes.use_more_bits(i, 18)] == [0, 1, 4, 7, 10, 13, 15, 16, 17]


def test_an_untied_mix_keeps_the_embedding_small() -> None:
    shape = shapes()["qwen3-8b"]
    kinds = {n: sizes.tensor_type(shape, "Q4_K_M", n, s[1]).name for n, s in shape.tensors() if len(s) == 2}
    assert kinds["token_embd.weight"] == "Q4_K"
    assert kinds["output.weight"] == "Q6_K"
    assert Counter(kinds.values()) == {"Q4_K": 217, "Q6_K": 37}  # 2 matrices of 18 of the 36 layers, and the output


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_blocks_have_the_variance_asked_for(kind: gguf.GGMLQuantizationType) -> None:
    entry = FORMATS[kind]
    blocks = random_blocks(kind, (1 << 20) // entry.block, 1 / 64, np.random.PCG64(1))
    assert blocks.shape == ((1 << 20) // entry.block, entry.block_bytes)
    values = 64 * reference(entry, blocks.reshape(1, -1)).astype(np.float64).reshape(-1, entry.block)
    assert np.isfinite(values).all()
    # The blocks of TQ2_0 have a mean of their own, 0.4, with random signs.
    assert abs(values.mean()) < (0.03 if kind.name in ("TQ2_0", "Q2_0") else 0.01)
    assert math.isclose(values.std(), 1.0, rel_tol=0.02)
    if entry.quantized:  # scales differ from block to block, so that a wrong one is noticed
        assert len(np.unique(np.abs(values).max(axis=1))) > (1 if kind.name in ("MXFP4", "NVFP4") else 1000)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape_name", ["tiny-qwen3", "tiny-qwen35moe"])
@pytest.mark.parametrize("quant", sizes.quants())
def test_every_quantization_makes_a_readable_file(quant: str, shape_name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", shape_name, quant)
    made = read_gguf(path, check_tensors=True)
    shape = shapes()[shape_name]
    assert {n: s for n, (_, s) in layout(made).items()} == dict(shape.tensors())
    assert list(tmp_path.iterdir()) == [path]
    for name, tensor in made.tensors.items():
        if len(tensor.shape) > 1:
            values = weights(made, name).astype(np.float64).reshape(-1, tensor.shape[-1])
            few = 1 / math.sqrt(values.size / FORMATS[tensor.type].block)
            assert math.isclose(values.std() * math.sqrt(tensor.shape[-1]), 1.0, rel_tol=0.1 + few), name
            assert len(np.unique(values, axis=0)) == len(values), f"{name} repeats a row"
        else:
            assert tensor.type.name == "F32"
    last = made.tensors[f"blk.{shape.n_layer - 1}.attn_output.weight"].type.name
    assert last in (quant, "Q5_0", "Q5_1", "Q4_0", "Q8_0", "IQ4_NL")
    if quant in FORMATS:  # 384 columns are not a multiple of 256, 256 are
        assert made.tensors[f"blk.0.ffn_up{'_exps' * bool(shape.experts)}.weight"].type.name == quant


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_awkward_and_read_back(name: str, tmp_path: Path) -> None:
    made = read_gguf(make_model(tmp_path / "m.gguf", name, "Q4_K_M"), check_tensors=True)
    shape = shapes()[name]
    arch, gemma = shape.architecture, shape.gemma4
    meta = made.metadata
    assert meta["general.architecture"] == arch
    assert name.startswith(f"tiny-{arch.removesuffix('-assistant')}")
    heads = shape.head_counts
    if not gemma and arch != "kimi-linear":  # whose heads are multiples of 4
        assert min(n % 2 for n in (heads if isinstance(heads, list) else [heads])) == 1
    assert meta[f"{arch}.attention.key_length"] == shape.head_dim
    assert (
        len(made.require("tokenizer.ggml.tokens", "str[]"))
        == shape.n_vocab
        == made.tensors["token_embd.weight"].shape[0]
    )
    assert ("blk.0.attn_q.bias" in made.tensors) == (arch in ("qwen2", "gpt-oss", "glm4moe"))
    assert (f"{arch}.attention.sliding_window" in meta) == (
        arch in ("gemma3", "gemma3n", "gpt-oss", "deepseek4", "step35", "cohere2", "llama4") or gemma is not None
    )
    assert ("rope_freqs.weight" in made.tensors) == (arch in ("llama", "llama4") or gemma is not None)
    assert (shape.n_embd != shape.n_head * shape.head_dim) == (arch not in ("llama", "qwen2", "cohere2"))
    assert (f"{arch}.expert_count" in meta) == (arch in MIXTURE or name.endswith("-moe"))
    recurrent = (*HYBRID, *MAMBA, "kimi-linear")
    assert (f"{arch}.ssm.conv_kernel" in meta) == ("blk.0.ssm_a" in made.tensors) == (arch in recurrent)
    assert (f"blk.{shape.n_layer}.nextn.eh_proj.weight" in made.tensors) == (
        arch in (*HYBRID, "glm4moe", "glm-dsa", "deepseek2", "deepseek32", "step35")
    )
    if shape.experts:
        assert shape.experts.n_expert.bit_count() > 1
    if shape.delta_net:
        assert shape.delta_net.n_v > shape.delta_net.n_k > 1
    assert len({tensor.type for tensor in made.tensors.values()}) > 2


def test_real_shapes_have_a_vocabulary_of_their_size(tmp_path: Path) -> None:
    made = read_gguf(make_model(tmp_path / "m.gguf", "smollm2-135m", "IQ2_XXS"))
    tokens = made.require("tokenizer.ggml.tokens", "str[]")
    assert len(tokens) == len(set(tokens)) == made.metadata["llama.vocab_size"] == 49152
    assert tokens[: sizes.N_VOCAB_TINY] == synthetic.vocabulary()[0]
    types = made.metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    assert set(types[sizes.N_VOCAB_TINY :]) == {int(gguf.TokenType.UNUSED)}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first = make_model(tmp_path / "a.gguf", "tiny-llama", "Q4_K_M", seed=7).read_bytes()
    assert make_model(tmp_path / "b.gguf", "tiny-llama", "Q4_K_M", seed=7).read_bytes() == first
    other = make_model(tmp_path / "c.gguf", "tiny-llama", "Q4_K_M", seed=8).read_bytes()
    assert len(other) == len(first)
    assert other != first


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        path = make_model(tmp_path / "m.gguf", "smollm2-135m", "F16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 260e6
    assert peak < 50e6


def test_rope_factors_follow_llama_3(tmp_path: Path) -> None:
    """Short waves are kept, long ones divided by the factor; the cases of the formula in Meta's reference code."""
    made = read_gguf(make_model(tmp_path / "m.gguf", "tiny-llama", "F32"))
    factors = weights(made, "rope_freqs.weight")
    shape = shapes()["tiny-llama"]
    expected = []
    for i in range(shape.head_dim // 2):
        wavelength = 2 * math.pi * shape.rope_base ** (2 * i / shape.head_dim)
        if wavelength < shape.rope_n_ctx / 4.0:
            expected.append(1.0)
        elif wavelength > shape.rope_n_ctx / 1.0:
            expected.append(shape.rope_factor)
        else:
            smooth = (shape.rope_n_ctx / wavelength - 1.0) / (4.0 - 1.0)
            expected.append(1.0 / ((1.0 - smooth) / shape.rope_factor + smooth))
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    assert len(set(expected)) > 2


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe"])
def test_states_decay_slowly_and_convolutions_keep_the_variance(name: str, tmp_path: Path) -> None:
    made, shape = read_gguf(make_model(tmp_path / "m.gguf", name, "F32")), shapes()[name]
    x = np.random.default_rng(0).standard_normal((10_000, 1))
    decays = []
    for layer in np.flatnonzero(shape.recurrent):
        a, dt = (weights(made, f"blk.{layer}.{part}").astype(np.float64) for part in ("ssm_a", "ssm_dt.bias"))
        assert (a > -8).all() and (a < -0.1).all()
        decays.append(np.exp(a * np.logaddexp(0, x + dt)))
        taps = weights(made, f"blk.{layer}.ssm_conv1d.weight").astype(np.float64)
        assert math.isclose((taps**2).sum(axis=1).mean(), 1, rel_tol=0.1)
        assert made.tensors[f"blk.{layer}.ssm_conv1d.weight"].type.name == "F32"
    every = np.concatenate(decays, axis=1)
    assert np.quantile(every, 0.001) > 0.5
    assert every.max() < 1
    assert len(np.unique(every[0])) == every.shape[1]


def tiny_tokenizer() -> Tokenizer:
    """The small vocabulary in the reference implementation of byte-level BPE."""
    tokens, types, merges = synthetic.vocabulary()
    assert len(tokens) == len(types) == len(set(tokens))
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [(a, b) for a, b in (m.split(" ") for m in merges)])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(st.text())
def test_the_small_vocabulary_writes_any_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_small_vocabulary_merges() -> None:
    tokens, types, merges = synthetic.vocabulary()
    assert tiny_tokenizer().encode("the thing and the rest").tokens[0] == "t"
    assert tiny_tokenizer().encode(" the").tokens == ["Ġthe"]
    assert set(types[-3:]) == {int(gguf.TokenType.CONTROL)}
    assert sorted(pre_tokenizers.ByteLevel.alphabet()) == sorted(tokens[:256])
    assert all(merge.replace(" ", "") in tokens for merge in merges)


@pytest.mark.parametrize("text", ["qwen9-1b", "qwen3-8b:Q9", "", ":Q4_0"])
def test_unknown_names_are_one_sentence_with_those_that_exist(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
    assert ("IQ4_XS" if text == "qwen3-8b:Q9" else "qwen3-8b") in str(caught.value)


def test_names_are_completed() -> None:
    assert parse_shape("qwen3-8b") == ("qwen3-8b", "Q4_K_M")
    assert parse_shape("qwen3-8b:iq4_xs") == ("qwen3-8b", "IQ4_XS")


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 10_000_000})
    monkeypatch.setattr("engine.synthetic.model.shutil.disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"needs 5\.0 GB and .* has 0\.0 GB free"):
        make_model(tmp_path / "m.gguf", "qwen3-8b")
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    assert command.main(["--shape", "tiny-gemma3:Q8_0", "-o", str(path), "--seed", "3"]) == 0
    assert list(tmp_path.iterdir()) == [path]
    assert path.name in capsys.readouterr().out
    assert read_gguf(path).metadata["general.name"] == "Random tiny-gemma3 Q8_0"
    assert command.main(["--list"]) == 0
    assert "qwen3-8b" in capsys.readouterr().out
    assert command.main(["--shape", "nothing"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "file").write_text("")
    for place, says in (
        ("file/m.gguf", "there is no folder"),
        ("no/m.gguf", "there is no folder"),
        (".", "is not a file"),
    ):
        assert command.main(["--shape", "tiny-llama", "-o", str(tmp_path / place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_file_is_complete_or_not_there(
    error: type[BaseException] | OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "Q4_0")
    before = path.read_bytes()

    def stop(part: Path, *rest: object) -> None:
        assert part.parent == path.parent and part.stat().st_size > 0
        part.write_bytes(b"half")
        raise error

    monkeypatch.setattr(synthetic, "_write_data", stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else UsageError):
        make_model(path, "tiny-llama", "Q8_0")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_formats_of_gemma4() -> None:
    """The rules of llama-quant.cpp: only layers with values are counted, 704 and 2112 columns have no 256-wide format,
    a tied model's tables both have the output's format, routers and per-layer projections keep their format."""
    names = shapes()

    def kinds(name: str, *tensors: str) -> list[str]:
        columns = dict(names[name].tensors())
        return [
            sizes.tensor_type(names[name], "Q4_K_M", f"{t}.weight", columns[f"{t}.weight"][-1]).name for t in tensors
        ]

    small = ("per_layer_token_embd", "token_embd", "per_layer_model_proj", "blk.3.inp_gate", "blk.3.proj")
    assert kinds("gemma4-e2b", *small) == ["Q6_K", "Q6_K", "BF16", "Q4_K", "Q4_K"]
    # Layers 0 and 14 are the first and the last of 15 with values, the last without; 2 of 35 has a Q4_K ffn_down.
    values = [f"blk.{il}.attn_v" for il in (0, 1, 3, 13, 14)]
    assert kinds("gemma4-e2b", *values) == ["Q6_K", "Q4_K", "Q6_K", "Q6_K", "Q6_K"]
    # Global layers have none: layer 6 is the sixth of 40 with values.
    assert "blk.5.attn_v.weight" not in dict(names["gemma4-12b"].tensors())
    assert kinds("gemma4-12b", "blk.4.attn_v", "blk.6.attn_v", "blk.8.attn_v") == ["Q6_K", "Q4_K", "Q6_K"]
    mixture = [f"blk.3.{t}" for t in ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_gate", "ffn_down_exps", "ffn_down")]
    assert kinds("gemma4-26b-a4b", *mixture) == ["F32", "Q4_K", "Q4_K", "Q5_0", "Q5_0"]
    assert kinds("gemma4-26b-a4b", "blk.0.ffn_down_exps", "blk.0.ffn_down") == ["Q8_0", "Q8_0"]


@pytest.mark.parametrize("name", [name for name in shapes() if shapes()[name].gemma4])
def test_gemma4_ends_with_a_global_layer_and_shares_what_there_is(name: str) -> None:
    """And an assistant has the heads, the window and the width of its target."""
    shape = shapes()[name]
    gemma = shape.gemma4
    assert gemma is not None
    owners = gemma.sliding(shape.n_layer)[: shape.n_layer - gemma.n_shared]
    assert gemma.sliding(shape.n_layer)[-1] is False
    if not gemma.n_embd_out:
        assert owners[-2:] == (True, False)
        return
    target = shapes()[name.removesuffix("-assistant")]
    of_target = target.gemma4
    assert owners == ()
    assert of_target is not None
    assert (gemma.head_dim_sliding, gemma.n_head_kv_sliding) == (
        of_target.head_dim_sliding,
        of_target.n_head_kv_sliding,
    )
    for field in ("head_dim", "n_head_kv", "window", "n_vocab", "n_ctx", "rope_base"):
        assert getattr(shape, field) == getattr(target, field)
    assert gemma.n_embd_out == target.n_embd


def test_scales_of_gemma4_keep_the_variance(tmp_path: Path) -> None:
    made = read_gguf(make_model(tmp_path / "e.gguf", "tiny-gemma4-e", "Q4_K_M"))
    table = weights(made, "per_layer_token_embd.weight")
    assert math.isclose(table.std(), 64**-0.5, rel_tol=0.05)
    assert np.abs(weights(made, "blk.0.attn_q_norm.weight") * 32**0.5 - 1).max() < 0.2
    mixture = read_gguf(make_model(tmp_path / "m.gguf", "tiny-gemma4-moe", "Q4_K_M"))
    assert np.abs(weights(mixture, "blk.0.ffn_gate_inp.scale") / 288**0.5 - 1).max() < 0.2
    scales = weights(mixture, "blk.0.ffn_down_exps.scale")
    assert 0.5 < scales.min() < scales.max() < 2
    assert mixture.tensors["blk.0.ffn_gate_up_exps.weight"].shape == (7, 192, 288)


@pytest.mark.parametrize("name", [name for name in TINY if not name.endswith("-assistant")])
def test_logits_are_finite_and_not_degenerate(name: str, tmp_path: Path) -> None:
    llm = engine.load(make_model(tmp_path / "m.gguf", name, "Q4_K_M"))
    logits = llm.logits(llm.tokenize("the rest of the thing", special=True))
    assert np.isfinite(logits).all()
    assert 2.0 < logits.std() < 4.5
    assert len(set(logits.argmax(axis=1))) > 1


@pytest.mark.parametrize(
    ("name", "quant", "size", "n_params"),
    [
        ("deepseek-v4-flash", "IQ2_XXS", 81, 284.33),
        ("deepseek-v4-flash", "Q4_K", 153, 284.33),
        ("deepseek-v4-flash-mtp", "Q4_K", 3.5, 6.61),
    ],
)
def test_files_of_deepseek_v4_are_as_large_as_those_of_ds4(name: str, quant: str, size: float, n_params: float) -> None:
    """In GiB and in billions."""
    shape, n_bytes = shapes()[name], 0
    for tensor, sides in shape.tensors():
        kind = sizes.tensor_type(shape, quant, tensor, sides[-1]) if len(sides) > 1 else gguf.GGMLQuantizationType.F32
        n_bytes += math.prod(sides[:-1]) * (FORMATS[kind].row_bytes(sides[-1]) if kind in FORMATS else 4 * sides[-1])
    assert abs(n_bytes / 2**30 - size) < 0.5
    assert abs(shape.n_params / 1e9 - n_params) < 0.01


@pytest.mark.parametrize("quant", ["Q4_K", "F32"])
def test_a_layer_in_a_file_of_its_own_drafts(quant: str, tmp_path: Path) -> None:
    target, layer = (
        make_model(tmp_path / f"{name}.gguf", name, quant) for name in ("tiny-deepseek4", "tiny-deepseek4-mtp")
    )
    llm = engine.load(target, draft_model=layer, n_ctx=64, device="cpu")
    answer = llm.complete("the rest", max_tokens=12, temperature=0, ignore_eos=True)
    assert answer.speculation is not None and answer.speculation.drafted > 0
    plain = engine.load(target, n_ctx=64, device="cpu").complete(
        "the rest", max_tokens=12, temperature=0, ignore_eos=True
    )
    assert plain.ids == answer.ids


def test_chat_template_renders(tmp_path: Path) -> None:
    """The template is valid Jinja and gives ChatML."""
    made = read_gguf(make_model(tmp_path / "m.gguf", "tiny-qwen2", "Q4_0"))
    source = made.require("tokenizer.chat_template", "str")
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
