"""The cache on disk: after a restart, prompts are taken from files with the same bits, and whatever happens to the files
costs time only."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.disk import KEY_FILE, SUFFIX
from engine.errors import UsageError
from engine.speculative.params import SpeculationParams
from tests.models.test_mixed_passes import KINDS, files
from tests.tiers import few

IDS = np.random.default_rng(3).integers(3, 280, 200).tolist()
NEXT = np.random.default_rng(4).integers(3, 280, 30).tolist()
OPTIONS: dict[str, Any] = {"max_tokens": 50, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 1}

Values = tuple[list[int], list[float]]


def values(answer: engine.Generation) -> Values:
    """The tokens of an answer and their logarithms of probabilities."""
    return answer.ids, [entry.logprob for entry in answer.logprobs]


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


class Runs:
    """Answers of a model whose texts are kept in a folder, each after a restart."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder = folder
        self._given = given | {"cache_disk": "64M", "cache_disk_path": folder}

    def __call__(self, ids: list[int], **more: Any) -> tuple[Values, int]:
        """The values of an answer, and how many tokens of the prompt did not have to be read."""
        gc.collect()  # what the last one has locked
        with engine.load(**self._given | more) as llm:
            answer = llm.complete(ids, **OPTIONS)
            llm.check_pages()
        return values(answer), answer.timings.cache_n


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "pages", {"path_or_name": "pycoder", "n_ctx": 512, "device": "cpu"})


@pytest.mark.parametrize("kind", few(["pycoder-moe-mtp", *KINDS]))
def test_a_conversation_after_a_restart(kind: str, tmp_path: Path) -> None:
    """The prompt again, and the next turn, with all whole pages that a model which was not restarted finds, too."""
    given = files(kind, tmp_path) if kind in KINDS else {"path_or_name": kind, "device": "cpu"}
    given |= {"n_ctx": 512}
    with engine.load(**given) as llm:
        first = llm.complete(IDS, **OPTIONS)
        turn = [*IDS, *first.ids, *NEXT]
        expected = []
        for ids in (IDS, turn):
            # Another text takes the slot, so that only pages and snapshots are left.
            llm.complete(NEXT, **OPTIONS)
            found = llm.complete(ids, **OPTIONS)
            expected.append((values(found), found.timings.cache_n))
    assert values(first) == expected[0][0]
    runs = Runs(tmp_path / "pages", given)
    assert runs(IDS) == (values(first), 0)
    assert runs(IDS) == expected[0] and runs(turn) == expected[1]
    reusable = kind not in ("windows", "gemma4") or expected[0][1] > 0
    assert not reusable or runs(turn)[1] >= expected[1][1]


@pytest.mark.first
def test_every_damaged_file_is_noticed(runs: Runs) -> None:
    """A bit of any file is flipped: the answer is the same, what precedes it is used, and the file is written again."""
    expected, _ = runs(IDS)
    assert runs(IDS) == (expected, 192)
    kept = {path: path.read_bytes() for path in stored(runs.folder)}
    assert len(kept) == 3
    random, reused = np.random.default_rng(5), set[int]()
    for path, data in kept.items():
        damaged = bytearray(data)
        damaged[random.integers(0, len(data))] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        found, cache_n = runs(IDS)
        assert found == expected
        reused.add(cache_n)
        assert path.read_bytes() == data or cache_n == 192  # a bit of the MAC: it is written again when it is wanted
    assert reused <= {0, 64, 128, 192} and len(reused) > 1


def test_files_that_are_cut_off_or_gone(runs: Runs) -> None:
    expected, _ = runs(IDS)
    for change in (lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.unlink()):
        change(stored(runs.folder)[1])
        assert runs(IDS)[0] == expected and runs(IDS) == (expected, 192)


def test_pages_of_another_installation_are_ignored(runs: Runs) -> None:
    expected, _ = runs(IDS)
    (runs.folder / KEY_FILE).write_bytes(bytes(32))
    assert runs(IDS) == (expected, 0)
    assert runs(IDS) == (expected, 192)  # they have been written again


def test_other_models_and_types_of_caches(runs: Runs) -> None:
    runs(IDS)
    assert runs(IDS, cache_type="q8_0")[1] == runs(IDS, path_or_name="pycoder-draft")[1] == 0
    assert runs(IDS, n_threads=1, batch_size=24, n_ctx=300, parallel=2)[1] == 192


