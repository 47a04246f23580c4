"""Faults to find: each can be planted, is noticed, and can be repaired.

``tests/cuda/simulated/test_exercises.py`` tests the kernels.
"""

import re
import shutil
from pathlib import Path

import pytest

from exercises import faults
from exercises.__main__ import main
from exercises.kernels import NAMES
from tests.conftest import REPOSITORY
from tests.tiers import few

NUMBERS = [str(i) for i in range(1, len(faults.EXERCISES) + 1)]

QUICK = "3"
"""A fault whose tests need no kernels."""


def test_the_exercises_are_faults_with_hints() -> None:
    assert len(faults.EXERCISES) == len({exercise.name for exercise in faults.EXERCISES}) == 20
    for exercise in faults.EXERCISES:
        chapter, file, look = exercise.hints
        for page in re.findall(r"docs/\S+\.md", chapter):
            assert (REPOSITORY / page).is_file()
        assert exercise.fault.file in file and exercise.fault.file not in chapter + exercise.fault.why
        assert exercise.fault.old.strip() not in look


def test_a_copy_has_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, fault = tmp_path / "copy", faults.numbered(QUICK).fault
    assert main(["plant", QUICK, str(folder)]) == 0
    said = capsys.readouterr().out
    assert fault.why in said and str(folder) in said and fault.file not in said
    assert fault.new in (folder / fault.file).read_text(encoding="utf-8")
    assert (folder / "exercises" / "__main__.py").is_file()
    with pytest.raises(SystemExit, match="is not empty"):
        main(["plant", QUICK, str(folder)])


@pytest.mark.parametrize(
    "number",
    # The first name is that of the case that --rest runs.
    [pytest.param(QUICK, id="0 quick"), *(pytest.param(n, marks=pytest.mark.thorough) for n in NUMBERS if n != QUICK)],
)
def test_a_fault_is_found_and_repaired(number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, fault = faults.plant(number, tmp_path / "copy"), faults.numbered(number).fault
    assert main(["check", str(folder)]) == 1
    assert re.match(r"Not repaired yet: tests/\S+.* (failed|does not end)\.$", capsys.readouterr().out)
    shutil.copy(REPOSITORY / fault.file, folder / fault.file)
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("Repaired: ")


def test_a_solution_and_hints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["solution", "9"])
    assert capsys.readouterr().out == (
        "In engine/cpu/attention.py, replace\n\nreturn max(0, position - window)\n\nby\n\n"
        "return max(0, position - window + 1)\n"
    )
    for k in ("1", "2", "3"):
        main(["hint", "9", k])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "Hint 1 of 3: Read docs/sliding-windows.md."
    assert second == "Hint 2 of 3: The fault is in engine/cpu/attention.py."
    assert third.startswith("Hint 3 of 3: ")
    main(["hint", "k1"])
    assert capsys.readouterr().out.startswith("Kernel 1. The sum of two vectors.\n")
    main(["solution", "k1"])
    assert "out[i] = x[i] + y[i]" in capsys.readouterr().out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    said = capsys.readouterr().out
    assert len(re.findall(r"^ +\d+  \w", said, re.M)) == 20
    assert [name for name in NAMES if f"(exercises/kernels/{name}.py)" in said] == list(NAMES)


@pytest.mark.parametrize(
    ("words", "problem"),
    few(
        [
            ("plant 21", "There is no fault 21: give a number from 1 to 20."),
            ("hint 0", "There is no fault 0: give a number from 1 to 20."),
            ("solution x", "There is no fault x: give a number from 1 to 20."),
            ("hint 3 4", "There are 3 hints: give a number from 1 to 3."),
            ("check k11", "There is no kernel k11: give one from k1 to k10."),
            ("check docs", "docs is not a copy with a fault: make one with python -m exercises plant NUMBER."),
        ],
        6,
    ),
)
def test_mistakes_are_one_sentence(words: str, problem: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == problem


def test_the_book_names_every_exercise() -> None:
    book = (REPOSITORY / "docs" / "exercises.md").read_text(encoding="utf-8")
    for exercise in faults.EXERCISES:
        assert exercise.fault.why.replace("<", "&lt;").replace("|", "&#124;") in book
        assert exercise.fault.file not in book
    for name in NAMES:
        assert f"`exercises/kernels/{name}.py`" in book
