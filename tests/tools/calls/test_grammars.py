"""What grammars of calls permit: calls as templates write them, free text around them, and no call that breaks its schema."""

from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.schemas import pruned
from engine.tools.calls.select import CALLS
from engine.tools.calls.tagged import MAYBE, OPEN
from engine.tools.formats.select import FORMATS
from tests.tools.calls.walks import MODELS, Model, follows

pytestmark = pytest.mark.together("serving")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
F = [Function("weather", SCHEMA, strict=True), Function("now", {})]

D = "｜DSML｜"
HEAD = "<|channel|>commentary to=functions."
JSON = " <|constrain|>json<|message|>"

CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n"
    '{}<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
)
CODER_DAYS = "<parameter=days>\n{}\n</parameter>\n"
CODER_ONE = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
CODER_VALUE = CODER_ONE.format("<parameter=p>\n{}\n</parameter>\n")
DSML = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n<{D}parameter name="city" string="true">{{}}</{D}parameter>\n'
    f'{{}}<{D}parameter name="tags" string="false">["a", "b"]</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'
)
DSML_DAYS = f'<{D}parameter name="days" string="false">{{}}</{D}parameter>\n'
DS, KIMI = "<｜tool▁call", "<|tool_call"
ARGUMENTS = '{{"city": "{}", {}"tags": ["a", "b"]}}'

CALL = {
    "qwen3": '<tool_call>\n{{"name": "weather", "arguments": ' + ARGUMENTS + "}}\n</tool_call>",
    "qwen3_coder": CODER,
    "gemma4": '<|tool_call>call:weather{{city:<|"|>{}<|"|>,{}tags:[<|"|>a<|"|>,<|"|>b<|"|>]}}<tool_call|>',
    "llama3": '{{"name": "weather", "parameters": ' + ARGUMENTS + "}}",
    "deepseek4": DSML,
    "gpt_oss": f"{HEAD}weather{JSON}" + ARGUMENTS + "<|call|>",
    "generic": '<tool_call>\n{{"name": "weather", "arguments": ' + ARGUMENTS + "}}\n</tool_call>",
    "granite": '<|tool_call|>[{{"name": "weather", "arguments": ' + ARGUMENTS + "}}]",
    "mistral": "[TOOL_CALLS]weather[ARGS]" + ARGUMENTS,
    "apertus": '<|tools_prefix|>[{{"weather": ' + ARGUMENTS + "}}]<|tools_suffix|>",
    "deepseek3": f"{DS}s▁begin｜>{DS}▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}{DS}▁end｜>{DS}s▁end｜>",
    "kimi": f"{KIMI}s_section_begin|>{KIMI}_begin|>functions.weather:1{KIMI}_argument_begin|>{ARGUMENTS}"
    f"{KIMI}_end|>{KIMI}s_section_end|>",
    "hunyuan": f"<tool_calls>\n<tool_call>weather\n```json\n{ARGUMENTS}\n```\n</tool_call>\n</tool_calls>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n{}<arg_key>tags</arg_key>\n"
    '<arg_value>["a", "b"]</arg_value>\n</tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>{}</parameter>\n{}"
    '<parameter=tags>["a", "b"]</parameter>\n</function>\n</seed:tool_call>',
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{}</parameter>\n{}'
    '<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n</minimax:tool_call>',
}
"""A call as templates write it, with a place for a city, and one for a number of days."""

DAYS = {
    "qwen3_coder": CODER_DAYS,
    "deepseek4": DSML_DAYS,
    "gemma4": "days:{},",
    "glm": "<arg_key>days</arg_key>\n<arg_value>{}</arg_value>\n",
    "seed_oss": "<parameter=days>{}</parameter>\n",
    "minimax": '<parameter name="days">{}</parameter>\n',
}
"""The number of days, as a call writes it; JSON if nothing else."""