def test_salts_share_nothing(tmp_path: Path) -> None:
    given: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "cache_disk": "64M", "cache_disk_path": tmp_path / "pages"}
    with engine.load(**given) as llm:
        llm.complete(IDS, **OPTIONS, cache_salt="a")
    del llm
    gc.collect()
    with engine.load(**given) as llm:
        found = [llm.complete(IDS, **OPTIONS, cache_salt=salt).timings.cache_n for salt in ("b", "", "a")]
    assert found == [0, 0, 192]


def test_the_folder_stays_within_its_size(tmp_path: Path) -> None:
    given: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "cache_disk_path": tmp_path}
    with engine.load(**given, cache_disk="1G") as llm:
        llm.complete(IDS, **OPTIONS)
    sizes = [path.stat().st_size for path in stored(tmp_path)]
    del llm
    gc.collect()
    with engine.load(**given, cache_disk=2 * sizes[0]) as llm:
        for first in range(3):
            llm.complete([first, *IDS], **OPTIONS)
            assert llm.disk is not None
            llm.disk.flush()
            assert sum(path.stat().st_size for path in stored(tmp_path)) <= 2 * sizes[0]
        assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize("model", ["pycoder", "pycoder-moe-mtp"])
def test_what_is_too_large_is_not_queued(model: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "cache_disk": 4000, "cache_disk_path": tmp_path}
    with engine.load(model, **given) as llm:
        disk = llm.disk
        assert disk is not None
        disk._identified.wait()
        with llm.lock:  # the thread needs it to copy pages
            llm.complete(IDS, **OPTIONS)
            assert llm.slots.current.sequence.keys and not disk._queue
    assert not stored(tmp_path)


def test_what_is_computed_faster_is_not_read(runs: Runs, tmp_path: Path) -> None:
    runs(IDS)
    gc.collect()
    given: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "cache_disk": "64M", "cache_disk_path": runs.folder}
    with engine.load(**given) as llm:
        assert llm.disk is not None
        llm.disk.per_byte.add(1.0, 1000)
        llm.disk.computed(1000, 1e-3)
        assert llm.complete(IDS, **OPTIONS).timings.cache_n == 0
        llm.disk.computed(1000, 1e9)
        llm.reset()
        assert llm.complete(IDS, **OPTIONS).timings.cache_n == 192


def test_pages_are_written_before_their_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes is held up, while prompts take the memory of one another."""
    given: dict[str, Any] = {"n_ctx": 256, "device": "cpu", "cache_disk": "64M", "cache_disk_path": tmp_path}
    prompts = [[i, *IDS[:150]] for i in range(5)]
    with engine.load(**given) as llm:
        disk = llm.disk
        assert disk is not None
        disk._identified.wait()
        with llm.lock:  # the thread needs it to copy pages
            expected = [values(llm.complete(ids, **OPTIONS)) for ids in prompts]
            assert disk._copied > 0
    del llm, disk
    gc.collect()
    with engine.load(**given) as llm:
        for ids, each in zip(prompts, expected, strict=True):
            answer = llm.complete(ids, **OPTIONS)
            assert values(answer) == each and answer.timings.cache_n == 128
        llm.check_pages()


def test_requests_together_and_drafts(runs: Runs) -> None:
    """Several requests, some of whose prompts are in files, with drafts of earlier text."""
    prompts = [[*IDS[:n], *NEXT] for n in (70, 130, 200)]
    expected = [runs(ids)[0] for ids in prompts]
    gc.collect()
    given: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "cache_disk": "64M", "cache_disk_path": runs.folder}
    with engine.load(**given, parallel=3) as llm:
        found = llm.complete([*prompts, NEXT * 5], **OPTIONS, speculation=SpeculationParams(lookup=True))
        llm.check_pages()
    assert [values(each) for each in found[:3]] == expected
    assert [each.timings.cache_n for each in found[:3]] == [64, 128, 192]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cache_disk": 0}, "cache_disk must be a size"),
        ({"cache_disk": "much"}, "cache_disk must be a size"),
        ({"cache_disk": 1000, "cache_disk_path": 5}, "cache_disk_path must be the path of a folder, not 5."),
        ({"cache_disk_path": "x"}, "say how large that is with cache_disk="),
    ],
)
def test_wrong_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        engine.load(**options)
