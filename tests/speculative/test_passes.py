"""The times of passes, and what is expected of those that were not measured."""

from collections.abc import Iterable

import pytest

from engine.speculative.passes import MEASURED, NominalTimes, PassShape, PassTimes


@pytest.fixture(autouse=True)
def _times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculative.passes.SEEN", 2)


def padded(rows: int, mixed: bool) -> int:
    """To a power of two, as on a GPU."""
    return 1 << (rows - 1).bit_length() if mixed else rows


def filled(answers: int, seconds: dict[tuple[int, int], Iterable[float]]) -> PassTimes:
    """Times of passes of some requests by (rows, depth), after a first one of each that waits for something."""
    times = PassTimes(padded)
    for (rows, depth), measured in seconds.items():
        for each in (50.0, *measured):
            times.add(times.shape(answers, rows, depth), each)
    return times


def test_the_first_pass_of_a_shape_and_outliers_do_not_count() -> None:
    times = filled(1, {(1, 0): [1.0, 9.0], (5, 4): [30.0, 1.4, 1.4]})
    price = times.prices(1, 0.1)
    assert [price(PassShape(1, 1 + n, n)) for n in (0, 2, 4, 8)] == pytest.approx([1.0, 1.2, 1.4, 1.8])


def test_times_are_known_after_passes_with_and_without_drafts() -> None:
    times, plain, drafted = PassTimes(padded), PassShape(8, 8, 0), PassShape(8, 32, 3)
    for i in range(MEASURED):
        assert not times.begun(5)
        times.add(plain, 1.0 if i else None)
    assert times.begun(5) and times.begun(8) and not times.begun(4) and not times.known(8)
    for seconds in (2.0, None, 2.0):
        times.add(drafted, seconds)
    assert not times.known(8)
    times.add(drafted, 2.0)
    assert times.known(8) and times.known(5) and not times.known(9)


def test_prices_between_measured_shapes() -> None:
    """Along what rows and drafts are expected to cost: 3 % for a row, and here 6 % for a draft."""
    times = filled(8, {(8, 0): [2.0, 2.0], (32, 3): [4.0, 4.0], (64, 4): [5.0, 5.0]})
    price = times.prices(8, 0.06)
    costs = [0.03 * rows + 0.06 * depth for rows, depth in ((24, 3), (56, 4), (8, 1), (56, 7), (120, 7))]
    assert price(PassShape(8, 32, 3)) == 2.0 and price(PassShape(8, 8, 0)) == 1.0
    assert price(PassShape(8, 16, 1)) == pytest.approx(1 + costs[2] / costs[0])
    assert price(PassShape(8, 64, 7)) == pytest.approx(1 + 1.5 * costs[3] / costs[1])
    assert price(PassShape(8, 128, 7)) == pytest.approx(1 + 1.5 * costs[4] / costs[1])


def test_a_pass_that_is_expected_to_cost_nothing() -> None:
    """Drafts that were found, in rows that are there anyway."""
    times = filled(5, {(5, 0): [2.0, 2.0], (5, 1): [2.2, 2.2]})
    price = times.prices(5, 0.0)
    assert price(PassShape(8, 8, 2)) == 1.0 and price(PassShape(8, 16, 2)) == 1.24


def test_nominal_times_do_not_look_at_the_clock() -> None:
    """Where the number of drafts affects the text, it must not depend on the machine."""
    for seconds in (1e-9, 1.0, 1e9):
        times = NominalTimes()
        assert times.begun(1) and not times.known(1)
        times.add(times.shape(1, 1, 0), seconds)
        assert not times.known(1)
        times.add(times.shape(1, 4, 3), seconds)
        assert times.known(1)
        assert times.prices(1, 0.1)(times.shape(1, 5, 4)) == pytest.approx(1.52)
    assert times.shape(3, 5, 1) == (3, 5, 1)
