"""Which format a chat template belongs to."""

import json
import os
from pathlib import Path

import pytest

from docs import tables
from engine.text.template.builtin import TEMPLATES
from engine.tools.formats.select import FORMATS, can_call, can_think, detect, opens_thought, parser
from tests.conftest import REPOSITORY
from tests.text.template import test_harmony

# The lines of published templates that write calls and thoughts.
QWEN3 = r"""{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments:' }}
{{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"""
QWEN25 = r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
QWEN35 = r"""{{- '\n\n<tool_call>\n<function=' + tool_call.name + '>\n' }}{{- '<parameter=' + args_name + '>\n' }}
{{- '\n</parameter>\n' }}{{- '</function>\n</tool_call>' }}{{- '<think>\n' }}"""
GEMMA4 = r"""{{- '<|channel>thought\n' + thinking_text + '\n<channel|>' -}}
{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}"""
LLAMA3 = r"""{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
GLM = r"""<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"""
R1 = r"""{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}{{ '<｜Assistant｜><think>\n' }}"""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN3, "qwen3"),
        (QWEN25, "qwen3"),
        (QWEN35, "qwen3_coder"),
        (GEMMA4, "gemma4"),
        (LLAMA3, "llama3"),
        (R1, "think"),
        (GLM, "glm"),
        (f"{GLM}<think></think>", "glm"),
        (TEMPLATES["deepseek4"], "deepseek4"),
        (TEMPLATES["deepseek4-0731"], "deepseek4"),
        (TEMPLATES["chatml"], "plain"),
        (TEMPLATES["llama3"], "plain"),
        (TEMPLATES["gemma"], "plain"),
        (test_harmony.SOURCE, "gpt_oss"),
        ("", "plain"),
        (None, "plain"),
    ],
)
def test_a_template_shows_the_format(template: str | None, name: str) -> None:
    assert detect(template) == name


@pytest.mark.parametrize(
    ("template", "thinks", "calls"),
    [
        (QWEN3, True, True),
        (QWEN25, False, True),
        (QWEN35, True, True),
        (GEMMA4, True, True),
        (LLAMA3, False, True),
        (R1, True, True),
        (GLM, False, True),
        (TEMPLATES["deepseek4"], True, True),
        (TEMPLATES["chatml"], False, True),
        (test_harmony.SOURCE, True, True),
        (None, False, False),
    ],
)
def test_a_template_shows_what_a_model_can_do(template: str | None, thinks: bool, calls: bool) -> None:
    assert (can_think(template), can_call(template)) == (thinks, calls)


def test_prompts_that_open_a_thought() -> None:
    for name in ("think", "qwen3", "qwen3_coder", "deepseek4"):
        assert opens_thought(name, "<|im_start|>assistant\n<think>")
        assert opens_thought(name, "<|im_start|>assistant\n<think>\n")
        assert not opens_thought(name, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert not opens_thought(name, "<think>\nhm")
    assert opens_thought("gemma4", "<|turn>model\n<|channel>thought\n")
    assert not opens_thought("gemma4", "<|turn>model\n<|channel>thought\n<channel|>")
    assert not opens_thought("llama3", "<think>") and not opens_thought("gpt_oss", "<|start|>assistant")


PUBLISHED = json.loads((REPOSITORY / "tests/published/templates.json").read_text(encoding="utf-8"))
FOLDER = os.environ.get("BITMIRROR_TEMPLATES", "")


@pytest.mark.skipif(not FOLDER, reason="BITMIRROR_TEMPLATES names no folder of .jinja files")
def test_the_formats_of_published_templates() -> None:
    paths = sorted(Path(FOLDER).glob("*.jinja"))
    assert {path.stem: detect(path.read_text(encoding="utf-8"), True) for path in paths} == PUBLISHED


def test_the_table_of_the_book() -> None:
    """Each format has its marks, published templates or none that llama.cpp has, and tests that read and write it."""
    rows = tables.format_rows()
    assert rows.keys() == FORMATS.keys() - {"plain", "think"}
    assert rows["mistral"][:2] == ["Mistral, Ministral and Devstral", "`[TOOL_CALLS]`"]
    assert rows["hunyuan"][1] == '`<tool_call>`, `` ```json ``; or `<tool_calls>[{"name"`'
    assert {name for name, columns in rows.items() if not columns[2]} == {"hunyuan"}
    for name, (_, _, templates, tests) in rows.items():
        assert "`test_grammars.py`" in tests and "`test_parser.py`" in tests
        assert all(PUBLISHED[each] == name for each in templates.split(", ") if each)


def test_every_format_is_one_file_that_shows_it() -> None:
    for name, kind in FORMATS.items():
        assert Path(kind.__module__.replace(".", "/")).name == name
        assert kind.__doc__ and ("TEXT" in kind.__doc__ or "{" in kind.__doc__)
        assert parser(name, single=lambda tag: False).finish() == []
