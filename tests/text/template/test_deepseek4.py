"""The chat format of DeepSeek-V4: the text of the built-in template, against the program of the release, and its answers.

``GOLDEN`` are texts of ``encode_messages`` of ``encoding/encoding_dsv4.py``, which DeepSeek published with the model. Two
long parts are shortened: ``[tools]`` and ``[max]``, of which ``DIGESTS`` has digests.  The templates of llama.cpp give the
same texts; if ``BITMIRROR_TEMPLATES`` names their folder, ours are compared with them.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.template import dsml
from engine.text.template.builtin import TEMPLATES
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.text.template.test_environment import FOLDER, environment
from tests.tiers import examples
from tests.vocabularies import CONTROL, USER, bpe_metadata, made

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TURNS = ("<｜User｜>", "<｜Assistant｜>")
PARTS = ("｜DSML｜", "<think>", "</think>")


def vocabulary(parts: int = CONTROL, **more: Any) -> Tokenizer:
    special = dict.fromkeys((BOS, EOS, *TURNS), CONTROL) | dict.fromkeys(PARTS, parts)
    return made(bpe_metadata([], special, pre="joyai-llm", bos_token_id=256, eos_token_id=257, **more))


TOK = vocabulary()
TEMPLATE = ChatTemplate.load("deepseek4", TOK)
LATER = ChatTemplate.load("deepseek4-0731", TOK)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def call(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, **function("get_weather", arguments=arguments)}


def result(id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "e.g. Köln"}}}
TOOLS = [function("get_weather", description="The <weather>.\nNow.", parameters=PARAMETERS), function("now")]
SCHEMAS = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS)
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER_1: dict[str, Any] = {"role": "user", "content": "Hi, é🙂\n"}
USER_2: dict[str, Any] = {"role": "user", "content": "And now?"}
ANSWER: dict[str, Any] = {"role": "assistant", "reasoning_content": "hm\n", "content": "Yes."}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "reasoning_content": "I look.",
    "content": "",
    "tool_calls": [call("a", city="Köln", days=2, at=[0.5, None, True], where={"x": "<"}), call("b")],
}
CALLED = [SYSTEM, USER_1, CALLING, result("a", "21.5"), result("b", "9\n")]

THINK: dict[str, Any] = {"enable_thinking": True}
WITH_TOOLS: dict[str, Any] = {"tools": TOOLS}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([SYSTEM, USER_1], {}),
    "thinking": ([USER_1], THINK),
    "an answer": ([USER_1, ANSWER], {"add_generation_prompt": False}),
    "turns": ([SYSTEM, USER_1, ANSWER, USER_2], {}),
    "thoughts of earlier turns are dropped": ([SYSTEM, USER_1, ANSWER, USER_2], THINK),
    "the last thought stays": ([USER_1, ANSWER, USER_2, ANSWER], THINK | {"add_generation_prompt": False}),
    "messages of a user are joined": ([USER_1, USER_2], {}),
    "tools": ([SYSTEM, USER_1], WITH_TOOLS),
    "tools keep thoughts": ([SYSTEM, USER_1, ANSWER, USER_2], WITH_TOOLS | THINK),
    "calls": (CALLED, WITH_TOOLS | THINK),
    "calls without thoughts": (CALLED, WITH_TOOLS),
    "results in another order": ([*CALLED[:3], *CALLED[:2:-1], USER_2], WITH_TOOLS | THINK),
    "max": ([SYSTEM, USER_1], THINK | {"reasoning_effort": "max"}),
    "high": ([SYSTEM, USER_1], THINK | {"reasoning_effort": "high"}),
    "max without thinking": ([SYSTEM, USER_1], {"reasoning_effort": "max"}),
    "a format": ([SYSTEM, USER_1], {"response_format": {"type": "object", "required": ["x"]}}),
}
ASKED = "<｜User｜>Hi, é🙂\n"
SAID = f"</think>Yes.{EOS}"
CALLS = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
<｜DSML｜parameter name="at" string="false">[0.5, null, true]</｜DSML｜parameter>
<｜DSML｜parameter name="where" string="false">{"x": "<"}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
RESULTS = "<｜User｜><tool_result>21.5</tool_result>\n\n<tool_result>9\n</tool_result>"
THOUGHT = "<｜Assistant｜><think>I look.</think>"
PLAIN, THINKING = "<｜Assistant｜></think>", "<｜Assistant｜><think>"
NEXT = "<｜User｜>And now?"
BEGIN = f"{BOS}Be brief."
GOLDEN = {
    "one turn": f"{BEGIN}{ASKED}{PLAIN}",
    "thinking": f"{BOS}{ASKED}{THINKING}",
    "an answer": f"{BOS}{ASKED}<｜Assistant｜>{SAID}",
    "turns": f"{BEGIN}{ASKED}<｜Assistant｜>{SAID}{NEXT}{PLAIN}",
    "thoughts of earlier turns are dropped": f"{BEGIN}{ASKED}<｜Assistant｜>{SAID}{NEXT}{THINKING}",
    "the last thought stays": f"{BOS}{ASKED}<｜Assistant｜>{SAID}{NEXT}{THINKING}hm\n{SAID}",
    "messages of a user are joined": f"{BOS}{ASKED}\n\nAnd now?{PLAIN}",
    "tools": f"{BEGIN}\n\n[tools]{ASKED}{PLAIN}",
    "tools keep thoughts": f"{BEGIN}\n\n[tools]{ASKED}{THINKING}hm\n{SAID}{NEXT}{THINKING}",
    "calls": f"{BEGIN}\n\n[tools]{ASKED}{THOUGHT}{CALLS}{EOS}{RESULTS}{THINKING}",
    "calls without thoughts": f"{BEGIN}\n\n[tools]{ASKED}{PLAIN}{CALLS}{EOS}{RESULTS}{PLAIN}",
    "results in another order": f"{BEGIN}\n\n[tools]{ASKED}{THOUGHT}{CALLS}{EOS}{RESULTS}\n\nAnd now?{THINKING}",
    "max": f"{BOS}[max]Be brief.{ASKED}{THINKING}",
    "high": f"{BEGIN}{ASKED}{THINKING}",
    "max without thinking": f"{BEGIN}{ASKED}{PLAIN}",
    "a format": f"{BEGIN}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    f'{{"type": "object", "required": ["x"]}}{ASKED}{PLAIN}',
}
DIGESTS = {"max": "f7a24f3b3050d4a8", "tools": "c7d3159308f7d076", "max of 0731": "53fb31b8392ec5b4"}
"""Digests of parts that ``GOLDEN`` shortens, that of tools without ``SCHEMAS``, and of a text that the release 0731 added."""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def effort(template: ChatTemplate, name: str) -> str:
    """What a template puts before everything else."""
    text = template.render([SYSTEM, USER_1], reasoning_effort=name, **THINK)
    return text[len(BOS) : text.index("Be brief.")]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_is_that_of_the_release(name: str) -> None:
    messages, values = CONVERSATIONS[name]
    text = TEMPLATE.render(messages, **values)
    if "tools" in values:
        start, end = text.index("## Tools"), text.index("<｜User｜>")
        assert digest(text[start:end].replace(SCHEMAS, "")) == DIGESTS["tools"]
        text = f"{text[:start]}[tools]{text[end:]}"
    if name == "max":
        assert digest(effort(TEMPLATE, "max")) == DIGESTS["max"]
        text = text.replace(effort(TEMPLATE, "max"), "[max]")
    assert text == GOLDEN[name]


def test_efforts_of_the_later_release() -> None:
    assert [digest(effort(LATER, name)) for name in ("high", "max")] == [DIGESTS["max"], DIGESTS["max of 0731"]]
    assert LATER.render(CALLED, **WITH_TOOLS) == TEMPLATE.render(CALLED, **WITH_TOOLS)


def test_what_the_release_does_not_say() -> None:
    """Tools without a system message, results without tools, messages of a developer, content in parts and of other types;
    as in llama.cpp's template where that has them."""
    assert TEMPLATE.render([USER_1], **WITH_TOOLS).startswith(f"{BOS}## Tools\n\n")
    assert f"<think>hm\n{SAID}{ASKED}" in TEMPLATE.render([USER_1, ANSWER, *CALLED[1:]], **THINK)
    developer = {"role": "developer", "content": "Hi, é🙂\n"}
    assert TEMPLATE.render([SYSTEM, developer]) == GOLDEN["one turn"]
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi, é🙂\n"}, {"type": "text", "text": "And now?"}]}
    assert TEMPLATE.render([parts]) == GOLDEN["messages of a user are joined"]
    assert '<tool_result>{"t": 21.5}</tool_result>' in TEMPLATE.render([*CALLED[:3], result("a", {"t": 21.5})])
    assert TEMPLATE.render([USER_1, ANSWER, USER_2], drop_thinking=False, **THINK).count("hm") == 1


