"""A table is complete wherever it is printed: one line per row for scripts, folded to its width on a terminal."""

import contextlib
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.table import print_table
from tests.tiers import examples

HEAD = ("name", "place", "size")
LONG = "a-name-of-" + "many-" * 60 + "characters"


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, *rows: tuple[str, ...], titled: bool = False) -> list[str]:
    with contextlib.redirect_stdout(stream):
        print_table(HEAD, rows, right=("size",), titled=titled)
    return stream.getvalue().splitlines()


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = [("a", "x [red] [/] :smile:", "1.0"), ("bcd", "", "20.5")]
    assert printed(io.StringIO(), *rows) == [
        "a    x [red] [/] :smile:   1.0",
        "bcd                       20.5",
    ]
    assert printed(io.StringIO(), *rows, titled=True)[0] == "name  place                size"
    assert printed(io.StringIO(), (LONG, LONG, "1"), titled=True)[1] == f"{LONG}  {LONG}     1"


# Cells of which a script can find the ends: two blanks are only between cells.
cells = st.lists(st.text("ab[]=:#\\é漢🙂%", min_size=1, max_size=40), min_size=1, max_size=4).map(" ".join)


@examples(100)
@given(st.lists(st.tuples(cells, cells, cells), max_size=5))
def test_scripts_read_every_cell(rows: list[tuple[str, ...]]) -> None:
    assert [tuple(re.split(" {2,}", line.strip())) for line in printed(io.StringIO(), *rows)] == rows


def test_a_terminal_shows_every_character() -> None:
    lines = printed(Screen(), (LONG, "here", "1"), ("[b]", "there", "2"))
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines]
    assert all(len(line) <= 40 for line in lines)
    assert any(set("".join(HEAD)) <= set(line) for line in lines)
    text = "\n".join(lines)
    assert "".join(re.findall(r"^ ([a-z-]+)", text.partition("[b]")[0].partition("─\n")[2], re.M)) == LONG
    assert re.search(r"\[b\] +there +2", text)
