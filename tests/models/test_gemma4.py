"""gemma4: the contract with every type of cache, layers that read the memory of others, and files that are refused."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine.arrays import Batch
from engine.decode.evaluate import evaluate
from engine.errors import EngineError, ModelError, UsageError
from engine.gguf.file import GGUF, read_gguf
from engine.models.attention_config import AttentionConfig
from engine.models.config import ASSISTANT, ModelConfig
from engine.models.families.gemma4_config import read
from engine.models.metadata import Metadata
from engine.models.network_config import DenseConfig
from engine.models.registry import read_config
from engine.models.traffic import weight_bytes_per_token
from engine.synthetic.model import make_model
from engine.synthetic.shape import N_VOCAB_TINY, Gemma4Shape, Shape
from tests.models.test_models import in_batches
from tests.tiers import examples

N_CTX = 320
KINDS = [("f16", "f16"), ("f32", "f32"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0")]
SHAPES = {"tiny-gemma4": "Q4_K_M", "tiny-gemma4-moe": "Q8_0", "tiny-gemma4-e": "Q4_K_M"}

Files = dict[str, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A random model of each variant, and an assistant."""
    folder = tmp_path_factory.mktemp("gemma4")
    wanted = SHAPES | {"tiny-gemma4-assistant": "Q8_0"}
    return {name: make_model(folder / f"{name}.gguf", name, quant, seed=2) for name, quant in wanted.items()}


def load(path: Path, kinds: tuple[str, str] = ("f16", "f16"), threads: int = 1, **options: Any) -> engine.LLM:
    given: dict[str, Any] = {"device": "cpu", "n_ctx": N_CTX, "cache_type_k": kinds[0], "cache_type_v": kinds[1]}
    return engine.load(path, n_threads=threads, **given | options)


# --- the contract ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("tiny-gemma4", kinds) for kinds in KINDS]
    + [(name, kinds) for name in ("tiny-gemma4-moe", "tiny-gemma4-e") for kinds in KINDS[2:4]],
    ids=str,
)
def test_chunks_threads_and_what_is_taken_back_do_not_show(files: Files, name: str, kinds: tuple[str, str]) -> None:
    """Rows of single steps on one thread, of a prompt in pieces on several, and of batches that are verified and partly
    rolled back while windows pass pages, which then hold other positions."""
    llm, several = load(files[name], kinds), load(files[name], kinds, 0)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, llm.config.n_vocab, 260).astype(np.int32)
    expected = in_batches(llm, tokens, [1] * tokens.size)
    assert in_batches(several, tokens, [100, 3, 127, 30]).tobytes() == expected.tobytes()
    for layer in (llm.cache.layers[0], several.cache.layers[0]):
        pages = layer.table[0, : -(-tokens.size // 64)].tolist()
        assert 0 < layer.window < 64 and len(set(pages)) < len(pages)
    llm.reset()
    at = 0
    for rows in [*range(1, 17), *range(16, 0, -1), 1, 2]:
        right = int(rng.integers(1, rows + 1))
        batch = tokens[at : at + rows].copy()
        batch[right:] = (batch[right:] + 1 + rng.integers(0, 100, rows - right)) % llm.config.n_vocab
        logits = evaluate(llm.model, batch, np.arange(at, at + rows, dtype=np.int32), rows, llm.model.sequence)
        assert logits[:right].tobytes() == expected[at : at + right].tobytes()
        at += right
        llm.sequence.truncate(at)
    rest = evaluate(llm.model, tokens[at : at + 9], np.arange(at, at + 9, dtype=np.int32), 9, llm.model.sequence)
    assert rest.tobytes() == expected[at : at + 9].tobytes()


@pytest.fixture(scope="module")
def loaded(files: Files) -> dict[tuple[str, str], engine.LLM]:
    """The model with a shared tail, with each pair of types."""
    return {kinds: load(files["tiny-gemma4-e"], kinds) for kinds in KINDS}


@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 150), st.integers(1, 100)), min_size=1, max_size=6))
@examples(25)
def test_any_sequence_of_rollbacks_gives_the_bits_of_a_fresh_cache(
    loaded: dict[tuple[str, str], engine.LLM], kinds: tuple[str, str], steps: list[tuple[int, int]]
) -> None:
    llm = loaded[kinds]
    rng, tokens, last = np.random.default_rng(len(steps)), np.zeros(0, np.int32), None
    llm.reset()
    for back, forward in steps:
        length = max(0, tokens.size - back)
        if not llm.sequence.can_truncate(length):
            length = 0
        llm.sequence.truncate(length)
        n = min(forward, N_CTX - length)
        if n == 0:
            continue
        new = rng.integers(0, llm.config.n_vocab, n).astype(np.int32)
        tokens = np.concatenate([tokens[:length], new])
        last = evaluate(llm.model, new, np.arange(length, length + n, dtype=np.int32), 1, llm.model.sequence)
    assert last is None or llm.logits(tokens.tolist())[-1].tobytes() == last[0].tobytes()


