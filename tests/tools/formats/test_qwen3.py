"""Qwen3's thoughts and calls."""

import json

import pytest

from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content
from engine.tools.formats.select import parser
from tests.tools.formats.answers import TOKENS, TOOLS, Answer, characters, events_of, pieces, read

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
VALUES = {"city": "Köln", "days": 3}


def test_a_thought_a_text_and_a_call() -> None:
    answer = read("qwen3", f"<think>\nWhere? There.\n\nNow.\n</think>\n\nI look.\n{CALL}")
    assert answer.reasoning == "Where? There.\n\nNow."
    assert answer.content == "I look."
    assert answer.calls == [("get_weather", VALUES)]


def test_the_prompt_has_opened_the_thought() -> None:
    assert read("qwen3", "hm\n</think>\n\nYes.\n", reasoning_open=True) == Answer("Yes.\n", "hm")
    assert read("qwen3", "\n\n</think>\n\nYes.", reasoning_open=True) == Answer("Yes.")
    assert read("qwen3", "hm, and hm\n", reasoning_open=True) == Answer("", "hm, and hm\n")


def test_a_leading_extra_think_tag_is_no_text() -> None:
    assert read("qwen3", "\n<think>\nhm\n</think>\nYes.", reasoning_open=True) == Answer("Yes.", "hm")


def test_a_tag_in_a_thought_or_in_a_text_about_tags_is_text() -> None:
    assert read("qwen3", "<think>\nthe <think> tag\n</think>\nok") == Answer("ok", "the <think> tag")
    assert read("qwen3", "Write <think>hm</think>.") == Answer("Write <think>hm</think>.")
    assert read("qwen3", "</think>ok") == Answer("</think>ok")


