"""A template gives the same text, or is refused, here and in the environment of ``transformers``.

``BITMIRROR_TEMPLATES`` may name a folder of ``.jinja`` files, such as ``models/templates`` of llama.cpp; each is then
compared on conversations with and without a system message, tools and calls of tools.
"""

import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError
from engine.text.template.chat import TEMPLATES, ChatTemplate
from tests.text.template.test_chat import ODD_TEMPLATES, TOK
from tests.tiers import examples

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
"""The texts of special tokens of ``TOK``."""

FOLDER = os.environ.get("BITMIRROR_TEMPLATES", "")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
NO_FILES = pytest.param(None, marks=pytest.mark.skip("BITMIRROR_TEMPLATES names no folder of .jinja files"))


class Generation(Extension):
    """``{% generation %}`` of ``transformers``, without its record of positions."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(lineno)

    def _block(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which ``transformers`` renders chat templates."""

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


def test_the_environment_is_that_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    sources = [*(TEMPLATES | ODD_TEMPLATES).values(), *(path.read_text(encoding="utf-8") for path in FILES)]
    names = ("one turn", "turns", "plain tools", "a call and an answer", "documents")
    for source in sources:
        for messages, values in map(CONVERSATIONS.__getitem__, names):
            values = SPECIAL | {"tools": None, "documents": None, "add_generation_prompt": True} | values
            try:
                expected = utils.render_jinja_template([messages], chat_template=source, **values)[0][0]
            except Exception as error:
                with pytest.raises(type(error)):
                    environment().from_string(source).render(values, messages=messages)
            else:
                assert environment().from_string(source).render(values, messages=messages) == expected


class Pair:
    """A template in both environments."""

    def __init__(self, source: str) -> None:
        self.ours = ChatTemplate(source, TOK)
        self.theirs = lambda: environment().from_string(source)
        try:
            compiled = environment().from_string(source)
            self.theirs = lambda: compiled
        except jinja2.TemplateError:
            pass

    def compare(self, messages: Sequence[Any], **values: Any) -> bool:
        """Check that both give the same text, or that both refuse; returns whether there is a text."""
        expected = text = None
        refusal = ""
        try:
            defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
            expected = self.theirs().render(SPECIAL | defaults | values, messages=messages)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        try:
            text = self.ours.render(messages, **values)
        except TemplateError as error:
            refusal = refusal or str(error)
        assert text == expected, refusal
        assert text is None or type(text) is str
        return text is not None


# --- the built-in templates ------------------------------------------------------------------------------------

