"""How Numba keeps the machine code of CPU kernels: in the folders of ``engine/compile/cache.py``, and nowhere else.

Numba's own cache writes beside the sources where its folder cannot be written, and knows a kernel there by the file it is
written in alone; it ends a run when the disk is full; and two processes that compile one function at a time may each number
their results 1.  Here a file holds one function for one signature and one kind of CPU, is named by them, and is written as a
whole or not at all.
"""

import hashlib
import pickle
from typing import Any

from numba.core import caching, compiler, dispatcher
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from engine.compile import cache as kernel_cache

PACKAGE = __name__.partition(".")[0]


class KernelCache(caching.FunctionCache):
    """The cache of one function, as Numba's dispatcher uses it."""

    def __init__(self, py_func: Any) -> None:
        self._py_func = py_func
        self._name = f"{py_func.__module__}.{py_func.__qualname__}"
        self.enable()

    @property
    def cache_path(self) -> str:
        """The folder that new results are written to; "" where they are not kept."""
        return str(kernel_cache.places("cpu").write or "")

    def flush(self) -> None:
        """Nothing to forget: a result is never out of date in the folder of its version."""

    def file(self, signature: Any, codegen: Any) -> str:
        """The name of the file of a signature (argument types) on the kind of CPU that ``codegen`` writes code for."""
        arguments, _ = normalize_signature(signature)
        key = repr(self._index_key(arguments, codegen))
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.numba"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None."""
        target_context.refresh()
        if not self._enabled:
            return None
        data = kernel_cache.read("cpu", self.file(sig, target_context.codegen()))
        if data is None:
            return None
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, unless it refers to addresses of this process."""
        if self._enabled and not data.lifted and not data.library.has_dynamic_globals:
            kernel_cache.write("cpu", self.file(sig, data.codegen), dumps(data._reduce()))


def _cache_of(py_func: Any) -> Any:
    ours = py_func.__module__.partition(".")[0] == PACKAGE
    return KernelCache(py_func) if ours else caching.FunctionCache(py_func)


# Functions of this package that are declared from now on are kept so.
vars(dispatcher)["FunctionCache"] = _cache_of
