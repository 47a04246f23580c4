"""engine/cuda/accept.py in the simulator: whole steps against engine/cpu/accept.py, and the start of drafting."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu import accept as law
from engine.cuda import accept, sample
from engine.cuda.accept import EMPTY, MOST_K, RESULT_WORDS
from engine.cuda.runtime.simulator import run
from engine.decode.device_params import pack_params
from engine.limits import DECODE_ANSWERS, DECODE_ROWS
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import MODES
from tests.tiers import few

N_CTX = 40
RING_STEPS = 4
N_VOCAB = 500


@dataclass
class Lists:
    """Candidates of each row; whatever is past the end of a list must not be read, so it is what would do most harm."""

    ids: np.ndarray = field(default_factory=lambda: np.zeros((DECODE_ROWS, MOST_K), np.int32))
    p: np.ndarray = field(default_factory=lambda: np.full((DECODE_ROWS, MOST_K), 2, np.float32))
    n: np.ndarray = field(default_factory=lambda: np.full(DECODE_ROWS, -7, np.int32))

    def set(self, row: int, ids: np.ndarray, p: np.ndarray) -> None:
        self.n[row] = n = len(ids)
        self.ids[row, :n], self.p[row, :n] = ids, p
        self.ids[row, n:] = ids[0] if n else 0

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The candidates as the mirror takes them."""
        n = int(self.n[row])
        return self.ids[row, :n], self.p[row, :n], n


@dataclass
class Step:
    """A device's memory at the end of a step over some rows, the first of them at position ``at``."""

    found: list[int]
    drafts: list[int]
    at: int = 10
    target: Lists = field(default_factory=Lists)
    source: Lists = field(default_factory=Lists)
    seed: int = 2**63 + 12345
    p_accept: float = 0.0

    def expected(self, mode: str) -> list[int]:
        """The tokens of the step, by the mirror."""
        tokens: list[int] = []
        for i, word in enumerate(self.found):
            if i == len(self.drafts) or word < 0:
                return [*tokens, word]
            x, position = self.drafts[i], self.at + 1 + i
            if mode == "exact":
                stays, token = x == word, word
            elif mode == "ratio":
                lists = (*self.target.of(i), *self.source.of(i))
                stays, token = law.accept_ratio(*lists, x, np.uint64(self.seed), position)
            else:
                stays, token = law.accept_p_min(*self.target.of(i), x, word, np.float32(self.p_accept))
            tokens.append(int(token))
            if not stays:
                break
        return tokens

    def lists(self, mode: str) -> list[Any]:
        """The kernel's arguments."""
        lists: list[Any] = [self.target.ids, self.target.p, self.target.n] if mode != "exact" else [None] * 3
        return lists + ([self.source.ids, self.source.p, self.source.n] if mode == "ratio" else [None] * 3)

    def run(self, mode: str, done: int = 0) -> list[int]:
        """The tokens of the step, by the kernel; everything that it writes is checked."""
        rows = len(self.found)
        found = np.full(DECODE_ANSWERS, 3, np.int32)
        found[:rows] = self.found
        tokens = np.full(DECODE_ANSWERS, 3, np.int32)
        tokens[1:rows] = self.drafts
        positions = self.at + np.arange(DECODE_ANSWERS, dtype=np.int32)
        history, certain = np.full(N_CTX, -99, np.int32), np.array([self.at], np.int32)
        ring, step = np.full((RING_STEPS, RESULT_WORDS), EMPTY, np.int32), np.array([done], np.int32)
        params = pack_params(Sampler(SamplerParams(seed=self.seed), N_VOCAB), self.p_accept)
        starts, slots = np.array([0, rows], np.int32), np.zeros(DECODE_ANSWERS, np.int32)
        state = [found, starts, N_CTX, tokens, positions, slots, history, certain, ring, ring, RING_STEPS, step, params]
        run(accept.accept(mode), 1, 32 if mode == "exact" else MOST_K, [*state, *self.lists(mode)], seed=done)

        result = ring[done % RING_STEPS]
        count = int(result[0])
        words = result[1 : 1 + count].tolist()
        assert (result[1 + count :] == EMPTY).all()
        assert (np.delete(ring, done % RING_STEPS, axis=0) == EMPTY).all()
        assert step[0] == done + 1
        assert tokens[0] == max(words[-1], 0) and tokens[1:rows].tolist() == self.drafts
        expected = np.full(N_CTX, -99, np.int32)
        inside = [max(word, 0) for word in words][: max(N_CTX - self.at - 1, 0)]
        expected[self.at + 1 : self.at + 1 + len(inside)] = inside
        assert np.array_equal(history, expected)
        moved = self.at + count if self.at + count < N_CTX else self.at
        assert np.array_equal(positions[:DECODE_ROWS], moved + np.arange(DECODE_ROWS))
        assert certain[0] == moved
        return words

    def check(self, mode: str, done: int = 0) -> list[int]:
        expected = self.expected(mode)
        assert self.run(mode, done) == expected
        return expected