def test_quantized_caches_are_near(files: Files) -> None:
    """Logits move by a few hundredths of their standard deviation even if only a rounding in float16 changes what is then
    quantized to 8 bits; by more if the cache has fewer bits, and by all of it if something is wrong."""
    ids = np.random.default_rng(3).integers(0, N_VOCAB_TINY, 200).tolist()
    for name in SHAPES:
        exact = load(files[name], ("f32", "f32")).logits(ids)
        errors = []
        for kinds in (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")):
            logits = load(files[name], kinds).logits(ids)
            errors.append(float(np.sqrt(np.mean((logits - exact) ** 2)) / exact.std()))
        assert errors[0] < 0.05 and errors[1] < 0.12 and errors[3] < 0.3
        assert all(one < other for one, other in pairwise(errors))


# --- memory ----------------------------------------------------------------------------------------------------

BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bits of an element, with its share of a scale."""


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_bytes_of_the_cache(files: Files, kinds: tuple[str, str]) -> None:
    """A window of 32, 64 tokens that may be rolled back and a batch of 128 touch at most 5 chunks; layers of a shared tail
    have none."""
    # (heads, width, positions) of every layer that has keys and values of its own
    wanted = {
        "tiny-gemma4": [(2, 64, 320), (2, 64, 320), (1, 96, 640)] * 2,
        "tiny-gemma4-moe": [(3, 64, 320), (1, 128, 640)] * 2,
        "tiny-gemma4-e": [(1, 32, 320)] * 3 + [(1, 64, 640)],
    }
    for name, layers in wanted.items():
        llm = load(files[name], kinds, n_ctx=640)
        assert len(llm.cache.layers) == len(layers)
        expected = sum(heads * d * positions * (BYTES[kinds[0]] + BYTES[kinds[1]]) for heads, d, positions in layers)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in llm.cache.layers)
        assert llm.cache_bytes == held == expected


def test_a_shared_tail_reads_the_last_layers_of_its_kind(files: Files) -> None:
    """Layers 4 to 7 have no memory: the sliding ones read that of layer 2, the global one that of layer 3."""
    llm = load(files["tiny-gemma4-e"], ("f32", "f32"))
    c = llm.config
    model: Any = llm.model
    assert [c.memory(il) for il in range(c.n_layer)] == [0, 1, 2, 3, 2, 2, 2, 3]
    widths = [layer.network.n_ff for layer in c.layers if isinstance(layer.network, DenseConfig)]
    assert widths == [widths[0]] * 4 + [2 * widths[0]] * 4
    assert all(layer.mixer.attn_k is None for layer in model.layers[4:])
    ids = np.random.default_rng(4).integers(0, c.n_vocab, 100).tolist()
    llm.logits(ids)
    x, positions = np.random.default_rng(1).standard_normal((3, c.n_embd)).astype(np.float32), np.arange(97, 100)
    batch = model.begin(Batch(np.array(ids[97:], np.int32), positions.astype(np.int32), np.zeros(3, np.int32)), x)
    memories = [(layer.keys.copy(), layer.values.copy()) for layer in llm.cache.layers]
    for il in range(4, 8):
        expected = model.block(il, x, batch)
        for own, layer in enumerate(llm.cache.layers):
            for ring in (layer.keys, layer.values):
                ring *= np.float32(-1)
                assert (model.block(il, x, batch).tobytes() == expected.tobytes()) is (own != c.memory(il))
                ring *= np.float32(-1)
    # They do not write any, either.
    for layer, (keys, values) in zip(llm.cache.layers, memories, strict=True):
        assert np.array_equal(layer.keys, keys) and np.array_equal(layer.values, values)


def test_keys_and_values_that_nobody_reads_may_stay_in_the_file(files: Files, tmp_path: Path) -> None:
    """Checkpoints of models with a shared tail have them in all layers."""
    ids = list(range(5, 40))
    expected = load(files["tiny-gemma4-e"]).logits(ids)
    source = read_gguf(files["tiny-gemma4-e"])
    writer = library.GGUFWriter(tmp_path / "more.gguf", "gemma4")
    for key, value in source.metadata.items():
        if key == "general.architecture":
            continue
        kind, element = source.kinds[key].removesuffix("[]").upper(), None
        kinds = {"STR": "STRING", "U32": "UINT32", "I32": "INT32", "F32": "FLOAT32", "BOOL": "BOOL"}
        if source.kinds[key].endswith("[]"):
            value = value if isinstance(value, list) else value.tolist()  # type: ignore[union-attr]
            kind, element = "ARRAY", kinds[kind]
        writer.add_key_value(
            key,
            value,
            library.GGUFValueType[kinds.get(kind, kind)],
            library.GGUFValueType[element] if element else None,
        )
    for tensor in source.tensors.values():
        shape = (*tensor.shape[:-1], -1) if tensor.type.name != "F32" else tensor.shape
        data = tensor.data if tensor.type.name != "F32" else tensor.data.view(np.float32)
        writer.add_tensor(tensor.name, data.reshape(shape), raw_dtype=tensor.type)
    for name, size in (("attn_k.weight", (32, 288)), ("attn_v.weight", (32, 288)), ("attn_k_norm.weight", (32,))):
        writer.add_tensor(f"blk.5.{name}", np.full(size, np.nan, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load(tmp_path / "more.gguf").logits(ids).tobytes() == expected.tobytes()


# --- what is refused -------------------------------------------------------------------------------------------


def changed(gguf: GGUF, values: dict[str, Any]) -> GGUF:
    """The metadata with other values: ints, floats, strings, or lists of ints or booleans; None: without that key."""
    metadata, kinds = dict(gguf.metadata), dict(gguf.kinds)
    for name, value in values.items():
        key = name if "." in name and name.startswith(("general", "tokenizer")) else f"{architecture(gguf)}.{name}"
        metadata.pop(key, None)
        kinds.pop(key, None)
        if value is None:
            continue
        if isinstance(value, list):
            kinds[key] = "bool[]" if isinstance(value[0], bool) else "i32[]"
            value = np.array(value)
        else:
            kinds[key] = {bool: "bool", int: "u32", float: "f32", str: "str"}[type(value)]
        metadata[key] = value
    return replace(gguf, metadata=metadata, kinds=kinds, offsets={})


def architecture(gguf: GGUF) -> str:
    return str(gguf.metadata["general.architecture"])


def config(gguf: GGUF, values: dict[str, Any]) -> ModelConfig:
    return read(Metadata(changed(gguf, values), architecture(gguf)))


def mixers(c: ModelConfig) -> list[AttentionConfig]:
    return [layer.mixer for layer in c.all_layers if isinstance(layer.mixer, AttentionConfig)]


# tiny-gemma4 has 6 layers, every third of them global, 6 heads, and 2 heads of keys of 64 elements or 1 of 96.
DENSE = [
    ({"attention.head_count": [6, 6, 3, 6, 6, 3]}, "attention.head_count differs from layer to layer"),
    ({"attention.head_count": [6, 6]}, "attention.head_count: has 2 elements for 6 layers"),
    ({"attention.head_count_kv": 4}, "attention.head_count_kv: is 4, which does not divide the 6 query heads"),
    ({"attention.head_count_kv": [4, 4, 1, 4, 4, 1]}, "is 4, which does not divide the 6 query heads"),
    ({"attention.head_count_kv": 0}, "attention.head_count_kv: is 0, outside 1"),
    ({"attention.shared_kv_layers": 1}, "attention.shared_kv_layers: is 1, but the last two layers before those"),
    ({"attention.shared_kv_layers": 5}, "attention.shared_kv_layers: is 5, but the last two layers before those"),
    ({"attention.shared_kv_layers": 6}, "attention.shared_kv_layers: is 6, but the last two layers before those"),
    ({"attention.shared_kv_layers": 7}, "attention.shared_kv_layers: is 7, outside 0 to 6"),
    ({"attention.key_length": None}, "attention.key_length: the key is missing"),
    ({"attention.value_length": 64}, "attention.value_length: is not 96, the length of the keys"),
    ({"attention.value_length_swa": 96}, "attention.value_length_swa: is not 64, the length of the keys"),
    ({"attention.sliding_window": None}, "attention.sliding_window: the key is missing"),
    ({"attention.sliding_window": 0}, "attention.sliding_window: is 0, outside 1"),
    ({"attention.sliding_window_pattern": None}, "attention.sliding_window_pattern: the key is missing"),
    ({"attention.sliding_window_pattern": 6}, "attention.sliding_window_pattern: is of type u32 instead of bool"),
    ({"attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern: has 2 elements for 6 layers"),
    ({"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon: the key is missing"),
    ({"feed_forward_length": [512]}, "feed_forward_length: has 1 elements for 6 layers"),
    ({"feed_forward_length": None}, "feed_forward_length: the key is missing"),
    ({"embedding_length_per_layer_input": None}, "embedding_length_per_layer_input: the key is missing"),
    ({"rope.dimension_count": 98}, "rope.dimension_count: is 98, but gemma4 rotates at most heads of 96"),
    ({"rope.dimension_count": 95}, "rope.dimension_count: is 95, an odd number"),
    ({"rope.dimension_count_swa": 96}, "rope.dimension_count_swa: is 96, for heads of 64"),
    ({"rope.dimension_count_swa": 33}, "rope.dimension_count_swa: is 33, for heads of 64"),
    ({"rope.freq_base_swa": 0.5}, "rope.freq_base_swa: is 0.5, outside 1"),
    ({"rope.scaling.type": "dynamic"}, "rope scaling 'dynamic' is not supported"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: is -1.0, outside 0"),
    ({"block_count": 0}, "block_count: is 0, outside 1"),
    ({"context_length": None}, "context_length: the key is missing"),
]
MIXTURE = [
    ({"expert_used_count": None}, "expert_used_count: the key is missing"),
    ({"expert_used_count": 8}, "expert_used_count: is 8, outside 1 to 7"),
    ({"expert_feed_forward_length": [96, 96, 64, 96]}, "expert_feed_forward_length differs from layer to layer"),
    ({"expert_feed_forward_length": None}, "expert_feed_forward_length: the key is missing"),
    ({"expert_count": 2000}, "expert_count: is 2000, outside 0 to 1024"),
]
ASSISTANTS = [
    ({"expert_count": 4}, "an assistant with experts is not supported"),
    ({"embedding_length_out": None}, "embedding_length_out: the key is missing"),
]
REFUSED = [("tiny-gemma4", *case) for case in DENSE] + [("tiny-gemma4-moe", *case) for case in MIXTURE]
REFUSED += [("tiny-gemma4-assistant", *case) for case in ASSISTANTS]


@pytest.mark.parametrize(("name", "values", "told"), REFUSED, ids=[str(case[1])[1:-1] for case in REFUSED])
def test_metadata_that_is_refused(files: Files, name: str, values: dict[str, Any], told: str) -> None:
    gguf = read_gguf(files[name])
    config(gguf, {})
    with pytest.raises(EngineError) as caught:
        config(gguf, values)
    sentence = str(caught.value)
    assert sentence.startswith(str(files[name])) and told in sentence and "\n" not in sentence


def test_defaults(files: Files) -> None:
    """The defaults of llama.cpp: softcapping unless a file says 0, as many KV heads as query heads, nothing shared."""
    dense = read_gguf(files["tiny-gemma4"])
    names = ("final_logit_softcapping", "attention.head_count_kv", "attention.shared_kv_layers", "rope.freq_base_swa")
    c = config(dense, dict.fromkeys(names))
    assert c.final_softcap == 30.0 and c.owners == (0, 1, 2, 3, 4, 5)
    assert all(mixer.n_head_kv == 6 and mixer.scale == 1.0 for mixer in mixers(c))
    assert {mixer.rope.base for mixer in mixers(c) if mixer.rope is not None and mixer.window} == {10000.0}
    assert config(dense, {"final_logit_softcapping": 0.0}).final_softcap == 0.0
    # An assistant has no such bound, and no layers with keys at all.
    c = config(read_gguf(files["tiny-gemma4-assistant"]), {"final_logit_softcapping": 5.0})
    assert (c.final_softcap, c.n_embd_out) == (0.0, 256)
    # Only one kind of layer.
    c = config(dense, {"attention.sliding_window_pattern": [False] * 6, "attention.head_count_kv": 3})
    assert [(mixer.n_head_kv, mixer.d_k, mixer.d_v) for mixer in mixers(c)] == [(3, 96, 96)] * 6
    # Counts per layer.
    c = config(
        dense, {"attention.head_count_kv": [2, 3, 1, 1, 2, 6], "feed_forward_length": [512, 512, 512, 512, 512, 256]}
    )
    assert [mixer.n_head_kv for mixer in mixers(c)] == [2, 3, 1, 1, 2, 6]
    assert [layer.network.n_ff for layer in c.layers if isinstance(layer.network, DenseConfig)] == [512] * 5 + [256]


def test_an_assistant_alone_is_refused(files: Files) -> None:
    path = files["tiny-gemma4-assistant"]
    with pytest.raises(ModelError) as caught:
        load(path)
    assert (
        str(caught.value)
        == f"{path}: a {ASSISTANT} only drafts for a gemma4 model; give it as the draft model (draft_model=...)."
    )
    with pytest.raises(ModelError, match="only drafts"):
        read_config(read_gguf(path))


@pytest.mark.parametrize("sliding", [False, True])
def test_cache_types_that_do_not_fit_the_heads(tmp_path: Path, sliding: bool) -> None:
    """Widths of global or of sliding layers that are not a multiple of 32."""
    widths = (64, 80) if sliding else (48, 32)
    gemma = Gemma4Shape(2, widths[1], 1)
    shape = Shape("gemma4", 2, 64, 2, 1, widths[0], 64, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32, gemma4=gemma)
    path = make_model(tmp_path / "m.gguf", shape, "Q8_0")
    for kinds in (("q8_0", "f16"), ("f16", "q8_0"), ("q4_0", "q4_0"), ("f32", "q4_0"), ("i12", "i12")):
        with pytest.raises(ModelError) as caught:
            load(path, kinds)
        sentence, wrong = str(caught.value), 80 if sliding else 48
        assert f"heads of {wrong} elements do not fit" in sentence and "use f16" in sentence and "\n" not in sentence
        assert next(kind for kind in kinds if kind.startswith(("q", "i"))) in sentence
    assert np.isfinite(load(path, ("f16", "f32")).logits([3, 4, 5])).all()


@pytest.mark.parametrize("key", ["cache_type", "cache_type_k", "cache_type_v"])
def test_an_unknown_cache_type(files: Files, key: str) -> None:
    options: dict[str, Any] = {key: "q5_1"}
    with pytest.raises(UsageError, match="cache type 'q5_1' is unknown; use f32, f16, q8_0, q4_0"):
        engine.load(files["tiny-gemma4"], **options)


def test_one_type_for_both_and_one_for_each(files: Files) -> None:
    def types(**options: Any) -> tuple[str, str]:
        layer = engine.load(files["tiny-gemma4"], device="cpu", n_ctx=64, **options).cache.layers[0]
        return layer.k_type.name, layer.v_type.name

    assert types() == ("i8", "i8")
    assert types(cache_type_k="q8_0") == ("q8_0", "f16")
    assert types(cache_type="q8_0") == ("q8_0", "q8_0")
    assert types(cache_type="q8_0", cache_type_v="q4_0") == ("q8_0", "q4_0")
    assert types(cache_type_k="q4_0") == ("q4_0", "f16")


def test_a_token_reads_one_row_of_the_per_layer_table(tmp_path: Path) -> None:
    path = make_model(tmp_path / "e.gguf", "tiny-gemma4-e", "Q8_0")
    file = read_gguf(path)
    table = file.tensors["per_layer_token_embd.weight"]
    assert weight_bytes_per_token(path) == file.n_bytes - table.nbytes + table.nbytes // table.shape[0]
