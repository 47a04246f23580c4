"""The tiers: what is recorded exists, and parts are balanced."""

import ast
from dataclasses import dataclass
from functools import cache

import pytest

from tests.conftest import REPOSITORY
from tests.tiers import MOST, SLOW, _affordable, cost, parts, recorded


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_tests_whose_time_is_recorded_exist() -> None:
    """Run ``pytest --record`` with the tier of a test that was renamed, or remove its line."""
    assert len(recorded()) > 100
    for name, seconds in recorded().items():
        file, _, test = name.partition("[")[0].partition("::")
        assert (REPOSITORY / file).exists(), f"{file} is in tests/seconds.txt and does not exist"
        assert test in functions(file), f"{file} has no test {test}, which is in tests/seconds.txt"
        assert seconds > 0


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_parts_are_balanced(n: int) -> None:
    costs = {f"group {k}": float(k % 17 + 1) for k in range(100)}
    found = parts(costs, n)
    assert sorted(group for part in found for group in part) == sorted(costs)
    totals = [sum(costs[group] for group in part) for part in found]
    assert max(totals) - min(totals) <= 17
    assert SLOW < 1


@dataclass(frozen=True)
class Case:
    """What the tiers read of a test."""

    nodeid: str
    whole: bool = False

    def get_closest_marker(self, name: str) -> bool:
        return self.whole and name == "whole"


def test_slow_tests_of_many_cases_run_in_part() -> None:
    for whole in (False, True):
        tests: dict[str, list[Case]] = {}
        for name in recorded():
            tests.setdefault(name.partition("[")[0], []).append(Case(name, whole))
        chosen = _affordable(case for cases in tests.values() for case in cases)
        for cases in tests.values():
            own = [case for case in cases if case in chosen]
            assert own and (len(own) == 1 or whole or sum(map(cost, own)) <= MOST)
            assert own == cases or (not whole and sum(map(cost, cases)) > MOST)