def test_two_calls_and_no_text_leaks_between_them() -> None:
    answer = read("qwen3", f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n')
    assert answer == Answer("", "", [("get_weather", VALUES), ("now", {})], answer.raw)


def test_a_call_in_a_thought_is_not_lost() -> None:
    answer = read("qwen3", f"<think>\nhm\n{CALL}\n</think>\n\nThere.")
    assert (answer.content, answer.reasoning, answer.calls) == ("There.", "hm", [("get_weather", VALUES)])
    answer = read("qwen3", f"hm\n{CALL}", reasoning_open=True)
    assert (answer.content, answer.reasoning, answer.calls) == ("", "hm", [("get_weather", VALUES)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a < b <tool",
        "<tool_call>\nnone\n</tool_call>\n",
        '<tool_call>\n{"name": "delete_all", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "city": "Köln"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": "Köln"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": null}\n</tool_call>',
        '<tool_call>\n{"name": ["get_weather"], "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather\\q", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": ',
        '<tool_call>\n{"name": "get_wea',
        '<tool_call>\n{"arguments": {"city": "Köln"}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"city": }, "name": "now"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"city": "Köln',
        '<tool_call>\n[{"name": "now", "arguments": {}}]\n</tool_call>',
        "<tool_call>\n{}\n</tool_call>\n\n",
        '<tool_call>\n{"name": "now", "name": "now"}\n</tool_call>',
        "</tool_call>",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert read("qwen3", text) == Answer(text)
    assert read("qwen3", f"\n\na\n{text}\nb") == Answer(f"\n\na\n{text}\nb")


def test_an_unknown_function_does_not_hide_the_call_after_it() -> None:
    unknown = '<tool_call>\n{"name": "delete_all", "arguments": {"x": 1}}\n</tool_call>'
    answer = read("qwen3", f"{unknown}\n{CALL}")
    assert (answer.content, answer.calls) == (unknown, [("get_weather", VALUES)])


def test_without_the_functions_of_a_request_every_name_can_be_called() -> None:
    assert read("qwen3", CALL.replace("get_weather", "delete_all"), tools=None).calls == [("delete_all", VALUES)]
    assert read("qwen3", CALL, tools=[]) == Answer(CALL)


def test_the_name_may_come_after_the_arguments() -> None:
    answer = read("qwen3", '<tool_call>{"arguments": {"city": "Köln", "days": 3}, "name": "get_weather"}</tool_call>')
    assert answer.calls == [("get_weather", VALUES)] and not answer.content
    answer = read("qwen3", '<tool_call>{"type": "function", "name": "now"}</tool_call>')
    assert answer.calls == [("now", {})] and not answer.content


def test_a_tag_is_a_tag_only_as_a_token() -> None:
    spelled = "<think>hm</think>" + CALL
    assert events_of("qwen3", [(spelled, False)], TOKENS["qwen3"]) == [Content(spelled)]
    # In a vocabulary without such tokens the model can only spell it.
    assert read("qwen3", spelled, [()]).calls == [("get_weather", VALUES)]
    # Other special tokens are text.
    assert events_of("qwen3", [("<|fim_pad|>", True), ("\n\n", True)], TOKENS["qwen3"]) == [Content("<|fim_pad|>\n\n")]


def test_tags_split_over_pieces() -> None:
    for at in range(1, len(CALL)):
        events = events_of("qwen3", [("a", False), (CALL[:at], False), (CALL[at:], False), ("b", False)], ())
        assert [type(event) for event in events] == [Content, CallBegin, CallArguments, CallEnd, Content]


def test_arguments_arrive_as_the_model_writes_them() -> None:
    reader = parser("qwen3", TOOLS, single=set(TOKENS["qwen3"]).__contains__)
    found = []
    for piece, special in characters(pieces(CALL, TOKENS["qwen3"])):
        for event in reader.feed(piece, special):
            found.append((piece, event))
    # A key waits for its value, and a number for its end.
    texts = ["{", '"city": "', "K", "ö", "l", "n", '"', ', "days": 3}']
    pieces_of_texts = ["{", '"', "K", "ö", "l", "n", '"', "}"]
    begun = [("{", CallBegin(0, "get_weather"))]
    arguments = [(piece, CallArguments(0, text)) for piece, text in zip(pieces_of_texts, texts, strict=True)]
    assert found == [*begun, *arguments, ("}", CallEnd(0))]
    assert not reader.finish()


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ("", {"city": "Köln", "days": 3}, ""),
        ("}", {"city": "Köln", "days": 3}, ""),
        ("}\n</tool_ca", {"city": "Köln", "days": 3}, "</tool_ca"),
        ("</tool_call>", {"city": "Köln", "days": 3}, ""),
        (" oops}\n</tool_call>", {"city": "Köln", "days": 3}, " oops}\n</tool_call>"),
    ],
)
def test_missing_close_tags(text: str, arguments: object, content: str) -> None:
    start = CALL[: CALL.index("}") + 1]
    answer = read("qwen3", start + text, [()] if text.endswith("_ca") else ())
    assert (answer.calls, answer.content) == ([("get_weather", arguments)], content)


@pytest.mark.parametrize(
    ("arguments", "closed", "content"),
    [
        ("{", {}, ""),
        ('{"ci', {}, '"ci'),
        ('{"city"', {}, '"city"'),
        ('{"city": ', {}, '"city": '),
        ('{"city": "', {"city": ""}, ""),
        ('{"city": "K\\u00f', {"city": "K"}, "\\u00f"),
        ('{"city": "Kö\\', {"city": "Kö"}, "\\"),
        ('{"city": "Köln", "days": ', {"city": "Köln"}, ', "days": '),
        ('{"city": "Köln", "days": 1', {"city": "Köln", "days": 1}, ""),
        ('{"city": "Köln", "days": 1.', {"city": "Köln"}, ', "days": 1.'),
        ('{"deep": tr', {}, '"deep": tr'),
        ('{"tags": ["a", {"b": [', {"tags": ["a", {"b": []}]}, ""),
    ],
)
def test_a_call_that_the_end_of_the_answer_cuts_off_is_closed(arguments: str, closed: object, content: str) -> None:
    answer = read("qwen3", f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}')
    assert answer.calls == [("get_weather", closed)]
    # Nothing is lost: what could not be closed is text.
    assert answer.content == content


def test_arguments_that_break_the_rules_end_where_they_can_be_closed() -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", days: 3}}\n</tool_call>\nDone.'
    answer = read("qwen3", broken)
    assert answer.calls == [("get_weather", {"city": "Köln"})]
    assert answer.content == ", days: 3}}\n</tool_call>\nDone."
    answer = read("qwen3", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days"</tool_call>')
    assert answer.calls == [("get_weather", {"city": "Köln"})]
    assert answer.content == ', "days"</tool_call>'


def test_strings_may_contain_tags_quotes_and_newlines() -> None:
    values = {"text": '</tool_call>\n<tool_call>{"name": "now"}\t\\ \\n "quoted" <think> é🙂\u2028', "city": ""}
    for ascii_only in (False, True):
        written = json.dumps({"name": "get_weather", "arguments": values}, ensure_ascii=ascii_only)
        answer = read("qwen3", f"<tool_call>\n{written}\n</tool_call>")
        assert answer.calls == [("get_weather", values)] and not answer.content


def test_values_stay_as_they_are_written() -> None:
    written = '{"a": -1.50e+2, "b": [true, null, {}], "c" : 12345678901234567890 }'
    answer = read("qwen3", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>')
    assert answer.raw == [written]


def test_what_is_not_looked_for_is_text() -> None:
    text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n"
    assert read("qwen3", text, calls=False, reasoning=False, reasoning_open=True) == Answer(text)
    assert read("qwen3", text, calls=False) == Answer(f"I look.\n{CALL}\n", "hm")
    answer = read("qwen3", text, reasoning=False)
    assert answer.content == "<think>\nhm\n</think>\n\nI look." and answer.calls == [("get_weather", VALUES)]
