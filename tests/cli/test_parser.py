"""The parser of all commands: ranges, suggestions, positional arguments."""

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli import flags
from engine.cli.parser import Number, Parser, listed, nearest, real, whole
from engine.errors import UsageError

NAMES = ("--temp", "--top-k", "--top-p", "--ctx-size", "--n-predict", "-n", "-ngl", "--stop", "--seed")


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--tmep", "--temp"),
        ("--tem", "--temp"),
        ("--temps", "--temp"),
        ("-temp", "--temp"),
        ("--n", "-n"),
        ("--ctx-siez", "--ctx-size"),
        ("--ctxsize", "--ctx-size"),
        ("--npredict", "--n-predict"),
        ("--predict", "--n-predict"),
        ("--sed", "--seed"),
        ("--ctx", "--ctx-size"),
        # Too far, too short, or as near to another flag.
        ("--top", None),
        ("--top-n", None),
        ("-ngk", None),
        ("-m", None),
        ("--stem", None),
        ("--template", None),
        ("--context", None),
    ],
)
def test_suggestions(word: str, near: str | None) -> None:
    assert nearest(word, NAMES) == near


WIDE = st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6)


@given(WIDE, st.none() | st.integers(-100, 100), st.none() | st.integers(0, 1000), st.booleans(), st.booleans())
def test_numbers(value: float, least: int | None, above: int | None, is_whole: bool, exclusive: bool) -> None:
    exclusive = exclusive and least is not None
    most = None if above is None or least is None else least + above
    number = Number(least, most, whole=is_whole, above=exclusive)
    inside = (least is None or value > least or (value == least and not exclusive)) and (most is None or value <= most)
    if inside and (isinstance(value, int) or not is_whole):
        assert number(str(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="must be .*, not "):
            number(str(value))


@pytest.mark.parametrize("text", ["", "x", "1,5", "1e400", "-inf", "nan", "0x10"])
def test_what_is_no_number(text: str) -> None:
    for kind in (real(), whole(), whole(0, 5)):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a (whole )?number"):
            kind(text)


def test_ranges_in_words() -> None:
    assert whole(0).range == "0 or more"
    assert whole(0, 2**64 - 1).range == "0 to 18446744073709551615"
    assert real(0, 1).range == "0 to 1"
    assert real(0, above=True).range == "above 0"
    assert real(0, 1, above=True).range == "above 0 and at most 1"
    assert math.isclose(real(0, 1)("0.25"), 0.25)


def test_lists_in_words() -> None:
    assert listed(["a"]) == "a"
    assert listed("ab") == "a or b"
    assert listed("abc", "and") == "a, b and c"


def parser() -> Parser:
    top = Parser("program", positional="give one")
    top.add_positional("words")
    top.add_argument("-n", "--number", type=whole(0))
    top.add_argument("-t", "--text")
    top.add_argument("--yes", action="store_true")
    return top


@pytest.mark.parametrize(
    "line",
    ["-n 5 -t -x --yes word", "word --yes -t -x -n5", "--number=5 word --text=-x --yes", "--yes -n 5 word --text -x"],
)
def test_order_does_not_matter(line: str) -> None:
    words = line.replace("-n5", "-n 5").split()
    assert vars(parser().parse_args(words)) == {"words": "word", "number": 5, "text": "-x", "yes": True}


def test_what_follows_two_dashes_is_no_flag() -> None:
    assert parser().parse_args(["--yes", "--", "--word"]).words == "--word"
    assert parser().parse_args(["--text", "--", "-"]).words == "-"
    with pytest.raises(UsageError, match="unexpected argument 'b': give one"):
        parser().parse_args(["--", "a", "b"])


def test_commands() -> None:
    top = Parser("program")
    top.add_commands("show", [("show", "", "show all"), ("add", "NAME", "add one")])
    assert top.parse_args([]).command == "show"
    assert vars(top.parse_args(["add", "x"])) == {"command": "add", "name": "x"}
    for words, says in (
        (["ad"], "there is no command 'ad': the commands are show and add"),
        (["add"], "program add needs NAME"),
        (["show", "x"], "unexpected argument 'x'"),
        (["add", "--force", "x"], "unknown flag --force"),
    ):
        with pytest.raises(UsageError, match=says):
            top.parse_args(words)


def test_a_whole_number_of_hundreds_of_digits() -> None:
    with pytest.raises(UsageError, match="must be a number of fewer digits"):
        flags.parser().parse_args(["-s", "9" * 400])


def test_words_after_two_dashes() -> None:
    with pytest.raises(UsageError, match="unexpected argument '-y'"):
        flags.parser().parse_args(["--", "-x", "-y"])


@pytest.mark.parametrize("words", [["--seed", "x"], ["--seed=x"], ["-s", "x"]])
def test_an_error_names_the_flag_as_it_was_written(words: list[str]) -> None:
    parser = Parser("test")
    parser.add_argument("-s", "--seed", type=whole())
    with pytest.raises(UsageError, match=f"^{words[0].removesuffix('=x')} must be a whole number"):
        parser.parse_args(words)