def candidates(rng: np.random.Generator, n: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.permutation(N_VOCAB)[:n].astype(np.int32)
    p = np.exp(-np.sort(rng.random(n) * spread))
    return ids, (p / p.sum()).astype(np.float32)


# --- exact -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_exact(rows: int) -> None:
    """Drafts are accepted up to the first that differs, from none to all, through a ring that wraps around; drafts after a
    rejected one have no effect."""
    rng = np.random.default_rng(rows)
    found = rng.integers(0, N_VOCAB, rows).tolist()
    for n in range(rows):
        drafts = found[:-1]
        if n < rows - 1:
            drafts[n] += 1
        assert Step(found, drafts).check("exact", done=n + 2) == found[: n + 1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("word", [sample.NAN, sample.INFINITE, sample.BANNED])
def test_rows_that_cannot_be_sampled(mode: str, word: int) -> None:
    """The first such row that is reached ends the step, and passes 0 to whatever runs next."""
    step = Step([4, word, 6], [4, 5])
    # Lists of a row that cannot be sampled may hold anything.
    for row, p in enumerate((1.0, np.nan, np.nan)):
        step.target.set(row, np.array([4], np.int32), np.array([p], np.float32))
        step.source.set(row, np.array([4, 5], np.int32), np.array([0.5, np.nan], np.float32))
    assert step.check(mode) == [4, word]
    step.found[0] = word
    assert step.check(mode, done=1) == [word]
    step.found = [4, 5, word]
    step.target.set(1, np.array([5], np.int32), np.ones(1, np.float32))
    step.source.set(1, np.array([5], np.int32), np.ones(1, np.float32))
    assert step.check(mode, done=2) == [4, 5, word]


@pytest.mark.parametrize("at", [N_CTX - 5, N_CTX - 4, N_CTX - 3, N_CTX - 1])
def test_the_end_of_the_context(at: int) -> None:
    """Nothing is written past it, and positions do not move there."""
    assert Step([7, 8, 9, 10], [7, 8, 9], at).check("exact") == [7, 8, 9, 10]
    assert Step([7, 8, 9, 10], [1, 2, 3], at).check("exact") == [7]
    step = Step([7, 8], [7], at)
    step.target.set(0, *candidates(np.random.default_rng(at), 30))
    step.source.set(0, *candidates(np.random.default_rng(at + 1), 30))
    step.check("ratio")
    step.check("p-min")


# --- ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", few(range(24), 8))
def test_ratio(seed: int) -> None:
    """Lists that are alike, overlap, or have nothing in common; drafts that are on both, one or neither, or certain."""
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 2, 4, 16]))
    step = Step(rng.integers(0, N_VOCAB, rows).tolist(), [0] * (rows - 1), seed=int(rng.integers(2**63)))
    for i in range(rows):
        step.target.set(i, *candidates(rng, int(rng.choice([1, 2, 40, 256])), spread=float(rng.choice([0.1, 8]))))
    for i in range(rows - 1):
        ids, p, n = step.target.of(i)
        kind = rng.choice(["same", "near", "far", "certain"], p=[0.3, 0.4, 0.1, 0.2])
        if kind == "same":
            step.source.set(i, ids, p)
        elif kind == "near":
            order, q = rng.permutation(n), p * rng.random(n).astype(np.float32)
            step.source.set(i, ids[order], (q / q.sum())[order])
        elif kind == "far":
            step.source.set(i, *candidates(rng, int(rng.choice([1, 40, 256]))))
        else:
            step.source.n[i] = 0
        lists = [*ids, *step.source.of(i)[0]] if rng.random() < 0.9 else range(N_VOCAB)
        step.drafts[i] = int(rng.choice(lists[: rng.integers(1, len(lists) + 1)]))
    step.check("ratio", done=seed)