NOW = {
    "qwen3": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "llama3": '{"name": "now", "parameters": {}}',
    "deepseek4": f'<{D}tool_calls>\n<{D}invoke name="now">\n\n</{D}invoke>\n</{D}tool_calls>',
    "gpt_oss": f"{HEAD}now{JSON}{{}}<|call|>",
    "generic": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "apertus": '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
    "deepseek3": f"{DS}s▁begin｜>{DS}▁begin｜>now<｜tool▁sep｜>{{}}{DS}▁end｜>{DS}s▁end｜>",
    "kimi": f"{KIMI}s_section_begin|>{KIMI}_begin|>functions.now:0{KIMI}_argument_begin|>{{}}"
    f"{KIMI}_end|>{KIMI}s_section_end|>",
    "hunyuan": "<tool_calls>\n<tool_call>now\n```json\n{}\n```\n</tool_call>\n</tool_calls>",
    "glm": "<tool_call>now\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
}
"""A call without arguments."""

ENDING = Model("gpt_oss", True)
"""Here the tag after a call is a token that ends the answer."""

BETWEEN = {"llama3": "; ", "gemma4": "", "gpt_oss": "<|start|>assistant", "mistral": ""}
"""What stands between calls; a newline if nothing else."""


BLOCK = {
    "deepseek4": (f"<{D}tool_calls>\n", f"</{D}tool_calls>"),
    "granite": ("<|tool_call|>[", "]", ", "),
    "apertus": ("<|tools_prefix|>[", "]<|tools_suffix|>", ", "),
    "deepseek3": (f"{DS}s▁begin｜>", f"{DS}s▁end｜>"),
    "kimi": (f"{KIMI}s_section_begin|>", f"{KIMI}s_section_end|>"),
    "hunyuan": ("<tool_calls>\n", "</tool_calls>"),
    "minimax": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
}
"""What stands around several calls, and between them."""


def call(format: str, city: str = "Köln", days: object = 3) -> str:
    return CALL[format].format(city, DAYS.get(format, '"days": {}, ').format(days))


def two(format: str) -> str:
    if format in BLOCK:
        begin, end, *between = BLOCK[format]
        return NOW[format].removesuffix(end) + "".join(between) + call(format).removeprefix(begin)
    return NOW[format] + BETWEEN.get(format, "\n") + call(format)


def test_every_format_that_has_calls_has_a_grammar() -> None:
    assert CALLS.keys() == FORMATS.keys() - {"plain", "think"} == CALL.keys() == {model.format for model in MODELS}


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_call_as_templates_write_it(model: Model) -> None:
    several, one = model.grammar(F), model.grammar(F, several=False)
    texts = [(call(model.format), 1), (NOW[model.format], 1), (two(model.format), 2)]
    if model == ENDING:
        assert not follows(model, several, texts.pop()[0])
    for text, calls in texts:
        assert follows(model, several, text) and follows(model, one, text) == (calls == 1), text
        ids = model.tokenizer.encode(text, add_special=False, parse_special=True)
        assert len(model.read(ids, F).calls) == calls
    for days in (15, "x", "1.5"):
        assert not follows(model, several, call(model.format, days=days))
    assert not follows(model, several, NOW[model.format].replace("now", "later"))
    assert not follows(model, several, f"I look. {NOW[model.format]}")
    assert not follows(model, several, "")


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_text_is_free_and_calls_in_it_are_not(model: Model) -> None:
    several, one = model.grammar(F, forced=False), model.grammar(F, forced=False, several=False)
    format = model.format
    begin = "<|channel|>final<|message|>" if format == "gpt_oss" else ""
    for text in ("Hello", "a < b, {c}\n\n<tool", "", "x<", "def f(a):\n\treturn [<b>]"):
        assert follows(model, several, begin + text) and follows(model, one, begin + text), text
    # Calls of Llama 3 are the whole answer.
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    before = {"gpt_oss": thought, "llama3": ""}.get(format, "I <look>.\n")
    assert follows(model, several, before + call(format)) and follows(model, one, before + call(format))
    assert follows(model, several, before + two(format)) == (model != ENDING)
    assert not follows(model, one, before + two(format))
    for grammar in (several, one):
        assert not follows(model, grammar, before + call(format, days=15))
        assert not follows(model, grammar, before + NOW[format].replace("now", "later"))


