"""Compatibility of the current suites with older commits.

asv takes the suites from the working tree and the package from the commit that it measures.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MOVED = {
    "engine.compile.cache": ("engine.kernel_cache",),
    "engine.gguf.file": ("engine.gguf",),
    "engine.gguf.quants": ("engine.quants",),
    "engine.hub.resolve": ("engine.catalog",),
    "engine.ops.activation": ("engine.models.activation",),
    "engine.ops.heads": ("engine.models.heads",),
    "engine.ops.weight": ("engine.models.weights", "engine.weights"),
    "engine.sampling.sampler": ("engine.decode.sampler", "engine.sampler"),
    "engine.synthetic.model": ("engine.synthetic",),
    "engine.text.tokenizer": ("engine.tokenizer",),
}
"""Modules that suites import, and their names in older commits, the latest first."""


def exists(name: str) -> bool:
    """Whether the commit has a module of this name.  Only the packages around it are imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def find(name: str) -> ModuleType:
    """Import a module that has moved, under the name that it has in the commit."""
    return import_module(next((known for known in (name, *MOVED[name]) if exists(known)), name))


def use_old_names() -> None:
    """Make current names importable in older commits: ``engine.gguf.quants`` may be ``engine.quants`` there."""
    for name in MOVED:
        if not exists(name):
            with suppress(
                ModuleNotFoundError
            ):  # a module that is newer than the commit: suites that need it are skipped
                sys.modules[name] = find(name)


def once(setup: Callable[..., None]) -> Callable[..., None]:
    """A decorator for ``setup``, which asv calls before every sample: only the first call does the work.

    A commit whose operations have other parameters is skipped, and asv prints the difference.
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


def sequence_of(llm: Any) -> Any:
    """What knows how many tokens a model has read, and truncates them: in older commits, the cache."""
    return getattr(llm, "sequence", llm.cache)


def layers_of(shapes: list[Any], n_ctx: int, rows: int, types: Any, ops: Any) -> list[Any]:
    """Layers of a cache whose first sequence can store ``n_ctx`` positions; in older commits, layers have no pages."""
    from engine.cache.kv import KVCache

    if not exists("engine.cache.pages"):
        return KVCache(shapes, n_ctx, rows, types, ops.zeros).layers
    cache = KVCache(shapes, n_ctx, rows, types, ops.zeros, ops.store)
    import_module("engine.cache.sequence").Sequence(cache).reserve(n_ctx)
    cache.publish()
    return cache.layers