def test_ratio_of_equal_lists_accepts() -> None:
    """u p < p always, so nothing is rejected."""
    rng = np.random.default_rng(1)
    step = Step([1] * 15 + [123], [0] * 15)
    for i in range(15):
        ids, p = candidates(rng, 20)
        step.target.set(i, ids, p)
        step.source.set(i, ids, p)
        step.drafts[i] = int(rng.choice(ids))
    assert step.check("ratio") == [*step.drafts, 123]


@pytest.mark.parametrize("seed", range(3))
def test_ratio_of_disjoint_lists_refuses(seed: int) -> None:
    """A draft that is not on the target's list is rejected, and the draw is from the whole list."""
    rng = np.random.default_rng(seed)
    ids, p = candidates(rng, 60)
    step = Step([1, 2], [int(ids[50])], seed=seed)
    step.target.set(0, ids[:50], p[:50])
    step.source.set(0, ids[50:], p[50:])
    (token,) = step.check("ratio")
    assert token in ids[:50]


def test_ratio_with_nothing_left() -> None:
    """Where rounding leaves p below q everywhere, the draw is from p."""
    ids, p = candidates(np.random.default_rng(2), 200)
    for seed in range(200):
        step = Step([1, 2], [int(ids[7])], seed=seed)
        step.target.set(0, ids, p)
        step.source.set(0, ids, p * np.float32(1.9))
        if len(step.expected("ratio")) == 1:
            assert step.check("ratio")[0] in ids
            return
    raise AssertionError("nothing was refused")


def test_ratio_of_a_certain_draft() -> None:
    """It is kept as often as the target would have drawn it; its replacement is another token."""
    ids, p = candidates(np.random.default_rng(3), 3)
    words = []
    for seed in range(12):
        step = Step([1, 77], [int(ids[1])], seed=seed)
        step.target.set(0, ids, p)
        step.source.n[0] = 0
        words.append(step.check("ratio"))
    assert {len(word) for word in words} == {1, 2}
    assert all((word[0] == ids[1]) == (len(word) == 2) for word in words)


# --- p-min -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", few(range(6), 3))
def test_p_min(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 2, 4, 16]))
    step = Step([0] * rows, [0] * (rows - 1), p_accept=float(rng.choice([0.02, 0.05])))
    for i in range(rows):
        ids, p = candidates(rng, int(rng.choice([1, 30, 256])), spread=8)
        step.target.set(i, ids, p)
        step.found[i] = int(ids[rng.integers(len(ids))])
        if i < rows - 1:
            step.drafts[i] = int(rng.choice([ids[0], ids[0], ids[-1], step.found[i], rng.integers(N_VOCAB)]))
    step.check("p-min", done=seed)


def test_p_min_at_its_bound() -> None:
    """A draft at the bound is kept; what the target has drawn is kept however improbable; what is not listed has p = 0."""
    step = Step([5, 6, 7, 9, 8], [4, 6, 3, 2], p_accept=0.25)
    ids, p = np.array([4, 3, 6], np.int32), np.array([0.25, 0.7, 0.05], np.float32)
    for row in range(5):
        step.target.set(row, ids, p)
    assert step.check("p-min") == [4, 6, 3, 9]
    step.p_accept = 0.0
    assert step.check("p-min") == [4, 6, 3, 2, 8]
    step.p_accept = float(np.nextafter(np.float32(0.25), np.float32(1)))
    assert step.check("p-min") == [5]


# --- several answers ---------------------------------------------------------------------------------------------


