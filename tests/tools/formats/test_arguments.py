"""Arguments that become JSON while they arrive."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.formats.arguments import MAX_DEPTH, Arguments, object_of
from tests.tiers import examples
from tests.tools.formats.answers import read

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
LAYOUTS: list[dict[str, Any]] = [
    {"ensure_ascii": False, "separators": (",", ":")},
    {"ensure_ascii": True, "indent": 2},
]


def fed(text: str, step: int = 1) -> tuple[Arguments, str, str]:
    """What reads ``text`` in pieces of ``step`` characters, what it delivers, and the text that this stands for."""
    arguments, found, used = Arguments(str), "", 0
    for start in range(0, len(text), step):
        piece = text[start : start + step]
        stopped, delivered, more = arguments.feed(piece, 0)
        found += more
        used = start + delivered if more else used
        if arguments.done or arguments.broken:
            break
        assert stopped == len(piece)
    return arguments, found, text[:used]


@given(OBJECTS, st.sampled_from(LAYOUTS), st.integers(1, 9))
@examples(200)
def test_json_stays_as_it_is(values: dict[str, Any], layout: dict[str, Any], step: int) -> None:
    text = json.dumps(values, **layout)
    arguments, found, used = fed(text + "tail", step)
    assert arguments.done and found == used == text


@given(OBJECTS, st.sampled_from(LAYOUTS), st.data())
@examples(200)
def test_what_was_delivered_can_be_closed(values: dict[str, Any], layout: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(values, **layout)
    arguments, found, _ = fed(text[: data.draw(st.integers(1, len(text)))])
    closed = json.loads(found + arguments.end() + arguments.closing)
    # No member is invented: all but the last are those of the object.
    assert set(closed) <= set(values)
    assert all(closed[key] == values[key] for key in list(closed)[:-1])


@given(st.text(st.sampled_from('{}[],:"\\un0a1.-e \n\x01tr'), max_size=30))
@examples(500)
def test_what_python_accepts_is_accepted_and_all_is_json(text: str) -> None:
    text = "{" + text
    arguments, found, used = fed(text)
    rest = "" if arguments.done else arguments.end() + arguments.closing
    value = json.loads(found + rest)
    assert isinstance(value, dict)
    try:
        expected = json.loads(text)
    except ValueError:
        return
    assert arguments.done and value == expected and used == text.rstrip()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\tz\x00"}', {"a": "x\ny\tz\x00"}),
        ('{"a": "\\d+ \\\' \\u12"}', {"a": "\\d+ \\' \\u12"}),
        ('{"a": "\\\\d \\"q\\" \\u00e9\\ud83d\\ude42"}', {"a": '\\d "q" é🙂'}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
    ],
)
def test_faults_that_are_mended(text: str, value: Any) -> None:
    arguments, found, _ = fed(text)
    assert arguments.done and json.loads(found) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a" 1}', {}),
        ("{a: 1}", {}),
        ("{'a': 1}", {}),
        ('{, "a": 1}', {}),
        ('{"a": tru}', {}),
        ('{"a": None}', {}),
        ('{"a": NaN}', {}),
        ('{"a": 01}', {}),
        ('{"a": 1.}', {}),
        ('{"a": +1}', {}),
        ('{"a":: 1}', {}),
        (f'{{"a": {"1" * 2000}}}', {}),
        ('{"a": 1 "b": 2}', {"a": 1}),
        ('{"a": 1]', {"a": 1}),
        ('{"a": [1}', {"a": [1]}),
        ('{"a": [,]}', {"a": []}),
    ],
)
def test_faults_that_break(text: str, value: Any) -> None:
    arguments, found, used = fed(text)
    assert arguments.broken and not arguments.done
    assert found == used and json.loads(found + arguments.closing) == value


def test_depth_is_limited() -> None:
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        arguments, found, _ = fed('{"a":' * (depth - 1) + "{" + "}" * depth)
        assert arguments.done == (depth == MAX_DEPTH)
        json.loads(found + arguments.closing)


def test_deep_arguments_are_closed_where_they_become_too_deep() -> None:
    answer = read("qwen3", '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 1000)
    assert json.dumps(answer.calls[0][1]).count("[") == MAX_DEPTH - 1
    assert answer.content == "[" * (1000 - MAX_DEPTH + 1)


@given(OBJECTS, st.sampled_from(LAYOUTS))
def test_complete_arguments_are_an_object(value: dict[str, Any], layout: dict[str, Any]) -> None:
    assert object_of(json.dumps(value, **layout)) == value


def test_an_object_can_be_written_again() -> None:
    found = object_of(r'{"a\ud83d": "\ud83d\ude42 \ude42", "b": [1e999, -1e999, 1.5]}')
    assert found == {"a?": "🙂 ?", "b": [sys.float_info.max, -sys.float_info.max, 1.5]}
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
