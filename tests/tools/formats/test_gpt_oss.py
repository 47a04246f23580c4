"""Messages of gpt-oss."""

import pytest

from engine.text.template.harmony import parts_of_answer
from engine.tools.formats.events import Content
from tests.text.template.test_harmony import CALLED, TEMPLATE, WITH_TOOLS
from tests.tools.formats.answers import TOKENS, Answer, events_of, read

NAME = "gpt_oss"
THOUGHT = "<|channel|>analysis<|message|>hm"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALLING = ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln"}'
CALLS = [("get_weather", {"city": "Köln"})]


@pytest.mark.parametrize("end", ["", "<|end|>", "<|return|>"])
def test_a_thought_and_a_text(end: str) -> None:
    assert read(NAME, f"{THOUGHT}{NEXT}{FINAL}{end}") == Answer("Yes.", "hm")


def test_thoughts_and_texts_of_several_messages() -> None:
    assert read(NAME, f"{THOUGHT}{NEXT}{THOUGHT}\n{NEXT}{FINAL}\n{NEXT}{FINAL}") == Answer("Yes.\n\nYes.", "hm\nhm\n")
    assert read(NAME, f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}") == Answer("I look.\nYes.")


@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>commentary{CALLING}",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Köln"}',
        ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Köln"}\n',
        f"<|channel|>analysis{CALLING}",
    ],
)
def test_the_function_is_named_in_the_channel_or_in_the_role(text: str, end: str) -> None:
    for before, reasoning in (("", ""), (f"{THOUGHT}{NEXT}", "hm")):
        answer = read(NAME, before + text + end)
        assert (answer.reasoning, answer.content, answer.calls) == (reasoning, "", CALLS)


def test_two_calls_and_a_text() -> None:
    call = f"<|channel|>commentary{CALLING}<|call|>"
    answer = read(NAME, f"{call}<|start|>assistant{call}<|start|>assistant{FINAL}")
    assert (answer.content, answer.calls) == ("Yes.", CALLS * 2)


@pytest.mark.parametrize(
    "text",
    [
        "Yes.\n",
        " to Köln",
        f"<|channel|>commentary{CALLING.replace('get_weather', 'delete_all')}<|call|>",
        "<|channel|>commentary to=functions.get_weather<|message|>Köln<|end|>",
        "<|channel|>anal",
        "<|message|>Yes.",
        "<|start|>user<|message|>Yes.<|end|>",
        "<|channel|>final<|end|>",
    ],
)
def test_what_is_no_message_stays_text(text: str) -> None:
    assert read(NAME, text) == Answer(text)


def test_a_call_that_the_end_of_the_answer_cuts_off_is_closed() -> None:
    answer = read(NAME, f"<|channel|>commentary{CALLING[:-3]}")
    assert (answer.content, answer.calls) == ("", [("get_weather", {"city": "Köl"})])


def test_a_tag_is_a_tag_only_as_a_token() -> None:
    assert events_of(NAME, [(THOUGHT, False)], TOKENS[NAME]) == [Content(THOUGHT)]


def test_what_is_not_looked_for_is_text() -> None:
    call = f"<|channel|>commentary{CALLING}<|call|>"
    assert read(NAME, call, calls=False) == Answer(call)
    assert read(NAME, f"{THOUGHT}<|end|><|start|>assistant{FINAL}", reasoning=False).content.startswith(THOUGHT)


def test_what_the_template_writes_is_read_as_the_template_reads_it() -> None:
    whole = TEMPLATE.render(CALLED, add_generation_prompt=False, **WITH_TOOLS)
    text = whole.partition("<|start|>assistant")[2].partition("<|start|>functions")[0]
    expected, answer = parts_of_answer(text.replace("<|call|>", "")), read(NAME, text)
    assert answer.reasoning == expected["thinking"] == "I call it."
    assert answer.calls == [("get_weather", expected["tool_calls"][0]["function"]["arguments"])]
    assert answer.content == expected["content"] == ""
