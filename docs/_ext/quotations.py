"""Quotations from the source, and code in general, without the indentation and the empty lines of their surroundings."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.directives.code import LiteralInclude


class Quotation(LiteralInclude):
    """``literalinclude`` that always removes the common indentation, as a method of a class has it."""

    def run(self) -> list[nodes.Node]:
        """The nodes of the quotation."""
        self.options.setdefault("dedent", None)
        return super().run()


def trim(app: Sphinx, document: nodes.document) -> None:
    """Remove the empty line with which an example ends so that doctest can read it."""
    for block in document.findall(nodes.literal_block):
        block.rawsource = block.astext().rstrip()
        block.children = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both."""
    app.add_directive("literalinclude", Quotation, override=True)
    app.connect("doctree-read", trim)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