NAMES = {"deepseek4": "deepseek-ai-DeepSeek-V4", "deepseek4-0731": "deepseek-ai-DeepSeek-V4-Flash-0731"}


@pytest.mark.parametrize("name", NAMES)
def test_text_is_that_of_llama_cpp(name: str) -> None:
    file = Path(FOLDER) / f"{NAMES[name]}.jinja"
    if not FOLDER or not file.exists():
        pytest.skip("BITMIRROR_TEMPLATES names no folder with llama.cpp's template of this model")
    theirs = environment()
    theirs.filters["from_json"] = json.loads
    source = file.read_text(encoding="utf-8")
    template, ours = theirs.from_string(source), ChatTemplate.load(name, TOK)
    for case, (messages, values) in CONVERSATIONS.items():
        defaults = {"bos_token": BOS, "tools": None, "add_generation_prompt": True}
        if case != "results in another order":  # it leaves them in the order that they are given in
            assert ours.render(messages, **values) == template.render(defaults | values, messages=messages), case
    # The template works here, too, also with arguments that are JSON in a text.
    given = ChatTemplate.from_source(source, TOK)
    assert given.render(as_json(CALLED), **WITH_TOOLS) == ours.render(CALLED, **WITH_TOOLS)


def as_json(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON, as interfaces of servers give them."""

    def converted(call: dict[str, Any]) -> dict[str, Any]:
        return call | function(call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))

    return [m | {"tool_calls": [converted(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def test_arguments_may_be_json() -> None:
    assert TEMPLATE.render(as_json(CALLED), **WITH_TOOLS) == TEMPLATE.render(CALLED, **WITH_TOOLS)
    broken = {"role": "assistant", "tool_calls": [function("f", arguments='{"a')]}
    assert '<｜DSML｜parameter name="arguments" string="true">{"a</' in TEMPLATE.render([USER_1, broken])


# --- which files have it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"architecture": "deepseek4"}, "deepseek4"),
        ({"architecture": "deepseek4", "name": "DeepSeek V4 Flash"}, "deepseek4"),
        ({"architecture": "deepseek4", "name": "DeepSeek-V4-Flash-0731"}, "deepseek4-0731"),
        ({"architecture": "deepseek2"}, None),
        ({}, None),
    ],
)
def test_a_file_without_a_template(values: dict[str, str], name: str | None) -> None:
    metadata = {f"general.{key}": value for key, value in values.items()}
    template = ChatTemplate.from_gguf(SimpleNamespace(path=Path("x"), metadata=metadata), TOK)
    assert (template and template.source) == (name and TEMPLATES[name])
    # A template in the file counts, and so do the tokens: a model without them was not trained on this format.
    own = SimpleNamespace(path=Path("x"), metadata=metadata | {"tokenizer.chat_template": "own"})
    found = ChatTemplate.from_gguf(own, TOK)
    assert found is not None and found.source == "own"
    bare = made(bpe_metadata([], dict.fromkeys(PARTS, CONTROL)))
    assert ChatTemplate.from_gguf(SimpleNamespace(path=Path("x"), metadata=metadata), bare) is None


# --- tokens ----------------------------------------------------------------------------------------------------

LOOKS = st.lists(
    st.sampled_from([BOS, EOS, *TURNS, *PARTS, "<", "｜", "DSML", "｜>", "</", "tool_result>", "x"]), max_size=6
)


def test_marks_are_tokens_and_text_that_looks_like_them_is_not() -> None:
    def ids(text: str) -> list[int]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "reasoning_content": text,
                "content": text,
                "tool_calls": [call("a", city=text, at=[text])],
            },
            result("a", text),
        ]
        return TEMPLATE.encode(messages, tools=[function("f", description=text)], **THINK)

    expected = [id for id in ids("x") if id >= 256]
    named = [TOK.vocabulary.tokens[id] for id in expected]
    assert named[0] == BOS and named.count(EOS) == 1
    assert [name for name in named if name in TURNS] == ["<｜User｜>", "<｜Assistant｜>"] * 2
    assert named[-len(PARTS) :] == ["<｜User｜>", "<｜Assistant｜>", "<think>"]

    @examples(60, 15)
    @given(LOOKS.map("".join))
    def check(text: str) -> None:
        found = ids(text)
        assert [id for id in found if id >= 256] == expected

    check()


@pytest.mark.parametrize("parts", [CONTROL, USER])
def test_marks_of_an_answer_show(parts: int) -> None:
    tok = vocabulary(parts)
    text = f"hm</think>Yes.{CALLS}"
    ids = tok.encode(text + EOS, parse_special=True)
    assert ids[-1] == 257 and tok.eog_ids == {257}
    assert tok.decode(ids) == text


def test_ends_of_results_and_parameters_are_escaped() -> None:
    """As in ds4: a text cannot end the part that it is in."""
    text = TEMPLATE.render([USER_1, CALLING, result("a", "1</tool_result>\n<b>&amp;")])
    assert "<tool_result>1&lt;/tool_result>\n<b>&amp;</tool_result>" in text
    end = "</｜DSML｜parameter>"
    calling: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("a", city=f"x{end}<y>", at=[end])],
    }
    text = TEMPLATE.render([USER_1, calling])
    assert f'string="true">x&lt;/｜DSML｜parameter><y>{end}' in text
    assert f'string="false">["\\u003c/｜DSML｜parameter>"]{end}' in text
    answer = text[text.index("</think>") :].partition(EOS)[0]
    assert dsml.parts_of_answer(answer)["tool_calls"][0]["function"] == calling["tool_calls"][0]["function"]


# --- answers ---------------------------------------------------------------------------------------------------

ARGUMENTS = CALLING["tool_calls"][0]["function"]["arguments"]
CALL_PARTS = [function("get_weather", arguments=ARGUMENTS), function("get_weather", arguments={})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b", {"content": "b"}),
        ("hm\n</think>b", {"content": "b", "reasoning_content": "hm\n"}),
        ("<think>hm</think>b", {"content": "b", "reasoning_content": "hm"}),
        ("<think>hm", {"content": "", "reasoning_content": "hm"}),
        (f"I look.</think>{CALLS}", {"content": "", "reasoning_content": "I look.", "tool_calls": CALL_PARTS}),
        (f"b{CALLS}\n", {"content": "b", "tool_calls": CALL_PARTS}),
        (CALLS.replace("\n", ""), {"content": "", "tool_calls": CALL_PARTS}),
        (f"b{CALLS[:-1]}", {"content": f"b{CALLS[:-1]}"}),
        (f"b{CALLS[:90]}", {"content": f"b{CALLS[:90]}"}),
        (f"b{CALLS} c", {"content": f"b{CALLS} c"}),
        (
            "b\n\n<｜DSML｜tool_calls></｜DSML｜tool_calls>",
            {"content": "b\n\n<｜DSML｜tool_calls></｜DSML｜tool_calls>"},
        ),
    ],
)
def test_parts_of_an_answer(text: str, expected: dict[str, Any]) -> None:
    assert dsml.parts_of_answer(text) == expected


def test_values_that_are_no_json_are_text() -> None:
    for value in ("{x", "[" * 100_000):
        text = CALLS.replace('false">2<', f'false">{value}<')
        assert dsml.parts_of_answer(text)["tool_calls"][0]["function"]["arguments"]["days"] == value


def test_answers_are_given_back_as_they_were_generated() -> None:
    """Also with the ids that they had."""
    for messages, values in (([USER_1, ANSWER, USER_2], THINK), (CALLED, WITH_TOOLS | THINK), (CALLED, WITH_TOOLS)):
        plain = [
            m if m is not CALLING else {"role": "assistant", "content": f"I look.</think>{CALLS}"} for m in messages
        ]
        plain = [m if m is not ANSWER else {"role": "assistant", "content": "hm\n</think>Yes."} for m in plain]
        assert TEMPLATE.render(plain, **values) == TEMPLATE.render(messages, **values)
    first = [SYSTEM, USER_1]
    asked, text = TEMPLATE.encode(first, **WITH_TOOLS, **THINK), TEMPLATE.render(first, **WITH_TOOLS, **THINK)
    answer = f"I look.</think>{CALLS}"
    # A token for each byte, which is what this vocabulary has, and one for each mark.
    ids = TOK.encode(answer, add_special=False, parse_special=True)
    later = [*first, {"role": "assistant", "content": answer}, *CALLED[3:]]
    found = TEMPLATE.encode(later, known=(text + answer, [*asked, *ids]), **WITH_TOOLS, **THINK)
    assert found == TEMPLATE.encode(CALLED, **WITH_TOOLS, **THINK)
    assert found[len(asked) + len(ids)] == 257
    # What the caller says counts.
    said = TEMPLATE.render([USER_1, {**ANSWER, "content": "a</think>b"}, USER_2], drop_thinking=False, **THINK)
    assert "<think>hm\n</think>a</think>b" in said
