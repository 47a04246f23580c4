"""Saved states: what a slot holds is taken up without computing anything, by another model, with the same bits; and read
again from its tokens if a part of it cannot be used."""

import json
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import engine
from engine.errors import ContextError
from engine.gguf.digest import model_digest
from engine.machine import records
from engine.state import sealed
from tests.models.test_mixed_passes import KINDS, files
from tests.tiers import few

IDS = np.random.default_rng(3).integers(3, 280, 200).tolist()
NEXT = np.random.default_rng(4).integers(3, 280, 30).tolist()
OPTIONS: dict[str, Any] = {"max_tokens": 50, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 1}
PYCODER: dict[str, Any] = {"path_or_name": "pycoder", "n_ctx": 512, "device": "cpu"}

Values = tuple[list[int], list[float]]


def values(answer: engine.Generation) -> Values:
    """The tokens of an answer and their logarithms of probabilities."""
    return answer.ids, [entry.logprob for entry in answer.logprobs]


def refuse(*_: object) -> NoReturn:
    raise AssertionError("tokens are read again")


def parts(path: Path) -> tuple[dict[str, Any], int]:
    """The line of a state, and where its records begin."""
    line = path.read_bytes().partition(b"\n")[0]
    return json.loads(line), len(line) + 1


@pytest.mark.parametrize("kind", few(["pycoder-moe-mtp", *KINDS]))
def test_a_conversation_goes_on_elsewhere(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = files(kind, tmp_path) if kind in KINDS else {"path_or_name": kind, "device": "cpu"}
    given |= {"n_ctx": 512}
    path = tmp_path / "state"
    with engine.load(**given) as llm:
        first = llm.complete(IDS, **OPTIONS)
        llm.save_state(path)
        text = [*IDS, *first.ids, *NEXT]
        expected, logits = llm.complete(text, **OPTIONS), llm.logits(text)[-1].tobytes()
        llm.check_pages()
    state, at = parts(path)
    assert state["fingerprint"] and path.stat().st_size > at + 1000
    with engine.load(**given | {"n_ctx": 448, "n_threads": 1, "batch_size": 24, "parallel": 2}) as llm:
        llm.complete(NEXT * 4, **OPTIONS)
        seen: list[tuple[int, int]] = []
        with monkeypatch.context() as patch:
            patch.setattr(llm, "prefill", refuse)
            ids = llm.load_state(path, lambda *step: seen.append(step))
        assert ids == [*IDS, *first.ids][: len(ids)] and len(ids) >= 249 and llm.n_cached == len(ids)
        assert not seen or seen[-1] == (len(ids), len(ids))
        again = llm.complete(text, **OPTIONS)
        assert again.timings.cache_n == len(ids)
        assert values(again) == values(expected) and llm.logits(text)[-1].tobytes() == logits
        llm.check_pages()
        # From here it goes back to where it came from.
        llm.load_state(path)
        llm.save_state(tmp_path / "back")
    with engine.load(**given) as llm:
        monkeypatch.setattr(llm, "prefill", refuse)
        assert llm.load_state(tmp_path / "back") == ids
        assert values(llm.complete(text, **OPTIONS)) == values(expected)


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(**PYCODER, parallel=2)


@pytest.fixture
def saved(llm: engine.LLM, tmp_path: Path) -> Path:
    llm.reset()
    llm.read(IDS)
    llm.save_state(tmp_path / "state")
    return tmp_path / "state"


def test_the_digest_is_of_all_weights(llm: engine.LLM, saved: Path) -> None:
    state, _ = parts(saved)
    assert state["model"]["digest"] == model_digest(llm.model.gguf) and state["fingerprint"] == llm.fingerprint


def test_damaged_values_are_read_again(llm: engine.LLM, saved: Path) -> None:
    data, (_, first) = saved.read_bytes(), parts(saved)
    expected = values(llm.complete([*IDS, *NEXT], **OPTIONS))
    random, reads = np.random.default_rng(1), list[int]()
    changed = [data[:-1], data[: first + 50], data[:first], data + b"more"]
    for at in [first, first + 12, *random.integers(first, len(data), 12)]:
        changed.append(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
    for each in changed:
        saved.write_bytes(each)
        llm.reset()
        seen: list[tuple[int, int]] = []
        assert llm.load_state(saved, lambda *step, seen=seen: seen.append(step)) == IDS
        reads.append(sum(done == 0 for done, _ in seen))
        assert llm.n_cached == len(IDS)
        found = llm.complete([*IDS, *NEXT], **OPTIONS)
        assert values(found) == expected and found.timings.cache_n == len(IDS)
        llm.check_pages()
    # A prefill reports that nothing is done yet; only what follows the records does not count.
    assert reads == [1, 1, 1, 0, *[1] * 14]


def test_a_state_from_elsewhere_is_read_again_unless_it_is_trusted(
    llm: engine.LLM, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path / "another user's"))
    for trusted in (False, True):
        seen: list[tuple[int, int]] = []
        llm.reset()
        assert llm.load_state(saved, lambda *step, seen=seen: seen.append(step), trusted=trusted) == IDS
        assert any(done == 0 for done, _ in seen) is not trusted


def test_a_line_that_was_changed(llm: engine.LLM, saved: Path) -> None:
    """Tokens with a new hash have no values, which belong to the line that was written."""
    state, at = parts(saved)
    rest = saved.read_bytes()[at:]
    state["tokens"][5] += 1
    saved.write_bytes(json.dumps(state).encode() + b"\n" + rest)
    with pytest.raises(engine.UsageError, match="is damaged: its first line has another hash"):
        llm.load_state(saved)
    del state["sha256"]
    saved.write_bytes(json.dumps(state | {"sha256": sealed(state)}).encode() + b"\n" + rest)
    seen: list[tuple[int, int]] = []
    assert llm.load_state(saved, lambda *step: seen.append(step), trusted=True) == state["tokens"]
    assert seen[0] == (0, len(IDS))
    for name, value in (("pages", [[1]]), ("pages", 5), ("salt", None), ("layout", 7)):
        odd = state | {name: value}
        saved.write_bytes(json.dumps(odd | {"sha256": sealed(odd)}).encode() + b"\n")
        with pytest.raises(engine.UsageError, match="is not a saved state"):
            llm.load_state(saved)


def test_other_pages_than_a_text_has(llm: engine.LLM, saved: Path) -> None:
    """Values whose hashes agree, of which one is missing, is there twice, or is of another kind."""
    state, _ = parts(saved)
    del state["sha256"]
    pages = state["pages"]
    for odd in (pages[:-1], [*pages, pages[-1]], pages[1:], [[64, 100, 0], *pages], [pages[0], *pages[:-1]], []):
        changed = state | {"pages": odd}
        saved.write_bytes(json.dumps(changed | {"sha256": sealed(changed)}).encode() + b"\n")
        llm.reset()
        assert llm.load_state(saved, trusted=True) == IDS and llm.n_cached == len(IDS)
        llm.check_pages()


def test_pages_run_out(saved: Path) -> None:
    """Other slots are cleared for a state; if that is not enough, it is not held."""
    with engine.load(**PYCODER | {"n_ctx": 256}) as small:
        (pool,) = small.cache.pools.values()
        taken = [pool.take() for _ in range(pool.n_pages - 2)]
        with pytest.raises(ContextError):
            small.load_state(saved)
        for page in taken:
            pool.give_back(page)
        small.check_pages()
        assert small.load_state(saved) == IDS


def test_others_go_on_while_a_state_is_saved(llm: engine.LLM, saved: Path, tmp_path: Path) -> None:
    """The slot is used by another text while its pages are copied: the file has what it held before."""
    before = saved.read_bytes()
    expected = values(llm.complete([9, *NEXT], **OPTIONS))
    write, found = records.write, list[Values]()

    def slowly(*given: Any) -> int:
        if not found:
            thread = threading.Thread(
                target=lambda: found.extend(
                    values(each) for each in llm.complete([[9, *NEXT], [*IDS[:90], *NEXT]], **OPTIONS)
                )
            )
            thread.start()
            thread.join(60)
        return write(*given)

    llm.reset()
    llm.load_state(saved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "write", slowly)
        llm.save_state(tmp_path / "meanwhile")
    assert found[0] == expected
    llm.check_pages()
    first, second = before.partition(b"\n")[2], (tmp_path / "meanwhile").read_bytes().partition(b"\n")[2]
    assert first == second