TOOLS = [{"name": "f", "description": "<é>"}]
FRAGMENTS = ["{{ x }}", "{% if", "#}", "<|im_end|>", "</s>", "[INST]", "&<>'\"", "é", "🙂", "\u2028", "x"]
texts = st.text(max_size=12) | st.lists(st.sampled_from([" ", "\n", "\r\n", "\t", *FRAGMENTS]), max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Mostly what models were trained on: a system message or none, then turns; now and then any roles in any order."""
    system = draw(st.none() | texts)
    contents = draw(st.lists(texts, max_size=5))
    roles = ["user", "assistant"] * 3
    if draw(st.integers(0, 4)) == 0:
        roles = draw(st.lists(st.sampled_from(["system", "user", "assistant", "tool", "x"]), min_size=5, max_size=5))
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return ([] if system is None else [{"role": "system", "content": system}]) + turns


@pytest.mark.parametrize("name", TEMPLATES | ODD_TEMPLATES)
def test_text_is_that_of_transformers(name: str) -> None:
    pair = Pair((TEMPLATES | ODD_TEMPLATES)[name])
    rendered = []

    @examples(150, 30)
    @given(conversations(), st.booleans(), st.none() | st.just(TOOLS))
    def check(messages: list[dict[str, Any]], prompt: bool, tools: list[dict[str, str]] | None) -> None:
        rendered.append(pair.compare(messages, add_generation_prompt=prompt, tools=tools))

    check()
    assert any(rendered)


# --- templates of a folder -------------------------------------------------------------------------------------


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}} | more


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The <city>, é & co."},
        "days": {"type": "integer", "default": 1},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}}},
    },
    "required": ["city"],
}
FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.\nNow.", "parameters": PARAMETERS},
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
PLAIN = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": CITY}}]
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "Hi, <b>é🙂</b> {{ x }}\n\n"}
ANSWER = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nYes "}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"t": 21.5}'}


def with_call(arguments: Any, content: Any = "", **more: Any) -> list[dict[str, Any]]:
    calls = [call(arguments, id="abcdefghi")]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls} | more, RESULT]


CONVERSATIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "a system message": ([SYSTEM, USER], {}),
    "no prompt": ([SYSTEM, USER, ANSWER], {"add_generation_prompt": False}),
    "turns": ([SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": ""}, USER], {}),
    "turns without a system message": ([USER, ANSWER, USER], {}),
    "empty": ([], {}),
    "users only": ([USER, USER], {}),
    "an answer first": ([ANSWER, USER], {}),
    "developer": ([{"role": "developer", "content": "Be brief."}, USER], {}),
    "thinking": (
        [USER, {"role": "assistant", "reasoning_content": "a\n", "content": "b"}, USER],
        {"enable_thinking": True},
    ),
    "no thinking": ([USER, {"role": "assistant", "thinking": "a\n", "content": "b"}, USER], {"enable_thinking": False}),
    "thoughts of several turns": (
        [
            SYSTEM,
            USER,
            {"role": "assistant", "reasoning_content": "one\n\n", "thinking": "one\n\n", "content": "1"},
            USER,
            {"role": "assistant", "reasoning_content": "", "thinking": "", "content": "2"},
            USER,
        ],
        {"reasoning_effort": "high", "preserve_thinking": True, "clear_thinking": False, "keep_cot": True},
    ),
    "a thought at the end": (
        [USER, {"role": "assistant", "reasoning_content": "so", "thinking": "so", "content": "1"}],
        {"add_generation_prompt": False, "thinking": True},
    ),
    "a call between thoughts": (
        [
            *with_call({"city": "Bern"}, "", thinking="I look.", reasoning_content="I look."),
            {"role": "assistant", "content": "Warm.", "reasoning_content": "Good."},
            USER,
        ],
        {"tools": PLAIN, "builtin_tools": ["python", "browser"], "model_identity": "You are X."},
    ),
    "no thinking in several turns": (
        [SYSTEM, USER, ANSWER, USER],
        {"enable_thinking": False, "thinking": False, "reasoning_effort": "low", "think_mode": "off"},
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}], {}),
    "no content": ([USER, {"role": "assistant", "content": None}, USER], {}),
    "tools": ([USER], {"tools": FUNCTIONS}),
    "tools and a system message": ([SYSTEM, USER], {"tools": FUNCTIONS}),
    "a call": (with_call({"city": "Köln", "days": 2}), {"tools": FUNCTIONS}),
    "a call as text": (with_call('{"city": "Köln"}'), {"tools": FUNCTIONS}),
    "a call after text": (
        [SYSTEM, *with_call({"city": "x\ny", "f": [1, 0.5, None, True]}, "I look.")],
        {"tools": FUNCTIONS},
    ),
    "a call after thought": (with_call({}, None, reasoning_content="hm"), {"tools": FUNCTIONS}),
    "a call and an answer": ([*with_call({"city": "Köln"}), ANSWER, USER], {"tools": FUNCTIONS}),
    "a call and no tools": ([*with_call({"city": "Köln"}), ANSWER], {}),
    "plain tools": ([SYSTEM, USER], {"tools": PLAIN, "functions": json.dumps(PLAIN), "datetime": "today"}),
    "documents": ([USER], {"documents": [{"title": "T", "text": "D", "doc_id": 1}]}),
}


@pytest.mark.parametrize("path", FILES or [NO_FILES], ids=lambda path: path.stem if path else "none")
def test_files(path: Path) -> None:
    pair = Pair(path.read_text(encoding="utf-8"))
    rendered = []
    for name, (messages, values) in CONVERSATIONS.items():
        try:
            rendered.append(pair.compare(messages, **values))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert any(rendered)
