"""The reference of the Python interface: the book has it from docstrings, in place of the Markdown that GitHub shows."""

from sphinx.application import Sphinx

from docs.documented import directives


def replace(app: Sphinx, page: str, source: list[str]) -> None:
    """Put directives in place of what ``docs/documented.py`` has written."""
    source[0] = directives(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.connect("source-read", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
