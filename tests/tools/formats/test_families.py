"""Families of models: their own examples of calls, and what breaks off or is none.

The templates are those that the models were published with, or the lines of them that write calls.
"""

import json
from typing import Any

import pytest

from engine.tools.formats import generic
from engine.tools.formats.described import described
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from engine.tools.formats.history import adapted, short_id
from engine.tools.formats.select import detect, parser
from tests.tools.formats.answers import TOKENS, TOOLS, Answer, characters, pieces, read

CALLS = [("get_weather", {"city": "Köln", "days": 3}), ("now", {})]
CITY = '{"city": "Köln", "days": 3}'

WRITTEN = {
    "generic": f"""<tool_call>
{{"name": "get_weather", "arguments": {CITY}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {{}}}}
</tool_call>""",
    "generic list": f"""<tool_call>[
{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>""",
    "granite": f"""<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]""",
    "granite tagged": f"""<tool_call>[{{"arguments": {CITY}, "name": "get_weather"}}, {{"name": "now"}}]</tool_call>""",
    "mistral": f"""[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}, "id": "abcdef123"}}, \
{{"name": "now", "arguments": {{}}, "id": "abcdef124"}}]""",
    "mistral args": f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral id": f"[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{CITY}[TOOL_CALLS]now[CALL_ID]abcdef124[ARGS]{{}}",
    "glm": """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>now
</tool_call>""",
    "glm 4.7": """<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>\
<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>""",
    "minimax": """<minimax:tool_call>
<invoke name="get_weather"><parameter name="city">Köln</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="now"></invoke>
</minimax:tool_call>""",
    "seed_oss": """<seed:tool_call>
<function=get_weather>
<parameter=city>Köln</parameter>
<parameter=days>3</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=now>
</function>
</seed:tool_call>""",
    "deepseek3": f"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>\
<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek3 fenced": f"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{CITY}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{{}}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "kimi": f"""<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CITY}\
<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>\
<|tool_calls_section_end|>""",
    "hunyuan": f"""<tool_calls>
<tool_call>get_weather
```json
{CITY}
```
</tool_call>
<tool_call>now
```json
{{}}
```
</tool_call>
</tool_calls>""",
    "hunyuan list": f"""<tool_calls>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]\
</tool_calls>""",
    "hunyuan typed": f"""<tool_calls><tool_call>function<tool_sep>get_weather
