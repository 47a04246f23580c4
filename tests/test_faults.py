"""The list of planted faults fits the sources, and the tests it names exist. ``python -m tests.faults`` plants them."""

import ast

import pytest

from tests.conftest import REPOSITORY
from tests.faults import FAULTS, Fault
from tests.mutations import ROOMS, mutants


def functions(file: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def assert_exists(test: str) -> None:
    file, _, function = test.split()[0].partition("::")
    name = function.partition("[")[0]
    assert not name or name in functions(file), f"{file} has no test {name}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (REPOSITORY / fault.file).read_text(encoding="utf-8")
    changed = fault.apply(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    for test in fault.tests:
        assert_exists(test)


def test_faults_are_in_all_rooms() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert len({fault.room for fault in FAULTS}) >= 10


def test_a_text_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="0 times"):
        FAULTS[0].apply("")


def test_mutants_are_drawn_by_seed() -> None:
    first = mutants(1, 20)
    assert first == mutants(1, 20) != mutants(2, 20)
    for mutant in first:
        text = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))


def test_the_tests_of_every_room_exist() -> None:
    for _, files in ROOMS.values():
        for file, tests in files.items():
            assert (REPOSITORY / file).is_file()
            for test in tests:
                assert_exists(test)
