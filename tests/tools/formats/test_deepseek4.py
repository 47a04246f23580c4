"""DeepSeek's markup language, as its template writes it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.template.dsml import parts_of_answer
from engine.tools.formats.events import Content
from tests.text.template.test_deepseek4 import EOS, TEMPLATE
from tests.tiers import examples
from tests.tools.formats.answers import TOKENS, Answer, events_of, read

NAME = "deepseek4"
MARK = "｜DSML｜"


def written(content: str, *calls: tuple[str, dict[str, Any]], **more: Any) -> str:
    """An answer as the template writes it, after ``</think>``."""
    called = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    message = {"role": "assistant", "content": content, "tool_calls": called, **more}
    text = TEMPLATE.render([{"role": "user", "content": "Hi"}, message], add_generation_prompt=False, **more)
    return text.partition("<think>" if more.get("thinking") else "</think>")[2].removesuffix(EOS)


def test_a_thought_a_text_and_a_call() -> None:
    text = written("I look.", ("get_weather", {"city": "Köln", "days": 3}), thinking=True, reasoning_content="hm\nyes")
    assert text.startswith("hm\nyes</think>I look.\n\n<")
    answer = read(NAME, text, reasoning_open=True)
    assert (answer.reasoning, answer.content) == ("hm\nyes", "I look.")
    assert answer.calls == [("get_weather", {"city": "Köln", "days": 3})]


def test_thoughts() -> None:
    assert read(NAME, "Yes.") == Answer("Yes.")
    assert read(NAME, "<think>hm</think>\n\nYes.") == Answer("Yes.", "hm")
    assert read(NAME, "hm", reasoning_open=True) == Answer("", "hm")


def test_two_calls_and_a_call_in_a_thought() -> None:
    calls = [("get_weather", {"city": "Köln"}), ("now", {}), ("get_weather", {"city": "Bonn"})]
    answer = read(NAME, written("", *calls))
    assert (answer.content, answer.calls) == ("", calls)
    answer = read(NAME, f"hm{written('', *calls)}</think>Done.", reasoning_open=True)
    assert (answer.reasoning, answer.content, answer.calls) == ("hm", "Done.", calls)


def test_the_block_of_an_earlier_release() -> None:
    text = written("", ("now", {})).replace("tool_calls", "function_calls")
    assert (read(NAME, text).content, read(NAME, text).calls) == ("", [("now", {})])


def test_values() -> None:
    values = {
        "city": f'</parameter>\n<b>"\\</b></{MARK}parameter> é🙂',
        "days": 3,
        "tags": ["a", None, {"b": True}],
        "share": -0.5,
        "text": "",
    }
    assert read(NAME, written("", ("get_weather", values))).calls == [("get_weather", values)]


def test_what_should_be_json_and_is_none_is_a_string() -> None:
    text = written("", ("get_weather", {"days": 3}))
    assert read(NAME, text.replace(">3<", ">three<")).calls == [("get_weather", {"days": "three"})]
    assert read(NAME, text.replace(">3<", ">NaN<")).calls == [("get_weather", {"days": "NaN"})]
    assert read(NAME, text.replace(">3<", ">\n{}\n<")).calls == [("get_weather", {"days": {}})]


@pytest.mark.parametrize("last", ["parameter", "invoke", "tool_calls"])
def test_missing_close_tags_at_the_end(last: str) -> None:
    text = written("", ("get_weather", {"city": "Köln"}))
    answer = read(NAME, text[: text.index(f"</{MARK}{last}>")])
    assert (answer.content, answer.calls) == ("", [("get_weather", {"city": "Köln"})])


@pytest.mark.parametrize(
    "text",
    [
        written("", ("delete_all", {"city": "Köln"})).lstrip(),
        f"<{MARK}tool_calls>",
        f"<{MARK}tool_calls>\nnone\n</{MARK}tool_calls>",
        f'<{MARK}tool_calls>\n<{MARK}invoke name="get_weather">\nKöln',
        f'<{MARK}invoke name="get_weather"></{MARK}parameter>',
        f'<{MARK}invoke name="get_weather" x>',
        f'<{MARK}invoke name="get_wea',
        f"<{MARK}",
        MARK,
        "<DSML tool_calls>",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert read(NAME, text) == Answer(text)
    assert read(NAME, f"a\n{text}\nb\n") == Answer(f"a\n{text}\nb\n")


def test_an_unknown_function_does_not_hide_the_call_after_it() -> None:
    answer = read(NAME, written("", ("delete_all", {}), ("now", {})))
    assert answer.calls == [("now", {})]
    assert answer.content == f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="delete_all">\n\n</{MARK}invoke>'


def test_a_call_that_breaks_the_rules_ends_where_it_can_be_closed() -> None:
    text = written("", ("get_weather", {"city": "Köln", "days": 3})).replace('"false"', '"maybe"')
    answer = read(NAME, text)
    assert answer.calls == [("get_weather", {"city": "Köln"})]
    assert answer.content == text[text.index(f'<{MARK}parameter name="days"') :]


def test_a_tag_is_a_tag_only_with_the_token() -> None:
    text = written("", ("now", {}))
    assert events_of(NAME, [(text, False)], TOKENS[NAME]) == [Content(text)]


PARAMETERS = st.text(min_size=1, max_size=5).filter(lambda text: not {'"', "\n"} & set(text))
VALUES = st.text() | st.integers() | st.lists(st.text() | st.booleans(), max_size=3) | st.none()


@given(st.dictionaries(PARAMETERS, VALUES, max_size=3), st.text(max_size=5))
@examples(60)
def test_answers_are_divided_as_the_template_divides_them(values: dict[str, Any], content: str) -> None:
    text = written(content, ("now", values))
    expected = parts_of_answer(text)
    answer = read(NAME, text)
    assert [called["function"]["arguments"] for called in expected["tool_calls"]] == [
        value for _, value in answer.calls
    ]
    assert answer.content == expected["content"].rstrip("\n")
