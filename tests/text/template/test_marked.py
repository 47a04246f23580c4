"""Marked text is the same text as without marks, and its marks never move to characters that had none."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup, escape

from engine.text.template.marked import HTMLText, MarkedText, escaped, joined, marks_of, trusted
from tests.tiers import examples

# Marked characters are upper case, others are not, so that a mark in the wrong place shows.
own = st.text("AB \n", max_size=6)
foreign = st.text("ab \n", max_size=6)
strings = own.map(trusted) | foreign
chars = st.none() | st.text("AaBb \n", min_size=1, max_size=2)

Operation = Callable[[str, Any], Any]
OPERATIONS: dict[str, tuple[Operation, Any]] = {
    "add": (lambda text, other: text + other, strings),
    "radd": (lambda text, other: other + text, strings),
    "strip": (lambda text, arg: text.strip(arg), chars),
    "lstrip": (lambda text, arg: text.lstrip(arg), chars),
    "rstrip": (lambda text, arg: text.rstrip(arg), chars),
    "removeprefix": (lambda text, arg: text.removeprefix(arg), foreign | own),
    "removesuffix": (lambda text, arg: text.removesuffix(arg), foreign | own),
    "split": (lambda text, arg: text.split(*arg), st.tuples(chars, st.integers(-1, 3))),
    "rsplit": (lambda text, arg: text.rsplit(*arg), st.tuples(chars, st.integers(-1, 3))),
    "join": (lambda text, arg: text.join(arg), st.lists(strings, max_size=4)),
    "joined": (
        lambda text, arg: "".join([text, *arg]) if type(text) is str else joined([text, *arg]),
        st.lists(strings),
    ),
    "slice": (lambda text, arg: text[arg], st.slices(8)),
    "first": (lambda text, arg: text[:1] and text[0], st.none()),
    "iterate": (lambda text, arg: list(text), st.none()),
    "replace": (lambda text, arg: text.replace(*arg), st.tuples(st.text("AaBb", max_size=2), strings)),
    "replace some": (lambda text, arg: text.replace("a", *arg), st.tuples(strings, st.integers(-1, 2))),
    "splitlines": (lambda text, arg: text.splitlines(arg), st.booleans()),
    "partition": (lambda text, arg: text.partition(arg), st.text("AaBb", min_size=1, max_size=2)),
    "multiply": (lambda text, arg: text * arg, st.integers(0, 3)),
    "format": (lambda text, arg: f"{text}|", st.none()),
}


def checked(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            checked(part)
    else:
        assert len(marks_of(value)) == len(value)
        assert not any(mark and symbol in "ab" for symbol, mark in zip(value, marks_of(value), strict=True))


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return str.__str__(value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_plain_text(name: str) -> None:
    operation, arguments = OPERATIONS[name]

    @given(st.lists(strings, max_size=4), arguments)
    def check(parts: list[str], argument: Any) -> None:
        text = joined(parts)
        result = operation(text, argument)
        assert plain(result) == operation(plain(text), plain(argument))
        checked(result)

    check()


html = st.text("AB<&", max_size=6).map(trusted) | st.text("ab \n'\"<>&", max_size=6)
HTML_OPERATIONS: dict[str, tuple[Operation, Any]] = {
    **{name: (OPERATIONS[name][0], html) for name in ("add", "radd")},
    **{name: OPERATIONS[name] for name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "slice")},
    "lower": (lambda text, arg: text.lower().upper() + arg, html),
    "split": (lambda text, arg: text.split(*arg), st.tuples(st.just("&") | st.just("a"), st.integers(-1, 3))),
    "join": (lambda text, arg: text.join(arg), st.lists(html, max_size=4)),
    "replace": (lambda text, arg: text.replace(*arg), st.tuples(st.text("Aa<", min_size=1, max_size=2), html)),
    "twice": (lambda text, arg: arg + (text.strip() + arg)[1:] + arg, html),
}


@pytest.mark.parametrize("name", HTML_OPERATIONS)
def test_html_is_escaped_as_by_markupsafe(name: str) -> None:
    operation, arguments = HTML_OPERATIONS[name]

    @examples(100)
    @given(st.lists(html, max_size=4), arguments)
    def check(parts: list[str], argument: Any) -> None:
        text = joined(parts)
        assert plain(escaped(text)) == str(escape(plain(text)))
        checked(escaped(text))
        result = operation(HTMLText(text, text.marks), argument)
        expected = operation(Markup(plain(text)), plain(argument))
        assert plain(result) == (list(map(str, expected)) if isinstance(expected, list) else str(expected))
        assert all(type(part) is HTMLText for part in (result if isinstance(result, list) else [result]))
        checked(result)

    check()


@given(st.lists(strings, max_size=4))
def test_lower_and_upper_keep_marks_of_ascii_only(parts: list[str]) -> None:
    text = joined(parts)
    assert marks_of(text.lower()) == marks_of(text.upper()) == text.marks
    assert marks_of((text + "ß").upper()) == bytes(len(text) + 2)


def test_marks_are_kept_where_the_text_is() -> None:
    text = trusted("<|im_start|>") + "user" + trusted("\n")
    assert text.marks == b"\1" * 12 + bytes(4) + b"\1"
    assert str(text) is text
    assert [marks_of(part) for part in text.split("user")] == [b"\1" * 12, b"\1"]
    assert [marks_of(part) for part in text.split("_", 1)] == [b"\1" * 4, b"\1" * 7 + bytes(4) + b"\1"]
    assert marks_of(text.replace("user", trusted("x"))) == b"\1" * 14
    with pytest.raises(ValueError, match="1 marks for 2 characters"):
        MarkedText("ab", b"\1")
