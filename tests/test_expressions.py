"""Regular expressions that meet text of users take time in proportion to it."""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import REPOSITORY

METHODS = ("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")

TRUSTED = {
    "engine/synthetic/shapes.py": "names of tensors that this package makes",
    "engine/cuda/runtime/ptx.py": "code of the compiler",
    "engine/cuda/runtime/compiler.py": "code of the compiler",
}
"""Files whose expressions meet no text of users, and what they meet."""

LITERALS = {
    "engine/text/tokenizer.py": "control tokens of the file, escaped",
    "engine/text/breakers.py": "breakers of DRY, escaped",
    "engine/serving/calls/rules.py": "names of tools, escaped",
    "engine/serving/formats/parser.py": "the first characters of tags",
    "engine/serving/formats/reader.py": "tags, escaped",
    "engine/hub/repository.py": "the name of a quantization, escaped",
}
"""Files with expressions that are put together while the program runs, and of what."""


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def expressions() -> Iterator[tuple[str, int, str, Any, int]]:
    """Every expression of the package: (file, line, method, pattern or None if it is made while the program runs, flags)."""
    for path in sorted((REPOSITORY / "engine").rglob("*.py")):
        file = str(path.relative_to(REPOSITORY))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        compiled: dict[str, tuple[int, Any, int]] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if dotted(node.func.value) in ("re", "regex") and node.func.attr in (*METHODS, "compile"):
                constant = isinstance(node.args[0], ast.Constant)
                pattern = node.args[0].value if constant else None  # type: ignore[attr-defined]
                if node.func.attr == "compile":
                    compiled[str(node.lineno)] = node.lineno, pattern, 0
                else:
                    yield file, node.lineno, node.func.attr, pattern, 0
        if not compiled:
            continue
        module = importlib.import_module(".".join(path.with_suffix("").relative_to(REPOSITORY).parts))
        names = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
        named = {
            node.value.lineno: node.targets[0].id
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names
        }
        used = {
            (node.value.id, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS
        }
        for line, pattern, _ in compiled.values():
            name = named.get(line)
            if name is None:
                yield file, line, "match", pattern, 0
                continue
            found = names[name]
            # One that is handed on may be used in any way.
            for method in sorted({method for owner, method in used if owner == name} or {"search"}):
                yield file, line, method, found.pattern, found.flags


FOUND = [each for each in expressions() if each[0] not in TRUSTED]

N = 16_000
"""Characters of a text.  An expression takes milliseconds in proportion to it, seconds in proportion to its square."""

LIMIT = 0.3
"""CPU seconds."""


def texts(pattern: Any) -> Iterator[Any]:
    """Texts on which an expression that goes back to try again does so most: a character, or two, of the expression or of a
    common class over and over, and an end that does not fit."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    characters = sorted({c for c in text if c.isascii() and c.isprintable()} | set("1a \n\\\"<0.,'"))
    for first in characters:
        yield first * N + "\0"
    literal = max(re.split(r"[^\w =/<>.:-]+", text), key=len)
    for unit in {literal, literal + " ", "\n" + literal, "ab", "1.", "\\\\", '\\"', " \n", "</"} - {""}:
        yield unit * (N // len(unit)) + "\0"


def spent(pattern: Any, flags: int, method: str, text: str) -> float:
    compiled = re.compile(pattern, flags)
    data: Any = text.encode() if isinstance(pattern, bytes) else text
    before = (data[:0],) if method.startswith("sub") else ()
    begun = time.process_time()
    found = getattr(compiled, method)(*before, data)
    if method == "finditer":
        list(found)
    return time.process_time() - begun


@pytest.mark.parametrize(
    ("file", "line", "method", "pattern", "flags"),
    [each for each in FOUND if each[3] is not None],
    ids=lambda value: str(value) if isinstance(value, int) else str(value)[:40],
)
def test_the_time_is_in_proportion_to_the_text(file: str, line: int, method: str, pattern: Any, flags: int) -> None:
    for text in texts(pattern):
        seconds = spent(pattern, flags, method, text)
        assert seconds < LIMIT, f"{file}:{line} takes {seconds:.1f} s for {text[:20]!r} ..."


def test_expressions_that_are_put_together_are_known() -> None:
    """Add a file to LITERALS if its expressions consist of escaped texts, and bound their use otherwise."""
    unknown = {f"{file}:{line}" for file, line, _, pattern, _ in FOUND if pattern is None and file not in LITERALS}
    assert not unknown


def test_the_list_is_complete() -> None:
    assert len(FOUND) > 30
    assert {file for file, *_ in FOUND} > {"engine/serving/ollama/loading.py", "engine/text/bpe.py"}


@pytest.mark.parametrize(
    ("pattern", "method", "text"),
    [(r"(?:\d+\.?\d*s)+", "fullmatch", "1" * N), (r"(a|a)*b", "match", "a" * 24), (r"\s*,", "search", " " * N)],
)
def test_others_are_found(pattern: str, method: str, text: str) -> None:
    """Expressions as they have been in this package, or could have been."""
    assert spent(pattern, 0, method, text + "\0") > LIMIT
