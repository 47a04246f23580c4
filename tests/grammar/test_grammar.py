"""Grammars: what is accepted, what is refused with which sentence, and how much time a hostile one takes."""

import copy
import json
import pickle
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import engine
from engine import Grammar
from engine.errors import UsageError
from engine.grammar import trial
from engine.grammar.grammar import MOST_BYTES
from engine.grammar.messages import CRASH, DEEP, LARGE, ONE_WAY, SLOW, problem
from engine.grammar.tokens import tokens_of
from engine.grammar.trial import Trial
from tests.vocabularies import tokenizer

pytest.importorskip("llguidance", reason="grammars need the extra serve")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(rules: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(rules)) + f'a{rules}: "x"\n'


def test_grammars_are_values() -> None:
    one, same, other = Grammar.regex("a+"), Grammar.regex("a+"), Grammar.regex("b+")
    assert one == same != other and hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.kind = "other"  # type: ignore[misc]
    assert repr(one) == "<Grammar: regular expression, 11 characters>"
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json_schema(schema) == Grammar.json_schema(json.dumps(schema))


CORRECT = "; correct or simplify it."
REFUSED: list[tuple[Callable[[Any], Grammar], Any, str]] = [
    (Grammar.json_schema, {"type": "foo"}, "the JSON schema cannot be used: Invalid type: foo" + CORRECT),
    (Grammar.json_schema, {"not": {}}, 'the JSON schema cannot be used: Unimplemented keys: ["not"]' + CORRECT),
    (
        Grammar.json_schema,
        {"type": "string", "pattern": "(?=a)b"},
        "the JSON schema cannot be used: look-around, including look-ahead and look-behind, is not supported" + CORRECT,
    ),
    (
        Grammar.json_schema,
        {"type": "integer", "minimum": 5, "maximum": 3},
        "the JSON schema cannot be used: Unsatisfiable schema: minimum (5) is greater than maximum (3)" + CORRECT,
    ),
    (Grammar.json_schema, '{"type": ', "the JSON schema is not JSON: Expecting value: line 1 column 10 (char 9); "),
    (Grammar.json_schema, {"const": float("nan")}, "the JSON schema is not JSON: "),
    (Grammar.json_schema, '{"const": NaN}', "the JSON schema is not JSON: NaN is not a JSON value; correct it."),
    (Grammar.json_schema, {"const": {1, 2}}, "the JSON schema is not JSON: "),
    (Grammar.json_schema, "true", "a JSON schema must be an object, such as {}, not True."),
    (Grammar.json_schema, ["a"], "a JSON schema must be an object, such as {}, not a list of str."),
    (
        Grammar.json_schema,
        "x" * (MOST_BYTES + 1),
        f"the JSON schema has {MOST_BYTES + 1} bytes, and at most {MOST_BYTES}",
    ),
    (Grammar.regex, "(", "the regular expression cannot be used: unclosed group" + CORRECT),
    (Grammar.regex, r"\bx", "the regular expression cannot be used: "),
    (Grammar.regex, "a\\", "the regular expression cannot be used: it ends with a single backslash" + CORRECT),
    (Grammar.regex, 5, "a regular expression must be a text, not 5."),
    (Grammar.regex, "a\ud800", "the regular expression has half a character at index 1; remove it."),
    (Grammar.lark, "", "the grammar cannot be used: no start rule found" + CORRECT),
    (Grammar.lark, 'start: "a" |\n  ) b', "the grammar cannot be used: line 2: expecting rule, token or statement"),
    (Grammar.lark, "start: foo", 'the grammar cannot be used: unknown name: "foo"' + CORRECT),
    (
        Grammar.lark,
        'root ::= "a"',
        "the grammar cannot be used: it is GBNF, not Lark; python -m llguidance.gbnf_to_lark",
    ),
    (
        Grammar.gbnf,
        "root ::= other",
        "the grammar cannot be used: it is not valid GBNF (Rule 'other' not found)" + CORRECT,
    ),
    (
        Grammar.gbnf,
        'root ::= "a',
        "the grammar cannot be used: it is not valid GBNF (Unexpected end of input at line 1",
    ),
    (Grammar.gbnf, "root ::= " + '("a"' * 5000, "the grammar cannot be used: it is not valid GBNF (maximum recursion"),
    (
        Grammar.gbnf,
        'root ::= "a"\n' * 2000,
        "the grammar cannot be used: it has too many rules for its length" + CORRECT,
    ),
    (Grammar.lark, '{"grammars": []}', "the grammar cannot be used: trailing characters"),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_what_is_refused(make: Callable[[Any], Grammar], given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}") as caught:
        make(given)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


BOMBS: list[tuple[Callable[[Any], Grammar], Any, str]] = [
    (Grammar.regex, "(" * 60_000 + "a" + ")" * 60_000, "nest"),
    (Grammar.lark, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000, DEEP),
    (Grammar.json_schema, nested(200), DEEP),
    (Grammar.json_schema, nested(900), DEEP),
    (Grammar.json_schema, '{"items": ' * 20_000 + "{}" + "}" * 20_000, DEEP),
    (Grammar.lark, chain(5000), CRASH),
    (Grammar.regex, "a?" * 20_000 + "a" * 20_000, SLOW),
    (
        Grammar.json_schema,
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(9)]},
        LARGE,
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), BOMBS, ids=range(len(BOMBS)))
def test_bombs_end_soon_with_a_sentence(make: Callable[[Any], Grammar], given: Any, message: str) -> None:
    """Here, or at the latest when the grammar meets the tokens of a model."""
    begun = time.perf_counter()
    with pytest.raises(UsageError, match=message) as caught:
        tokens_of(tokenizer("bundled")).matcher(make(given))
    assert time.perf_counter() - begun < trial.PATIENCE / 2
    assert len(str(caught.value)) < 400
    assert Grammar.regex("a{1000}b").kind == "regular expression"  # nothing has been broken


