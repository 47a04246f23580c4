"""Calls of Llama 3: JSON at the beginning of the answer."""

import pytest

from engine.tools.formats.events import Content
from tests.tools.formats.answers import TOKENS, Answer, events_of, read

CALL = '{"name": "get_weather", "parameters": {"city": "Köln", "days": 3}}'
CALLS = [("get_weather", {"city": "Köln", "days": 3})]


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n {CALL}\n",
        f"<|python_tag|>{CALL}",
        CALL.replace('{"name"', '{"type": "function", "name"'),
        CALL.replace("parameters", "arguments"),
        CALL.removesuffix("}"),
    ],
)
def test_json_at_the_beginning_is_a_call(text: str) -> None:
    answer = read("llama3", text)
    assert (answer.content, answer.calls) == ("", CALLS)


def test_two_calls() -> None:
    answer = read("llama3", f'{CALL}; {{"name": "now", "parameters": {{}}}}')
    assert (answer.content, answer.calls) == ("", [*CALLS, ("now", {})])
    answer = read("llama3", f"{CALL}; and so on")
    assert (answer.content, answer.calls) == ("; and so on", CALLS)


def test_text_after_a_call_is_text() -> None:
    answer = read("llama3", f"{CALL}\n\nI called it.\n")
    assert (answer.content, answer.calls) == ("I called it.\n", CALLS)


@pytest.mark.parametrize(
    "text",
    [
        f"I call it: {CALL}",
        CALL.replace("get_weather", "delete_all"),
        '{"name": "get_weather"}',
        '{"name": "get_weather", "parameters": "Köln"}',
        '{"name": "get_weather", "city": "Köln"}',
        '{"name": "get_weather", "parameters"',
        '{"name": "get_wea',
        '{"parameters": {"city": "Köln"}}',
        '{"type": "object", "name": "now", "parameters": {}}',
        '{"city": "Köln"}',
        f"[{CALL}]",
        f"```json\n{CALL}\n```",
        '<|python_tag|>brave_search.call(query="Köln")',
        "<|python_tag|>",
        "{",
        "",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert read("llama3", text) == Answer(text)


def test_a_tag_is_a_tag_only_as_a_token() -> None:
    text = f"<|python_tag|>{CALL}"
    assert events_of("llama3", [(text, False)], TOKENS["llama3"]) == [Content(text)]


def test_calls_that_are_not_looked_for_are_text() -> None:
    assert read("llama3", CALL, calls=False) == Answer(CALL)
    assert read("llama3", CALL.replace("get_weather", "any"), tools=None).calls == [("any", CALLS[0][1])]
