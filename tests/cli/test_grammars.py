"""The flags that restrict an answer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import Grammar
from engine.cli.flags import parser
from engine.cli.grammars import grammar
from engine.errors import UsageError
from engine.run import main
from tests import fake_llm

pytest.importorskip("llguidance", reason="grammars need the extra serve")

SCHEMA = {"enum": ["red", "green"]}


def given(*words: str) -> Grammar | None:
    return grammar(parser().parse_args(words))


def test_schemas_are_text_or_files(tmp_path: Path) -> None:
    expected = Grammar.json_schema(SCHEMA)
    text, file = json.dumps(SCHEMA), tmp_path / "schema.json"
    file.write_text(f"{text}\n", encoding="utf-8")
    for words in (("--json-schema", text), ("-j", f" {text}"), ("-j", str(file)), ("-jf", str(file))):
        assert given(*words) == expected
    assert given() is None


def test_expressions_and_grammars(tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "a" | "b"\n', encoding="utf-8")
    assert given("--grammar", str(file)) == given("--grammar-file", str(file)) == Grammar.lark('start: "a" | "b"')
    assert given("--regex", r"\d+\n") == Grammar.regex(r"\d+\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json-schema", "none.json"), "the JSON schema cannot be read from none.json: No such file or directory"),
        (("--json-schema", '{"type": '), "the JSON schema is not JSON: "),
        (("--grammar", "none.lark"), "the grammar cannot be read from none.lark: No such file or directory"),
        (
            ("--grammar", 'root ::= "a"'),
            "--grammar takes a file with a grammar in Lark's notation, not a grammar in GBNF",
        ),
        (("--regex", "("), "the regular expression cannot be used: unclosed group; correct or simplify it."),
        (("--regex", "a", "-j", "{}"), "--json-schema and --regex are both given: use only one of them"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        given(*words)


def test_they_reach_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that a grammar ends needs no other limit."""
    made: list[fake_llm.FakeLLM] = []

    def load(*args: Any, **options: Any) -> fake_llm.FakeLLM:
        made.append(fake_llm.load(*args, **options))
        return made[-1]

    monkeypatch.setitem(vars(engine), "load", load)
    assert main(["-p", "x", "--regex", "a+"]) == 0
    assert main(["-p", "x"]) == 0
    restricted, free = (llm.asked[0] for llm in made)
    assert restricted["grammar"] == Grammar.regex("a+") and restricted["max_tokens"] == -1 and restricted["stop"] == []
    assert "grammar" not in free and free["max_tokens"] == 256
    assert main(["-p", "x", "--regex", "("]) == 2
    assert "error: the regular expression cannot be used: unclosed group; correct" in capsys.readouterr().err
