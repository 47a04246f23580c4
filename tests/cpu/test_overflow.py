"""What is not finite, or overflows in a norm, shows in the result of its row on the CPU (``tests/overflow.py``)."""

from typing import Any

import pytest

from tests.mirror import Mirror
from tests.overflow import NORMS, OTHERS, TOO_LARGE, Case, OnCpu

device = OnCpu(Mirror(1))
CASES = [pytest.param(case, x, id=f"{case.name}-{x:g}") for case in NORMS + OTHERS + TOO_LARGE for x in case.numbers]


@pytest.mark.parametrize(("case", "bad"), CASES)
def test_it_shows_in_its_row(case: Case, bad: Any) -> None:
    case.check(device, bad)