def together(mode: str, steps: list[Step], slots: list[int], n_slots: int, entries: int) -> None:
    """Run steps as the entries of one launch, the answer of entry e in slot slots[e], and compare everything that it writes
    with each step alone (:meth:`Step.expected`).  Rows and entries that are not used are padding."""
    starts = np.cumsum([0] + [len(step.found) for step in steps] + [0] * (entries - len(steps))).astype(np.int32)
    used = starts[-1]
    found, tokens, positions, sequences = (np.full(DECODE_ANSWERS, -99, np.int32) for _ in range(4))
    target, source = Lists(), Lists()
    params, done = np.zeros(n_slots, sample.PARAMS), np.arange(3, 3 + n_slots, dtype=np.int32)
    for step, slot, start in zip(steps, slots, starts, strict=False):
        n = len(step.found)
        part = slice(start, start + n)
        found[part], tokens[part], positions[part] = step.found, [7, *step.drafts], step.at + np.arange(n)
        sequences[part] = slot
        params[slot] = pack_params(Sampler(SamplerParams(seed=step.seed), N_VOCAB), step.p_accept)[0]
        for mine, its in ((target, step.target), (source, step.source)):
            mine.ids[part], mine.p[part], mine.n[part] = its.ids[:n], its.p[:n], its.n[:n]
    history, ring = (
        np.full((n_slots, N_CTX), -99, np.int32),
        np.full((n_slots, RING_STEPS, RESULT_WORDS), EMPTY, np.int32),
    )
    certain = np.full(n_slots, -99, np.int32)
    certain[slots] = [step.at for step in steps]
    after = [array.copy() for array in (tokens, positions, history, ring, done, certain)]
    for step, slot, start in zip(steps, slots, starts, strict=False):
        words = step.expected(mode)
        n, end = len(words), step.at + 1 + len(words)
        after[0][start] = max(words[-1], 0)
        after[1][start : start + len(step.found)] += n
        after[2][slot, step.at + 1 : end] = [max(word, 0) for word in words]
        after[3][slot, done[slot] % RING_STEPS, : 1 + n] = [n, *words]
        after[4][slot] += 1
        after[5][slot] += n
    state = [found, starts, N_CTX, tokens, positions, sequences, history, certain, ring, ring, RING_STEPS, done, params]
    lists = Step([], [], target=target, source=source).lists(mode)
    run(accept.accept(mode), entries, 32 if mode == "exact" else MOST_K, [*state, *lists], seed=int(used))
    for array, expected in zip((tokens, positions, history, ring, done, certain), after, strict=True):
        assert np.array_equal(array, expected)


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1, 5), (1,) * 16, (4, 5, 1, 6), (2,), (1,) * DECODE_ANSWERS, (1,) * 37])
def test_exact_of_several_answers(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(sizes))
    steps = []
    for rows in sizes:
        found = rng.integers(0, N_VOCAB, rows).tolist()
        drafts = [token + int(rng.random() < 0.3) for token in found[:-1]]
        steps.append(Step(found, drafts, at=int(rng.integers(20))))
    steps[-1].found[0] = sample.NAN
    slots = rng.permutation(len(sizes) + 2)[: len(sizes)].tolist()
    together("exact", steps, slots, len(sizes) + 2, min(DECODE_ANSWERS, len(sizes) + 2))


@pytest.mark.parametrize("mode", ["ratio", "p-min"])
def test_lists_of_several_answers(mode: str) -> None:
    """Each has its own seed, bound and lists."""
    rng, steps = np.random.default_rng(8), []
    for entry, rows in enumerate((3, 1, 4)):
        step = Step([0] * rows, [0] * (rows - 1), at=3 * entry, seed=entry, p_accept=0.04 * entry)
        for i in range(rows):
            ids, p = candidates(rng, 30, spread=8)
            step.target.set(i, ids, p)
            step.found[i] = int(rng.choice(ids))
            order = rng.permutation(30)
            step.source.set(i, ids[order], p[order[::-1]])
            if i < rows - 1:
                step.drafts[i] = int(rng.choice(ids[:4]))
        steps.append(step)
    steps[2].source.n[0] = 0
    together(mode, steps, [1, 3, 0], 4, 4)


# --- the rows of a step ------------------------------------------------------------------------------------------

Entry = tuple[int, int, list[int]]
"""The slot of an answer, its number of rows, and its drafts from the host."""


def lay_out(entries: list[Entry], at: list[int], history: np.ndarray) -> list[tuple[int, int, int]]:
    """(token, position, slot) of 128 rows, by the kernel, of answers whose last sampled tokens are at positions ``at``, by
    slot.  The drafts are checked in ``history``, which also changes, and the first rows of entries."""
    layout = np.full(accept.LAYOUT, 999, np.int32)
    accept.write_layout(layout, entries)
    tokens, positions, sequences, starts = (np.full(DECODE_ANSWERS + 1, -99, np.int32) for _ in range(4))
    expected, certain = history.copy(), np.array(at, np.int32)
    for slot, _, drafts in entries:
        end = min(at[slot] + 1 + len(drafts), N_CTX)
        expected[slot, at[slot] + 1 : end] = drafts[: end - at[slot] - 1]
    run(
        accept.lay_out(),
        1,
        accept.LAY_OUT_THREADS,
        [layout, N_CTX, certain, history, tokens, positions, sequences, starts],
        seed=len(entries),
    )
    assert np.array_equal(history, expected) and certain.tolist() == at
    assert (
        starts.tolist() == np.cumsum([0, *(n for _, n, _ in entries), *[0] * (DECODE_ANSWERS - len(entries))]).tolist()
    )
    assert tokens[-1] == positions[-1] == sequences[-1] == -99
    return list(zip(*(array[:-1].tolist() for array in (tokens, positions, sequences)), strict=True))


