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

# Figures with an image for each theme.
sys.path.insert(0, str(Path(__file__).parent / "_ext"))
extensions += ["figures"]
