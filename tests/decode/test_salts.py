"""Answers with different salts share nothing that the cache holds, and those with the same salt share it as before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.request import Request
from engine.decode.slot import Slot
from engine.errors import UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model

IDS = np.random.default_rng(0).integers(0, 8000, 200).tolist()
SHORT = IDS[:10]


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(device="cpu", n_ctx=512, n_threads=1, parallel=2)


def kept(llm: engine.LLM, ids: list[int], salt: str) -> int:
    """How many tokens of a prompt with a salt are not read."""
    answer = llm.complete(ids, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt)
    assert answer.timings.cache_n + answer.timings.prompt_n == len(ids)
    return answer.timings.cache_n


def test_pages_are_shared_within_a_salt(llm: engine.LLM) -> None:
    """There are three salts and two slots, so what is found is in pages that no sequence has."""
    llm.reset()
    salts = ["", "a", "b"]
    assert [kept(llm, IDS, salt) for salt in salts] == [0, 0, 0]
    assert [kept(llm, IDS, salt) for salt in salts] == [192, 192, 192]
    assert [kept(llm, [*IDS[:130], 5], salt) for salt in (*salts, "c")] == [128, 128, 128, 0]
    assert kept(llm, IDS, "a\0") == kept(llm, IDS, "\ud83d") == 0
    llm.check_pages()


def test_a_slot_keeps_less_than_a_page_for_its_salt(llm: engine.LLM) -> None:
    llm.reset()
    assert [kept(llm, SHORT, salt) for salt in "aabba"] == [0, 9, 0, 9, 9]
    assert kept(llm, SHORT, "") == 0
    # The slot of b was used least recently.
    assert [kept(llm, SHORT, salt) for salt in "ab"] == [9, 0]


def test_the_end_of_a_text_is_not_found_with_another_salt(llm: engine.LLM) -> None:
    """A slot holds 200 tokens, 8 of them in its last page."""
    llm.reset()
    assert [kept(llm, [*IDS, 7], salt) for salt in "aab"] == [0, 200, 0]


def test_while_another_one_runs(llm: engine.LLM) -> None:
    llm.reset()
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    first = llm.generate(IDS, cache_salt="a", **options)
    next(first)
    assert [kept(llm, [*IDS, 7], salt) for salt in ("", "b", "a")] == [0, 0, 192]
    for _ in first:
        pass
    llm.reset()
    assert llm.complete(IDS, **options).ids == first.ids


def test_what_is_read_without_a_request_has_no_salt(llm: engine.LLM, tmp_path: Path) -> None:
    llm.reset()
    llm.read(SHORT)
    assert [kept(llm, SHORT, salt) for salt in ("a", "")] == [0, 9]
    # A saved state has tokens and no salt.
    kept(llm, IDS, "a")
    llm.save_state(tmp_path / "state")
    llm.reset()
    assert llm.load_state(tmp_path / "state")[: len(IDS)] == IDS
    assert [kept(llm, IDS, salt) for salt in ("a", "")] == [0, 199]


def test_after_giving_way() -> None:
    """Two answers take the one slot from each other: each finds its own pages again, and never those of the other."""
    options: dict[str, Any] = {"max_tokens": 90, "temperature": 0, "ignore_eos": True}
    with engine.load(device="cpu", n_ctx=512, n_threads=1) as llm:
        expected = llm.complete(IDS, **options).ids
        llm.reset()
        rewind, found = llm.slots.rewind, []

        def noted(slot: Slot, tokens: np.ndarray) -> int:
            length = rewind(slot, tokens)
            found.append((slot.sequence.salt, length))
            return length

        llm.slots.rewind = noted  # type: ignore[method-assign]
        answers = [llm.generate(IDS, cache_salt=salt, **options) for salt in "ab"]
        while not all(answer.done for answer in answers):
            for answer in answers:
                for _ in range(25):
                    next(answer, None)
        assert [answer.ids for answer in answers] == [expected, expected]
        for salt in "ab":
            first, *others = (length for each, length in found if each == salt)
            assert first == 0 and len(others) > 0 and all(length >= 192 for length in others)
        llm.check_pages()


def test_whether_there_is_room_depends_on_the_pages_of_its_salt(llm: engine.LLM) -> None:
    """The pages that it can share are those that :meth:`Slots.has_room` counts."""
    llm.reset()
    tokens = np.array(IDS, np.int32)
    kept(llm, IDS, "a")
    assert [slot.shared(tokens) for slot in llm.slots if slot.sequence.salt == "a"] == [192]
    slot = llm.slots.free(tokens, "b")
    assert slot is not None and slot.sequence.salt == "b" and slot.shared(tokens) == 0


def test_states_of_recurrent_layers(tmp_path: Path) -> None:
    """Snapshots after messages are found with their salt only."""
    path = make_model(tmp_path / "hybrid.gguf", "tiny-qwen35", "Q8_0")
    with engine.load(path, device="cpu", n_ctx=512, n_threads=1, parallel=3) as llm:
        rng, end = np.random.default_rng(1), min(llm.tokenizer.eog_ids)
        system = [*rng.integers(5, 200, 150).tolist(), end]
        texts = [[*system, *rng.integers(5, 200, 60 + i).tolist()] for i in range(6)]
        salts = ["a", "b", "a", "b", "", "a"]
        assert [kept(llm, ids, salt) for ids, salt in zip(texts, salts, strict=True)] == [0, 0, 128, 128, 0, 128]
        llm.reset()
        assert [kept(llm, texts[0], salt) for salt in "aba"] == [0, 0, len(texts[0]) - 1]
        llm.check_pages()


@pytest.mark.parametrize("alone", [False, True])
def test_the_draft_model_has_the_salts_of_the_target(tmp_path: Path, alone: bool) -> None:
    """It reads a prompt again for another salt; alone: also where it chooses several drafts without the target's host."""
    files = [make_model(tmp_path / f"{seed}.gguf", "tiny-qwen3", "Q8_0", seed) for seed in (1, 2)]
    with engine.load(files[0], device="cpu", n_ctx=512, n_threads=1, draft_model=files[1]) as llm:
        assert isinstance(llm.draft, DraftModel)
        draft: Any = llm.draft.llm
        draft.can_sample = lambda sampler: alone
        ids = np.random.default_rng(2).integers(0, llm.config.n_vocab, 150).tolist()
        split, n_read = draft.model.split, 0

        def counted(tokens: np.ndarray, *given: Any, **options: Any) -> Any:
            nonlocal n_read
            n_read += tokens.size
            return split(tokens, *given, **options)

        draft.model.split = counted
        options: dict[str, Any] = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
        options["speculation"] = SpeculationParams(draft_max=3)
        answers = []
        for salt, whole in (("a", True), ("a", False), ("b", True), ("b", False), ("a", False), ("", True)):
            n_read = 0
            answer = llm.complete(ids, cache_salt=salt, **options)
            assert answer.speculation is not None and answer.speculation.drafted > 0
            assert (n_read >= len(ids)) is whole
            answers.append(answer.ids)
        assert all(each == answers[0] for each in answers)


def test_a_request_of_the_scheduler(llm: engine.LLM) -> None:
    """Requests of different salts that are submitted together."""
    llm.reset()
    greedy = Sampler(SamplerParams(temperature=0.0, seed=1), llm.config.n_vocab)
    made = [Request(IDS, greedy, 3, salt=salt) for salt in ("a", "b", "a", "")]
    for request in made:
        llm.core.submit(request)
    while llm.core.step():
        pass
    assert [request.kept for request in made] == [0, 0, 199, 0]
    assert len({tuple(token for token, _ in request.items) for request in made}) == 1
    llm.check_pages()


@pytest.mark.parametrize("salt", [None, 3, b"a"])
def test_a_salt_is_a_text(llm: engine.LLM, salt: Any) -> None:
    with pytest.raises(UsageError, match="cache_salt must be a text, not"):
        llm.generate(SHORT, cache_salt=salt)
