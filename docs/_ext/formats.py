"""The directive ``formats``: a table of the formats of calls, made from the code that recognizes them and from its tests."""

import ast
import json
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from engine.tools.calls.select import CALLS
from engine.tools.formats.select import FORMATS, MARKS

REPOSITORY = Path(__file__).parents[2]

TESTS = ("tests/tools/formats", "tests/tools/calls")
"""Folders whose tests read or write calls of the formats that they name."""


def rows() -> dict[str, list[str]]:
    """The columns of each format: models, what their templates contain, published templates, and tests."""
    recognized: dict[str, list[str]] = {name: [] for name in CALLS}
    published = json.loads((REPOSITORY / "tests/published/templates.json").read_text(encoding="utf-8"))
    for template, name in published.items():
        if name in recognized:
            recognized[name].append(template)
    named = {path: _texts(path) for folder in TESTS for path in sorted((REPOSITORY / folder).glob("test_*.py"))}
    found = {}
    # In the order in which they are tried; a format without marks is that of all other templates.
    order = dict.fromkeys([*(name for name, _ in MARKS if name in CALLS), *CALLS])
    for name in order:
        models, colon, _ = (sys.modules[FORMATS[name].__module__].__doc__ or "").partition(":")
        marks = "; or ".join(", ".join(map(_code, marks)) for each, marks in MARKS if each == name)
        tests = [path.stem for path, texts in named.items() if name in texts]
        found[name] = [
            models if colon else "all others",
            marks,
            ", ".join(recognized[name]),
            ", ".join(map(_code, tests)),
        ]
    return found


def _texts(path: Path) -> set[str]:
    """The texts in a source file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


class Formats(SphinxDirective):
    """One row per format."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        lines = [
            "| format | models | a template that contains | published templates | tests |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [f"| {_code(name)} | {' | '.join(columns)} |" for name, columns in rows().items()]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("formats", Formats)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