@pytest.mark.parametrize("model", [model for model in MODELS if FORMATS[model.format].THOUGHT], ids=str)
def test_a_thought_before_a_call(model: Model) -> None:
    thought = FORMATS[model.format].THOUGHT
    assert thought is not None
    begin, end = thought
    begin += "thought\n" if model.format == "gemma4" else ""
    grammars = {kind: model.grammar(F, thought=kind) for kind in (OPEN, MAYBE)}
    text = f"I look {{'it'}} up <b>.\n{end}\n\n{NOW[model.format]}"
    assert follows(model, grammars[OPEN], text) and not follows(model, grammars[OPEN], NOW[model.format])
    assert follows(model, grammars[MAYBE], begin + text) and follows(model, grammars[MAYBE], NOW[model.format])
    assert not follows(model, model.grammar(F), begin + text)


def test_a_function_of_gpt_oss_may_be_named_in_the_role() -> None:
    model = Model("gpt_oss", True)
    texts = (f" to=functions.now<|channel|>commentary{JSON}{{}}<|call|>", f"{HEAD}now json<|message|>{{}}<|call|>")
    for text in texts:
        assert follows(model, model.grammar(F), text) and follows(model, model.grammar(F, forced=False), text)
        ids = model.tokenizer.encode(text, add_special=False, parse_special=True)
        assert model.read(ids, F).calls == [("now", {})]


def one(schema: Any, strict: bool = True) -> Function:
    return Function("f", {"type": "object", "properties": {"p": schema}, "required": ["p"]}, strict)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "string"}, ["", "a\n\nb", "</b> 3", "\n", "null"], ["</parameter>", "x<parameter=p>", "<function="]),
        ({"type": ["string", "integer"]}, ["3", "3a", "-12", "x", "3.5", ""], []),
        ({"type": ["string", "integer"], "minimum": 5}, ["5", "x3"], ["3", "3a"]),
        ({"type": ["string", "null", "boolean"]}, ["null", "true", "nullable", "trues"], ["None", "TRUE", " null"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, ["[1]", "a[", ""], ["[a", " [1"]),
        ({"enum": ["a", "1", 1, None]}, ["a", "1", "null"], ["b", "None"]),
        ({"enum": ["", "x\n"]}, ["", "x\n"], ["x"]),
        ({"type": "string", "pattern": "^a/b+$", "maxLength": 4}, ["a/b", "a/bb"], ["a/bbb", "xa/b"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-29"]),
        ({"type": "string", "minLength": 2}, ["é🙂"], ["é"]),
        ({"$ref": "#/properties/p/anyOf/0", "anyOf": [{"type": "boolean"}]}, ["true"], ["True", "x"]),
        ({}, ["x", "3"], []),
        (True, ["x", "3"], []),
    ],
)
@pytest.mark.parametrize("tags", [True, False])
def test_values_of_qwen3_coder(schema: Any, yes: list[str], no: list[str], tags: bool) -> None:
    model = Model("qwen3_coder", tags)
    grammar = model.grammar([one(schema)])
    for value in yes:
        assert follows(model, grammar, CODER_VALUE.format(value)), value
    for value in no:
        assert not follows(model, grammar, CODER_VALUE.format(value)), value


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "string", "format": "uri-template"},
        {"type": "string", "minLength": "x"},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema"},
        {"oneOf": [{"type": "string", "minLength": 3}, {"type": ["string", "null"], "maxLength": 5}]},
        {"allOf": [{"type": "string", "minLength": 3}, {"minLength": 5}]},
        {"anyOf": [{"$ref": "#/properties/p"}]},
        {"enum": []},
    ],
)
@pytest.mark.parametrize("format", ["qwen3_coder", "gemma4"])
def test_what_cannot_be_enforced_is_said(format: str, schema: Any) -> None:
    with pytest.raises(Unenforceable, match=r"^has a (schema|parameter) "):
        Model(format, True).grammar([one(schema)])


