"""How many tokens are drafted, with costs made up here: as many as pay off, and almost none if none do."""

from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest

from engine.speculative.controller import (
    FIRST_CHECK,
    FIRST_PAUSE,
    GAIN,
    LONGEST_PAUSE,
    LOSS,
    ROW,
    WINDOW,
    Controller,
    Costs,
    NominalCosts,
)


def rate(n: int, acceptance: float, cost: float) -> float:
    """Tokens per second of passes with n drafts, 1 without drafts: the expected number of tokens, place by place."""
    return float(sum(acceptance**i for i in range(n + 1)) / (1 + cost * n))


class Answer:
    """An answer of a model whose passes take 1 without drafts and 1 + cost n with n."""

    def __init__(
        self, cost: float, most: int = 8, least: int = 0, seed: int = 0, draft: float | None = None, row: float = 0.0
    ) -> None:
        """draft, row: the costs that are expected of a draft and of a row, if there are any."""
        self.cost, self.seconds, self.tokens = cost, 0.0, 0
        self.plain: deque[float] = deque([1.0], maxlen=WINDOW)
        expected = None if draft is None else NominalCosts(draft, row)
        self.controller = Controller(most, least, Costs(self.plain), expected)
        self.sizes: list[int] = []
        self._random = np.random.default_rng(seed)

    def run(self, tokens: int, acceptance: float) -> "Answer":
        """Generates some tokens, where each draft is right with a given probability."""
        end = self.tokens + tokens
        while self.tokens < end:
            n = self.controller.drafts()
            self.sizes.append(n)
            kept = next((i for i in range(n) if self._random.random() >= acceptance), n)
            seconds = 1 + self.cost * n
            if n:
                self.controller.verified(n, kept, seconds)
            else:
                self.plain.append(seconds)
                self.controller.passed()
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
    assert answer.controller.drafts() == most
    assert np.mean(np.array(answer.sizes) == most) > 0.9
    assert answer.tokens / answer.seconds > 0.93 * rate(most, 0.9, 0.03)


