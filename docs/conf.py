"""How the book is built: ``sphinx-build --fail-on-warning docs build/book``."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the Python reference is made of docstrings
sys.path.insert(0, str(HERE / "_ext"))

_package = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _package["name"]
release = version = _package["version"]
copyright = "the bitmirror contributors"

extensions = ["myst_parser", "documented", "figures", "mathml", "quotations"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_copy_source = False
html_math_renderer = "mathml"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

extensions += ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name the types
napoleon_google_docstring = False
napoleon_use_ivar = True
