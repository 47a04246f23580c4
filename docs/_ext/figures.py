"""The directive ``picture``: a figure of ``docs/figures``, whose image depends on the theme of the page.

::

    ```{picture} layer
    :alt: What the figure shows, for readers who do not see it

    A caption.
    ```

shows ``images/layer-light.svg`` on a light page and ``images/layer-dark.svg`` on a dark one.
"""

from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Picture(SphinxDirective):
    """A figure with one image per theme, hidden or shown by the classes of the theme."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """The figure: both images and the caption."""
        if "alt" not in self.options:
            raise self.error("a picture needs the option :alt:, a text for readers who do not see it")
        figure = nodes.figure(align="center")
        self.set_source_info(figure)
        for theme in ("light", "dark"):
            uri = f"images/{self.arguments[0]}-{theme}.svg"
            figure += nodes.image(uri=uri, alt=self.options["alt"], align="center", classes=[f"only-{theme}"])
        if self.content:
            caption = nodes.caption()
            # A caption is one paragraph, whose inline markup is that of the page.
            paragraphs = self.parse_content_to_nodes()
            caption += [child for paragraph in paragraphs for child in paragraph.children]
            figure += caption
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
