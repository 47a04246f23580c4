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
from engine.cuda.accept import EMPTY, MOST_K, MOST_ROWS, SLOT
from engine.cuda.runtime.simulator import run
from engine.decode.sampler import Sampler, SamplingParams
from engine.speculative.params import MODES
from tests.tiers import few

N_CTX = 40
SLOTS = 4
N_VOCAB = 500


@dataclass
class Lists:
    """Candidates of each row; whatever is past the end of a list must not be read, so it is what would do most harm."""

    ids: np.ndarray = field(default_factory=lambda: np.zeros((MOST_ROWS, MOST_K), np.int32))
    p: np.ndarray = field(default_factory=lambda: np.full((MOST_ROWS, MOST_K), 2, np.float32))
    n: np.ndarray = field(default_factory=lambda: np.full(MOST_ROWS, -7, np.int32))

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

    def run(self, mode: str, done: int = 0) -> list[int]:
        """The tokens of the step, by the kernel; everything that it writes is checked."""
        rows = len(self.found)
        found = np.full(MOST_ROWS, 3, np.int32)
        found[:rows] = self.found
        tokens = np.full(MOST_ROWS, 3, np.int32)
        tokens[1:rows] = self.drafts
        positions = self.at + np.arange(MOST_ROWS, dtype=np.int32)
        history = np.full(N_CTX, -99, np.int32)
        ring, step = np.full((SLOTS, SLOT), EMPTY, np.int32), np.array([done], np.int32)
        params = sample.pack_params(Sampler(SamplingParams(seed=self.seed), N_VOCAB), self.p_accept)
        lists: list[Any] = [self.target.ids, self.target.p, self.target.n] if mode != "exact" else [None] * 3
        lists += [self.source.ids, self.source.p, self.source.n] if mode == "ratio" else [None] * 3
        state = [found, rows, N_CTX, tokens, positions, history, ring, ring, SLOTS, step, params]
        run(accept.accept(mode), 1, 32 if mode == "exact" else MOST_K, [*state, *lists], seed=done)

        slot = ring[done % SLOTS]
        count = int(slot[0])
        words = slot[1 : 1 + count].tolist()
        assert (slot[1 + count :] == EMPTY).all()
        assert (np.delete(ring, done % SLOTS, axis=0) == EMPTY).all()
        assert step[0] == done + 1
        assert tokens[0] == max(words[-1], 0) and tokens[1:rows].tolist() == self.drafts
        expected = np.full(N_CTX, -99, np.int32)
        inside = [max(word, 0) for word in words][: max(N_CTX - self.at - 1, 0)]
        expected[self.at + 1 : self.at + 1 + len(inside)] = inside
        assert np.array_equal(history, expected)
        moved = self.at + count if self.at + count < N_CTX else self.at
        assert np.array_equal(positions, moved + np.arange(MOST_ROWS))
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
        history, target = np.full(N_CTX, -99, np.int32), np.arange(MOST_ROWS, dtype=np.int32)
        script = np.full(N_CTX, -1, np.int32)
        script[8] = 33
        found_ = np.array([found, 99], np.int32)
        out = target[3:]
        arguments = [found_, last, N_CTX, tokens, positions, history, script if scripted else None, out]
        run(accept.propose(scripted), 1, 32, arguments)
        assert (tokens[0], positions[0], target[3]) == (token, at + 1, token)
        assert (history != -99).nonzero()[0].tolist() == ([at + 1] if at + 1 < N_CTX else [])
        assert history[at + 1 :][:1].tolist() == ([token] if at + 1 < N_CTX else [])
        assert np.delete(target, 3).tolist() == np.delete(np.arange(MOST_ROWS), 3).tolist()


@pytest.mark.parametrize(("rows", "at"), [(1, 0), (1, 9), (2, 1), (2, 9), (16, 20)])
def test_begin_draft(rows: int, at: int) -> None:
    history = np.arange(100, 100 + N_CTX, dtype=np.int32)
    tokens, positions = np.full(MOST_ROWS, -99, np.int32), np.full(MOST_ROWS, -99, np.int32)
    target_positions = np.arange(at, at + MOST_ROWS, dtype=np.int32)
    anchor = np.full(2, -99, np.int32)
    arguments = [target_positions, history, tokens, positions, anchor]
    run(accept.begin_draft(rows, rows == 1), 1, 32, arguments)
    assert anchor.tolist() == ([at, at - 1] if rows == 1 else [-99, -99])
    expected = list(range(at - rows + 1, at + 1))
    assert positions.tolist() == expected + [-99] * (MOST_ROWS - rows)
    assert tokens[:rows].tolist() == history[expected].tolist() and (tokens[rows:] == -99).all()


@pytest.mark.parametrize(("n", "at"), [(0, 3), (1, 3), (15, 3), (5, N_CTX - 3)])
def test_place(n: int, at: int) -> None:
    drafts = np.arange(50, 50 + n, dtype=np.int32)
    tokens, history = np.full(MOST_ROWS, -99, np.int32), np.full(N_CTX, -99, np.int32)
    run(accept.place(), 1, 32, [drafts, n, N_CTX, tokens, np.arange(at, at + MOST_ROWS, dtype=np.int32), history])
    assert tokens.tolist() == [-99, *drafts, *[-99] * (15 - n)]
    expected = np.full(N_CTX + 20, -99)
    expected[at + 1 : at + 1 + n] = drafts
    assert history.tolist() == expected[:N_CTX].tolist()
