"""What is not finite, or overflows in a norm, shows in the result of its row on the CPU (``tests/overflow.py``)."""

from typing import Any

import pytest

from tests.mirror import Mirror
from tests.overflow import NORMS, OTHERS, TOO_LARGE, Case, OnCpu

device = OnCpu(Mirror(1))
# The first tier has one number of each case: of norms, one whose square overflows.
CASES = [
    pytest.param(case, x, id=f"{case.name}-{x:g}", marks=[] if k == len(case.numbers) - 2 else pytest.mark.thorough)
    for case in NORMS + OTHERS + TOO_LARGE
    for k, x in enumerate(case.numbers)
]


@pytest.mark.parametrize(("case", "bad"), CASES)
def test_it_shows_in_its_row(case: Case, bad: Any) -> None:
    case.check(device, bad)
