"""Pages: their memory, who holds them, how far tokens can be rolled back, and that a rewound cache gives the bits of a fresh
one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.mamba import MambaCacheSpec
from engine.cache.pages import NoPages, PagedMemory, PagePool, Paging
from engine.cache.pair import PairCacheSpec
from engine.cache.sequence import Sequence, first_key, keys_of
from engine.cache.spec import Ring
from engine.cache.types import CACHE_TYPES, F16, F32, Types
from engine.decode.evaluate import evaluate
from engine.errors import ContextError, UsageError
from engine.synthetic.model import make_model
from tests.pages import arrays_of, layer_of
from tests.sequences import store
from tests.tiers import examples


def cache(window: int, n_ctx: int = 1000, max_rows: int = 32, n_sequences: int = 1) -> KVCache:
    return KVCache([AttentionCacheSpec(1, 8, 8, window)], n_ctx, max_rows, F32, np.zeros, n_sequences=n_sequences)


@pytest.mark.parametrize(("decode_rows", "rewind"), [(1, 64), (16, 64), (21, 64), (22, 128), (32, 128)])
def test_what_decode_batches_in_flight_have_stored_can_be_rolled_back(decode_rows: int, rewind: int) -> None:
    """Those of three batches, in whole pages."""
    memory = KVCache([AttentionCacheSpec(1, 8, 8, 100, decode_rows)], 1000, decode_rows, F32, np.zeros)
    assert memory.rewind == rewind >= 3 * decode_rows
    sequence = Sequence(memory)
    while sequence.length + decode_rows <= 600:
        store(sequence, sequence.length, decode_rows)
    sequence.truncate(sequence.length - rewind)


def test_a_layer_with_two_mixers_has_both_caches() -> None:
    """Its memory, pages and rings are those of two layers, and what one of both refuses."""
    first, second = AttentionCacheSpec(2, 24, 24), MambaCacheSpec(40, 4, 2, 16, 32, 44, rewind=20)
    pair, alone = (
        KVCache(specs, 640, 16, F16, np.zeros) for specs in ([PairCacheSpec(first, second)], [first, second])
    )
    (layer,) = pair.layers
    assert [array.nbytes for part in (layer.first, layer.second) for array in arrays_of(part).values()] == [
        array.nbytes for part in alone.layers for array in arrays_of(part).values()
    ]
    assert (pair.n_bytes, pair.page_bytes, pair.rings) == (alone.n_bytes, alone.page_bytes, alone.rings)
    spec = pair.specs[0]
    assert (spec.segments, spec.snapshot_bytes) == (second.segments, second.snapshot_bytes) and spec.can_be_thinned
    assert spec.restorable and "use f16" in spec.refusal(Types(*[CACHE_TYPES["q8_0"]] * 2), "falcon-h1")
    assert not PairCacheSpec(AttentionCacheSpec(2, 24, 24, window=8), second).restorable and layer.types == F16
    visible = np.arange(1, 9)
    assert layer.bytes_per_token(visible) == sum(part.bytes_per_token(visible) for part in alone.layers)


def test_sliding_layers_hold_only_their_window() -> None:
    full, sliding = AttentionCacheSpec(1, 8, 8, 0).paging, AttentionCacheSpec(1, 8, 8, 512).paging
    assert full.chunks(32768) == full.held(32768, 128) == full.pages(32768, 128, 1) == 512
    assert sliding.chunks(32768) == 512 and sliding.chunks(100) == sliding.held(100, 128) == 2
    # Positions of the window, tokens that may be rolled back, and the rows of a pass, from the middle of a page on.
    assert sliding.held(32768, 128) == sliding.pages(32768, 128, 1) == 12
    assert sliding.held(32768, 48) == 11 and sliding.pages(32768, 128, 4) >= 4 * 11 + 1
    shape = AttentionCacheSpec(2, 64, 32, 0)
    assert shape.n_bytes(128, 64, F16) == 128 * 2 * (64 + 32) * 2 == shape.n_bytes(128, 64, F16, 5) // 5
    for memory in (cache(100), cache(100, n_sequences=3)):
        assert sum(a.nbytes for a in (memory.layers[0].keys, memory.layers[0].values)) == memory.n_bytes


def test_keys_and_values_have_their_own_types() -> None:
    types = Types(CACHE_TYPES["q8_0"], CACHE_TYPES["f16"])
    layer = layer_of(AttentionCacheSpec(2, 64, 32, 0), 128, 64, types, np.zeros)
    assert (layer.k_type, layer.v_type) == (types.k, types.v)
    # A page of keys: 64 positions of 64 bytes, and a float16 scale for every 32 of them.
    assert layer.k_type.integer_words(64) == 64 * 64 // 4
    assert layer.keys.shape == (2, 2, 64 * (64 + 2 * 2) // 4) and layer.values.shape == (2, 2, 64, 32)


def test_a_layer_knows_the_sizes_of_its_pages() -> None:
    layer = layer_of(AttentionCacheSpec(2, 64, 32, 0), 320, 64, F32, np.zeros, n_sequences=2)
    assert layer.keys.shape == (layer.n_head_kv, layer.pages, layer.d_k, 64) == (2, 10, 64, 64)
    assert layer.values.shape == (layer.n_head_kv, layer.pages, 64, layer.d_v) == (2, 10, 64, 32)
    assert sorted(layer.table.ravel()) == list(range(10)) and layer.table.shape == (2, 5)


def test_layers_of_one_kind_share_a_table() -> None:
    shapes = [
        AttentionCacheSpec(1, 8, 8),
        AttentionCacheSpec(2, 32, 16, 100),
        AttentionCacheSpec(4, 16, 8),
        AttentionCacheSpec(1, 8, 8, 100),
    ]
    memory = KVCache(shapes, 640, 32, F32, np.zeros, n_sequences=2)
    a, b, c, d = memory.layers
    assert len(memory.pools) == 2 and a.table is c.table and b.table is d.table and a.table is not b.table
    assert a.pages == c.pages == 20 and b.pages == d.pages


def test_positions_follow_one_another() -> None:
    sequence = Sequence(cache(0, n_ctx=40))
    store(sequence, 0, 32)
    for first, count, message in ((3, 1, "continue at 32"), (32, 33, "at most 32"), (32, 9, "outside the context")):
        with pytest.raises(ContextError, match=message):
            sequence.claim(first, count)
    assert sequence.length == 32


def test_rewinding() -> None:
    full, sliding = Sequence(cache(0)), Sequence(cache(100))
    for sequence in (full, sliding):
        for first in range(0, 960, 32):
            store(sequence, first, 32)
    full.truncate(1)
    assert full.length == 1
    # Of 960 tokens a pass may need positions 960 - 64 - 99 and on, which is in page 12.
    sliding.reserve(960)
    (paging,) = cache(100).pools
    assert list(sliding.pages(paging)) == [12, 13, 14]
    assert sliding.can_truncate(960)
    assert sliding.can_truncate(12 * 64 + 99)
    assert not sliding.can_truncate(12 * 64 + 98)
    with pytest.raises(ContextError, match="start again"):
        sliding.truncate(500)
    sliding.truncate(0)
    assert not sliding.pages(paging)
    store(sliding, 0, 1)
    with pytest.raises(ContextError, match="cannot be cut"):
        sliding.truncate(2)


# --- pages -----------------------------------------------------------------------------------------------------


def test_a_pool_gives_each_page_once() -> None:
    pool = PagePool(5, 3, 2, np.zeros, None)
    taken = [pool.take() for _ in range(5)]
    assert taken == [0, 1, 2, 3, 4] and pool.n_free == 0
    with pytest.raises(NoPages, match="all 5 pages of the cache are in use"):
        pool.take()
    pool.give_back(3)
    assert pool.n_free == 1 and pool.take() == 3


def test_changes_of_a_table_are_published_at_once() -> None:
    """Only the rows of sequences that have changed are written, and only once."""
    written: list[int] = []

    def write(target: np.ndarray, first: int, rows: np.ndarray) -> None:
        target[first : first + len(rows)] = rows
        written.append(first)

    space = PagedMemory(256, 16, np.zeros, write, n_sequences=3)
    pool = space.pool(Paging())
    assert pool is space.pool(Paging()) and pool.table.dtype == np.int32
    pool.place(2, 1, 7)
    pool.place(2, 3, 5)
    pool.place(0, 0, 9)
    assert not pool.table.any()
    space.publish()
    assert pool.table.tolist() == [[9, 0, 0, 0], [0, 0, 0, 0], [0, 7, 0, 5]] and sorted(written) == [0, 2]
    space.publish()
    assert len(written) == 2


def test_sequences_share_pages_of_their_salt() -> None:
    memory = cache(0, n_sequences=3)
    first, second, third = (Sequence(memory, slot) for slot in range(3))
    first.belong("a")
    for at in range(0, 160, 32):
        store(first, at, 32)
    first.settle()
    assert second.find([0] * 160) == third.find([0] * 160) == (0, [])
    second.belong("a")
    length, keys = second.find([0] * 160)
    assert length == 128
    second.adopt([0] * 128, keys)
    second.belong("a")
    assert second.length == 128
    # With another salt it begins anew; its pages stay where they are wanted.
    second.belong("b")
    assert second.length == 0 and second.find([0] * 160) == (0, [])
    second.belong("a")
    assert second.find([0] * 160) == (128, keys)
    check_pages(memory, [first, second, third])


def chunks_before(paging: Paging, length: int) -> range:
    """The chunks with a position that a row after ``length`` tokens reads."""
    first = max(0, length - paging.window + 1) if paging.window else 0
    return range(first // paging.span, length // paging.span)


TEXTS = np.random.default_rng(0).integers(0, 1000, (2, 640)).astype(np.int32)
"""Two texts that begin alike."""
TEXTS[1, :192] = TEXTS[0, :192]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 640)), max_size=10),
    st.sampled_from([1, 64, 65, 66, 200]),
    st.sampled_from([64, 128]),
)
@examples(60, 30)
def test_a_sequence_begins_with_the_most_that_is_held(
    steps: list[tuple[int, int, int]], window: int, span: int
) -> None:
    """It shares the pages that a pass after these tokens reads, and no others."""
    ring = Ring(3, 80)
    memory = KVCache([AttentionCacheSpec(1, 2, 2, window)], 640, 64, F32, np.zeros, others=[ring], n_sequences=3)
    memory.pool(Paging(span))
    sequences, states = [Sequence(memory, slot) for slot in range(3)], set[bytes]()
    for slot, which, n in steps:
        sequence, text, keys = sequences[slot], TEXTS[which, :n], keys_of(TEXTS[which, :n], first_key(""))
        wanted = {
            length: {
                pool: {chunk: keys[paging.span * (chunk + 1) // 64 - 1] for chunk in chunks_before(paging, length)}
                for paging, pool in memory.pools.items()
            }
            for length in range(0, n + 1, span)
        }
        for known in (states, None):
            most = max(
                length
                for length, pools in wanted.items()
                if (length == 0 or known is None or keys[length // 64 - 1] in known)
                and all(pool.find(key) is not None for pool, own in pools.items() for key in own.values())
            )
            assert sequence.find(text, known) == (most, keys[: most // 64])
            sequence.adopt(text[:most].tolist(), keys[: most // 64])
            assert sequence.tokens == text[:most].tolist() and list(sequence.keys) == keys[: most // 64]
            for paging, pool in memory.pools.items():
                found = {chunk: pool.find(key) for chunk, key in wanted[most][pool].items()}
                assert sequence.pages(paging) == found
                pool.check(page for other in sequences for page in other.pages(paging).values())
            # The rings hold what a snapshot contains, and nothing before it.
            assert sequence.intact and (most == 0 or not sequence.can_truncate(most - 1))
        states.update(keys[(n + which) % 3 :: 3])
        while sequence.length < n:
            at, count = sequence.length, min(64, n - sequence.length)
            sequence.claim(at, count)
            sequence.commit(text[at : at + count].tolist())
        sequence.settle()


@given(st.text(), st.text(), st.lists(st.integers(0, 255), min_size=64, max_size=128))
@examples(100, 20)
def test_keys_of_texts_with_different_salts_differ(one: str, other: str, tokens: list[int]) -> None:
    keys = [keys_of(tokens, first_key(salt)) for salt in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_a_salt_is_not_taken_for_tokens() -> None:
    """A salt that consists of the bytes of a chunk without a salt does not lead to the chunks after it."""
    chunk = [*range(64)]
    salt = np.array(chunk, np.int32).tobytes().decode()
    assert keys_of([*chunk, *chunk], first_key(""))[1] != keys_of(chunk, first_key(salt))[0]


def test_no_pages() -> None:
    """A pass for which there are no pages changes no other sequence, and is possible again once there are."""
    memory = cache(0, n_ctx=256, n_sequences=2)
    ((paging, pool),) = memory.pools.items()
    first, second = Sequence(memory, 0), Sequence(memory, 1)
    store(first, 0, 32)
    held = [pool.take() for _ in range(pool.n_free)]
    store(first, 32, 32)
    before = memory.layers[0].table[0].copy()
    for sequence in (first, second):
        with pytest.raises(NoPages):
            sequence.claim(sequence.length, 1)
    assert first.length == 64 and second.length == 0 and not second.pages(paging)
    for page in held:
        pool.give_back(page)
    store(second, 0, 32)
    store(first, 64, 32)
    assert memory.layers[0].table[0, 0] == before[0] and not set(first.pages(paging).values()) & set(
        second.pages(paging).values()
    )


def check_pages(memory: KVCache, sequences: list[Sequence]) -> None:
    """No page is lost or held twice, tables say what sequences hold, and these hold what the next pass reads."""
    memory.publish()
    for paging, pool in memory.pools.items():
        held = [page for sequence in sequences for page in sequence.pages(paging).values()]
        assert len(held) == len(set(held)) and pool.n_free == pool.n_pages - len(held)
        for sequence in sequences:
            own = sequence.pages(paging)
            assert list(own) == sorted(own) and all(0 <= page < pool.n_pages for page in own.values())
            assert all(pool.table[sequence.slot, chunk] == page for chunk, page in own.items())
            low = max(0, sequence.length - paging.window + 1) if paging.window else 0
            assert set(range(low // paging.span, -(-sequence.length // paging.span))) <= set(own)


STEPS = st.tuples(st.integers(0, 2), st.sampled_from("rrrctz"), st.integers(1, 100), st.integers(0, 100))


@given(st.lists(STEPS, max_size=60), st.sampled_from([1, 40, 64, 200]), st.booleans())
@examples(60)
def test_no_page_is_lost_or_held_twice(steps: list[tuple[int, str, int, int]], window: int, on_device: bool) -> None:
    """Whatever three sequences read, claim without reading it, roll back, and continue from; and there are always enough."""

    def write(target: np.ndarray, first: int, rows: np.ndarray) -> None:
        target[first : first + len(rows)] = rows

    shapes = [AttentionCacheSpec(1, 2, 2), AttentionCacheSpec(1, 2, 2, window)]
    memory = KVCache(shapes, 640, 100, F32, np.zeros, write if on_device else None, n_sequences=3)
    sequences = [Sequence(memory, slot) for slot in range(3)]
    for slot, action, n, back in steps:
        sequence = sequences[slot]
        n = min(n if slot == 0 else n % 16 + 1, 640 - sequence.length)
        target = max(0, sequence.length - back)
        if action == "r":
            sequence.claim(sequence.length, n)
            check_pages(memory, sequences)
            # Drafts that were wrong are not kept.
            sequence.commit([0] * max(0, n - back % 4))
        elif action == "c":
            sequence.claim(sequence.length, n)
        elif action == "t" and sequence.can_truncate(target):
            sequence.truncate(target)
        elif action == "z":
            sequence.resume(target)
        check_pages(memory, sequences)
        assert sequence.intact and all(sequence.can_truncate(length) for length in (0, sequence.length))
    for sequence in sequences:
        sequence.truncate(0)
    assert all(pool.n_free == pool.n_pages for pool in memory.pools.values())


@given(st.sampled_from([0, 1, 63, 64, 65, 200]), st.integers(1, 130), st.integers(1, 3), st.data())
@examples(30)
def test_windows_can_always_be_rolled_back(window: int, max_rows: int, n_sequences: int, data: st.DataObject) -> None:
    """By as many tokens as the cache says, whatever has been read before them."""
    memory = cache(window, 900, max_rows, n_sequences)
    assert memory.rewind == (64 if window else 900)
    sequences = [Sequence(memory, slot) for slot in range(n_sequences)]
    for _ in range(12):
        sequence = data.draw(st.sampled_from(sequences))
        n = min(data.draw(st.integers(1, max_rows)), 900 - sequence.length)
        sequence.claim(sequence.length, n if sequence is sequences[0] else min(n, 48))
        sequence.commit([0] * (n if sequence is sequences[0] else min(n, 48)))
        assert all(
            sequence.can_truncate(length)
            for length in range(max(0, sequence.length - memory.rewind), sequence.length + 1)
        )
        check_pages(memory, sequences)


# --- models ----------------------------------------------------------------------------------------------------


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
        last = evaluate(model, new, np.arange(length, length + n, dtype=np.int32), 1, model.sequence)
    if last is not None:
        assert gemma.logits(tokens.tolist())[-1].tobytes() == last[0].tobytes()


def test_integer_caches_are_for_keys_and_values_alike() -> None:
    with pytest.raises(
        UsageError, match="cache type i12 is for keys and values alike, not for i12 and f16: use i12 for both"
    ):
        engine.load(device="cpu", cache_type_k="i12")
    with pytest.raises(UsageError, match="not for f32 and i8: use i8 for both"):
        engine.load(device="cpu", cache_type="f32", cache_type_v="i8")
