"""The times of passes, from which the number of drafts follows (``engine/speculative/allotment.py``)."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

MEASURED = 3
"""Plain passes that come first, and provide a time to compare with."""

WINDOW = 8
"""Number of latest passes of one shape whose median is taken as their time."""

SEEN = 2
"""Passes of one shape that must have been timed before their time is known."""

ROW = 0.03
"""What a further row of a pass is expected to cost, as a fraction of a plain pass."""


class PassShape(NamedTuple):
    """What the time of a pass depends on.

    plain, rows: the rows of a plain pass of the same requests, and of this one, with those that a backend adds; depth: the
    drafts that a model has made one after another.
    """

    plain: int
    rows: int
    depth: int


class PassTimes:
    """Seconds of the passes of one model.  Requests share them, since they share passes."""

    def __init__(self, padded_rows: Callable[[int, bool], int]) -> None:
        """padded_rows: the rows that a backend computes for a pass of so many, of several requests (True) or one."""
        self._padded_rows = padded_rows
        self._passes: Counter[PassShape] = Counter()
        self._latest: dict[PassShape, deque[float]] = {}
        #: The times of shapes that have been measured, for each number of rows of plain passes.
        self._times: dict[int, dict[PassShape, float]] = {}
        #: The shape that was chosen last for each number of rows of plain passes.
        self.chosen: dict[int, PassShape] = {}

    def shape(self, answers: int, rows: int, depth: int) -> PassShape:
        """The shape of a pass of some requests.  Passes of one request are not padded."""
        mixed = answers > 1
        return PassShape(self._padded_rows(answers, mixed), self._padded_rows(rows, mixed), depth)

    def add(self, shape: PassShape, seconds: float | None) -> None:
        """Record that a pass took some time; None: something else took time, too.  The first pass of its shape also waits for
        one-time work, and is left out."""
        self._passes[shape] += 1
        if seconds is not None and self._passes[shape] > 1:
            latest = self._latest.setdefault(shape, deque(maxlen=WINDOW))
            latest.append(seconds)
            if len(latest) >= SEEN:
                # Of two times, the shorter one: some passes are slow by chance.
                self._times.setdefault(shape.plain, {})[shape] = median_low(latest)

    def begun(self, answers: int) -> bool:
        """Whether there have been enough plain passes of so many requests."""
        return self._passes[self.shape(answers, answers, 0)] >= MEASURED

    def known(self, answers: int) -> bool:
        """Whether passes with and without drafts of so many requests have been measured."""
        plain = self.shape(answers, answers, 0)
        times = self._times.get(plain.plain, {})
        return plain in times and len(times) > 1

    def prices(self, answers: int, draft: float) -> Callable[[PassShape], float]:
        """The times of passes of so many requests, in units of that of a plain pass.

        Between shapes that were measured they are interpolated, and beyond the largest one in proportion, along what shapes
        are expected to cost.  draft: bytes that making a draft reads, as a fraction of those that a pass of the target reads.
        """
        plain = self.shape(answers, answers, 0)
        times = self._times[plain.plain]
        measured = {shape: seconds / times[plain] for shape, seconds in times.items()}
        points = sorted((nominal(shape, draft), price) for shape, price in measured.items() if shape != plain)
        costs, prices = ([0.0, *(x for x, _ in points)], [1.0, *(y for _, y in points)])

        def price(shape: PassShape) -> float:
            if shape in measured:
                return measured[shape]
            cost = nominal(shape, draft)
            above = bisect_right(costs, cost)
            if above == len(costs):
                return 1 + (prices[-1] - 1) * cost / costs[-1] if costs[-1] > 0 else 1 + cost
            share = (cost - costs[above - 1]) / (costs[above] - costs[above - 1])
            return prices[above - 1] + (prices[above] - prices[above - 1]) * share

        return price


def nominal(shape: PassShape, draft: float) -> float:
    """What a pass is expected to cost more than a plain one, as a fraction of that."""
    return ROW * (shape.rows - shape.plain) + draft * shape.depth


class NominalTimes(PassTimes):
    """Costs that are the same on every machine, for the modes in which the number of drafts affects the text."""

    def __init__(self) -> None:
        """Of one answer."""
        super().__init__(lambda rows, mixed: rows)
        self._passed = False

    def add(self, shape: PassShape, seconds: float | None) -> None:
        """Time is not measured."""
        self._passed = self._passed or shape.rows > shape.plain

    def begun(self, answers: int) -> bool:
        """Always."""
        return True

    def known(self, answers: int) -> bool:
        """Whether there has been a pass with drafts."""
        return self._passed

    def prices(self, answers: int, draft: float) -> Callable[[PassShape], float]:
        """What passes are expected to cost."""
        return lambda shape: 1 + nominal(shape, draft)
