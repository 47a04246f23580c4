"""The ring: its memory, how far it can be rewound, and that a rewound cache gives the bits of a fresh one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine.cache.kv import KVCache, LayerShape
from engine.cache.sequence import Sequence
from engine.cache.types import CACHE_TYPES, F16, F32, Types
from engine.errors import ContextError, UsageError
from engine.synthetic.model import make_model
from tests.sequences import store
from tests.tiers import examples


def cache(window: int, n_ctx: int = 1000, max_rows: int = 32) -> KVCache:
    return KVCache([LayerShape(1, 8, 8, window)], n_ctx, max_rows, F32, np.zeros)


def test_sliding_layers_hold_only_their_window() -> None:
    assert LayerShape(1, 8, 8, 0).chunks(32768, 128) == 512
    assert LayerShape(1, 8, 8, 512).chunks(32768, 128) == 10
    assert LayerShape(1, 8, 8, 512).chunks(100, 128) == 2
    shape = LayerShape(2, 64, 32, 0)
    assert shape.n_bytes(128, 64, F16) == 128 * 2 * (64 + 32) * 2
    assert sum(a.nbytes for a in (cache(100).layers[0].keys, cache(100).layers[0].values)) == cache(100).n_bytes


def test_keys_and_values_have_their_own_types() -> None:
    types = Types(CACHE_TYPES["q8_0"], CACHE_TYPES["f16"])
    layer = LayerShape(2, 64, 32, 0).layer(128, 64, types, np.zeros)
    assert (layer.k_type, layer.v_type) == (types.k, types.v)
    # A chunk of keys: 64 positions of 64 bytes, and a float16 scale for every 32 of them.
    assert layer.k_type.integer_words(64) == 64 * 64 // 4
    assert layer.keys.shape == (2, 2, 64 * (64 + 2 * 2) // 4) and layer.values.shape == (2, 2, 64, 32)


def test_a_layer_knows_the_sizes_of_its_rings() -> None:
    layer = LayerShape(2, 64, 32, 0).layer(320, 64, F32, np.zeros)
    assert layer.keys.shape == (layer.n_head_kv, layer.chunks, layer.d_k, 64) == (2, 5, 64, 64)
    assert layer.values.shape == (layer.n_head_kv, layer.chunks, 64, layer.d_v) == (2, 5, 64, 32)


def test_positions_follow_one_another() -> None:
    ring = Sequence(cache(0, n_ctx=40))
    store(ring, 0, 32)
    for first, count, message in ((3, 1, "continue at 32"), (32, 33, "at most 32"), (32, 9, "outside the context")):
        with pytest.raises(ContextError, match=message):
            ring.claim(first, count)
    assert ring.length == 32


def test_rewinding() -> None:
    full, sliding = Sequence(cache(0)), Sequence(cache(100))
    for ring in (full, sliding):
        for first in range(0, 960, 32):
            store(ring, first, 32)
    full.truncate(1)
    assert full.length == 1
    capacity = 3 * 64
    assert sliding.can_truncate(960)
    assert sliding.can_truncate(960 - capacity + 99)
    assert not sliding.can_truncate(960 - capacity + 98)
    with pytest.raises(ContextError, match="start again"):
        sliding.truncate(500)
    sliding.truncate(0)
    store(sliding, 0, 1)
    with pytest.raises(ContextError, match="cannot be cut"):
        sliding.truncate(2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> engine.LLM:
    path = make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "tiny-gemma3", "Q4_0", seed=3)
    return engine.load(path, n_ctx=512)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 128)), min_size=1, max_size=8), st.integers(0, 99))
@examples(25)
def test_any_sequence_of_rollbacks_gives_the_bits_of_a_fresh_cache(
    gemma: engine.LLM, steps: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model, tokens = gemma.model, np.zeros(0, np.int32)
    model.sequence.truncate(0)
    last = None
    for back, forward in steps:
        length = max(0, tokens.size - back)
        if not model.sequence.can_truncate(length):
            length = 0
        model.sequence.truncate(length)
        n = min(forward, model.cache.max_rows, 512 - length)
        if n == 0:
            continue
        new = rng.integers(0, gemma.config.n_vocab, n).astype(np.int32)
        tokens = np.concatenate([tokens[:length], new])
        last = model.forward(new, np.arange(length, length + n, dtype=np.int32), 1)
    if last is not None:
        assert gemma.logits(tokens.tolist())[-1].tobytes() == last[0].tobytes()


def test_integer_caches_are_for_keys_and_values_alike() -> None:
    with pytest.raises(
        UsageError, match="cache type i12 is for keys and values alike, not for i12 and f16: use i12 for both"
    ):
        engine.load(device="cpu", cache_type_k="i12")
    with pytest.raises(UsageError, match="not for f32 and i8: use i8 for both"):
        engine.load(device="cpu", cache_type="f32", cache_type_v="i8")