def histories(n_slots: int = 4) -> np.ndarray:
    """The token at position i of slot s is 100 s + i + 1."""
    return np.array([100 * slot + 1 + np.arange(N_CTX) for slot in range(n_slots)], np.int32)


@pytest.mark.parametrize(
    ("n", "rows", "at"),
    [(0, 1, 3), (1, 2, 3), (15, 16, 3), (5, 6, N_CTX - 3), (0, 4, 3), (0, 16, N_CTX - 1), (0, 1, 0)],
)
def test_lay_out(n: int, rows: int, at: int) -> None:
    """An answer with drafts of the host or rows for those of a model: all rows get their positions, which stop at the end
    of the context, as drafts do."""
    drafts = list(range(950, 950 + n))
    found = lay_out([(2, rows, drafts)], [7, 7, at, 7], histories())
    tokens = [201 + at, *drafts, *[drafts[-1] if drafts else 0] * (DECODE_ANSWERS - 1 - n)]
    assert found == [(token, min(at + i, N_CTX - 1), 2) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    "entries",
    [
        [(1, 3, [950, 951]), (0, 1, []), (3, 2, [952])],
        [(3, 1, []), (1, 1, [])],
        [(2, 4, []), (0, 1, []), (1, 3, [960, 961])],
        [(1, 7, list(range(950, 956))), (2, 9, list(range(960, 968)))],
        [(0, 3, [950, 951]), (2, 2, [0]), (3, 6, list(range(960, 965)))],
    ],
)
def test_lay_out_for_several_answers(entries: list[Entry]) -> None:
    """With drafts of the host, without, or with rows for those of a model; the other rows are copies
    of the last one."""
    at, expected = [5, 8, 0, N_CTX - 3], []
    for slot, n, drafts in entries:
        tokens = [100 * slot + 1 + at[slot], *drafts, *[0] * (n - 1 - len(drafts))]
        expected += [(token, min(at[slot] + i, N_CTX - 1), slot) for i, token in enumerate(tokens)]
    expected += [expected[-1]] * (DECODE_ANSWERS - len(expected))
    assert lay_out(entries, at, histories()) == expected


@pytest.mark.parametrize("n", [DECODE_ROWS, 100, DECODE_ANSWERS])
def test_lay_out_for_many_answers(n: int) -> None:
    at, slots = [slot % N_CTX for slot in range(n)], np.random.default_rng(1).permutation(n).tolist()
    found = lay_out([(slot, 1, []) for slot in slots], at, histories(n))
    slots += slots[-1:] * (DECODE_ANSWERS - n)
    assert found == [(100 * slot + at[slot] + 1, at[slot], slot) for slot in slots]


# --- drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1])
def test_propose(last: int) -> None:
    """The token found, or one of a script, becomes the next input, and a draft of the target."""
    for scripted, at, found, token in [
        (False, 6, 11, 11),
        (True, 6, 11, 11),
        (True, 7, 11, 33),
        (False, 7, 11, 11),
        (False, 8, sample.NAN, 0),
        (True, N_CTX - 1, 11, 11),
    ]:
        tokens, positions = np.array([1, 2], np.int32), np.array([at - last, at - last + 1], np.int32)
        history, target = np.full(N_CTX, -99, np.int32), np.arange(DECODE_ROWS, dtype=np.int32)
        script, slots, starts = np.full(N_CTX, -1, np.int32), np.zeros(2, np.int32), np.array([0, 4], np.int32)
        script[8] = 33
        state = [N_CTX, starts, tokens, positions, slots, history, script if scripted else None, target]
        run(accept.propose(scripted), 1, 32, [np.array([found, 99], np.int32), 1, 1 + last, 2, *state, 14])
        # Rows of the step after the last one in use are copies of it; positions stop at the end of the context.
        assert (tokens[0], positions[0]) == (token, min(at + 1, N_CTX - 1))
        assert target.tolist() == [0, 1, 2, *[token] * 11, 14, 15]
        assert (history != -99).nonzero()[0].tolist() == ([at + 1] if at + 1 < N_CTX else [])
        assert history[at + 1 :][:1].tolist() == ([token] if at + 1 < N_CTX else [])


