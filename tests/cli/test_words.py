"""Lines that are broken between words while they arrive, compared with ``textwrap``."""

import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.words import Words
from tests.tiers import examples

CODE = "```python\nx = 'a long line of code that is longer than the terminal'\n```\n"
TABLE = "| a table | that is wider | than the terminal is |\n"
INDENTED = "    code that is indented by four spaces and rather long\n"


def written(text: str, columns: int, seed: int = 0) -> str:
    """The text as it is written, in pieces of random sizes."""
    words, out, i = Words(lambda: columns), "", 0
    sizes = np.random.default_rng(seed)
    while i < len(text):
        n = int(sizes.integers(1, 9))
        out += words.feed(text[i : i + n])
        i += n
    return out + words.end()


@examples(100)
@given(st.lists(st.text("abc", min_size=1, max_size=12), max_size=40), st.integers(14, 40), st.integers(0, 9))
def test_lines_are_those_of_textwrap(words: list[str], columns: int, seed: int) -> None:
    text = " ".join(words)
    found = [line.rstrip() for line in written(text, columns, seed).splitlines()]
    assert found == textwrap.wrap(text, columns - 1)


@examples(100)
@given(st.text("ab `|~-\n\t中", max_size=200), st.integers(5, 40), st.integers(0, 9))
def test_nothing_is_lost(text: str, columns: int, seed: int) -> None:
    found = written(text, columns, seed)
    assert found == written(text, columns, seed + 1)  # however it arrives
    assert "".join(found.split()) == "".join(text.split())  # a line may be broken within a word of wide characters
    assert found.replace("\n", "") == text.replace("\n", "")
    assert found.count("\n") >= text.count("\n")


@pytest.mark.parametrize("kept", [CODE, TABLE, INDENTED, "https://example.org/an/address/without/spaces\n"])
def test_what_keeps_its_lines(kept: str) -> None:
    assert written(f"Some words.\n\n{kept}and some more words", 25) == f"Some words.\n\n{kept}and some more words"


def test_the_width_is_that_of_the_moment() -> None:
    columns = 20
    words = Words(lambda: columns)
    found = words.feed("one two three four five ")
    columns = 8
    found += words.feed("six seven eight ") + words.end()
    assert found == "one two three four \nfive \nsix \nseven \neight "


def test_what_is_wider_than_the_terminal_does_not_wait() -> None:
    words = Words(lambda: 20)
    assert words.feed("see " + "x" * 19) == "see "
    assert words.feed("xx") == "\n" + "x" * 21
    assert words.feed("yz and") == "yz "
    assert words.end() == "\nand"


def test_lines_of_scripts_without_spaces() -> None:
    words = Words(lambda: 11)
    assert words.feed("巴黎是法国的首都。") == "巴黎是法国\n的首"
    assert words.feed("它") == "都。" and words.end() == "它"
