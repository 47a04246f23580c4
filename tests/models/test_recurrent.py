"""States of recurrent layers: rolling tokens back, snapshots, and conversations that are resumed."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.recurrent import RecurrentCacheSpec, Snapshot, States, default_budget
from engine.cache.sequence import Sequence, keys_of
from engine.cache.spec import Ring, StoredRows, of_sequence
from engine.cache.types import CHUNK, F16, F32
from engine.cli.conversation import Conversation
from engine.decode.evaluate import evaluate
from engine.errors import ContextError
from engine.synthetic.model import make_model
from engine.text.template.chat import ChatTemplate
from tests.interrupts import interrupted
from tests.pages import arrays_of, no_pages
from tests.sequences import store
from tests.tiers import examples

SHAPE = RecurrentCacheSpec(n_channels=10, n_conv=4, n_k=2, n_v=3, d=32, rewind=20)


def test_memory_does_not_grow_with_the_context() -> None:
    cache = KVCache([SHAPE, AttentionCacheSpec(1, 8, 8)], 640, 16, F32, np.zeros)
    layer = cache.layers[0]
    assert SHAPE.segments == 3
    sizes = [array.nbytes for array in arrays_of(layer).values()]
    assert sum(sizes) == SHAPE.n_bytes(640, 16, F16) == SHAPE.n_bytes(64000, 16, F32)
    assert layer.states.shape == (1, 3, 3, 32, 32) and 3 * SHAPE.segment_bytes == sum(sizes[1:])
    assert layer.keys.shape == (1, 48, 2, 32) and layer.deltas.shape == (1, 48, 3, 32)
    assert layer.decays.shape == (1, 48, 3) and layer.conv.shape == (1, 20 + 3, 10)


def test_each_sequence_has_rings_of_its_own() -> None:
    cache = KVCache([SHAPE], 640, 16, F32, np.zeros, n_sequences=3)
    layer = cache.layers[0]
    assert sum(array.nbytes for array in arrays_of(layer).values()) == cache.n_bytes == 3 * SHAPE.n_bytes(640, 16, F32)
    for slot in range(3):
        for rows in (*layer.needed(slot, 20, no_pages), *layer.written(slot, 20, 36)):
            for run in rows.runs():
                rows.ring[run] += 1 + slot
    for array in arrays_of(layer).values():
        one, two, three = (of_sequence(array, slot) for slot in range(3))
        assert one.any() and np.array_equal(2 * one, two) and np.array_equal(3 * one, three)


@pytest.mark.parametrize(("rewind", "segments"), [(1, 2), (11, 2), (16, 2), (17, 3), (32, 3), (33, 4)])
def test_there_are_as_many_segments_as_can_be_needed(rewind: int, segments: int) -> None:
    """The segment of every position that can be gone back to is still there, wherever segments begin."""
    shape = replace(SHAPE, rewind=rewind)
    assert shape.segments == segments
    for end in range(200, 232):
        cache = KVCache([shape], 640, 400, F32, np.zeros)
        sequence = Sequence(cache)
        store(sequence, 0, end)
        assert cache.rewind >= rewind
        for position in range(end + 1):
            # A segment is overwritten by the one that is ``segments`` later.
            there = end // 16 - position // 16 < segments
            assert there or not sequence.can_truncate(position) or position == 0
            assert sequence.can_truncate(position) or position < end - rewind


def test_memory_does_not_grow_with_the_batch() -> None:
    """Rolling back beyond a step; what the ring of inputs holds of a long pass is enough to roll tokens back as far as was
    requested."""
    assert SHAPE.length(4) == SHAPE.length(4096) == 20 + 3 and replace(SHAPE, rewind=5).length(4096) == 16 + 3
    cache = KVCache([SHAPE], 640, 400, F32, np.zeros)
    sequence = Sequence(cache)
    store(sequence, 0, 400)
    assert cache.rewind == 20 and [length for length in range(401) if sequence.can_truncate(length)] == [
        0,
        *range(380, 401),
    ]


def test_how_far_tokens_can_be_taken_back() -> None:
    cache = KVCache(
        [replace(SHAPE, rewind=5), AttentionCacheSpec(1, 8, 8)], 640, 16, F32, np.zeros, others=[Ring(1, 17)]
    )
    sequence = Sequence(cache)
    assert cache.rewind == 16
    store(sequence, 0, 16)
    assert all(sequence.can_truncate(length) for length in range(17))
    for first in (16, 32):
        store(sequence, first, 16)
    assert [length for length in range(49) if sequence.can_truncate(length)] == [0, *range(32, 49)]
    sequence.truncate(40)
    store(sequence, 40, 1)
    # What has been overwritten is lost.
    assert [length for length in range(42) if sequence.can_truncate(length)] == [0, *range(32, 42)]
    with pytest.raises(ContextError, match="start again"):
        sequence.truncate(31)
    sequence.resume(31)
    assert [length for length in range(42) if sequence.can_truncate(length)] == [0, 31]
    store(sequence, 31, 3)
    assert [length for length in range(42) if sequence.can_truncate(length)] == [0, 31, 32, 33, 34]


@pytest.mark.parametrize("first", [0, 2, 3, 7])
def test_entries_of_a_ring(first: int) -> None:
    """Rows by entry, also around the end of the ring."""
    ring = np.arange(5)
    for end in range(first, first + 6):
        rows = StoredRows("", ring, first, end)
        found = [int(i) for run in rows.runs() for i in ring[run]]
        assert found == [i % 5 for i in range(first, end)] and len(list(rows.runs())) <= 2


def test_entries_in_pages() -> None:
    """Page by page, wherever each is."""
    memory, pages = np.arange(5 * 64), {2: 4, 3: 0, 4: 1}
    for first, end in ((128, 320), (150, 150), (191, 193), (200, 256), (255, 257)):
        found = [int(i) for run in StoredRows("", memory, first, end, pages).runs() for i in memory[run]]
        assert found == [pages[i // 64] * 64 + i % 64 for i in range(first, end)]


def test_snapshots_keep_to_their_budget() -> None:
    """The one that has not been wanted for the longest time goes; what is found is that of the very text."""
    texts = [[*range(64)], [*range(64), *range(64)], [*range(1, 65)], [*range(1, 65), *range(64)]]
    keys = [keys_of(text, b"")[-1] for text in texts]
    kept, snapshots = States(100), [Snapshot(len(text), [np.zeros(8, np.float32)]) for text in texts]
    for key, snapshot in zip(keys[:3], snapshots, strict=False):
        assert key not in kept
        kept.add(key, snapshot)
    assert [key in kept for key in keys] == [True, True, True, False] and len(kept) == 3 and kept.n_bytes == 96
    assert kept.get(keys[0]) is snapshots[0]
    kept.add(keys[3], snapshots[3])
    assert [key in kept for key in keys] == [True, False, True, True] and kept.n_bytes == 96
    assert [kept.get(keys[i]) for i in (3, 2, 0)] == [snapshots[i] for i in (3, 2, 0)]
    # Another one of the same text replaces the first.
    again = Snapshot(128, [np.ones(8, np.float32)])
    kept.add(keys[3], again)
    assert len(kept) == 3 and kept.get(keys[3]) is again
    # One that is larger than the budget leaves nothing.
    kept.add(keys[1], Snapshot(128, [np.zeros(100, np.float32)]))
    assert len(kept) == kept.n_bytes == 0 and not any(key in kept for key in keys)
    for key, snapshot in zip(keys[:3], snapshots, strict=False):
        kept.add(key, snapshot)
    kept.keep({keys[1], keys[3]})
    assert [key in kept for key in keys] == [False, True, False, False] and kept.n_bytes == 32
    kept.add(keys[0], snapshots[0])
    kept.clear()
    assert kept.n_bytes == 0
    assert len(kept) == 0 and keys[0] not in kept


@pytest.fixture(scope="module", params=["tiny-qwen35", "tiny-qwen35moe", "tiny-lfm2", "tiny-granitehybrid"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> engine.LLM:
    path = make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param, "Q8_0", seed=3)
    return engine.load(path, n_ctx=256, n_threads=1, draft_max=8)


def states(llm: engine.LLM) -> list[bytes]:
    return [array.tobytes() for array in llm.model.save(llm.model.sequence).arrays]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 1000))
@examples(10, 3)
def test_every_prefix_of_a_pass_can_be_gone_back_to(llm: engine.LLM, first: int, rows: int, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, llm.config.n_vocab, first + rows + 3).astype(np.int32)
    expected, logits = [], []
    llm.reset()
    for position, token in enumerate(tokens):
        logits.append(llm.step(int(token)).tobytes())
        expected.append(states(llm))
        assert position + 1 == llm.sequence.length
    for accepted in range(1, rows + 1):
        llm.reset()
        llm.read(tokens[:first].tolist())
        positions = np.arange(first, first + rows, dtype=np.int32)
        evaluate(llm.model, tokens[first : first + rows], positions, rows, llm.model.sequence)
        llm.sequence.truncate(first + accepted)
        assert states(llm) == expected[first + accepted - 1]
        at = first + accepted
        row = evaluate(llm.model, tokens[at : at + 1], np.array([at], np.int32), 1, llm.model.sequence)
        assert row.tobytes() == logits[at]


def test_a_snapshot_is_the_state(llm: engine.LLM) -> None:
    """Restored after other tokens have overwritten everything: every bit of it, and of what follows."""
    tokens = np.random.default_rng(1).integers(0, llm.config.n_vocab, 120).tolist()
    for length in (1, 2, 16, 17, 31, 64):
        llm.reset()
        llm.read(tokens[:length])
        snapshot, saved = llm.model.save(llm.model.sequence), states(llm)
        following = [llm.step(token).tobytes() for token in tokens[length : length + 40]]
        llm.sequence.truncate(llm.sequence.length)
        llm.model.restore(snapshot, llm.model.sequence)
        assert states(llm) == saved and llm.sequence.length == length
        again = []
        for at in range(length, length + 40):
            again.append(
                evaluate(
                    llm.model, np.array(tokens[at : at + 1], np.int32), np.array([at], np.int32), 1, llm.model.sequence
                ).tobytes()
            )
        assert again == following


def test_a_saved_conversation_continues(llm: engine.LLM, tmp_path: Path) -> None:
    tokens = np.random.default_rng(6).integers(3, 200, 90).tolist()
    llm.reset()
    llm.prefill(tokens[:70])
    llm.save_state(tmp_path / "state")
    saved, expected = states(llm), llm.prefill(tokens)[0].tobytes()
    llm.reset()
    assert llm.load_state(tmp_path / "state") == tokens[:70] and states(llm) == saved
    logits, kept = llm.prefill(tokens)
    assert kept == 70 and logits.tobytes() == expected


def borders(llm: engine.LLM, ids: SequenceOf[int]) -> list[int]:
    """The numbers of first tokens of a text after which a snapshot is kept."""
    return [CHUNK * n for n, key in enumerate(keys_of(ids, b""), 1) if key in llm.states]


def test_prompts_that_share_a_beginning(llm: engine.LLM) -> None:
    """Whatever was read before, logits are those of a fresh start, and no more is read again than from the page border before
    the end of a message."""
    (end, *_) = llm.tokenizer.eog_ids
    words = np.random.default_rng(2).integers(3, 200, 200).tolist()
    first = [*words[:69], end, *words[69:139], end, *words[139:169]]
    llm.reset()
    llm.prefill(first)
    assert borders(llm, first) == [64, 128] and len(llm.states) == 2
    for prompt, kept in (
        (first, len(first) - 1),  # the same again
        (first + words[169:199], len(first)),
        ([*first[:141], *words[:30]], 128),  # from the end of a message
        (first[:70], 64),
        ([*first[:70], *words[:30]], 64),
        ([*first[:40], *words[:30]], 0),
    ):
        llm.reset()
        llm.prefill(first)
        logits, held = llm.prefill(prompt)
        assert held == kept and llm.reread is None
        fresh = llm.logits(prompt)[-1]
        assert fresh.tobytes() == logits.tobytes()


def test_snapshots_of_texts_that_no_slot_holds_are_forgotten(llm: engine.LLM) -> None:
    words = np.random.default_rng(4).integers(3, 200, 400).tolist()
    held, other = words[:200], words[200:]
    expected = llm.logits(held)[-1]
    llm.reset()
    llm.prefill(other)
    llm.prefill(held)
    assert borders(llm, other) == borders(llm, held) == [192]
    both = llm.memory.snapshots
    assert 0 < both <= 2 * llm.snapshot_bytes
    llm.rest()
    assert len(llm.states) == 2
    llm.rest(forget=True)
    assert borders(llm, held) == [192] and borders(llm, other) == []
    assert llm.memory.snapshots == both // 2
    llm.resume()
    logits, kept = llm.prefill(held)
    assert kept == 199 and logits.tobytes() == expected.tobytes()


def test_the_default_limit_of_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of what is free beside the model, at most 2 GiB; what the user says, whatever is free."""
    assert [default_budget(n) for n in (-5, 0, 8 << 20, 16 << 30, 1 << 40)] == [0, 0, 1 << 20, 2 << 30, 2 << 30]
    path = make_model(tmp_path / "tiny.gguf", "tiny-qwen35", "Q8_0", seed=3)

    def limit(free: int, snapshot_bytes: int | None = None) -> int:
        monkeypatch.setattr("engine.loading.available_memory", lambda: free)
        with engine.load(path, device="cpu", n_ctx=256, parallel=2, snapshot_bytes=snapshot_bytes) as model:
            needs = model.n_bytes + model.cache_bytes
            assert model.memory.snapshots_limit == model.states.budget
            return model.states.budget - max(0, min(2 << 30, (free - needs) // 8))

    assert limit(1 << 40) == limit(100 << 20) == limit(5) == 0
    assert limit(5, 7) == 7


def test_what_is_read_again_is_explained(llm: engine.LLM, caplog: pytest.LogCaptureFixture) -> None:
    """If it is more than the part of a page: here no state of the 70 common tokens was kept."""
    llm.reset()
    llm.prefill(list(range(5, 105)))
    assert borders(llm, range(5, 105)) == [64]
    llm.states.clear()
    with caplog.at_level("DEBUG", logger="bitmirror.decode"):
        llm.prefill([*range(5, 75), 120, *range(76, 105)])
    assert llm.reread is not None and llm.reread in caplog.text
    # It quotes the text, which a server must not log.
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    was, now = (repr(llm.tokenizer.decode([i])) for i in (75, 120))
    assert "70 tokens are read again" in llm.reread and f"token 70 is {now} and was {was}" in llm.reread
    llm.prefill([*range(5, 75), 120, *range(76, 105), 3])
    assert llm.reread is None


def test_no_snapshots_when_nobody_wants_them(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tiny.gguf", "tiny-qwen35", "Q8_0")
    llm = engine.load(path, n_ctx=128, n_threads=1, snapshot_bytes=0)
    llm.prefill(list(range(100)))
    assert len(llm.states) == 0
    with pytest.raises(engine.errors.UsageError, match="snapshot_bytes"):
        engine.load(path, snapshot_bytes=-1)


def test_an_interrupted_pass(llm: engine.LLM) -> None:
    """It has moved states of the first layers and claimed positions: the next pass still works correctly."""
    tokens = list(range(3, 90))
    expected = llm.logits(tokens)[-1]
    for at in (1, 2):
        llm.reset()
        llm.prefill(tokens[:40])
        with interrupted(llm.model.ops, (at + 0.5) / llm.config.n_layer), pytest.raises(KeyboardInterrupt):
            llm.prefill(tokens)
        if at == 2:  # the next pass may also be a single step
            last = [llm.step(token) for token in tokens[llm.n_cached :]][-1]
            assert last.tobytes() == expected.tobytes()
        assert llm.prefill(tokens)[0].tobytes() == expected.tobytes()


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("mtp", [False, True])
def test_ten_turns_read_only_what_is_new(mtp: bool) -> None:
    """A chat in which every turn reads only its own message and what the template writes around it."""
    llm = engine.load("pycoder-moe-mtp", device="cpu", n_threads=1, n_ctx=1024, mtp=mtp)
    template = ChatTemplate.from_source(TEMPLATE, llm.tokenizer)
    conversation = Conversation("You write Python.")
    for turn in range(10):
        message = f"def f{turn}(a, b):\n    return a"
        conversation.add("user", message)
        ids = conversation.prompt(template)
        answer = llm.complete(ids, max_tokens=12, temperature=0.9, seed=turn, ignore_eos=True)
        tail = llm.tokenize(f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
        if turn > 0:
            # The last token of an answer was chosen, not read.
            assert answer.timings.prompt_n <= len(tail) + 1
            assert ids[-len(tail) :] == tail
        assert llm.reread is None
        assert llm.detokenize(ids) == llm.detokenize(llm.tokenize(template.render(conversation.messages)))
        conversation.answered(answer, llm.detokenize(answer.ids))
    fresh = engine.load("pycoder-moe-mtp", device="cpu", n_threads=1, n_ctx=1024, mtp=mtp)
    assert fresh.complete(ids, max_tokens=12, temperature=0.9, seed=9, ignore_eos=True).ids == answer.ids


@pytest.mark.parametrize("shape", ["tiny-qwen35", "tiny-lfm2moe", "tiny-granitehybrid-moe", "tiny-kimi-linear"])
def test_a_snapshot_fits_rings_of_other_lengths(tmp_path: Path, shape: str) -> None:
    """More drafts need longer rings, which go round at other positions: the arrays and what follows are the same."""
    path = make_model(tmp_path / "tiny.gguf", shape, "Q8_0", seed=3)
    short, long = (engine.load(path, n_ctx=256, n_threads=1, draft_max=n) for n in (1, 15))
    tokens = np.random.default_rng(1).integers(0, short.config.n_vocab, 60).tolist()
    for length in (21, 37, 48, 59):
        for llm in (short, long):
            llm.reset()
            llm.read(tokens[:length])
        assert states(short) == states(long)
        snapshot, expected = short.model.save(short.model.sequence), short.step(tokens[length]).tobytes()
        # Something else goes where the snapshot belongs.
        evaluate(
            long.model,
            np.array(tokens[:9], np.int32),
            np.arange(length, length + 9, dtype=np.int32),
            1,
            long.model.sequence,
        )
        long.sequence.truncate(length)
        long.model.restore(snapshot, long.model.sequence)
        row = evaluate(
            long.model,
            np.array(tokens[length : length + 1], np.int32),
            np.array([length], np.int32),
            1,
            long.model.sequence,
        )
        assert row.tobytes() == expected
