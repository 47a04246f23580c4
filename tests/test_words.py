"""The two parts of the book: their order, how long the course is, and how its chapters end."""

import ast
import io
import re
import tokenize

import pytest

from docs import words
from tests.conftest import REPOSITORY

INDEX = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
COURSE = words.contents(INDEX)[words.COURSE]


def test_what_is_counted() -> None:
    assert words.words("# Two words\n\nOne [link](to/a-file.md), $x + y$, and `code`.\n") == 2 + 6
    assert words.words("```python\nnot counted\n```\n\n$$\nx = y\n$$\n\n<!-- nor this -->\n") == 0
    assert words.words("| a | table |\n| --- | ---: |\n| of | 4 |\n") == 4
    assert words.words('<picture>\n<img alt="not this" src="a.svg">\n</picture>\n\nA caption.\n') == 2


def test_the_course_is_short() -> None:
    pages = words.count()[words.COURSE]
    assert len(pages) >= 12
    assert {page: n for page, n in pages.items() if n > words.MOST_OF_A_CHAPTER} == {}
    assert sum(pages.values()) <= words.MOST_OF_THE_COURSE


def test_the_first_page_has_the_order_of_the_contents() -> None:
    """Each page is once in the contents, and once in a table of the first page, in the same order."""
    listed = [page for part in words.contents(INDEX).values() for page in part]
    assert len(set(listed)) == len(listed)
    assert words.tables(INDEX) == listed


@pytest.mark.parametrize("chapter", COURSE)
def test_a_chapter_ends_with_an_exercise_and_what_others_do(chapter: str) -> None:
    text = (REPOSITORY / "docs" / f"{chapter}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", words.FENCE.sub("", text), re.M)
    assert headings[-2:] == ["Exercise", "What others do"]
    exercise = text.partition("\n## Exercise\n")[2].partition("\n## What others do\n")[0]
    assert "Hint" in exercise
    assert "```" in exercise


def test_the_law_is_as_short_as_the_first_page_says() -> None:
    """Lines with code: neither blank, nor comments, nor docstrings."""
    assert "fewer than 300 lines of code" in INDEX
    source = (REPOSITORY / "examples" / "law.py").read_text(encoding="utf-8")
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    assert 200 < len(lines) < 300
