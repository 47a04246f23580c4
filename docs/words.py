"""The words of the book by part and chapter: ``python -m docs.words``.

What is counted is what a reader reads as text: sentences, headings, lists and tables, with the captions of pictures.  Code,
formulas on lines of their own, the targets of links, and docstrings (``docs/documented.py``) are not.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent

FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)[ ]*$", re.M | re.S)

COURSE = "Part one: the course"
"""The caption of the first part in the contents.  All others are of the second part, the reference."""

MOST_OF_A_CHAPTER = 2500
MOST_OF_THE_COURSE = 22000
"""Bounds on the words of a chapter of the course, and of all of them."""


def contents(index: str) -> dict[str, list[str]]:
    """The names of pages by the caption of their part, in the order of the contents in ``index``, the text of index.md."""
    parts: dict[str, list[str]] = {}
    for block in FENCE.finditer(index):
        if block["info"].strip() == "{toctree}":
            (caption,) = re.findall(r"^:caption: (.+)$", block["body"], re.M)
            lines = (line.strip() for line in block["body"].splitlines())
            parts[caption] = [line for line in lines if line and not line.startswith(":")]
    return parts


def tables(index: str) -> list[str]:
    """The names of pages in the first column of the tables of ``index``, the text of index.md, from top to bottom."""
    return re.findall(r"^\| \[[^]]*\]\(([\w-]+)\.md\)", index, re.M)


def words(text: str) -> int:
    """How many words of text a page in Markdown has."""

    def caption(block: re.Match[str]) -> str:
        directive = block["info"].startswith(("{note}", "{glossary}"))
        return re.sub(r"^:.*$", "", block["body"], flags=re.M) if directive else ""

    text = re.sub(r"<!-- documented: .*?<!-- end of documented -->", "", text, flags=re.S)
    text = FENCE.sub(caption, text)
    text = re.sub(r"<!--.*?-->|<picture>.*?</picture>|^\$\$\n.*?^\$\$$", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(1 for word in re.split(r"[\s|]+", text) if re.search(r"\w", word))


def count() -> dict[str, dict[str, int]]:
    """The words of each page, by part and page."""
    parts = contents((DOCS / "index.md").read_text(encoding="utf-8"))
    pages = {page: words((DOCS / f"{page}.md").read_text(encoding="utf-8")) for part in parts.values() for page in part}
    return {part: {page: pages[page] for page in names} for part, names in parts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the words of each page, part, and of the book.  Returns the exit status."""
    argparse.ArgumentParser(prog="python -m docs.words", description="Count the words of the book.").parse_args(argv)
    parts = count()
    for part, pages in parts.items():
        print(f"{sum(pages.values()):7}  {part}")
        for page, n in pages.items():
            print(f"{n:7}    {page}")
    course = sum(parts[COURSE].values())
    print(f"{course:7}  in part one, {sum(sum(pages.values()) for pages in parts.values()) - course} in part two")
    return 0


if __name__ == "__main__":
    sys.exit(main())
