"""How the book is built: ``sphinx-build --fail-on-warning docs build/book``."""

import sys
import tomllib
from pathlib import Path

_package = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _package["name"]
release = version = _package["version"]
copyright = "the bitmirror contributors"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
myst_heading_anchors = 3

# The Python reference is made of docstrings.
sys.path.insert(0, str(Path(__file__).parent.parent))
extensions += ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name the types
napoleon_google_docstring = False
napoleon_use_ivar = True