@pytest.mark.parametrize(("rows", "draft"), [(1, 1), (2, 1), (2, 0)])
def test_propose_for_several_answers(rows: int, draft: int) -> None:
    """A draft of each that has a place for it, and copies in the rows after the last one in use; the fourth entry is padding,
    and repeats the third."""
    slots, at = np.array([2, 0, 3, 3], np.int32), np.array([5, 9, 7, 7], np.int32)
    tokens, positions, sequences = (np.full(8, -99, np.int32) for _ in range(3))
    for row in range(rows):
        positions[row : 4 * rows : rows], sequences[row : 4 * rows : rows] = at - (rows - 1) + row, slots
    history, target = np.full((4, N_CTX), -99, np.int32), np.full(DECODE_ROWS, -99, np.int32)
    script = np.full((4, N_CTX), -1, np.int32)
    script[0, 10] = 66
    script[2, 10] = 67
    found, starts = np.array([51, 52, 53, 53], np.int32), np.array([0, 3, 8, 10, 10], np.int32)
    expected, past = target.copy(), history.copy()
    past[2, 6], past[0, 10] = 51, 66
    expected[[1 + draft, 4 + draft]] = 51, 66
    if draft == 0:
        expected[9:] = 53
    past[3, 8] = 53
    state = [N_CTX, starts, tokens, positions, sequences, history, script, target]
    run(accept.propose(True), 1, 32, [found, 4, rows, draft, *state, DECODE_ROWS], seed=rows)
    assert np.array_equal(history, past) and np.array_equal(target, expected)
    assert tokens[:4].tolist() == [51, 66, 53, 53] and (tokens[4:] == -99).all()
    assert np.array_equal(positions[:4], at + 1) and np.array_equal(sequences[:4], slots)


@pytest.mark.parametrize(("rows", "at"), [(1, 0), (1, 9), (2, 1), (2, 9), (16, 20)])
def test_begin_draft(rows: int, at: int) -> None:
    history = np.arange(100, 100 + N_CTX, dtype=np.int32)
    tokens, positions, sequences = (np.full(DECODE_ROWS, -99, np.int32) for _ in range(3))
    target_positions = np.arange(at, at + DECODE_ROWS, dtype=np.int32)
    anchor, slots = np.full((2, DECODE_ANSWERS), -99, np.int32), np.zeros(DECODE_ROWS, np.int32)
    given = [np.array([0, 4], np.int32), target_positions, slots, N_CTX, history]
    run(accept.begin_draft(rows, rows == 1), 1, 32, [*given, tokens, positions, sequences, anchor])
    assert anchor[:, 0].tolist() == ([at, at - 1] if rows == 1 else [-99, -99]) and (anchor[:, 1:] == -99).all()
    expected = list(range(at - rows + 1, at + 1))
    assert positions.tolist() == expected + [-99] * (DECODE_ROWS - rows)
    assert sequences.tolist() == [0] * rows + [-99] * (DECODE_ROWS - rows)
    assert tokens[:rows].tolist() == history[expected].tolist() and (tokens[rows:] == -99).all()


@pytest.mark.parametrize("rows", [1, 2])
def test_begin_draft_of_several_answers(rows: int) -> None:
    """Two entries of padding repeat the last sampled token of the last answer."""
    history = np.arange(3 * N_CTX, dtype=np.int32).reshape(3, N_CTX)
    starts, slots = np.array([0, 3, 4, 4, 4], np.int32), np.array([2, 2, 2, 1] + [-99] * 12, np.int32)
    target_positions = np.array([9, 10, 11, 5] + [-99] * 12, np.int32)
    tokens, positions, sequences = (np.full(DECODE_ROWS, -99, np.int32) for _ in range(3))
    anchor, expected = (np.full((2, DECODE_ANSWERS), -99, np.int32) for _ in range(2))
    given = [starts, target_positions, slots, N_CTX, history]
    run(accept.begin_draft(rows, True), 4, 32, [*given, tokens, positions, sequences, anchor])
    n = 4 * rows
    assert positions[:n].tolist() == ([9, 5, 5, 5] if rows == 1 else [8, 9, 4, 5, 5, 5, 5, 5])
    assert np.array_equal(sequences[:n], np.repeat([2, 1, 1, 1], rows))
    assert np.array_equal(tokens[:n], sequences[:n] * N_CTX + positions[:n])
    assert all((array[n:] == -99).all() for array in (tokens, positions, sequences))
    expected[:, :n:rows] = [[9, 5, 5, 5], [8, 4, 4, 4]]
    assert np.array_equal(anchor, expected)
