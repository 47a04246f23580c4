"""Calls of Qwen3-Coder and its successors, with values that are plain text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.formats.events import CallArguments, CallBegin, CallEnd
from engine.tools.formats.select import parser
from tests.tiers import examples
from tests.tools.formats.answers import TOKENS, TOOLS, Answer, read

NAME = "qwen3_coder"
STRUCTURE = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")


def call(name: str = "get_weather", **values: str) -> str:
    """A call as the templates write it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_a_thought_that_the_prompt_has_opened_a_text_and_a_call() -> None:
    answer = read(NAME, f"hm\n</think>\n\nI look.\n\n{call(city='Köln')}", reasoning_open=True)
    assert (answer.reasoning, answer.content, answer.calls) == ("hm", "I look.", [("get_weather", {"city": "Köln"})])


def test_a_leading_extra_think_tag_is_no_text() -> None:
    assert read(NAME, "<think>\nhm\n</think>\n\nYes.", reasoning_open=True) == Answer("Yes.", "hm")
    assert read(NAME, "\n\n<think>\n\n</think>\n\nYes.", reasoning_open=True) == Answer("Yes.")


def test_a_call_in_a_thought_is_not_lost() -> None:
    answer = read(NAME, f"I look it up.\n\n{call(city='Köln')}", reasoning_open=True)
    assert (answer.reasoning, answer.calls) == ("I look it up.", [("get_weather", {"city": "Köln"})])
    answer = read(NAME, f"hm\n{call('now')}\nAnd then?\n</think>\n\nDone.", reasoning_open=True)
    assert (answer.reasoning, answer.content, answer.calls) == ("hmAnd then?", "Done.", [("now", {})])


def test_two_calls_and_nothing_of_the_second_leaks() -> None:
    answer = read(NAME, f"{call(city='Köln')}\n{call('now')}\n{call(city='Bonn')}")
    calls = [("get_weather", {"city": "Köln"}), ("now", {}), ("get_weather", {"city": "Bonn"})]
    assert (answer.content, answer.calls) == ("", calls)
    # Also in one block.
    block = call(city="Köln").removesuffix("\n</tool_call>") + call(city="Bonn").removeprefix("<tool_call>")
    assert [values["city"] for _, values in read(NAME, block).calls] == ["Köln", "Bonn"]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("days", "3", 3),
        ("days", " -12 ", -12),
        ("days", "5.0", 5),
        ("days", "three", "three"),
        ("days", "007", "007"),
        ("days", "3.5", "3.5"),
        ("days", "9" * 2000, "9" * 2000),
        ("days", "null", None),
        ("limit", "None", None),
        ("limit", "4", 4),
        ("limit", "", ""),
        ("share", "0.25", 0.25),
        ("share", "-1e-3", -0.001),
        ("share", "NaN", "NaN"),
        ("deep", "true", True),
        ("deep", "False", False),
        ("deep", "yes", "yes"),
        ("nothing", "null", None),
        ("tags", '["a", 1, null]', ["a", 1, None]),
        ("tags", "[\n  1,\n  2\n]", [1, 2]),
        ("tags", "['a']", "['a']"),
        ("tags", '{"a": 1}', '{"a": 1}'),
        ("tags", "[NaN]", "[NaN]"),
        ("options", '{"a": {"b": [true]}}', {"a": {"b": [True]}}),
        ("options", '{"a":' * 3_000, '{"a":' * 3_000),
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("city", "true", "true"),
        ("city", "", ""),
        ("city", ' "quoted" ', ' "quoted" '),
        ("text", "a\n\n\tb\\n\n", "a\n\n\tb\\n\n"),
        ("text", "\n", "\n"),
        ("text", "é🙂\u2028\x00<b>&lt;</b>", "é🙂\u2028\x00<b>&lt;</b>"),
        ("unknown", "3", "3"),
    ],
)
def test_values_are_typed_by_the_schema(parameter: str, text: str, value: Any) -> None:
    assert read(NAME, call(**{parameter: text})).calls == [("get_weather", {parameter: value})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["integer", "string"]}, "3", 3),
        ({"type": ["integer", "string"]}, "x", "x"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, None]}, "null", None),
        ({"const": True}, "true", True),
        ({"const": {"a": 1}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Size"}, "2", 2),
        ({"allOf": [{"$ref": "#/$defs/Size"}]}, "2", 2),
        ({"$ref": "#/$defs/Loop"}, "2", "2"),
        ({"$ref": "#/$defs/None"}, "2", "2"),
        ({"$ref": "elsewhere.json"}, "2", "2"),
        ({"description": "anything"}, "2", "2"),
        (True, "2", "2"),
        ({"type": 3, "anyOf": 3, "enum": 3}, "2", "2"),
    ],
)
def test_types_of_a_schema(schema: Any, text: str, value: Any) -> None:
    circle = [{"$ref": "#/$defs/Loop"}] * 40  # would take forever if references were followed along every path
    definitions = {"Size": {"type": "integer"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, *circle]}}
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert read(NAME, call("f", p=text), tools=tools).calls == [("f", {"p": value})]


