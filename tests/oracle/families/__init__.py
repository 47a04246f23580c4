"""Small random models of architectures, a file for each: their checkpoints, and the GGUF files that they convert to."""

import importlib
import pkgutil

from tests.oracle.families.family import Family

__all__ = ["FAMILIES", "Family"]

_MODULES = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("family", "parts")]

FAMILIES: dict[str, Family] = {
    case.name: case for name in _MODULES for case in importlib.import_module(f"{__name__}.{name}").CASES
}
"""Every case of every file of this package, by its name."""
