"""Code without the empty line with which an example ends so that doctest can read it."""

from docutils import nodes
from sphinx.application import Sphinx


def trim(app: Sphinx, document: nodes.document) -> None:
    """Remove empty lines at the end of blocks of code."""
    for block in document.findall(nodes.literal_block):
        block.rawsource = block.astext().rstrip()
        block.children = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.connect("doctree-read", trim)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
