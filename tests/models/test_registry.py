"""The registry of architectures: every table of them equals it."""

import re
from pathlib import Path

import pytest

from engine.cli import models
from engine.models.registry import ARCHITECTURES, FAMILIES
from tests.conftest import REPOSITORY

HEAD = ("architecture", "models", "drafts by", "tested against")


def rows(page: Path) -> list[tuple[str, ...]]:
    """The rows of the table of architectures in a page, without backticks."""
    text = page.read_text(encoding="utf-8")
    head = "| " + " | ".join(HEAD) + " |\n| --- | --- | --- | --- |\n"
    assert text.count(head) == 1, f"{page.name} has no table {head}"
    body = re.match(r"(\|.*\|\n)*", text.partition(head)[2])
    assert body is not None
    return [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in body[0].splitlines()]


@pytest.mark.parametrize("page", ["README.md", "docs/layers.md"])
def test_the_book_lists_the_registry(page: str) -> None:
    entries = [(f"`{a.name}`", a.models, a.drafts, a.oracle) for a in ARCHITECTURES.values()]
    assert rows(REPOSITORY / page) == entries


def test_the_command_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--architectures"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(ARCHITECTURES)
    for line, entry in zip(lines, ARCHITECTURES.values(), strict=True):
        assert [part.strip() for part in re.split(r"\s{2,}", line)] == [
            part for part in (entry.name, entry.models, entry.drafts, entry.oracle) if part
        ]


def test_names_are_distinct() -> None:
    assert len(ARCHITECTURES) == sum(len(family.ARCHITECTURES) for family in FAMILIES)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_book_counts_the_registry(page: str) -> None:
    assert f"{len(ARCHITECTURES)} architectures" in (REPOSITORY / page).read_text(encoding="utf-8")
