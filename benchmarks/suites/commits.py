"""What the suites of today need in order to measure commits of other days.

asv takes the suites from the working tree and the package from the commit that it measures.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MOVED = {
    "engine.compile.cache": "engine.kernel_cache",
    "engine.decode.sampler": "engine.sampler",
    "engine.gguf.file": "engine.gguf",
    "engine.gguf.quants": "engine.quants",
    "engine.hub.resolve": "engine.catalog",
    "engine.models.weights": "engine.weights",
    "engine.synthetic.model": "engine.synthetic",
    "engine.text.tokenizer": "engine.tokenizer",
}
"""Modules that suites import, and where commits before the package was sorted into rooms have them."""


def exists(name: str) -> bool:
    """Whether the commit has a module of this name.  Only the packages around it are imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def find(name: str) -> ModuleType:
    """One of the modules that moved, wherever the commit has it."""
    return import_module(name if exists(name) else MOVED[name])


def use_old_names() -> None:
    """Let ``from engine.gguf.quants import FORMATS`` work with commits that have it in ``engine.quants``."""
    for name in MOVED:
        if not exists(name):
            sys.modules[name] = find(name)


def once(setup: Callable[..., None]) -> Callable[..., None]:
    """A ``setup`` that asv may call before every sample and that does its work before the first.

    A commit whose operations are called in another way is skipped, and asv prints how they differ.
    """

    @wraps(setup)
    def prepare(self: Any, *params: Any) -> None:
        if getattr(self, "prepared", None) == params:
            return
        try:
            setup(self, *params)
        except (AttributeError, KeyError, TypeError) as error:
            raise NotImplementedError(f"this commit differs: {type(error).__name__}: {error}") from error
        self.prepared = params

    return prepare
