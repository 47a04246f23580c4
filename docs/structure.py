"""The tables of files in ``docs/structure.md``: made from the docstrings of modules.

    python -m docs.structure           write the tables anew
    python -m docs.structure --check   only tell whether the page is out of date

The page marks the place of a table with comments, which no reader sees::

    <!-- files: engine/cache -->
    ...
    <!-- end of files -->

What is between them is replaced: by a table of the folder's files, each with the first paragraph of its docstring, and for a
folder within a package also that of the folder's own docstring.  Files of folders within belong to the same table, unless
those folders have a place of their own.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.page import fill

REPOSITORY = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("structure.md")

PLACE = re.compile(r"(<!-- files: ([\w/]+) -->\n)(.*?)(<!-- end of files -->)", re.S)


def summary(file: Path) -> str:
    """The first paragraph of the docstring of a module, as Markdown in one line.  Raises ValueError if there is none."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{file} has no docstring: write what the file is in its first line.")
    line = " ".join(docstring.partition("\n\n")[0].split()).removesuffix("::")
    # What is between double backticks is code.  The rest has no markup, but characters that Markdown would take for it.
    parts = line.split("``")
    parts[::2] = [re.sub(r"([*_<$])", r"\\\1", text) for text in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


def folders(text: str) -> list[str]:
    """The folders that have a place in a page."""
    return [place[2] for place in PLACE.finditer(text)]


def files(folder: str, others: Sequence[str]) -> Iterator[Path]:
    """The modules of a folder, in the order of their names, without those of ``others`` within it."""
    apart = [REPOSITORY / other for other in others if other.startswith(f"{folder}/")]
    for file in sorted(
        (REPOSITORY / folder).rglob("*.py"), key=lambda file: (len(file.relative_to(REPOSITORY).parts), file)
    ):
        if file.name != "__init__.py" and not any(file.is_relative_to(other) for other in apart):
            yield file


def table(folder: str, others: Sequence[str]) -> str:
    """What is written in the place of a folder."""
    init = REPOSITORY / folder / "__init__.py"
    lines = [summary(init), ""] if "/" in folder and init.exists() else []
    lines += ["| file | what it is |", "| --- | --- |"]
    lines += [f"| `{file.relative_to(REPOSITORY).as_posix()}` | {summary(file)} |" for file in files(folder, others)]
    return "".join(f"{line}\n" for line in lines)


def filled(text: str) -> str:
    """The text of a page with its tables made anew."""
    others = folders(text)
    return PLACE.sub(lambda place: place[1] + table(place[2], others) + place[4], text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` only tell whether it is out of date.  Returns the exit status."""
    return fill("python -m docs.structure", "Write the tables of files.", PAGE, filled, argv)


if __name__ == "__main__":
    sys.exit(main())
