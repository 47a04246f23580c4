"""How the time of a computation grows with its input: in CPU seconds of this thread, which other programs change little."""

import time
from collections.abc import Callable
from typing import Any

FACTOR = 4
"""How much larger the larger input is."""

MOST = 8.0
"""The most that the time may grow by: 4 is linear, 16 quadratic."""


def growth(work: Callable[[Any], object], small: Any, large: Any) -> float:
    """How many times as long ``work`` takes for ``large``, which is FACTOR times ``small``: the least of a few trials, fewer
    if the first ones are short enough."""
    took = [float("inf")] * 2
    for _ in range(5):
        for i, given in enumerate((small, large)):
            begun = time.thread_time()
            work(given)
            took[i] = min(took[i], time.thread_time() - begun)
        if took[1] < MOST / 2 * took[0]:
            break
    return took[1] / took[0]
