"""Hostile templates end in one sentence: none runs on, fills the memory, reaches Python or changes the environment."""

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TemplateError
from engine.text.template.chat import ChatTemplate
from tests.conftest import REPOSITORY
from tests.tiers import examples
from tests.vocabularies import CONTROL, bpe_metadata, made

TOK = made(bpe_metadata([], {"<|eot_id|>": CONTROL}))


def render(source: str, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate.from_source(source, TOK).render(messages)


HUGE, STEPS, NESTED = "far too much text", "far too many steps", "nested too deeply"
DATE = "unreasonable format"
PERCENT, FIELDS = "formats text by %, which is not allowed", "more than plain fields"
DOUBLED = "".join(f"{{% set d{n + 1} = [d{n}, d{n}] %}}" for n in range(15))
HOSTILE = {
    "an unbound method": (
        "{% set d0 = {} %}" + DOUBLED + "{% set _ = dict.update(d0, a='x' * 1000) %}{{ d15 }}",
        "is unsafe",
    ),
    "nested loops": ("{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}", STEPS),
    "loops that print": ("{% for a in range(10000) %}{% for b in range(10000) %}x{% endfor %}{% endfor %}", "far too"),
    "loops with a condition": (
        "{% for a in range(10000) %}{% for b in range(10000) if false %}{% endfor %}{% endfor %}",
        STEPS,
    ),
    "loops over lists": ("{% set x = [1] * 1000 %}" + "{% for a in x %}" * 4 + "{% endfor %}" * 4, STEPS),
    "range": ("{{ range(1000000000) | list }}", "range of more than 10000"),
    "recursive macro": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", NESTED),
    "branching macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        STEPS,
    ),
    "recursive loop": ("{% for a in [1, 2] recursive %}{{ loop([a, a]) }}{% endfor %}", NESTED),
    "text times number": ("{{ 'a' * 1000000000 }}", HUGE),
    "number times text": ("{{ 1000000000 * 'a' }}", HUGE),
    "list times number": ("{{ [1] * 1000000000 }}", HUGE),
    "doubling by +": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        HUGE,
    ),
    "doubling by ~": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        HUGE,
    ),
    "doubling lists": (
        "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
        HUGE,
    ),
    "doubling tuples": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
        HUGE,
    ),
    "doubling dicts": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
        HUGE,
    ),
    "doubling by dict()": (
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
        HUGE,
    ),
    "doubling by blocks": (
        "{% set x %}" + "{{ x }}{{ x }}" * 9 + "{% endset %}{% set x = 'aaaaaaaaaa' * 20000 %}{{ [x, x] }}",
        HUGE,
    ),
    "escaping": ("{{ ('<' * 200000) | e }}", HUGE),
    "adding to escaped text": ("{{ ('' | safe) + '<' * 200000 }}", HUGE),
    "many large values": ("{% set x = 'a' * 200000 %}{% for i in range(1000) %}{% set y = x[1:] %}{% endfor %}", HUGE),
    "join": ("{{ ('a' * 1000) | join('b' * 100000) }}", HUGE),
    "join method": ("{{ ('b' * 100000).join('a' * 100000) }}", HUGE),
    "replace": ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}", HUGE),
    "replace method": ("{{ ('a' * 100000).replace('', 'b' * 100000) }}", HUGE),
    "indent": ("{{ ('a\n' * 10000) | indent(100000000) }}", HUGE),
    "indent json": ("{{ messages | tojson(indent=100000000) }}", "excessive width"),
    "sum of lists": ("{{ ([[1, 2, 3]] * 50000) | sum(start=[]) }}", HUGE),
    "search backwards": ("{% set x = 'a' * 200000 %}{{ x.rfind('b' + 'a' * 100000) }}", HUGE),
    "strip": ("{% set x = 'ab' * 100000 %}{{ x.strip(x) }}", HUGE),
    "trim": ("{% set x = 'ab' * 100000 %}{{ x | trim(x) }}", HUGE),
    "power": ("{{ 10 ** 10000000000 }}", "numbers that are far too large"),
    "squares": (
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "far too large",
    ),
    "round": ("{{ 1.5 | round(1000000000) }}", "excessive number of digits"),
    "percent": ("{{ '%s' % 1 }}", PERCENT),
    "percent of a variable": ("{{ messages[0].content % () }}", PERCENT),
    "percent width": ("{{ '%1000000000d' % 1 }}", PERCENT),
    "percent with a mapping": ("{{ '%(a)s' % {'a': 1} }}", PERCENT),
    "format width": ("{{ '{:1000000000}'.format(1) }}", FIELDS),
    "format nested width": ("{{ '{:{}}'.format(1, 1000000000) }}", FIELDS),
    "format precision": ("{{ '{:.1000000000f}'.format(1.0) }}", FIELDS),
    "format conversion": ("{{ '{!r}'.format(messages) }}", FIELDS),
    "format item": ("{{ '{0[0]}'.format(messages) }}", FIELDS),
    "format of a method": ("{% set f = 'x{:1000000000}'.format %}{{ f(1) }}", FIELDS),
    "format by item": ("{{ ''['format'](1) }}{{ '{:9}'['format'](1) }}", FIELDS),
    "format without its argument": ("{{ '{}{}'.format(1) }}", "IndexError"),
    "format without its name": ("{{ '{a}'.format(b=1) }}", "KeyError"),
    "format half a field": ("{{ '{'.format(1) }}", "ValueError"),
    "format many": ("{{ ('{0}' * 10000).format('x' * 10000) }}", HUGE),
    "date width": ("{{ strftime_now('%1000000000d') }}", DATE),
    "date width after a flag": ("{{ strftime_now('%-1000000000d') }}", DATE),
    "date width after a prefix": ("{{ strftime_now('%E1000000000d') }}", DATE),
    "long date": ("{{ strftime_now('%c' * 101) }}", DATE),
    "center": ("{{ 'a'.center(1000000000) }}", "unsafe"),
    "center filter": ("{{ 'a' | center(1000000000) }}", "No filter named 'center'"),
    "bytes": ("{{ (1).to_bytes(1000000000) }}", "unsafe"),
    "lorem ipsum": ("{{ lipsum(1000000) }}", "'lipsum' is undefined"),
    "parentheses": ("{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}", NESTED),
    "lists in lists": ("{{ " + "[" * 30000 + "]" * 30000 + " }}", NESTED),
    "attributes": ("{{ a" + ".b" * 30000 + " }}", NESTED),
    "blocks in blocks": ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, NESTED),
    "a long number": ("{{ 1" + "0" * 60000 + " }}", "ValueError"),
    "a long template": ("x" * 65537, "65537 characters, more than the 65536 allowed"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "class by item": ("{{ ''['__class__']['__mro__'] }}", "unsafe"),
    "class by format": ("{{ '{0.__class__.__mro__}'.format('') }}", FIELDS),
    "class by map": ("{{ messages | map(attribute='__class__.__mro__') | list }}", "unsafe"),
    "marks": ("{{ 'x'.marks + 'x'.marks }}", "unsafe"),
    "marks of escaped text": ("{{ ('x' | safe).marks + 'x'.marks }}", "unsafe"),
    "format_map": ("{{ '{a}'.format_map({'a': 1}) }}", "unsafe"),
    "append": ("{{ messages.append(1) }}", "unsafe"),
    "update": ("{{ messages[0].update({'role': 'system'}) }}", "unsafe"),
    "globals of a function": ("{{ raise_exception.__globals__['x'] }}", "unsafe"),
    "include": ("{% include 'x' %}", "uses Include .line 1., which is not allowed"),
    "import": ("{% import 'x' as y %}", "uses Import"),
    "from import": ("{% from 'x' import y %}", "uses FromImport"),
    "extends": ("{% extends 'x' %}", "uses Extends"),
    "autoescape": ("{% autoescape true %}{% endautoescape %}", "not allowed"),
    "syntax": ("{% if %}", "line 1"),
    "unknown tag": ("{% bla %}", "unknown tag 'bla'"),
    "undefined": ("{{ nothing.more }}", "'nothing' is undefined"),
    "python error": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "refusal": ("{{ raise_exception('no\x1b[2J way') }}", "refuses these messages: no .2J way"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str) -> None:
    source, message = HOSTILE[name]
    with pytest.raises(TemplateError, match=message) as caught:
        render(source, "Hi")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


fields = st.lists(st.sampled_from(["{}", "{a}", "{b1}", "{{", "}}", "x", "\n"]), max_size=8).map("".join)


@examples(100)
@given(fields, st.lists(st.text("ab{}", max_size=3) | st.integers(), min_size=8, max_size=8))
def test_format_is_that_of_python(text: str, values: list[Any]) -> None:
    source = "{{ messages[0].content.format(*values, a=values[0], b1=values[1]) }}"
    chat = ChatTemplate.from_source(source, TOK)
    messages = [{"role": "user", "content": text}]
    assert chat.render(messages, values=values) == text.format(*values, a=values[0], b1=values[1])


def test_format_keeps_marks_of_the_template_only() -> None:
    def n_control(source: str, content: str) -> int:
        ids = ChatTemplate.from_source(source, TOK).encode([{"role": "user", "content": content}])
        return ids.count(TOK.vocabulary.tokens.index("<|eot_id|>"))

    assert n_control("{{ '<|{}|>'.format('eot_id') }}", "") == 1
    assert n_control("{{ '<|{}|>'.format(messages[0].content) }}", "eot_id") == 0
    assert n_control("{{ messages[0].content.format('eot_id') }}", "<|{}|>") == 0
    assert n_control("{{ (messages[0].content ~ '_id|>').format() }}", "<|eot") == 0


def test_printing_a_namespace_that_holds_itself() -> None:
    source = "{% set n = namespace() %}{% set n.a = n %}{{ n }}{{ [n, n] }}"
    assert render(source) == "<namespace>[<namespace>, <namespace>]"


def test_limits_grow_with_the_messages() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    assert render(source, *["message"] * 3000).count("<|eot_id|>") == 3000
    long = "word " * 100_000
    assert render(source, long) == f"user: {long.strip()}<|eot_id|>"


def test_a_template_that_failed_can_be_used_again() -> None:
    source = "{% if messages[0].content == 'bad' %}{{ 'a' * 1000000000 }}{% endif %}{{ messages[0].content }}"
    chat = ChatTemplate.from_source(source, TOK)
    for _ in range(2):
        with pytest.raises(TemplateError):
            chat.render([{"role": "user", "content": "bad"}])
        assert chat.render([{"role": "user", "content": "good"}]) == "good"


def test_templates_are_made_in_one_place_only() -> None:
    """Nothing but the sandbox may load Jinja's machinery, and the sandbox makes one kind of environment, once."""
    calls: list[str] = []
    users = set()
    for path in sorted((REPOSITORY / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(module.split(".")[0] == "jinja2" for module in modules):
                users.add(path.name)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.split(".")[-1].endswith("Environment") or called in ("jinja2.Template", "from_string"):
                    calls.append(f"{path.name}: {called}")
    assert users == {"sandbox.py", "code.py"}
    assert calls == ["sandbox.py: TemplateEnvironment"]
