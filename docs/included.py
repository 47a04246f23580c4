"""The code that chapters quote: copied from the source into the Markdown, so that it is read on GitHub, too.

    python -m docs.included           write the code anew
    python -m docs.included --check   only tell which chapters are out of date

A chapter says what it quotes in a comment, which no reader sees.  The block of code after it is written by this module::

    <!-- included: engine/numerics.py
    :pyobject: fma
    -->
    ```python
    ...
    ```

The file is relative to the repository.  The options are those of Sphinx's ``literalinclude``: ``pyobject`` is a function or a
class, with its decorators; ``start-at``, ``start-after``, ``end-at`` and ``end-before`` are parts of lines, searched in what
``pyobject`` has left, the end after the start; ``language`` is that of the block (default: python).  Texts may be in
quotation marks.  The indentation that all lines have in common is removed.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

PLACE = re.compile(
    r"(?P<comment><!-- included: (?P<file>\S+)\n(?P<options>(?::[a-z-]+: [^\n]*\n)*)-->\n)"
    r"(?:(?P<ticks>`{3,})[^\n`]*\n(?P<code>.*?)^(?P=ticks)\n)?",
    re.M | re.S,
)
"""A comment, and the block after it, which is missing where nothing has been written yet."""

OPTIONS = {"pyobject", "start-at", "start-after", "end-at", "end-before", "language"}


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """The dotted names of functions and classes, each with its first line (that of its first decorator) and its last one,
    counted from 1."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield prefix + child.name, first, child.end_lineno or first
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def index(lines: Sequence[str], text: str, first: int = 0) -> int:
    """The index of the first line from ``first`` on that contains a text.  Raises ValueError if there is none."""
    found = next((i for i in range(first, len(lines)) if text in lines[i]), None)
    if found is None:
        raise ValueError(f"no line contains {text!r}{' where it should be' if first else ''}")
    return found


def quoted(source: str, options: dict[str, str]) -> str:
    """What the options select of a source.  Raises ValueError if they select nothing, or everything."""
    if unknown := options.keys() - OPTIONS:
        raise ValueError(f"there is no option {', '.join(sorted(unknown))}")
    if not options.keys() - {"language"}:
        raise ValueError("a whole file is quoted; name a pyobject, or a start or an end")
    lines = source.splitlines()
    if (name := options.get("pyobject")) is not None:
        places = {dotted: (first - 1, last) for dotted, first, last in definitions(ast.parse(source))}
        if name not in places:
            raise ValueError(f"there is no function or class {name}")
        lines = lines[slice(*places[name])]
    if (text := options.get("start-at")) is not None:
        lines = lines[index(lines, text) :]
    elif (text := options.get("start-after")) is not None:
        lines = lines[index(lines, text) + 1 :]
    if (text := options.get("end-at")) is not None:
        lines = lines[: index(lines, text) + 1]
    elif (text := options.get("end-before")) is not None:
        lines = lines[: index(lines, text, 1)]
    return textwrap.dedent("\n".join(lines)).strip("\n")


def block(place: re.Match[str]) -> str:
    """The comment of a place, and its block of code.  Raises ValueError that names the file and says what is wrong."""
    pairs = re.findall(r"^:([a-z-]+): (.*)$", place["options"], re.M)
    options = {name: re.sub(r"^([\"'])(.*)\1$", r"\2", text) for name, text in pairs}
    path = REPOSITORY / place["file"]
    try:
        code = quoted(path.read_text(encoding="utf-8"), options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{place['file']}: {error}") from None
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{place['comment']}{ticks}{options.get('language', 'python')}\n{code}\n{ticks}\n"


def filled(text: str) -> str:
    """The text of a page with its code written anew.  Raises ValueError if a place quotes what is not there."""
    return PLACE.sub(block, text)


def pages() -> list[Path]:
    """The chapters of the book."""
    return sorted((REPOSITORY / "docs").glob("*.md"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the code, or with ``--check`` only tell which chapters are out of date.  Returns the exit status."""
    top = argparse.ArgumentParser(prog="python -m docs.included", description="Write the code that chapters quote.")
    top.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if a chapter is out of date"
    )
    check, stale = top.parse_args(argv).check, 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = filled(text)
        except ValueError as error:
            print(f"error: {page.relative_to(REPOSITORY)} quotes {error}", file=sys.stderr)
            return 2
        if new != text:
            stale += 1
            print(f"{page.relative_to(REPOSITORY)} {'is out of date' if check else 'was written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