def test_a_loose_function_follows_what_is_known() -> None:
    for format in ("qwen3", "qwen3_coder", "gemma4", "deepseek4"):
        model = Model(format, True)
        grammar = model.grammar([one({"type": "integer", "not": {"const": 3}, "maximum": 9}, strict=False)])
        text = call(format).replace("weather", "f")
        assert not follows(model, grammar, text)
        wrap = {
            "qwen3": '<tool_call>\n{{"name": "f", "arguments": {{"p": {}}}}}\n</tool_call>',
            "qwen3_coder": CODER_VALUE,
            "gemma4": "<|tool_call>call:f{{p:{}}}<tool_call|>",
            "deepseek4": f'<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="p" string="false">{{}}</{D}parameter>\n'
            f"</{D}invoke>\n</{D}tool_calls>",
        }[format]
        assert follows(model, grammar, wrap.format(3)) and not follows(model, grammar, wrap.format(10))


def test_a_function_whose_parameters_are_not_listed() -> None:
    anything = [Function("f", {"type": "object"})]
    coder = CODER_ONE.format("<parameter=a>\nx\n</parameter>\n<parameter=b>\n3\n</parameter>\n")
    gemma = '<|tool_call>call:f{a:<|"|>x<|"|>,b:{c:[1,null]}}<tool_call|>'
    for format, text in (("qwen3_coder", coder), ("gemma4", gemma)):
        assert follows(Model(format, True), Model(format, True).grammar(anything), text)
        assert not follows(Model(format, True), Model(format, True).grammar([Function("f", {})]), text)


@pytest.mark.parametrize("name", ["a b", "a>b", 'a"b', "", "a{b", "a\n"])
def test_names_that_no_call_can_have(name: str) -> None:
    with pytest.raises(Unenforceable, match="has a name with blanks"):
        Model("qwen3", True).grammar([Function(name, {})])


def test_what_describes_a_schema_is_left_out() -> None:
    text = {"type": "string", "description": "x" * 99, "default": "a"}
    values = {"enum": [{"title": "a"}], "title": "t"}
    schema = {"title": "T", "type": "object", "properties": {"title": text, "p": {"anyOf": [text, values]}}}
    string = {"type": "string"}
    expected = {"title": string, "p": {"anyOf": [string, {"enum": [{"title": "a"}]}]}}
    assert pruned(schema | {"required": ["title"]}) == {"type": "object", "properties": expected, "required": ["title"]}


def test_parameters_of_gemma_4_come_in_the_order_of_their_names() -> None:
    properties: Any = {name: {"type": "integer"} for name in ("b", "a", "C")}
    schema = {"type": "object", "properties": properties | {"o": {"type": "object", "properties": properties}}}
    model, call = Model("gemma4", True), "<|tool_call>call:f{{{}}}<tool_call|>"
    grammar = model.grammar([Function("f", schema)])
    for members in ("a:1,b:2,C:3,o:{a:1,C:3}", "b:2,o:{}", "C:3", ""):
        assert follows(model, grammar, call.format(members)), members
    assert not follows(model, grammar, call.format("b:2,a:1"))


def test_cases_of_one_of_must_be_apart() -> None:
    def case(kind: Any, name: str = "kind") -> Any:
        return {"type": "object", "properties": {name: kind, "n": {"type": "integer"}}, "required": [name]}

    model = Model("gemma4", True)
    a, b, text = {"const": "a"}, {"enum": ["b", "c"]}, {"type": "string"}
    apart: list[list[Any]] = [
        [case(a), case(b)],
        [{"type": "integer"}, {"type": "boolean"}, {"type": "string"}, case(a)],
        [{"const": 1}, {"enum": [2, 3]}],
    ]
    for cases in apart:
        model.grammar([one({"oneOf": cases})])
    call = '<|tool_call>call:f{p:{kind:<|"|>b<|"|>,n:3}}<tool_call|>'
    assert follows(model, model.grammar([one({"oneOf": apart[0]})]), call)
    overlapping: list[list[Any]] = [
        [case(a), case(text)],
        [case(a), case(b, "sort")],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1, 2]}],
        [{"type": "array"}, {"type": "array", "maxItems": 1}],
    ]
    for cases in overlapping:
        with pytest.raises(Unenforceable, match="cases may overlap"):
            model.grammar([one({"oneOf": cases})])
        model.grammar([one({"oneOf": cases}, strict=False)])
