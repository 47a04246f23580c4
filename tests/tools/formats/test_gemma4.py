"""Gemma 4's channels and calls."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.formats.events import Content
from tests.tiers import examples
from tests.tools.formats.answers import TOKENS, Answer, collected, events_of, pieces, read

NAME = "gemma4"
QUOTE = '<|"|>'


def written(value: Any) -> str:
    """A value as the template writes it (``format_argument``)."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return str(value)


def call(name: str = "get_weather", **values: Any) -> str:
    return f"<|tool_call>call:{name}{written(values)}<tool_call|>"


def test_a_thought_a_text_and_a_call() -> None:
    answer = read(NAME, f"<|channel>thought\nhm\n\nyes\n<channel|>I look.{call(city='Köln', days=3)}")
    assert (answer.reasoning, answer.content) == ("hm\n\nyes", "I look.")
    assert answer.calls == [("get_weather", {"city": "Köln", "days": 3})]


def test_thoughts() -> None:
    assert read(NAME, "<|channel>thought\n<channel|>Yes.\n") == Answer("Yes.\n")
    assert read(NAME, "hm\n<channel|>Yes.", reasoning_open=True) == Answer("Yes.", "hm")
    assert read(NAME, "<|channel>thought\nhm\n<channel|>Yes.", reasoning_open=True) == Answer("Yes.", "hm")
    assert read(NAME, "<|channel>thought\nhm") == Answer("", "hm")
    assert read(NAME, "<|channel>thought") == Answer()
    # Another channel is no thought.
    assert read(NAME, "<|channel>final\nYes.<channel|>") == Answer("<|channel>final\nYes.<channel|>")
    assert read(NAME, "<|channel>thoughts\nYes.") == Answer("<|channel>thoughts\nYes.")
    # Thoughts may come between texts.
    assert read(NAME, "One.<|channel>thought\nhm\n<channel|>Two.") == Answer("One.Two.", "hm")


def test_two_calls_and_a_call_in_a_thought() -> None:
    calls = [("get_weather", {"city": "Köln"}), ("now", {})]
    answer = read(NAME, f"{call(city='Köln')}{call('now')}")
    assert (answer.content, answer.calls) == ("", calls)
    answer = read(NAME, f"{call(city='Köln')}\n<|tool_call>\ncall:now {{}}\n<tool_call|>")
    assert (answer.content, answer.calls) == ("", calls)
    answer = read(NAME, f"<|channel>thought\nhm\n{call(city='Köln')}\n{call('now')}\n<channel|>Yes.")
    assert (answer.reasoning, answer.content, answer.calls) == ("hm", "Yes.", calls)


@pytest.mark.parametrize(
    "strays", ["<tool_call|>", "<|tool_response>", "\n<tool_call|><tool_call|>\n<|tool_response>\n"]
)
def test_stray_tokens_after_a_call_are_dropped(strays: str) -> None:
    assert read(NAME, call(city="Köln") + strays).content == ""
    assert read(NAME, call(city="Köln") + strays + "Done.").content == "Done."


def test_the_close_tag_may_be_missing_at_the_end() -> None:
    whole = call(city="Köln", days=3)
    for cut in (whole.removesuffix("<tool_call|>"), whole.removesuffix("}<tool_call|>"), whole.replace("}<", "<")):
        answer = read(NAME, cut)
        assert (answer.content, answer.calls) == ("", [("get_weather", {"city": "Köln", "days": 3})])
    answer = read(NAME, f"<|tool_call>call:get_weather{{city:{QUOTE}Kö")
    assert (answer.content, answer.calls) == ("", [("get_weather", {"city": "Kö"})])


@pytest.mark.parametrize(
    "text",
    [
        call("delete_all", city="Köln"),
        "<|tool_call>get_weather{}<tool_call|>",
        "<|tool_call>call:get_weather<tool_call|>",
        "<|tool_call>call:get_weather[]<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call:get_wea",
        "<|tool_call>",
        "<tool_call|>",
        "call:get_weather{}",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert read(NAME, text) == Answer(text)
    assert read(NAME, f"a\n{text}\nb\n") == Answer(f"a\n{text}\nb\n")


def test_a_tag_is_a_tag_only_as_a_token() -> None:
    text = call(city="Köln")
    assert events_of(NAME, [(text, False)], TOKENS[NAME]) == [Content(text)]
    # Within a string the spelled quote is text.
    start = pieces("<|tool_call>call:get_weather{city:", TOKENS[NAME])
    arriving = [*start, (QUOTE, True), ("a" + QUOTE, False), (QUOTE, True), ("}", False), ("<tool_call|>", True)]
    assert collected(events_of(NAME, arriving, TOKENS[NAME])).calls == [("get_weather", {"city": f"a{QUOTE}"})]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{}", {}),
        ("{ }", {}),
        ("{n:-1.5e3, t:true ,f:false,z:null}", {"n": -1500.0, "t": True, "f": False, "z": None}),
        ("{t:True,f:False,z:None}", {"t": True, "f": False, "z": None}),
        ('{a:"x, }\\n\\"y\\"",b:1}', {"a": 'x, }\n"y"', "b": 1}),
        (f"{{{QUOTE}a b{QUOTE}:1,{QUOTE}c{QUOTE}:{{{QUOTE}d{QUOTE}:[]}}}}", {"a b": 1, "c": {"d": []}}),
        ('{"a":1,\n  "b": [1, 2,],\n}', {"a": 1, "b": [1, 2]}),
        (f"{{a:{QUOTE}\n<|channel> {{}}:,\\ \"'{QUOTE}}}", {"a": "\n<|channel> {}:,\\ \"'"}),
        (
            "{city:New York,url:http://x.y/z?a=b,zip:0123}",
            {"city": "New York", "url": "http://x.y/z?a=b", "zip": "0123"},
        ),
        (f"{{a:[{QUOTE}{QUOTE},[[]],{{}}]}}", {"a": ["", [[]], {}]}),
        ("{größe:1,🙂:2,a-b.c d:3}", {"größe": 1, "🙂": 2, "a-b.c d": 3}),
    ],
)
def test_values(text: str, values: Any) -> None:
    answer = read(NAME, f"<|tool_call>call:get_weather{text}<tool_call|>")
    assert (answer.content, answer.calls) == ("", [("get_weather", values)])


@pytest.mark.parametrize(
    ("text", "values", "content"),
    [
        ("{city}", {}, "city}<tool_call|>"),
        ("{a:1,,b:2}", {"a": 1}, ",,b:2}<tool_call|>"),
        ("{a:1]", {"a": 1}, "]<tool_call|>"),
        ("{a:[1}", {"a": [1]}, "}<tool_call|>"),
        (f"{{a:1 {QUOTE}x{QUOTE}}}", {"a": 1}, f"{QUOTE}x{QUOTE}}}<tool_call|>"),
        ("{a:{b:}}", {"a": {}}, "b:}}<tool_call|>"),
        ("{a:1}}", {"a": 1}, "}<tool_call|>"),
    ],
)
def test_arguments_that_break_the_rules_end_where_they_can_be_closed(text: str, values: Any, content: str) -> None:
    answer = read(NAME, f"<|tool_call>call:get_weather{text}<tool_call|>")
    assert (answer.calls, answer.content) == ([("get_weather", values)], content)


KEYS = st.text(st.sampled_from("abcé_"), min_size=1, max_size=4)
VALUES = st.recursive(
    st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@examples(200)
def test_any_values_come_back(values: dict[str, Any]) -> None:
    text = f"<|tool_call>call:now{written(values)}<tool_call|>"
    assert read(NAME, text).calls == [("now", values)]
