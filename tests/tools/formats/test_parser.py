"""What holds for every format: the cuts of a text change nothing, nothing is lost, and the time is linear."""

import itertools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.formats.arguments import whole_members
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, merged
from engine.tools.formats.select import FORMATS, parser
from tests.tiers import examples, few
from tests.tools.formats.answers import TOKENS, TOOLS, Answer, Pieces, characters, collected, events_of, pieces, read

M = "｜DSML｜"
FRAGMENTS: dict[str, tuple[str, ...]] = {
    "plain": ("<think>", "<tool_call>"),
    "think": ("<think>", "</think>"),
    "qwen3": (
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "',
            'now"',
            'get_weather"',
            ', "arguments": ',
        ),
        *(
            '{"name": "get_weather", "arguments": {"city": "',
            '"}}',
            '"arguments": {"text": "',
            '"text": "',
            "{",
            "}",
            "[",
        ),
    ),
    "qwen3_coder": (
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<function=now>",
            "<function=get_weather>",
            "<function=",
        ),
        *("<parameter=city>", "<parameter=text>", "<parameter=tags>", "</parameter>", "</function>", "<parameter="),
    ),
    "gemma4": (
        *(
            "<|channel>",
            "thought",
            "<channel|>",
            "<|tool_call>",
            "call:now{",
            "call:get_weather{",
            "<tool_call|>",
            "city:",
        ),
        *('<|"|>', "text:", "{", "}", "[", "]", "<|tool_response>", "-1", "true"),
    ),
    "llama3": ("<|python_tag|>", '{"name": "get_weather", "parameters": {"city": "', '"}}', '"', ";", "{", "}"),
    "deepseek4": (
        *("<think>", "</think>", f"<{M}tool_calls>", f"</{M}tool_calls>", f'<{M}invoke name="', f"</{M}invoke>", M),
        *('now">', 'get_weather">', f'<{M}parameter name="city" string="', 'true">', 'false">', f"</{M}parameter>"),
        f"&lt;/{M}parameter>",
    ),
    "gpt_oss": (
        *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary", "<|message|>"),
        *(
            "<|end|>",
            "<|call|>",
            " to=functions.now",
            " <|constrain|>json",
            '{"city": "',
            '"}',
            "{",
            "}",
            "<|channel|>",
        ),
    ),
    "generic": (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', "[", "]", ", ", "}"),
        *('{"name": "get_weather", "arguments": {"city": "', '"}}', "{"),
    ),
    "granite": (
        *("<think>", "</think>", "<|tool_call|>", "</tool_call>", '{"name": "now", "arguments": ', "[", "]", ", ", "}"),
        *('{"name": "get_weather", "arguments": {"city": "', '"}}', "{"),
    ),
    "mistral": (
        *("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "now", "get_weather", '{"city": "', '"}', "{"),
        *('[{"name": "get_weather", "arguments": {"city": "', '"}}]', '"}}, {"name": "now", "arguments": ', "}", "]"),
    ),
    "glm": (
        *TOKENS["glm"],
        *("<tool_call>now", "<tool_call>get_weather", "city", "tags", "<arg_key>city</arg_key><arg_value>"),
    ),
    "minimax": (
        *("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', "</invoke>"),
        *('<invoke name="get_weather">', '<parameter name="city">', '<parameter name="days">', "</parameter>"),
    ),
    "seed_oss": (
        *("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<function=now>", "</function>"),
        *("<function=get_weather>", "<parameter=city>", "<parameter=days>", "</parameter>"),
    ),
    "deepseek3": (
        *(
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "```json",
            "```",
        ),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "now", "get_weather", '{"city": "', '"}', "{"),
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
    ),
    "kimi": (
        *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
        *("<|tool_call_begin|>functions.now:0", "<|tool_call_begin|>functions.get_weather:1", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", '{"city": "', '"}', "{"),
    ),
    "hunyuan": (
        *(
            "<think>",
            "</think>",
            "<tool_calls>",
            "</tool_calls>",
            "<tool_call>",
            "</tool_call>",
            "<tool_sep>",
            "```json",
        ),
        *("<tool_call>now", "<tool_call>get_weather", "```", '{"city": "', '"}', "[", "]", '{"name": "now"}'),
    ),
    "apertus": (
        *("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>", "[", "]", '{"now": ', "}"),
        *('{"get_weather": {"city": "', '"}}', ", ", "{"),
    ),
}
"""Parts of which texts consist that are calls, nearly calls, or none."""

COMMON = ("\n", "\n\n", " ", ",", ":", '"', "\\", "<", ">", "</", "é🙂", "{}", "null", "3", "0.5")


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    """A text of the parts of a format, with a different word between any two of them."""
    parts = draw(st.lists(st.sampled_from((*FRAGMENTS[name] * 2, *COMMON, "WORD")), max_size=20))
    return "".join(f"w{i}w" if part == "WORD" else part for i, part in enumerate(parts))


@st.composite
def cut(draw: st.DrawFn, arriving: Pieces) -> Pieces:
    """``arriving`` with its text cut anywhere."""
    found: Pieces = []
    for text, special in arriving:
        cuts = [] if special else sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
        found += [(text[a:b], special) for a, b in itertools.pairwise([0, *cuts, len(text)])]
    return found


OPTIONS = st.fixed_dictionaries({"reasoning_open": st.booleans(), "tools": st.sampled_from([TOOLS, None])})


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), options=OPTIONS)
@examples(400, 25)
def test_cuts_change_nothing_and_no_word_is_lost(name: str, data: st.DataObject, options: dict[str, Any]) -> None:
    text = data.draw(texts(name))
    tokens = data.draw(st.sampled_from([TOKENS[name], ()]))
    whole = pieces(text, tokens)
    events = events_of(name, whole, tokens, **options)
    assert events_of(name, data.draw(cut(whole)), tokens, **options) == events
    answer = collected(events)
    found = " ".join((answer.content, answer.reasoning, *answer.raw, *(called for called, _ in answer.calls)))
    assert set(re.findall(r"w\d+w", text)) <= set(re.findall(r"w\d+w", found))


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@examples(100, 12)
def test_without_calls_and_thoughts_the_text_is_the_text(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    assert read(name, text, calls=False, reasoning=False, reasoning_open=True).content == text or name == "gpt_oss"
    # No function can be called.
    assert read(name, text, tools=[], reasoning=False).content == text or name == "gpt_oss"


@pytest.mark.parametrize("name", FORMATS)
def test_any_single_piece_may_be_special(name: str) -> None:
    """A special token is text where it is no tag; it is never recognized together with its neighbours."""
    reader = parser(name, TOOLS, single=lambda tag: True)
    events = [
        *reader.feed("<|fim", False),
        *reader.feed("<|endoftext|>", True),
        *reader.feed("", True),
        *reader.finish(),
    ]
    assert merged(events) == [Content("<|fim<|endoftext|>")]
    assert reader.finish() == []


def test_plain_text_is_text() -> None:
    text = '<think>\nhm\n</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
    assert read("plain", text, reasoning_open=True) == Answer(text)
    assert read("think", text) == Answer(text[text.index("<tool_call>") :], "hm")


def test_text_arrives_at_once() -> None:
    """Only what may become a tag waits, and newlines, which may belong to one."""
    reader = parser("qwen3_coder", TOOLS, single={"<think>", "</think>", "<tool_call>"}.__contains__)
    steps = [("Hi", "Hi"), (" <", " "), ("b", "<b"), (">\n", ">"), ("\n", ""), ("a<func", "\n\na"), ("x", "<funcx")]
    for piece, text in steps:
        assert reader.feed(piece) == ([Content(text)] if text else [])
    assert reader.feed("\n") == []
    assert reader.finish() == [Content("\n")]


def test_a_lone_surrogate_is_no_character() -> None:
    for name in FORMATS:
        assert events_of(name, [("a\ud800b\udfff", False)], ()) == [Content("a\ufffdb\ufffd")]


def test_merged_events() -> None:
    events: list[Event] = [
        Content("a"),
        Content("b"),
        Reasoning("c"),
        CallBegin(0, "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
    ]
    expected = [Content("ab"), Reasoning("c"), CallBegin(0, "f"), CallArguments(0, "{}"), CallEnd(0), Content("d")]
    assert merged([*events, CallEnd(0), Content("d")]) == expected
    assert merged([]) == []


LONG = 200_000
SHAPES: list[tuple[str, str, str]] = [
    ("qwen3_coder", "<function=now>\n<parameter=text>\n", "</parameter>    "),
    ("qwen3_coder", "<function=get_weather>\n<parameter=tags>\n", "1, "),
    ("qwen3", '<tool_call>{"arguments": {"text": "', "abc\\n"),
    ("qwen3_coder", "<tool_call>", "\n "),
    ("gemma4", "<|tool_call>call:now{text:", "abc "),
    ("qwen3_coder", "", "abc def\n"),
    ("qwen3_coder", "", "<"),
    ("qwen3_coder", "", "\n"),
    ("qwen3_coder", "", "<function="),
    ("qwen3_coder", "<function=now>\n<parameter=text>\n", "abc def\n"),
    ("qwen3_coder", "<function=now>\n<parameter=text>\n<function=", "</parameter></function>"),
    ("qwen3", '<tool_call>{"name": "now", "arguments": {"text": "', "abc\\n"),
    ("qwen3", '<tool_call>{"name": "now", "arguments": {"text": ', "1"),
    ("qwen3", '<tool_call>{"name": "now", "arguments": {"text": ', "["),
    ("qwen3", '<tool_call>{"name": "', "now"),
    ("gemma4", '<|tool_call>call:now{text:<|"|>', "abc\n"),
    ("deepseek4", f'<{M}invoke name="now"><{M}parameter name="text" string="false">', "[1],"),
    ("deepseek4", "", f"<{M}tool_calls>\n"),
    ("gpt_oss", "<|channel|>", "final "),
    ("llama3", '{"name": "now", "parameters": {}}', "; "),
]


@pytest.mark.parametrize(("name", "start", "part"), few(SHAPES, 3))
def test_the_time_is_linear(name: str, start: str, part: str) -> None:
    """200 kB in one piece, and in 50,000: to look at a text that waits again for each piece would take many seconds."""
    text = start + part * (LONG // len(part))
    for size in (len(text), 4):
        arriving = [(text[i : i + size], False) for i in range(0, len(text), size)]
        started = time.process_time()
        collected(events_of(name, arriving, ()))
        assert time.process_time() - started < 3


CALLS = {
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 12, "tags": ["a"]}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        '<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>'
    ),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:12,tags:[<|"|>a<|"|>]}<tool_call|>',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln", "days": 12, "tags": ["a"]}}',
    "deepseek4": (
        f'<{M}tool_calls>\n<{M}invoke name="get_weather">\n<{M}parameter name="city" string="true">Köln</{M}parameter>\n'
        f'<{M}parameter name="days" string="false">12</{M}parameter>\n'
        f'<{M}parameter name="tags" string="false">["a"]</{M}parameter>\n</{M}invoke>\n</{M}tool_calls>'
    ),
    "gpt_oss": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Köln", "days": 12, "tags": ["a"]}<|call|>'
    ),
}
"""The same call in each format."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_off_is_neither_completed_nor_text(name: str) -> None:
    arriving = characters(pieces(CALLS[name], TOKENS[name]))
    (whole,) = collected(events_of(name, arriving, TOKENS[name])).calls
    seen = set()
    for n in range(1, len(arriving) + 1):
        reader = parser(name, tools=TOOLS, single=set(TOKENS[name]).__contains__)
        events = [event for piece, special in arriving[:n] for event in reader.feed(piece, special)]
        events = [*events, *reader.finish(cut=True)]
        # A single "<" before the token of DSML may be text.
        assert (
            events == [Content("<")]
            if arriving[:n] == [("<", False)]
            else not any(isinstance(event, (Content, Reasoning)) for event in events)
        )
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        if any(isinstance(event, CallEnd) for event in events):
            assert json.loads(arguments) == whole[1]
            seen.add("whole")
        elif arguments:
            with pytest.raises(ValueError, match="."):
                json.loads(arguments)
            assert whole_members(arguments).items() <= whole[1].items()
            seen.add("city" if whole_members(arguments) else "begun")
    assert seen == {"begun", "city", "whole"}


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_is_cut_off_is_whole(name: str) -> None:
    text = "<|channel|>final<|message|>a < b {" if name == "gpt_oss" else "a < b {"
    reader = parser(name, tools=TOOLS, single=set(TOKENS[name]).__contains__)
    events = [event for piece, special in pieces(text, TOKENS[name]) for event in reader.feed(piece, special)]
    assert merged([*events, *reader.finish(cut=True)]) == [Content("a < b {")]
