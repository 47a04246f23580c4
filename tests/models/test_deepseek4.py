"""deepseek4 beyond what every architecture is tested for: compressed rows across passes, rolling back, snapshots,
refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import engine
from engine.cache.compressed import CompressedCacheSpec
from engine.cache.types import F16
from engine.decode.evaluate import evaluate
from engine.errors import GGUFError, ModelError
from engine.models.traffic import cache_bytes_per_token, memories
from tests.families import Tensors, quantized, rewritten, write_quantized
from tests.models.test_models import in_batches
from tests.oracle.families.deepseek4 import CASES
from tests.oracle.models import write_gguf
from tests.tiers import few

N_CTX = 320


@pytest.fixture(scope="module", params=few(CASES), ids=lambda case: case.name)
def path(request: Any, tmp_path_factory: Any) -> Path:
    return write_quantized(request.param, tmp_path_factory.mktemp("deepseek4") / "m.gguf")


def texts(llm: engine.LLM, n: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, llm.config.n_vocab, n).astype(np.int32)


def test_the_division_of_a_prompt_does_not_show(path: Path) -> None:
    """Passes that end before, at and after the end of blocks of 4, 8 and 128, and passes of several blocks."""
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=2)
    tokens = texts(llm, 280)
    expected = in_batches(llm, tokens, [1] * tokens.size)
    for batches in ([128, 128, 24], [3, 1, 4, 9, 15, 96, 2, 127, 23], [127, 1, 1, 126, 25], [5] * 56):
        assert in_batches(llm, tokens, batches).tobytes() == expected.tobytes()


def test_tokens_can_be_rolled_back(path: Path) -> None:
    """Over the ends of blocks, by as many tokens as the cache allows, with other tokens in between."""
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1, batch_size=16)
    tokens = texts(llm, 280)
    expected = in_batches(llm, tokens, [1] * tokens.size)
    back = llm.cache.rewind
    assert back >= 5
    for end in (9, 64, 128, 130, 137, 256, 259):
        for count in {1, min(4, back), back}:
            at = max(1, end - count)
            in_batches(llm, tokens[:at], [16] * (at // 16) + ([at % 16] if at % 16 else []))
            other = (tokens[at:end] + 1) % llm.config.n_vocab
            evaluate(llm.model, other, np.arange(at, end, dtype=np.int32), 1, llm.model.sequence)
            llm.sequence.truncate(at)
            again = evaluate(
                llm.model, tokens[at : at + 8], np.arange(at, at + 8, dtype=np.int32), 8, llm.model.sequence
            )
            assert again.tobytes() == expected[at : at + 8].tobytes(), (end, count)


def test_a_snapshot_is_what_was_read(path: Path) -> None:
    """A conversation goes on from the end of a message although its rings have been overwritten."""
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1, batch_size=16)
    tokens = texts(llm, 300)
    for length in (1, 6, 40, 129, 131):
        in_batches(llm, tokens[:length], [1] * length)
        snapshot = llm.model.save(llm.model.sequence)
        rows = [
            evaluate(llm.model, tokens[p : p + 1], np.array([p], np.int32), 1, llm.model.sequence)
            for p in range(length, length + 20)
        ]
        # The same beginning, then another text.
        in_batches(llm, np.concatenate([tokens[:length], tokens[::-1][: 290 - length]]), [10] * 29)
        llm.model.restore(snapshot, llm.model.sequence)
        again = [
            evaluate(llm.model, tokens[p : p + 1], np.array([p], np.int32), 1, llm.model.sequence)
            for p in range(length, length + 20)
        ]
        assert np.concatenate(again).tobytes() == np.concatenate(rows).tobytes()


def test_prompts_that_share_a_beginning(path: Path) -> None:
    """Whatever was read before, logits are those of a fresh start; a shared message is not read again from before its last
    page border, in the middle of a page of compressed rows."""
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1, batch_size=16)
    (end, *_) = llm.tokenizer.eog_ids
    words = [t for t in texts(llm, 280).tolist() if t not in llm.tokenizer.eog_ids]
    message = [*words[:150], end]
    prompts = [[*message, *words[150:240]], [*message, *words[20:60]], words[:200], [*message, *words[150:170]]]
    fresh = []
    for prompt in prompts:
        llm.reset()
        fresh.append(llm.prefill(prompt)[0].tobytes())
    llm.reset()
    found = [llm.prefill(prompt) for prompt in prompts]
    assert [logits.tobytes() for logits, _ in found] == fresh
    assert [kept for _, kept in found] == [0, 128, 128, 128] and len(message) // 64 * 64 == 128
    assert [paging.span for paging in llm.cache.pools] != [64] * len(llm.cache.pools)


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_states_are_saved_and_belong_to_a_cache_type(path: Path, tmp_path: Path, cache_type: str) -> None:
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1, cache_type=cache_type)
    tokens = texts(llm, 140).tolist()
    llm.prefill(tokens)
    expected = llm.step(5)
    llm.sequence.truncate(140)
    llm.save_state(tmp_path / "s.json")
    llm.reset()
    assert llm.load_state(tmp_path / "s.json") == tokens
    assert llm.step(5).tobytes() == expected.tobytes()
    other = engine.load(
        path, n_ctx=N_CTX, device="cpu", n_threads=1, cache_type="f32" if cache_type == "f16" else "f16"
    )
    with pytest.raises(engine.errors.UsageError, match="cache"):
        other.load_state(tmp_path / "s.json")


def test_memory_is_as_planned(path: Path) -> None:
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1)
    held = sum(
        array.nbytes
        for layer in llm.cache.layers
        for part in (layer, layer.compressed, layer.keys)
        if part is not None
        for name, array in vars(part).items()
        if isinstance(array, np.ndarray) and name != "table"
    )
    assert held == llm.cache.n_bytes


def test_the_cache_of_the_real_model() -> None:
    """6880 bytes for each token of the context in float16, and a part that does not grow."""
    shapes = [CompressedCacheSpec(512, 128, 0, 1, 0, 0, 5)] * 2
    shapes += [CompressedCacheSpec(512, 128, 4, 2, 128, 512, 5)] * 21 + [
        CompressedCacheSpec(512, 128, 128, 1, 0, 0, 5)
    ] * 20
    small, large = (sum(s.n_bytes(n, 128, F16) for s in shapes) for n in (1 << 16, 1 << 17))
    assert large - small == 6880 << 16
    assert small - (6880 << 16) < 40 << 20


def test_the_bytes_that_a_token_reads(path: Path) -> None:
    """Latents of the window, chosen rows, and keys of the indexer once it has to choose."""
    llm = engine.load(path, n_ctx=N_CTX, device="cpu", n_threads=1)
    for position in (0, 30, 35, 200):
        expected = 0
        for layer in llm.config.layers:
            m: Any = layer.mixer
            rows = (position + 1) // m.ratio if m.ratio else 0
            if m.indexer is not None and rows > m.indexer.top_k:
                expected += rows * m.indexer.d * 2
                rows = m.indexer.top_k
            expected += (min(position + 1, m.window) + rows) * m.d * 2
        assert cache_bytes_per_token(memories(llm), position, 1) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hyper_connection.count", 3, "is 3, and 4 streams are supported"),
        ("attention.compress_ratios", [0, 0, 2, 128, 4], "has 2; 0, 4 and larger ones"),
        ("attention.compress_ratios", [0, 0], "has 2 elements for 5 layers"),
        ("attention.output_group_count", 4, "which does not divide the 6 heads"),
        ("attention.indexer.key_length", 8, "fewer than the 16 dimensions"),
        ("swiglu_clamp_exp", [1.0], "has 1 elements for 5 layers"),
        ("swiglu_clamp_shexp", [1.0] * 5, "differs from swiglu_clamp_exp"),
        ("hash_layer_count", 2, "exp_probs_b.bias is missing"),
        ("hash_layer_count", 4, "ffn_gate_tid2eid.weight is missing"),
        ("attention.head_count_kv", 2, "one head of keys"),
    ],
)
def test_files_that_cannot_run_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    case = CASES[0]
    changed = replace(case, metadata={**case.metadata, key: value})
    with pytest.raises((GGUFError, ModelError), match=message):
        engine.load(write_gguf(changed, tmp_path / "m.gguf"), device="cpu", n_ctx=64)


def test_the_type_of_a_small_tensor_does_not_matter(tmp_path: Path) -> None:
    """Matrices of hyper-connections and compressors are F16 in some files."""
    plain = write_gguf(CASES[1], tmp_path / "a.gguf")

    def small(name: str) -> bool:
        return name.endswith(("_fn.weight", "_ape.weight", "_compressor_kv.weight", "indexer.proj.weight"))

    def halved(tensors: Tensors) -> Tensors:
        return {k: v.astype(np.float16) if small(k) else v for k, v in tensors.items()}

    def rounded(tensors: Tensors) -> Tensors:
        return {k: v.astype(np.float32) for k, v in halved(tensors).items() if v.dtype == np.float16} | {
            k: v for k, v in tensors.items() if not small(k)
        }

    one = rewritten(plain, tmp_path / "f16.gguf", halved)
    two = rewritten(plain, tmp_path / "f32.gguf", rounded)
    assert any(t.tensor_type == gguf.GGMLQuantizationType.F16 for t in gguf.GGUFReader(one).tensors)
    rows = [engine.load(p, n_ctx=64, device="cpu", n_threads=1).logits([1, 2, 3, 4, 5, 6, 7, 8, 9]) for p in (one, two)]
    assert rows[0].tobytes() == rows[1].tobytes()


# --- the layer that drafts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers(tmp_path_factory: Any) -> dict[str, Path]:
    """A model, and the files of its layer in Q8_0."""
    folder, case = tmp_path_factory.mktemp("layers"), CASES[0]
    files = {"model": write_quantized(case, folder / "model.gguf")}
    for layout in ("llama.cpp", "ds4"):
        plain = case.write_layer(folder / f"{layout}.f32", layout)
        files[layout] = rewritten(plain, folder / f"{layout}.gguf", lambda t: quantized(t, "Q8_0"))
    return files


def test_both_layouts_are_the_same_layer(layers: dict[str, Path]) -> None:
    """Also with the embedding and the output of the model, which only one of the two files has."""
    given: dict[str, Any] = {"n_ctx": 128, "device": "cpu", "n_threads": 1}
    found, costs = [], []
    for layout in ("llama.cpp", "ds4"):
        llm: Any = engine.load(layers["model"], draft_model=layers[layout], **given)
        tokens = texts(llm, 60).tolist()
        llm.prefill(tokens)
        found.append(
            [llm.model.drafter.forward(tokens[-1 - i], 60 + i, llm.model.sequence).tobytes() for i in range(3)]
        )
        costs.append(llm.model.drafter.n_bytes)
    assert found[0] == found[1] and costs[0] == costs[1]
    assert costs[0] < layers["ds4"].stat().st_size


def test_a_snapshot_has_what_the_layer_needs(layers: dict[str, Path]) -> None:
    llm: Any = engine.load(layers["model"], draft_model=layers["ds4"], n_ctx=192, device="cpu", n_threads=1)
    tokens = texts(llm, 180)
    in_batches(llm, tokens[:100], [100])
    snapshot, expected = (
        llm.model.save(llm.model.sequence),
        llm.model.drafter.forward(7, 100, llm.model.sequence).tobytes(),
    )
    in_batches(llm, np.concatenate([tokens[:100], tokens[:80]]), [60, 60, 60])
    llm.model.restore(snapshot, llm.model.sequence)
    assert llm.model.drafter.forward(7, 100, llm.model.sequence).tobytes() == expected


def test_layers_that_do_not_fit_are_refused(layers: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a layer that only drafts for a deepseek4 model"):
        engine.load(layers["llama.cpp"], device="cpu")
    with pytest.raises(ModelError, match="drafts for deepseek4 models, and .* is qwen3"):
        engine.load("pycoder", draft_model=layers["ds4"], device="cpu")
    with pytest.raises(engine.errors.UsageError, match="is a layer of the model"):
        engine.load(layers["model"], draft_model=layers["ds4"], device="cpu", device_draft="cpu")
    with pytest.raises(ModelError, match="tensor mtp.0.e_proj.weight has shape"):
        engine.load(write_gguf(CASES[1], tmp_path / "other.gguf"), draft_model=layers["ds4"], device="cpu")
    whole = CASES[0].write_layer(tmp_path / "whole.gguf", "ds4")
    cut = rewritten(whole, tmp_path / "cut.gguf", lambda t: {k: v for k, v in t.items() if "hnorm" not in k})
    with pytest.raises(ModelError, match="mtp.0.hnorm.weight is missing"):
        engine.load(layers["model"], draft_model=cut, device="cpu")
