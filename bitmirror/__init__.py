"""bitmirror: an LLM inference engine that gives the same bits on every path.

The code is in the package ``engine``. This package has the same public names, and it finds ``engine`` even if the current
folder contains an ``engine.py``.

>>> import bitmirror
>>> llm = bitmirror.load(n_ctx=256)
>>> llm.complete("def is_even(n):\\n    return n %", max_tokens=8, temperature=0, stop="\\n").text
' 2 == 0'
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import *  # noqa: F403
    from engine import __all__ as __all__
    from engine import __version__ as __version__


def _engine() -> ModuleType:
    """The package ``engine`` that is installed with this one.  Raises ImportError if another module of that name has been
    imported before."""
    path = Path(__file__).resolve().parent.parent / "engine" / "__init__.py"
    found = sys.modules.get("engine")
    if found is not None:
        where = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", [])), "the interpreter")
        if Path(where).resolve() != path:
            raise ImportError(
                f"another module named 'engine' is in use ({where}): import bitmirror before it, or rename it"
            )
        return found
    # A plain import would take an engine.py of the current folder.
    spec = importlib.util.spec_from_file_location("engine", path, submodule_search_locations=[str(path.parent)])
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"{path} is missing: install bitmirror again")
    module = sys.modules["engine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_package = _engine()

if not TYPE_CHECKING:  # type checkers would accept any name
    __all__ = _package.__all__

    def __getattr__(name: str) -> Any:
        """Names of the interface, imported when they are first used."""
        if name not in __all__:
            raise AttributeError(f"module 'bitmirror' has no attribute {name!r}")
        return getattr(_package, name)

    def __dir__() -> list[str]:
        return sorted(__all__)