JSON_GBNF = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""The grammar of JSON that llama.cpp comes with."""


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"a": [1, -2.5e+7, null, {"b": "\\u00e9 \\" é"}], "c":{}}', True),
        ("{}", True),
        ("[]", False),
        ('{"a" 1}', False),
        ('{"a": 01}', False),
        ('{"a": "\n"}', False),
        ('{"a": tru}', False),
        ('{"a": 1', False),
    ],
)
def test_llama_cpps_grammar_of_json(text: str, accepted: bool) -> None:
    vocabulary = tokenizer("bundled")
    matcher = tokens_of(vocabulary).matcher(Grammar.gbnf(JSON_GBNF))
    ids = vocabulary.encode(text, add_special=False, parse_special=False)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == accepted


@pytest.mark.parametrize("option", ["max_tokens=3", 'stop="x"'])
def test_grammars_that_cannot_go_back_are_refused(option: str) -> None:
    grammar = Grammar.lark(f'start: a "x"\na[{option}]: /[a-z ]*/')
    with pytest.raises(UsageError, match=re.escape(ONE_WAY)):
        tokens_of(tokenizer("bundled")).matcher(grammar)
    tokens_of(tokenizer("bundled")).matcher(Grammar.lark('start: a "x"\na[suffix="y"]: /[a-z ]*/'))


def test_special_tokens_must_exist() -> None:
    tokens = tokens_of(tokenizer("bundled"))
    with pytest.raises(UsageError, match=re.escape('cannot be used: unknown special token: "<|no|>"; correct')):
        tokens.matcher(Grammar.lark("start: <|no|>"))
    tokens.matcher(Grammar.lark("start: <|im_start|>"))


def test_reports_do_not_leak() -> None:
    assert problem("panic: index out of bounds\n<backtrace>\n/home/x\n") == "llguidance does not accept it"
    long = problem('at 1(8): unknown name: "' + "x" * 5000 + "\x1b[2J")
    assert len(long) < 220 and long.isprintable()
    assert problem("3(1): bad (at x); available: secret\n  2 | y") == "line 3: bad (at x)"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        UsageError, match=r"need the package llguidance: install it with pip install 'bitmirror\[serve\]'"
    ):
        Grammar.json_schema({})
    assert engine.Grammar is Grammar


# --- the process in which they are tried -----------------------------------------------------------------------


def test_a_process_that_was_killed_is_replaced() -> None:
    own = Trial()
    assert own.problem('start: "a"') == ""
    process = own._process
    assert process is not None
    process.kill()
    process.wait()
    assert own.problem("start: b") == 'unknown name: "b"'
    own._end()


def test_an_interrupt_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Trial()
    exchange = trial._exchange

    def interrupted(process: Any, request: bytes) -> str | None:
        if request:
            process.stdin.write(request)
            process.stdin.flush()
            raise KeyboardInterrupt
        return exchange(process, request)

    with monkeypatch.context() as patch:
        patch.setattr(trial, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.problem("start: b")
    assert own.problem('start: "a"') == ""
    own._end()


def test_a_process_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(UsageError, match="the process that tries grammars cannot be started: "):
        Trial().problem('start: "a"')
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match="cannot be started: /bin/false cannot run llguidance"):
        Trial().problem('start: "a"')
