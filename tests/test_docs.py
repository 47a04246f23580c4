"""The book and the README: quotations find their source, command lines parse, and examples run."""

import ast
import doctest
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bitmirror import completion
from docs import documented, included, tables
from engine import bench, parity
from engine.cli import embed, flags, models, serve_flags, synthetic, trace, verify
from engine.cli.compile import parser as compile_parser
from engine.cli.texts import unescape
from engine.errors import EngineError, named_by_flags
from engine.hub import catalog
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.glob("*.md"))]
CHAPTERS = [page for page in PAGES if page.parent == DOCS]

FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)[ ]*$", re.M | re.S)
SHELLS = ("console", "sh", "bash", "shell")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``info`` is what follows the opening fence, ``line`` the number of that line."""

    page: Path
    line: int
    info: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, but not those of docstrings, whose examples ``tests/test_api.py`` runs."""
    text = documented.PLACE.sub(lambda place: "\n" * place[0].count("\n"), page.read_text(encoding="utf-8"))
    for match in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match["info"].strip(), match["body"])


BLOCKS = [block for page in PAGES for block in blocks(page)]


# --- quotations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_has_the_code_of_today(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert included.filled(text) == text, f"{page.name} is out of date; run: python -m docs.included"
    assert text.count("<!-- included:") == len(included.PLACE.findall(text)), (
        f"{page.name} has a comment with a mistake"
    )
    assert "{literalinclude}" not in text, f"{page.name} has code that GitHub does not show; see docs/included.py"


