"""Tables of measured speeds: pages have those of the data, and every speed in README is one of them."""

import datetime
import re
from pathlib import Path

import pytest

from docs import results
from tests.conftest import REPOSITORY

README = REPOSITORY / "README.md"


@pytest.mark.parametrize("page", results.pages(), ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_data(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results.filled(text) == text, f"{page.name} is out of date; run: python -m docs.results"


def test_each_table_has_a_place_and_each_place_ends() -> None:
    texts = [page.read_text(encoding="utf-8") for page in results.pages()]
    assert {place[2] for text in texts for place in results.PLACE.finditer(text)} == set(results.TABLES)
    for text in texts:
        assert text.count("<!-- results: ") == text.count("<!-- end of results -->")
        # A place whose end is missing would reach to the end of the next one.
        assert not any("<!-- results:" in place[3] for place in results.PLACE.finditer(text))


def test_readme_has_no_table_of_speeds_beside_those_of_the_data() -> None:
    text = results.PLACE.sub("", README.read_text(encoding="utf-8"))
    rows = [
        line for line in text.splitlines() if line.startswith("|") and re.search(r"\|\s*\d[\d ]*(\.\d+)?\s*\|", line)
    ]
    assert rows == []


def test_a_changed_rate_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    changed = {**results.data()}
    rates = results.data()["h200-default"]["rates"]
    changed["h200-default"] = {"rates": rates | {"llama.cpp": {"tg64": 1035.9}}}
    monkeypatch.setattr(results, "data", lambda: changed)
    (line,) = [line for line in results.filled(text).splitlines() if line.startswith("| answer, at the start")]
    assert line == "| answer, at the start | 518 | 548 | 1036 | 0.50 |"


def test_prose_of_readme_agrees_with_the_data() -> None:
    """Ratios that sentences state in words."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "with `i8` a GPU reads a prompt behind 32 768 tokens three times as fast as with `f16`" in text
    ours, plain = (results.rate("h200-default", kind, "pp2048@32768") for kind in ("i8", "f16"))
    assert ours and plain and round(ours.value / plain.value) == 3


def test_every_run_says_when_where_and_how() -> None:
    assert len(results.data()) > 8
    for name, run in results.data().items():
        assert isinstance(run["date"], datetime.date), name
        assert run["machine"] and run["command"], name
        for rates in run.get("rates", {}).values():
            for given in rates.values():
                value, deviation = given if isinstance(given, list) else (given, 0)
                assert value > 0 and 0 <= deviation < value, name


def test_numbers() -> None:
    assert [results.spaced(n) for n in (7, 9794, 13956, 1234567, 0.2, 13956.25)] == [
        "7",
        "9794",
        "13 956",
        "1 234 567",
        "0.2",
        "13 956.25",
    ]
    assert str(results.Rate(15212, 9)) == "15 212 ± 9"
    assert results.ratio(results.Rate(3), results.Rate(2)) == "1.50" and results.ratio(None, results.Rate(2)) == ""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n<!-- results: users -->\nold\n<!-- end of results -->\n\nb\n", encoding="utf-8")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    monkeypatch.setattr(results, "pages", lambda: [page])
    assert results.main(["--check"]) == 1 and "old" in page.read_text(encoding="utf-8")
    assert results.main([]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("a\n\n<!-- results: users -->\n| users | 1 |") and text.endswith("-->\n\nb\n")
    assert results.main(["--check"]) == 0
    assert capsys.readouterr().out == "page.md is out of date\npage.md was written\n"
