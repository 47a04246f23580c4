"""Formulas as MathML, converted when the book is built: browsers render it without scripts, fonts or a network."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)


def mathml(latex: str, display: str) -> str:
    """The ``<math>`` element of a formula; ``display`` is "inline" or "block".  Raises ValueError for a command that the
    converter does not know."""
    # The converter knows align*, of which aligned is the form within a formula.
    element = convert(re.sub(r"\{aligned\}", "{align*}", latex), display=display)
    # Underscores are escaped in the text of a formula; the converter copies it as it is.
    element = element.replace(r"\_", "_")
    unknown = re.search(r">[^<]*?(\\[^<\s]*)", element)
    if unknown:
        raise ValueError(f"{unknown[1]} is unknown")
    # A function is an identifier: as an operator it would be followed by a space.
    element = re.sub(r"<mo>([a-z][A-Za-z]+)</mo>", r"<mi>\1</mi>", element)
    # A prime that is raised once more, as a superscript, is too small and too high in most fonts.
    element = re.sub(
        r"<msup>(<m[ion]>[^<]*</m[ion]>)<mi>&#x02032;</mi></msup>",
        r'<mrow>\1<mo lspace="0" rspace="0">′</mo></mrow>',
        element,
    )
    source = latex.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return element.replace("<math ", f'<math alttext="{source}" ', 1)


def visit(translator: Any, node: nodes.Element, display: str) -> None:
    """Write a formula in the place of its node."""
    try:
        element = mathml(node.astext().strip(), display)
    except Exception as error:  # the converter's errors have no common base
        log.warning("formula %r: %s", node.astext(), error, location=node)
        element = f"<code>{translator.encode(node.astext())}</code>"
    translator.body.append(f'<div class="formula">{element}</div>\n' if display == "block" else element)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer ``mathml`` for ``html_math_renderer``."""
    app.add_html_math_renderer(
        "mathml",
        (lambda translator, node: visit(translator, node, "inline"), None),
        (lambda translator, node: visit(translator, node, "block"), None),
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