SOURCE = '''\
"""Fences:

```text
x
```
"""

class A:
    @property
    def one(self):
        return 1  # first

    def two(self):
        x = 2
        return x
'''


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pyobject": "A.one"}, "@property\ndef one(self):\n    return 1  # first"),
        ({"pyobject": "A.two", "start-at": "x = "}, "x = 2\nreturn x"),
        ({"start-after": "def two", "end-before": "return"}, "x = 2"),
        ({"start-at": "return 1", "end-at": "# first"}, "return 1  # first"),
        ({"start-at": "return 1", "end-before": "x = 2"}, "    return 1  # first\n\ndef two(self):"),
    ],
)
def test_options_select_code(options: dict[str, str], expected: str) -> None:
    assert included.quoted(SOURCE, options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a whole file is quoted"),
        ({"pyobject": "two"}, "no function or class two"),
        ({"start-at": "y ="}, "no line contains 'y ='"),
        ({"start-at": "x = 2", "end-before": "def one"}, "no line contains 'def one' where it should be"),
        ({"linenos": ""}, "no option linenos"),
    ],
)
def test_code_that_is_not_there_is_an_error(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        included.quoted(SOURCE, options)


def test_code_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "a.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(included, "REPOSITORY", tmp_path)
    page = tmp_path / "docs" / "page.md"
    quotation = '<!-- included: a.py\n:start-at: "Fences"\n:end-before: class A\n:language: text\n-->\n'
    edited = "<!-- included: a.py\n:pyobject: A.two\n-->\n```python\nchanged = 3\n```\n\nText.\n"
    page.write_text(f"# Page\n\n{quotation}\n{edited}", encoding="utf-8")
    assert included.main(["--check"]) == 1 and "is out of date" in capsys.readouterr().out
    assert included.main([]) == 0 and included.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert f"{quotation}````text\n" in text and text.count("````") == 2
    assert text.endswith("-->\n```python\ndef two(self):\n    x = 2\n    return x\n```\n\nText.\n")
    page.write_text("<!-- included: b.py\n:pyobject: A\n-->\n", encoding="utf-8")
    assert included.main([]) == 2
    assert "docs/page.md quotes b.py" in capsys.readouterr().err


def test_every_chapter_is_in_the_contents() -> None:
    contents = "\n".join(block.body for block in BLOCKS if block.info.startswith("{toctree}"))
    listed = {line.strip() for line in contents.splitlines() if line.strip() and not line.startswith(":")}
    assert {page.stem for page in CHAPTERS} <= listed | {"index"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:engine|tests|benchmarks|docs)/[\w./]*)`", text):
        assert (REPOSITORY / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", text):
        assert (page.parent / name).exists(), f"{page.name} links to {name}"


TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[^`]*\])?`|`(test_\w+)`")
"""A test that a page names, with or without its file."""


@cache
def functions(file: Path) -> frozenset[str]:
    """The names of the functions of a file of tests."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(name for name, *_ in included.definitions(tree))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    """Names without parameters: these are checked only when a run of the tests writes them."""
    for file, name, alone in TEST.findall(page.read_text(encoding="utf-8")):
        files = [REPOSITORY / file] if file else sorted((REPOSITORY / "tests").rglob("test_*.py"))
        assert all(path.is_file() for path in files), f"{page.name} names {file}"
        assert any((alone or name) in functions(path) for path in files), f"{page.name} names {file}::{alone or name}"


def test_structure_lists_every_module() -> None:
    text = (DOCS / "structure.md").read_text(encoding="utf-8")
    for path in sorted((REPOSITORY / "engine").rglob("*.py")):
        name = path.relative_to(REPOSITORY).as_posix()
        if path.name != "__init__.py":
            assert f"`{name}`" in text, f"structure.md does not list {name}"


def test_the_tables_of_the_server_are_those_of_the_code() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "serving.md is out of date; run: python -m docs.tables"
    assert {place[2] for place in tables.PLACE.finditer(text)} == set(tables.TABLES)


def test_the_reference_has_the_signatures_and_docstrings_of_today() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert documented.filled(text) == text, "api.md is out of date; run: python -m docs.documented"
    assert text.count("<!-- documented:") == len(documented.PLACE.findall(text)), "api.md has a comment with a mistake"
    assert "{eval-rst}" not in text, "api.md has a directive that GitHub does not show; see docs/documented.py"


def test_a_docstring_becomes_markdown() -> None:
    docstring = """One line with ``code``, :meth:`LLM.generate`, <this> and 2**64.

Parameters
----------
a, b : int
    First.
    Still first.

    Second paragraph.
**rest
    Others.

Returns
-------
int, or list of int
    The result.

Examples
--------
>>> 1 + 1
2

Text.
"""
    assert "\n".join(documented.markdown(docstring)).splitlines() == [
        *(r"One line with `code`, `LLM.generate`, \<this> and 2\*\*64.", "", "**Parameters**", ""),
        *("- `a`, `b` (int): First. Still first.", "", "  Second paragraph.", "- `**rest`: Others.", ""),
        *("**Returns**", "", "- int, or list of int: The result.", ""),
        *("**Examples**", "", "```pycon", ">>> 1 + 1", "2", "```", "", "Text."),
    ]


def test_a_signature_has_names_and_defaults() -> None:
    def short(self: object, a: int, *more: int, b: str = "x", **others: int) -> None: ...

    def long(a: int, /, b: int = 1, *, c: str = "c" * 70, d: None = None) -> None: ...

    def lines(found: Callable[..., None]) -> list[str]:
        return list(documented.signature("f", found))[1:-2]

    assert lines(short) == ["f(a, *more, b='x', **others)"]
    assert lines(long) == ["f(", f"    a, /, b=1, *, c='{'c' * 70}',", "    d=None,", ")"]


def test_the_book_has_directives_in_place_of_the_reference() -> None:
    text = "A\n\n<!-- documented: class a.B()\n:members: c, d\n-->\nTEXT\n<!-- end of documented -->\n\nZ\n"
    assert documented.directives(text) == ("A\n\n```{eval-rst}\n.. autoclass:: a.B()\n   :members: c, d\n```\n\nZ\n")


def test_the_readme_lists_every_room() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("## Layout")[2]
    rooms = {path.parent.name for path in (REPOSITORY / "engine").glob("*/__init__.py")}
    assert set(re.findall(r"^engine/(\w+)/ ", text, re.M)) - {"data"} == rooms - {"data"}


# --- command lines ---------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every ``bitmirror TOOL ...`` of a page, without the first: in shell blocks, and in code spans within text.

    ``python -m engine.TOOL`` is another way to write it.
    """
    text = page.read_text(encoding="utf-8")
    shell = [block.body.replace("\\\n", " ") for block in blocks(page) if block.info in SHELLS]
    lines = [line.removeprefix("$ ") for body in shell for line in body.splitlines()]
    # A code span may continue on the next line.
    spans = re.findall(r"`((?:bitmirror|python\s+-m\s+engine\.)[^`]*)`", FENCE.sub("", text))
    lines += [" ".join(span.split()) for span in spans]
    for line in lines:
        line = re.sub(r"\s[0-9](?=>)", " ", line)  # the 2 of 2>
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word[0] in ";|&<>":
                if command[:2] == ["python", "-m"] and command[2].startswith("engine."):
                    yield [command[2].removeprefix("engine."), *command[3:]]
                elif command[:1] == ["bitmirror"] and len(command) > 1:
                    yield command[1:]
                # What follows a redirection is a file, not a command.
                command = ["to"] if word[0] in "<>" else []
            elif command or "=" not in word:
                command.append(word)


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page.name}: {' '.join(w)}" for page, w in COMMANDS])
def test_a_command_line_parses(
    page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: dict[str, Callable[[list[str]], None]] = {
        "run": check_run,
        "chat": lambda args: check_run(["--cnv", *args]),
        "bench": check_bench,
        "serve": check_serve,
        "compile": check_compile,
        "parity": check_parity,
        "embed": lambda args: embed.parser().parse_args(args),
        "verify": lambda args: verify.parser().parse_args(args),
        "trace": lambda args: trace.parser().parse_args(args),
        "models": lambda args: check_models(args, monkeypatch),
        "synthetic": lambda args: check_synthetic(args, monkeypatch),
        "completion": lambda args: completion.parser().parse_args(args),
    }
    if words[0] in ("-h", "--help", "--version"):
        return
    assert words[0] in run, f"{page.name} names a command that does not exist"
    run[words[0]](words[1:])


PLACEHOLDERS = ("NAME", "MODEL")


def check_model(name: str) -> None:
    """Checks that a model that is neither a file nor of the hub is a name of the catalog."""
    known = not name or name in catalog.CATALOG or name in PLACEHOLDERS
    assert known or name.startswith("hf:") or name.endswith(".gguf"), f"there is no model named {name}"


def check_compile(args: list[str]) -> None:
    parsed = compile_parser().parse_args(args)
    assert not args or parsed.target.startswith("sm_")
    check_model(parsed.model)


def check_run(args: list[str]) -> None:
    if {"-h", "--help"} & set(args):
        return
    parsed = flags.parser().parse_args(args)
    check_model(parsed.model)
    flags.generation_options(parsed)
    if parsed.prompt is not None:
        flags.check(parsed, unescape(parsed.prompt))


def check_bench(args: list[str]) -> None:
    parsed = bench.parser().parse_args(args)
    for model in parsed.model:
        check_model(model)
    for shape in parsed.shape:
        bench.parse_shape(shape)


def check_serve(args: list[str]) -> None:
    for model in serve_flags.parser().parse_args(args).model:
        check_model(model)


def check_parity(args: list[str]) -> None:
    check_model(parity.parser().parse_args(args).model)


def check_models(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "resolve", lambda name, progress=None: check_model(name))
    monkeypatch.setattr(catalog, "verify", lambda model: catalog.model_file(model))
    monkeypatch.setattr(catalog, "remove", lambda model: not model.bundled)
    assert models.main([catalog.DEFAULT if word in PLACEHOLDERS else word for word in args]) == 0


def check_synthetic(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "make_model", lambda *_: Path(__file__))
    assert synthetic.main(args) == 0


def test_there_are_command_lines() -> None:
    named = {words[0] for _, words in COMMANDS}
    assert named >= {"run", "bench", "compile", "models", "parity", "synthetic"}


# --- messages --------------------------------------------------------------------------------------------------


MARKS = " :;,.()"


def texts() -> Iterator[str]:
    """The texts in the source, with a line break in the place of each value that is put into one."""
    for path in (REPOSITORY / "engine").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_are_those_of_the_source() -> None:
    """Every part of a message in troubleshooting.md, between values ("…"), is in a text of the source, with the flags that a
    command line has in place of arguments."""
    page = DOCS / "troubleshooting.md"
    with named_by_flags():
        source = "\n\n".join(str(EngineError(text)) for text in texts())
    quoted = [line for block in blocks(page) if block.info == "text" for line in block.body.splitlines()]
    parts = [part.strip(MARKS) for line in quoted for part in re.sub("^(error|note): ", "", line).split("…")]
    words = [part for part in parts if len(part) > 3]
    assert len(words) > 50

    def is_there(part: str) -> bool:
        """Whether the source contains it, or both halves of it: a value may be a text of the source, too."""
        halves = [(part[:at].strip(MARKS), part[at:].strip(MARKS)) for at, c in enumerate(part) if c == " "]
        return part in source or any(a in source and b in source for a, b in halves if min(len(a), len(b)) > 2)

    missing = [part for part in words if not is_there(part)]
    assert not missing, missing


# --- glossary --------------------------------------------------------------------------------------------------


def terms(text: str) -> Iterator[str]:
    """The terms of a glossary: the lines that are not indented.  An entry may have several."""
    (block,) = re.findall(r"^```{glossary}\n(.*?)^```$", text, re.M | re.S)
    yield from (line.strip() for line in block.splitlines() if line and not line.startswith(" "))


def unused(terms: Iterable[str], texts: Iterable[str]) -> list[str]:
    """The terms that no text contains, in the singular or the plural.  ``RunningBatch`` and ``running_batch`` contain
    "running batch"."""

    def words(text: str) -> str:
        return " ".join(["", *re.findall(r"[^\W_]+", text), ""]).lower()

    plain = "".join(words(text) + words(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)) for text in texts)
    return [term for term in terms if not any(form in plain for form in (words(term), words(f"{term}s")))]


def test_every_term_of_the_glossary_is_used() -> None:
    glossary = DOCS / "glossary.md"
    found = list(terms(glossary.read_text(encoding="utf-8")))
    assert len(found) > 100
    assert len(set(found)) == len(found)
    sources = [*(page for page in CHAPTERS if page != glossary), *(REPOSITORY / "engine").rglob("*.py")]
    assert unused(found, (path.read_text(encoding="utf-8") for path in sources)) == []


def test_terms_that_are_not_used_are_found() -> None:
    glossary = (
        "# G\n\n```{glossary}\npage table\n  An array.\n\nrunning batch\n  Rows.\n\nring\nslot\n  A place.\n```\n"
    )
    source = "class RunningBatch:\n    page_tables = string = 0  # its slots"
    assert unused(terms(glossary), [source]) == ["ring"]


# --- examples --------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    """The ``>>>`` examples of a page, in order and in one namespace, print what the page says."""
    if page.name in ("gpu.md", "evidence.md"):
        pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    if page.name == "structured.md":
        pytest.importorskip("llguidance", reason="grammars need the extra serve")
    examples = [block for block in blocks(page) if block.info == "pycon"]
    namespace: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    parser = doctest.DocTestParser()
    complaints: list[str] = []
    for block in examples:
        test = parser.get_doctest(block.body, namespace, page.name, str(page), block.line)
        test.globs = namespace
        runner.run(test, out=complaints.append, clear_globs=False)
    assert runner.failures == 0, "".join(complaints)