```json
{CITY}
```</tool_call><tool_call>function<tool_sep>now
```json
{{}}
```</tool_call></tool_calls>""",
    "apertus": f"""<|tools_prefix|>[{{"get_weather": {CITY}}}, {{"now": {{}}}}]<|tools_suffix|>""",
}
"""Two calls as each family writes them, by the format and a word."""


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_that_are_cut_off_are_neither_completed_nor_text(case: str) -> None:
    """At every character; but the first ones of a tag that is no token may be text."""
    name = case.split()[0]
    arriving = characters(pieces(WRITTEN[case], TOKENS[name]))
    ended = set()
    for n in range(1, len(arriving)):
        reader = parser(name, tools=TOOLS, single=set(TOKENS[name]).__contains__)
        events = [event for piece, special in arriving[:n] for event in reader.feed(piece, special)]
        events = [*events, *reader.finish(cut=True)]
        text = "".join(event.text for event in events if isinstance(event, (Content, Reasoning)))
        assert not text.strip() or any(tag.startswith(text) for tag in reader.tags), text
        begun = [i for i, event in enumerate(events) if isinstance(event, CallBegin)]
        ended.add(n_ended := sum(isinstance(event, CallEnd) for event in events))
        if len(begun) > n_ended:
            arguments = "".join(event.text for event in events[begun[-1] :] if isinstance(event, CallArguments))
            with pytest.raises(ValueError, match="."):
                json.loads(arguments)
    assert ended >= {0, 1}


@pytest.mark.parametrize("kind", WRITTEN)
def test_two_calls_after_a_text(kind: str) -> None:
    answer = read(kind.split()[0], f"I look.\n{WRITTEN[kind]}")
    assert (answer.content, answer.calls) == ("I look.", CALLS)
    answer = read(kind.split()[0], WRITTEN[kind])
    assert (answer.content, answer.calls) == ("", CALLS)


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_that_break_off(kind: str) -> None:
    """However an answer breaks off, the calls before are there, and the others are text or shorter."""
    text = WRITTEN[kind]
    for end in range(len(text)):
        answer = read(kind.split()[0], text[:end], [()])
        names = [name for name, _ in answer.calls]
        assert names == ["get_weather", "now"][: len(names)]
        if len(names) == 2:
            assert answer.calls == CALLS
        elif not names:
            assert answer.content.rstrip() == text[:end].rstrip()


@pytest.mark.parametrize("kind", WRITTEN)
def test_other_functions_are_text(kind: str) -> None:
    text = f"a\n{WRITTEN[kind].replace('get_weather', 'delete').replace('now', 'remove')}\nb"
    assert read(kind.split()[0], text) == Answer(text)


def test_the_thoughts_of_families() -> None:
    for format, begin, end in (
        ("mistral", "[THINK]", "[/THINK]"),
        ("seed_oss", "<seed:think>", "</seed:think>"),
        ("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("hunyuan", "<think>", "</think>"),
    ):
        assert read(format, f"{begin}hm{end}Yes.") == Answer("Yes.", "hm")


TEMPLATES = {
    "mistral": """{%- if tools %}{{ "[AVAILABLE_TOOLS]" }}{% endif %}{{- "[TOOL_CALLS][" }}""",
    "glm": """{%- if tools -%}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{% endif %}""",
    "kimi": """{%- if tools -%}{% endif %}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>""",
    "minimax": """{%- if tools -%}{{ '<minimax:tool_call>' }}{{- '<invoke name="' + tool_call.name + '">' }}{% endif %}""",
    "seed_oss": """{%- if tools %}{% set toolcall_begin_token = '<seed:tool_call>' %}{{ "\\n<function=" }}{% endif %}""",
    "granite": """{%- if tools and not available_tools %}respond only with <|tool_call|> followed by{% endif %}""",
    "deepseek3": """{%- if tools %}{% endif %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '<｜tool▁sep｜>'}}""",
    "hunyuan": """{% if tools %}{% set c = '为<tool_calls>[{\\"name\\": \\"func_name1\\"' %}{% endif %}""",
    "apertus": """{% if tools %}{% set a = '<|tools_prefix|>' %}{% set b = '<|tools_suffix|>' %}{% endif %}""",
    "generic": """{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}""",
}
"""Lines of the templates of the families."""


@pytest.mark.parametrize("format", TEMPLATES)
def test_templates_of_families(format: str) -> None:
    assert detect(TEMPLATES[format], True) == format
    # A template that is never told about tools cannot describe them.
    assert (
        detect(TEMPLATES[format].replace("tools", "others"), True)
        in ("generic", "apertus")[: 1 + (format == "apertus")]
    )


def test_the_ids_of_calls_suit_the_template() -> None:
    call = {"type": "function", "id": "call_0123", "function": {"name": "now", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call, call | {"id": "call_0124"}]},
        {"role": "tool", "tool_call_id": "call_0124", "content": "12:00"},
    ]
    first, second = adapted("mistral", messages)
    ids = [each["id"] for each in first["tool_calls"]]
    assert ids[0] != ids[1] == second["tool_call_id"]
    assert all(len(id) == 9 and id.isalnum() for id in ids) and short_id("abcDEF123") == "abcDEF123"
    first, second = adapted("kimi", messages)
    assert [each["id"] for each in first["tool_calls"]] == ["functions.now:0", "functions.now:1"]
    assert second["tool_call_id"] == "functions.now:1"
    assert adapted("qwen3", messages) == messages and messages[1]["tool_call_id"] == "call_0124"


def test_a_conversation_with_calls_as_text() -> None:
    call = {"type": "function", "id": "a", "function": {"name": "now", "arguments": {"zone": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "tool", "tool_call_id": "b", "content": "13:00"},
    ]
    asked, called, result = generic.as_text(messages)
    assert asked == messages[0] and called["role"] == "assistant" and result["role"] == "user"
    found = read("generic", called["content"])
    assert (found.content, found.calls) == ("I look.", [("now", {"zone": "é"})])
    assert result["content"].count("<tool_response>") == 2 and "12:00" in result["content"]
    text = generic.describe([{"type": "function", "function": {"name": "now", "description": "The time"}}])
    assert json.dumps({"name": "now", "description": "The time"}) in text.split("\n")
    assert generic.with_system([{"role": "system", "content": "Be brief."}], "T")[0]["content"] == "Be brief.\n\nT"
    assert [each["role"] for each in generic.with_system(messages, "T")][:2] == ["system", "user"]


def test_earlier_calls_of_granite_are_as_it_writes_them() -> None:
    """Granite 3.3's template writes the role and the content of every message, and no calls."""
    weather = {"type": "function", "id": "a", "function": {"name": "get_weather", "arguments": CALLS[0][1]}}
    now = {"type": "function", "id": "b", "function": {"name": "now", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [weather, now]},
        {"role": "tool", "tool_call_id": "a", "content": "mild"},
    ]
    for tools in (TOOLS, []):
        source = "respond only with <|tool_call|> followed by{% set available_tools = tools %}"
        format, own, _ = described(source + "<|start_of_role|>", messages, tools, {})
        assert (format, own[0], own[2]) == ("granite", messages[0], messages[2])
        found = read("granite", own[1]["content"])
        assert (found.content, found.calls) == ("I look.", CALLS) and "tool_calls" not in own[1]
        # A template that writes calls is given them.
        assert described(source + "{{ message.tool_calls }}", messages, tools, {}).messages == messages