@pytest.mark.parametrize("cost", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("least", [0, 3])
def test_drafts_that_are_never_right_are_hardly_made(cost: float, least: int) -> None:
    answer = Answer(cost, 4, least).run(6000, 0.0)
    waits = [n for drafting, n in runs(answer.sizes) if not drafting and n > 1]  # one step is a check
    pauses = [min(FIRST_PAUSE * 2**i, LONGEST_PAUSE) for i in range(len(waits))]
    # The last one is cut off by the end.
    assert all(pause <= wait <= LONGEST_PAUSE for wait, pause in zip(waits[:-1], pauses[:-1], strict=True))
    assert LONGEST_PAUSE in waits
    parts = runs(answer.sizes)
    tries = [n for drafting, n in parts[parts.index((False, waits[0])) :] if drafting]
    assert max(tries[:1]) <= 3 and max(tries[1:]) == 1  # the smallest number may have to be timed first


def test_probing_costs_little() -> None:
    answer = Answer(0.3, 4).run(2000, 0.0)
    assert answer.seconds < 1.02 * answer.tokens


@pytest.mark.parametrize("tokens", [100, 200, 1000])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_a_pair_that_cannot_pay_off_costs_little(tokens: int, acceptance: float) -> None:
    """As on a CPU where a pass with one draft takes longer than two plain ones: two passes tell."""
    answer = Answer(1.2, 4, draft=0.3, row=ROW["cpu"]).run(tokens, acceptance)
    assert answer.sizes[:3] == [1, 1, 0]
    assert answer.seconds < 1.03 * answer.tokens


def test_a_slow_probe_is_followed_by_a_long_pause() -> None:
    answer = Answer(7.0, 1).run(300, 1.0)
    lost = 2 * (1 + 7) - 4
    assert runs(answer.sizes)[:2] == [(True, 2), (False, 296)]
    assert 296 < lost / LOSS <= LONGEST_PAUSE + 88


def test_a_plain_step_that_was_slow_by_chance_is_found_out() -> None:
    """The times with which drafts are compared: both of them four times too long, until a plain step is timed again."""
    answer = Answer(1.5, 2)
    answer.plain[0] = 4.0
    answer.plain.append(4.0)
    answer.run(200, 0.6)
    assert FIRST_CHECK < sum(map(bool, answer.sizes)) < 4 * FIRST_CHECK
    assert runs(answer.sizes)[-1][1] > FIRST_PAUSE


@pytest.mark.parametrize(
    ("draft", "row", "first"), [(0.3, "cpu", 1), (0.02, "cpu", 2), (0.1, "cuda", 4), (0.9, "cpu", 1)]
)
def test_the_first_number_is_that_of_the_expected_costs(draft: float, row: str, first: int) -> None:
    expected = 0.75  # the acceptance before anything is known
    gains = {n: rate(n, expected, draft + ROW[row]) for n in range(1, 5)}
    assert max(gains, key=lambda n: gains[n]) == first
    assert Answer(0.1, 4, draft=draft, row=ROW[row]).controller.drafts() == first


@pytest.mark.parametrize("before", [200, 3000])
def test_drafts_that_become_right_are_made_again(before: int) -> None:
    answer = Answer(0.1, 4).run(before, 0.0)
    assert answer.sizes.count(0) > 0.85 * before
    answer.run(3 * LONGEST_PAUSE, 0.9)  # the first draft tried may be one of the wrong tenth
    assert {*answer.sizes[-20:]} <= {0, 4} and answer.sizes[-20:].count(4) >= 19  # one may be a check
    # And a later failure is noticed at once: pauses begin with the shortest again.
    at = len(answer.sizes)
    answer.run(200, 0.0)
    pauses = [n for drafting, n in runs(answer.sizes[at:]) if not drafting and n > 1]
    assert FIRST_PAUSE <= pauses[0] < 3 * FIRST_PAUSE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8])
def test_no_size_is_better_than_the_one_chosen(acceptance: float, cost: float, seed: int) -> None:
    answer = Answer(cost, 15, seed=seed)
    for _ in range(300):
        answer.run(1, acceptance)
        if answer.seconds < 3 * (1 + cost * 15):
            continue  # the first pass of a size is not measured, and one measurement is needed
        estimate = answer.controller.acceptance
        rates = {n: rate(n, estimate, cost) for n in range(1, 16)}
        if size := answer.controller.drafts():
            assert rates[size] * GAIN >= max(rates.values()) * (1 - 1e-9)
        else:
            assert answer.controller.wait > 0 or answer.controller.checks


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


def test_the_first_pass_of_a_size_and_outliers_do_not_count() -> None:
    costs = Costs(deque([1.0, 1.0, 9.0, 1.0, 1.0]))
    costs.add(4, 50.0)
    assert not costs.known
    for seconds in (1.4, 1.4, 30.0):
        costs.add(4, seconds)
    assert costs.known
    assert costs.relative(4) == pytest.approx(1.4)
    assert costs.relative(2) == pytest.approx(1.2)
    assert costs.relative(8) == pytest.approx(1.8)
    assert not Costs(deque()).known


def test_nominal_costs_do_not_look_at_the_clock() -> None:
    """Where the number of drafts affects the text, it must not depend on the machine."""
    sizes: list[list[int]] = []
    for seconds in (1e-9, 1.0, 1e9):
        controller = Controller(7, 0, NominalCosts(0.1))
        sizes.append([])
        random = np.random.default_rng(1)
        for _ in range(300):
            sizes[-1].append(n := controller.drafts())
            if n:
                controller.verified(n, int(random.integers(0, n + 1)) if random.random() < 0.5 else 0, seconds)
            else:
                controller.passed()
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(set(sizes[0])) > 2
