"""The tables of ``docs/serving.md`` that are made from the code: which fields the server accepts, and which formats of calls.

    python -m docs.tables           write the tables anew
    python -m docs.tables --check   only tell whether the page is out of date

The page marks the place of a table with comments, which no reader sees::

    <!-- table: formats -->
    ...
    <!-- end of table -->

What is between them is replaced.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from docs.page import fill
from engine.serving.accepted import OPTIONS, READING, ROUTES, Effect
from engine.tools.calls.select import CALLS
from engine.tools.formats.select import FORMATS, MARKS

REPOSITORY = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("serving.md")

PLACE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.S)

TESTS = ("tests/tools/formats", "tests/tools/calls")
"""Folders whose tests read or write calls of the formats that they name."""


def accepted() -> Iterator[str]:
    """The fields that each route of the server accepts: a row for each route and effect."""
    yield "| route | | fields |"
    yield "| --- | --- | --- |"
    for route, table in {**ROUTES, **READING, "options": OPTIONS}.items():
        for effect in Effect:
            names = sorted(name for name, rule in table.items() if rule.effect is effect)
            first = f" `{route}`" if effect is Effect.OBEYED else ""
            yield f"|{first} | {effect.value} | {', '.join(f'`{name}`' for name in names)} |"


def formats() -> Iterator[str]:
    """The formats of calls."""
    yield "| format | models | a template that contains | published templates | tests |"
    yield "| --- | --- | --- | --- | --- |"
    for name, columns in format_rows().items():
        yield f"| {_code(name)} | {' | '.join(columns)} |"


def format_rows() -> dict[str, list[str]]:
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
        tests = [path.name for path, texts in named.items() if name in texts]
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


TABLES: dict[str, Callable[[], Iterator[str]]] = {"accepted": accepted, "formats": formats}
"""What the places of the page are filled with, by name."""


def filled(text: str) -> str:
    """The text of the page with its tables made anew.  Raises KeyError for a name that is not in ``TABLES``."""
    return PLACE.sub(lambda place: place[1] + "".join(f"{line}\n" for line in TABLES[place[2]]()) + place[4], text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or with ``--check`` only tell whether the page is out of date.  Returns the exit status."""
    return fill("python -m docs.tables", "Write the tables made from the code.", PAGE, filled, argv)


if __name__ == "__main__":
    sys.exit(main())
