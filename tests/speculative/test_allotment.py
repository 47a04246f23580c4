"""How many drafts each request of a pass gets: compared with every possible choice, and with the same number for all."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.speculative.allotment import GAIN, Wish, allot, gain
from engine.speculative.controller import Controller
from engine.speculative.passes import NominalTimes, PassShape, PassTimes
from tests.tiers import few


@pytest.fixture(autouse=True)
def _times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculative.passes.SEEN", 2)


def padded(rows: int, mixed: bool) -> int:
    """As on a GPU: to a power of two or 96."""
    return 96 if mixed and 64 < rows <= 96 else 1 << (rows - 1).bit_length() if mixed else rows


def unpadded(rows: int, mixed: bool) -> int:
    """As on a CPU."""
    return rows


def certain(acceptance: float, most: int, made: bool = True, least: int = 1, tries: bool = False) -> Wish:
    """A request of which much has been seen."""
    return Wish(1e9 * acceptance, 1e9, least, most, made, 0.1, tries)


def tokens(acceptance: float, n: int) -> float:
    """The expected number of tokens of n drafts and the token after them."""
    return float(np.sum(acceptance ** np.arange(n + 1)))


@pytest.mark.parametrize("seed", few(range(100), 25))
@pytest.mark.parametrize("padding", [padded, unpadded])
def test_no_choice_is_better(padding: Callable[[int, bool], int], seed: int) -> None:
    """Any acceptances, limits and times: the tokens per second are those of the best of all choices."""
    random = np.random.default_rng(seed)
    answers = int(random.integers(1, 5))
    wishes = [
        certain(float(random.random()), int(random.integers(0, 5)), bool(random.random() < 0.8)) for _ in range(answers)
    ]
    limit, times = int(random.integers(answers + 1, 5 * answers + 2)), PassTimes(padding)
    seconds: dict[PassShape, float] = {}

    def shape_of(counts: Sequence[int]) -> PassShape:
        depth = max((n for n, wish in zip(counts, wishes, strict=True) if wish.made), default=0)
        return times.shape(answers, answers + sum(counts), depth)

    choices = [
        counts
        for counts in itertools.product(*(range(wish.most + 1) for wish in wishes))
        if sum(counts) + answers <= limit
    ]
    for shape in sorted({shape_of(counts) for counts in choices}):
        # More rows and more drafts take longer, by any amount.
        less = [taken for other, taken in seconds.items() if all(a <= b for a, b in zip(other, shape, strict=True))]
        seconds[shape] = max(less, default=1.0) + float(random.random() ** 3)
        for _ in range(4):
            times.add(shape, seconds[shape])

    def rate(counts: Sequence[int]) -> float:
        of_all = sum(tokens(wish.acceptance, n) for wish, n in zip(wishes, counts, strict=True))
        return of_all / seconds[shape_of(counts)]

    found = allot(wishes, limit, times)
    assert all(n <= wish.most for n, wish in zip(found, wishes, strict=True)) and answers + sum(found) <= limit
    assert rate(found) == pytest.approx(max(map(rate, choices)), rel=1e-6)


ROWS, MILLISECONDS = (1, 8, 16, 32, 64, 96, 128), (5.4, 6.4, 9.0, 11.0, 16.0, 20.5, 25.0)
"""The time of a pass of Qwen3.6-27B on an H200 by its rows; those of 64 rows and more are rough."""

DRAFT = 0.5
"""What each draft of its own layer takes, in milliseconds."""


class Users:
    """Requests that run together, whose drafts are right with given probabilities, and whose passes take the times above,
    some of them longer by chance."""

    def __init__(self, acceptance: Sequence[float], most: int = 4, seed: int = 0) -> None:
        self.acceptance = acceptance
        self.times = PassTimes(padded)
        self.controllers = [Controller(most, 0) for _ in acceptance]
        self.random = np.random.default_rng(seed)
        self.shapes: list[tuple[int, ...]] = []
        self.counts: list[list[int]] = []

    def step(self, limit: int, count: int | None = None) -> tuple[int, float]:
        """Tokens and milliseconds of a pass, with as many drafts as pay off, or with ``count`` drafts of each."""
        latest = self.counts[-1] if self.counts else [0] * len(self.controllers)
        wishes = [
            Wish(*each.seen, max(1, min(each.least, each.most)), each.most, True, 0.06, each.tries, n > 0)
            for each, n in zip(self.controllers, latest, strict=True)
        ]
        counts = allot(wishes, limit, self.times) if count is None else [count] * len(wishes)
        if self.times.known(len(wishes)) and count is None:
            for each, wish, n in zip(self.controllers, wishes, counts, strict=True):
                if wish.most:
                    each.allotted(n, any(counts))
        shape = self.times.shape(len(wishes), len(wishes) + sum(counts), max(counts))
        took = float(np.interp(shape.rows, ROWS, MILLISECONDS)) + DRAFT * shape.depth
        took *= 1 + 0.02 * float(self.random.standard_normal()) + 2 * (self.random.random() < 0.01)
        self.times.add(shape, took)
        self.shapes.append(shape)
        self.counts.append(counts)
        kept = [self._kept(n, a) for n, a in zip(counts, self.acceptance, strict=True)]
        for each, n, right in zip(self.controllers, counts, kept, strict=True):
            if n:
                each.verified(n, right)
            else:
                each.passed()
        return len(kept) + sum(kept), took

    def _kept(self, n: int, acceptance: float) -> int:
        return next((i for i in range(n) if self.random.random() >= acceptance), n)

    def rate(self, steps: int, limit: int, count: int | None = None) -> float:
        """Tokens per second of some passes."""
        made, took = zip(*(self.step(limit, count) for _ in range(steps)), strict=True)
        return 1e3 * sum(made) / sum(took)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("users", few([8, 16, 1, 2, 3, 5, 12, 20, 32, 40, 64], 4))
def test_as_fast_as_the_best_number_for_all(users: int, acceptance: float) -> None:
    """And where rows would be empty otherwise, faster.  The number settles."""
    limit = 128 if users > 1 else 16
    measured = Users([acceptance] * users)
    rate = measured.rate(400, limit)
    fixed = [Users([acceptance] * users).rate(200, limit, n) for n in range(5) if users * (1 + n) <= limit]
    assert rate > 0.93 * max(fixed)
    settled = measured.shapes[100:]
    assert sum(a != b for a, b in itertools.pairwise(settled)) < 30
    # Who has drafts at all changes seldom, because steps in flight must end before.
    drafted = [[n > 0 for n in counts] for counts in measured.counts[100:]]
    assert sum(a != b for a, b in itertools.pairwise(drafted)) < 30


def test_eight_users_fill_32_rows() -> None:
    """Four drafts of each would need 40 rows, which are padded to 64."""
    users = Users([0.9] * 8)
    users.rate(100, 64)
    assert set(users.shapes[20:]) == {(8, 32, 3)}


def test_rows_are_for_drafts_that_are_right() -> None:
    """Four requests whose drafts are right and four whose drafts never are: the former have more."""
    mixed = [0.9] * 4 + [0.0] * 4
    best = max(Users(mixed).rate(300, 64, n) for n in range(5))
    assert Users(mixed).rate(300, 64) > 1.05 * best


def test_a_small_gain_does_not_change_the_number() -> None:
    times = PassTimes(unpadded)
    for n, seconds in ((0, 1.0), (1, 1.2), (2, 1.4)):
        for _ in range(4):
            times.add(times.shape(1, 1 + n, n), seconds)
    assert allot([certain(0.4, 2)], 16, times) == [1]
    # Two drafts are 1 % faster, and then 3 %.
    for above, expected in ((GAIN - 0.01, 1), (GAIN + 0.01, 2)):
        acceptance = next(a for a in np.linspace(0.4, 1, 10000) if tokens(a, 2) / 1.4 >= above * tokens(a, 1) / 1.2)
        assert allot([certain(float(acceptance), 2)], 16, times) == [expected]


def test_equal_shares_until_times_are_known() -> None:
    times = PassTimes(padded)
    wishes = [certain(0.5, n) for n in (1, 4, 4, 0)]
    assert allot(wishes, 12, times) == [0, 0, 0, 0]  # plain passes come first
    for _ in range(3):
        times.add(times.shape(4, 4, 0), 1.0)
    assert allot(wishes, 12, times) == [1, 3, 2, 0]
    assert allot([certain(0.5, 0)] * 4, 12, times) == [0] * 4


def test_no_fewer_than_asked_for() -> None:
    """The first drafts of a request come together, or not at all."""
    times = PassTimes(unpadded)
    for n in range(9):
        for _ in range(4):
            times.add(times.shape(2, 2 + n, min(n, 4)), 1 + 0.1 * n)
    assert allot([certain(0.9, 4, least=3), certain(0.9, 4, least=3)], 6, times) in ([4, 0], [0, 4], [3, 0], [0, 3])
    assert allot([certain(0.1, 4, least=3), certain(0.9, 4)], 16, times)[0] == 0


def test_drafts_that_are_tried_again_are_made_as_far_as_there_are_rows() -> None:
    times = PassTimes(unpadded)
    for n in range(5):
        for _ in range(4):
            times.add(times.shape(2, 2 + n, n), 1.0 + n)
    assert allot([certain(0.0, 1, tries=True), certain(0.0, 4)], 16, times) == [1, 0]
    assert allot([certain(0.0, 2, least=2, tries=True)] * 2, 5, times) == [2, 0]


def test_the_gain_of_a_request_alone() -> None:
    times = PassTimes(unpadded)
    assert gain(certain(0.5, 4), times) is None
    for n in range(5):
        for _ in range(4):
            times.add(times.shape(1, 1 + n, n), 1 + 0.1 * n)
    assert gain(certain(0.5, 4), times) == pytest.approx(max(tokens(0.5, n) / (1 + 0.1 * n) for n in range(1, 5)))
    assert gain(certain(0.5, 0), times) == 1.0


def test_nominal_costs_give_the_same_numbers_on_every_machine() -> None:
    sizes: list[list[int]] = []
    for seconds in (1e-9, 1.0, 1e9):
        controller, times, random = Controller(7, 0), NominalTimes(), np.random.default_rng(1)
        sizes.append([])
        for _ in range(300):
            (n,) = allot([Wish(*controller.seen, 1, controller.most, True, 0.1, controller.tries)], 16, times)
            if times.known(1) and controller.most:
                controller.allotted(n, n > 0)
            sizes[-1].append(n)
            times.add(times.shape(1, 1 + n, n), seconds)
            if n:
                controller.verified(n, int(random.integers(0, n + 1)) if random.random() < 0.5 else 0)
            else:
                controller.passed()
    assert sizes[0] == sizes[1] == sizes[2] and sizes[0][0] == 7
    assert len(set(sizes[0])) > 2
