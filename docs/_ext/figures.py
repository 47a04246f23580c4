"""Pictures: one image on a light page and another on a dark one, and wide images that scroll.

::

    <picture>
    <source media="(prefers-color-scheme: dark)" srcset="images/layer-dark.svg">
    <img alt="What the figure shows, for readers who do not see it" src="images/layer-light.svg">
    </picture>

GitHub shows the image that fits the reader's theme.  In the book the reader can choose a theme, which such an element does
not follow, so it becomes two images, which the classes of the theme hide or show.

An image that is too wide to be read on a phone gets the class ``wide``, by which it keeps its size and scrolls.
"""

import re
from html import unescape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

log = logging.getLogger(__name__)

PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)

WIDE = 480
"""The largest width, in pixels, at which the text of an image can be read on a phone."""


class Pictures(SphinxTransform):
    """Replaces each such element by two images."""

    default_priority = 200

    def apply(self) -> None:
        """Run the transformation."""
        for raw in list(self.document.findall(nodes.raw)):
            text = raw.astext().strip()
            if not text.startswith("<picture"):
                continue
            found = PICTURE.fullmatch(text)
            if found is None:
                log.warning("a picture needs a dark source, and an image with the attributes alt and src", location=raw)
                raw.parent.remove(raw)
                continue
            figure = nodes.figure(align="center")
            figure.source, figure.line = raw.source, raw.line
            for theme in ("light", "dark"):
                alt, classes = unescape(found["alt"]), [f"only-{theme}"]
                figure += nodes.image(uri=found[theme], alt=alt, align="center", classes=classes)
            raw.replace_self(figure)


def width(image: Path) -> float:
    """The width of an SVG in pixels; 0 if it has none."""
    head = re.search(r"<svg [^>]*>", image.read_text(encoding="utf-8"))
    found = head and re.search(r'(?<= width=")[\d.]+|(?<= viewBox="0 0 )[\d.]+', head[0])
    return float(found[0]) if found else 0.0


def mark(app: Sphinx, document: nodes.document) -> None:
    """Give wide images their class."""
    for image in document.findall(nodes.image):
        path = Path(app.srcdir) / image["uri"]
        if path.suffix == ".svg" and path.is_file() and width(path) > WIDE:
            image["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both."""
    app.add_transform(Pictures)
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
