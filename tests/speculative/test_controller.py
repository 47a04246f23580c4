"""How many tokens are drafted, with costs made up here: as many as pay off, and almost none if none do."""

from collections.abc import Iterable

import numpy as np
import pytest

from engine.speculative.allotment import Wish, allot
from engine.speculative.controller import FIRST_PAUSE, LONGEST_PAUSE, Controller
from engine.speculative.passes import PassTimes


@pytest.fixture(autouse=True)
def _times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculative.passes.SEEN", 2)


def rate(n: int, acceptance: float, cost: float) -> float:
    """Tokens per second of passes with n drafts, 1 without drafts: the expected number of tokens, place by place."""
    return float(sum(acceptance**i for i in range(n + 1)) / (1 + cost * n))


class Answer:
    """An answer of a model whose passes take 1 without drafts and 1 + cost n with n."""

    def __init__(self, cost: float, most: int = 8, least: int = 0, seed: int = 0) -> None:
        self.cost, self.seconds, self.tokens = cost, 0.0, 0
        self.times = PassTimes(lambda rows, mixed: rows)
        for _ in range(3):
            self.times.add(self.times.shape(1, 1, 0), 1.0)
        self.controller = Controller(most, least)
        self.sizes: list[int] = []
        self._random = np.random.default_rng(seed)

    def run(self, tokens: int, acceptance: float) -> "Answer":
        """Generates some tokens, where each draft is right with a given probability."""
        end = self.tokens + tokens
        while self.tokens < end:
            controller = self.controller
            wish = Wish(*controller.seen, controller.least, controller.most, True, 0.05, controller.tries)
            (n,) = allot([wish], 16, self.times)
            resumes = controller.tries
            if wish.most and self.times.known(1):
                controller.allotted(n, n > 0)
            self.sizes.append(n)
            kept = next((i for i in range(n) if self._random.random() >= acceptance), n)
            seconds = 1 + self.cost * n
            if n:
                controller.verified(n, kept)
            else:
                controller.passed()
            if not resumes:
                self.times.add(self.times.shape(1, 1 + n, n), seconds)
            self.seconds += seconds
            self.tokens += 1 + kept
        return self


def runs(values: Iterable[int]) -> list[tuple[bool, int]]:
    """(whether drafts were made, how many steps in a row)."""
    found: list[tuple[bool, int]] = []
    for value in values:
        if found and found[-1][0] == bool(value):
            found[-1] = (bool(value), found[-1][1] + 1)
        else:
            found.append((bool(value), 1))
    return found


@pytest.mark.parametrize("most", [1, 4, 7])
def test_good_and_cheap_drafts_are_made_as_long_as_allowed(most: int) -> None:
    answer = Answer(0.03, most).run(600, 0.9)
    assert answer.controller.most == most
    assert np.mean(np.array(answer.sizes) == most) > 0.9
    assert answer.tokens / answer.seconds > 0.93 * rate(most, 0.9, 0.03)


@pytest.mark.parametrize("cost", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("least", [0, 3])
def test_drafts_that_are_never_right_are_hardly_made(cost: float, least: int) -> None:
    answer = Answer(cost, 4, least).run(6000, 0.0)
    waits = [n for drafting, n in runs(answer.sizes) if not drafting]
    pauses = [min(FIRST_PAUSE * 2**i, LONGEST_PAUSE) for i in range(len(waits))]
    assert waits[:-1] == pauses[:-1]  # the last one is cut off by the end
    assert LONGEST_PAUSE in waits
    tries = [n for drafting, n in runs(answer.sizes) if drafting]
    assert max(tries[1:]) == 1


def test_probing_costs_little() -> None:
    answer = Answer(0.3, 4).run(2000, 0.0)
    assert answer.seconds < 1.02 * answer.tokens


@pytest.mark.parametrize("before", [200, 3000])
def test_drafts_that_become_right_are_made_again(before: int) -> None:
    answer = Answer(0.1, 4).run(before, 0.0)
    assert answer.sizes.count(0) > 0.85 * before
    answer.run(3 * LONGEST_PAUSE, 0.9)  # the first draft tried may be one of the wrong tenth
    assert answer.sizes[-20:] == [4] * 20
    # And a later failure is noticed at once: pauses begin with the shortest again.
    at = len(answer.sizes)
    answer.run(200, 0.0)
    assert runs(answer.sizes[at:])[1] == (False, FIRST_PAUSE)


@pytest.mark.parametrize(("acceptance", "cost", "best"), [(0.8, 0.25, 3), (0.6, 0.1, 3), (0.5, 0.02, 4)])
def test_the_size_is_that_of_brute_force(acceptance: float, cost: float, best: int) -> None:
    """Where the true acceptance is known: it is estimated well from a long answer."""
    assert best == max(range(1, 16), key=lambda n: rate(n, acceptance, cost))
    sizes = np.array(Answer(cost, 15).run(4000, acceptance).sizes[200:])
    assert abs(np.median(sizes) - best) <= 1


@pytest.mark.parametrize("least", [2, 5])
def test_no_fewer_than_asked_for(least: int) -> None:
    answer = Answer(0.1, 5, least).run(500, 0.3)
    assert set(answer.sizes) <= {0, *range(least, 6)}
    assert {0, least} <= set(answer.sizes)
