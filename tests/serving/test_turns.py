"""Conversations whose order of roles a chat template refuses, in the words of published templates."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import TemplateError
from engine.serving.conversation import prompt_of
from engine.text.template.budget import BudgetError
from engine.text.template.chat import ChatTemplate
from engine.tools.turns import rendered
from tests.text.template.test_chat import TOK

GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
"""That of google/gemma-2-2b-it."""

MINISTRAL_3 = """\
{%- if messages[0].role == 'system' -%}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]
{%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and (message.tool_calls is not defined or message.tool_calls is none or message.tool_calls | length == 0)) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must alternate user and assistant roles except for tool calls and results.') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}[INST]{{ message.content }}[/INST]
    {%- elif message['role'] == 'assistant' %}
        {%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and (message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}
            {{- raise_exception('Assistant message must have a string or a list of chunks in content or a list of tool calls.') }}
        {%- endif %}
        {{- message.content }}{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}{% endfor %}</s>
    {%- elif message['role'] == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported, got ' + message['role'] + '.') }}
    {%- endif %}
{%- endfor %}"""  # noqa: E501
"""The conditions of mistralai/Ministral-3-14B-Reasoning-2512, with less around the texts."""


def said(role: str, content: str = "", *calls: str) -> dict[str, Any]:
    made = [{"type": "function", "id": "123456789", "function": {"name": name, "arguments": {}}} for name in calls]
    result = {"tool_call_id": "123456789"} if role == "tool" else {}
    return {"role": role, "content": content} | ({"tool_calls": made} if made else {}) | result


A, B, C = said("user", "a"), said("user", "b"), said("user", "c")
SYSTEM, LATER = said("system", "s"), said("system", "t")
ANSWER, NOTHING = said("assistant", "x"), said("assistant")

CONVERSATIONS: dict[str, tuple[Sequence[dict[str, Any]], str, str]] = {
    "alternating": ([A, ANSWER, B], "", "[INST]a[/INST]x</s>[INST]b[/INST]"),
    "two questions": ([A, B], "a\n\nb", "[INST]a\n\nb[/INST]"),
    "two answers": ([A, ANSWER, said("assistant", "y"), B], "", "[INST]a[/INST]x\n\ny</s>[INST]b[/INST]"),
    "an answer without text": ([A, NOTHING, B], "", "[INST]a\n\nb[/INST]"),
    "a system message": ([SYSTEM, A], "s\n\na", "[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]a[/INST]"),
    "two system messages": ([SYSTEM, LATER, A], "s\n\nt\n\na", "[SYSTEM_PROMPT]s\n\nt[/SYSTEM_PROMPT][INST]a[/INST]"),
    "a later system message": (
        [SYSTEM, A, LATER, B],
        "s\n\na\n\nt\n\nb",
        "[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]a\n\nt\n\nb[/INST]",
    ),
    "a text before calls": (
        [A, ANSWER, said("assistant", "", "f", "g"), said("tool", "1"), said("tool", "2"), ANSWER, B],
        "",
        "[INST]a[/INST]x[TOOL_CALLS]f[TOOL_CALLS]g</s>[TOOL_RESULTS]1[/TOOL_RESULTS][TOOL_RESULTS]2[/TOOL_RESULTS]x</s>"
        "[INST]b[/INST]",
    ),
    "a text after results": (
        [A, said("assistant", "", "f"), said("tool", "1"), B, C, ANSWER, C],
        "",
        "[INST]a[/INST][TOOL_CALLS]f</s>[TOOL_RESULTS]1\n\nb\n\nc[/TOOL_RESULTS]x</s>[INST]c[/INST]",
    ),
}
"""Messages; the one message of the user that Gemma 2 gets, if it is one; what Ministral 3 gets."""


def text(source: str, messages: Sequence[dict[str, Any]]) -> str:
    return rendered(ChatTemplate.from_source(source, TOK).render, messages)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_template_that_wants_turns_gets_them(name: str) -> None:
    messages, only, mistral = CONVERSATIONS[name]
    assert text(MINISTRAL_3, messages) == mistral
    if only:
        own = text(GEMMA_2, messages)
        assert own.endswith(f"<start_of_turn>user\n{only}<end_of_turn>\n<start_of_turn>model\n")
        assert own.count("<start_of_turn>") == 2


def test_a_conversation_that_a_template_takes_stays_as_it_is() -> None:
    seen: list[Any] = []
    messages = [SYSTEM, A, LATER, B, NOTHING, ANSWER]
    rendered(seen.append, messages)
    assert len(seen) == 1 and seen[0] is messages


def test_a_refusal_is_that_of_the_messages_as_they_are_given() -> None:
    with pytest.raises(TemplateError, match="must alternate"):
        text(GEMMA_2, [A, said("assistant", "", "f"), said("tool", "1"), ANSWER, ANSWER, B])
    with pytest.raises(TemplateError, match=r"Assistant message must have|must alternate"):
        text(MINISTRAL_3, [NOTHING])


def test_a_prompt_has_turns_before_an_answer_that_is_begun() -> None:
    llm: Any = SimpleNamespace(chat_template=ChatTemplate.from_source(GEMMA_2, TOK), tokenizer=TOK)
    one = prompt_of(llm, [A, B, said("assistant", "x")], continue_final=True)
    assert one.ids == prompt_of(llm, [said("user", "a\n\nb"), said("assistant", "x")], continue_final=True).ids


FOLDER = os.environ.get("BITMIRROR_TEMPLATES", "")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
NO_FILES = pytest.param(None, marks=pytest.mark.skip("BITMIRROR_TEMPLATES names no folder of .jinja files"))


@pytest.mark.parametrize("path", FILES or [NO_FILES], ids=lambda path: path and path.stem)
def test_published_templates_take_any_order(path: Path) -> None:
    template = ChatTemplate.from_source(path.read_text(encoding="utf-8"), TOK)
    try:
        template.render([A])
    except TemplateError as error:
        pytest.skip(str(error))
    for name, (messages, _, _) in CONVERSATIONS.items():
        if all(each["role"] != "tool" for each in messages):
            made = rendered(template.render, messages)
            assert all(each["content"] in made for each in messages if each["role"] == "user"), name


def test_a_template_that_takes_too_long_is_rendered_once() -> None:
    """Any other form would take as long, and a rendering may take seconds."""
    source = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    template, seen = ChatTemplate.from_source(source, TOK), []

    def render(messages: Sequence[Any]) -> str:
        seen.append(messages)
        return template.render(messages)

    with pytest.raises(BudgetError, match="too many steps"):
        rendered(render, [said("user", "a"), said("user", "b"), said("system", "c")])
    assert len(seen) == 1