def test_functions_without_a_schema_take_strings() -> None:
    assert read(NAME, call("now", zone="3")).calls == [("now", {"zone": "3"})]
    assert read(NAME, call("other", zone="3"), tools=None).calls == [("other", {"zone": "3"})]


@pytest.mark.parametrize(
    "text",
    [
        call("delete_all", city="Köln"),
        "<tool_call>\n<function=",
        "<tool_call>\n<function=get_weather",
        "<tool_call>\n<function=get_weather>",
        "<tool_call>\n<function=get weather>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\nKöln\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Write <function=now> and then </function>.",
        "<parameter=city>\nKöln\n</parameter>\n",
        "</function>\n</tool_call>",
        "a<b and <func",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert read(NAME, text) == Answer(text)
    assert read(NAME, f"a\n{text}\nb\n") == Answer(f"a\n{text}\nb\n")


def test_an_unknown_function_does_not_hide_the_call_after_it() -> None:
    unknown = call("delete_all", city="Köln")
    answer = read(NAME, f"{unknown}\n{call('now')}")
    assert (answer.content, answer.calls) == (unknown, [("now", {})])


def test_the_opening_tag_may_be_missing() -> None:
    bare = call(city="Köln").removeprefix("<tool_call>\n")
    answer = read(NAME, f"I look.\n\n{bare}\nDone.")
    assert (answer.content, answer.calls) == ("I look.Done.", [("get_weather", {"city": "Köln"})])


@pytest.mark.parametrize("cut", ["", "\n", "\n</parameter>", "\n</parameter>\n", "\n</parameter>\n</function>"])
def test_a_missing_close_tag_at_the_end(cut: str) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nKöln{cut}"
    answer = read(NAME, text)
    assert (answer.content, answer.calls) == ("", [("get_weather", {"days": 3, "city": "Köln"})])


def test_a_call_that_is_cut_off_in_a_tag() -> None:
    start = "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n"
    answer = read(NAME, start + "<parameter=ci")
    assert (answer.content, answer.calls) == ("<parameter=ci", [("get_weather", {"days": 3})])
    answer = read(NAME, start + "<parameter=a b>\n1\n</parameter>")
    assert (answer.content, answer.calls) == ("<parameter=a b>\n1\n</parameter>", [("get_weather", {"days": 3})])


def test_forgotten_close_tags_within_a_call() -> None:
    forgotten = call(city="Köln", days="3").replace("\n</parameter>", "")
    assert read(NAME, forgotten).calls == [("get_weather", {"city": "Köln", "days": 3})]
    forgotten = call(city="Köln", days="3").replace("</function>\n", "")
    assert read(NAME, f"{forgotten}\n{call('now')}").calls == [
        ("get_weather", {"city": "Köln", "days": 3}),
        ("now", {}),
    ]


@pytest.mark.parametrize(
    "value",
    [
        "<b>bold</b>\n</parameter> is a tag",
        "the tags <tool_call>, </tool_call>,\n</function> and <parameter=x>",
        "<parameter=days> in a line\nand <parameter=more>\nat its beginning",
        "<function=demo>\n</function>\n</tool_call>",
        "<function=a>\n<function=b>\n</function>\n</tool_call>\n</function>\n</tool_call>",
        call("now", text="x"),
        f"An example:\n{call('now', text='x')}\nEnd.",
        "a\n</parameter>\nb",
        "a\n<parameter=text>\nb",
        "<think>\nhm\n</think>\n",
        "</parameter",
    ],
)
def test_strings_with_newlines_and_tags(value: str) -> None:
    answer = read(NAME, f"{call(text=value, days='3')}\nDone.")
    assert answer.calls == [("get_weather", {"text": value, "days": 3})]
    assert answer.content == "Done."


def test_a_call_within_a_value_may_have_no_end() -> None:
    value = "Write <function=NAME> first."
    answer = read(NAME, f"{call(text=value)}\n{call(text=value)}")
    assert answer.calls == [("get_weather", {"text": value})] * 2


@pytest.mark.parametrize(
    "tags",
    ["<function=", "<function=f>", "<function=f><parameter=x>", r"\"<function=\\", "]}</function><function=<function="],
)
def test_a_call_within_a_string_of_json_may_have_no_end(tags: str) -> None:
    for parameter, text in (("tags", f'["{tags}", [1]]'), ("options", f'{{\n"a": ["{tags}"]\n}}')):
        value, after = json.loads(text), call(days="3").removeprefix("<tool_call>\n<function=get_weather>")
        before = f"<tool_call>\n<function=get_weather>\n<parameter={parameter}>\n{text}"
        # Also where the tag after the value is forgotten, and in a text that is JSON.
        for answer in (f"{before}\n</parameter>{after}", before + after):
            found = read(NAME, f"{answer}\nDone.")
            assert (found.content, found.calls) == ("Done.", [("get_weather", {parameter: value, "days": 3})])
        found = read(NAME, f"{call(text=text, days='3')}\nDone.")
        assert (found.content, found.calls) == ("Done.", [("get_weather", {"text": text, "days": 3})])


def test_a_call_within_brackets_that_are_no_json_has_an_end() -> None:
    for value in (f"[{call('now', text='x')}]", f"[1]\n{call('now', text='[x]')}", f'["{call("now", text="x")}'):
        assert read(NAME, call(text=value, days="3")).calls == [("get_weather", {"text": value, "days": 3})]


def test_strings_arrive_as_the_model_writes_them() -> None:
    reader = parser(NAME, TOOLS, single=set(TOKENS[NAME]).__contains__)
    assert reader.feed("<tool_call>", True) == []
    assert reader.feed("\n<function=get_weather>\n") == []
    assert reader.feed("<parameter=text>") == [CallBegin(0, "get_weather"), CallArguments(0, '{"text": "')]
    assert reader.feed('\na "b"\n') == [CallArguments(0, 'a \\"b\\"')]
    assert reader.feed("c</par") == [CallArguments(0, "\\nc")]
    assert reader.feed("ts\n</parameter>\n") == [CallArguments(0, "</parts")]
    assert reader.feed("<parameter=days>\n4") == [CallArguments(0, '"')]
    assert reader.feed("2\n</parameter>\n</function>") == [CallArguments(0, ', "days": 42}'), CallEnd(0)]


@given(st.dictionaries(st.sampled_from(["city", "text"]), st.text(st.sampled_from("ab\n<>/=\\\"'é🙂 \t"))))
@examples(200)
def test_any_string_comes_back(values: dict[str, str]) -> None:
    assert read(NAME, call(**values)).calls == [("get_weather", values)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
@examples(100)
def test_any_array_comes_back(value: Any) -> None:
    values = {"tags": json.dumps([value])}
    assert read(NAME, call(**values), [TOKENS[NAME]]).calls == [("get_weather", {"tags": [value]})]


@given(st.lists(st.lists(st.sampled_from(["<function=", "</function>", "<tool_call>", '"', "\\", "[", "}", " "]))))
@examples(100)
def test_any_array_with_tags_comes_back(parts: list[list[str]]) -> None:
    value = ["".join(each) for each in parts]
    answer = read(NAME, call(tags=json.dumps(value), days="3"), [TOKENS[NAME]])
    assert answer.calls == [("get_weather", {"tags": value, "days": 3})]
