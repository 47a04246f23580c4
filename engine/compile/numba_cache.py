"""Numba's cache of machine code for CPU kernels, restricted to the folders of ``engine/compile/cache.py``.

Numba's own cache falls back to a folder next to the sources if its folder is not writable, and there identifies a kernel by
its source file alone; a full disk ends the run; and two processes that compile the same function at the same time may both
number their results 1.  Here a file contains one function for one signature and one kind of CPU, is named after them, and is
written atomically.

A file also contains the functions that its function calls; ``engine/compile/symbols.py`` gives them symbols that are equal
only for equal code.
"""

import hashlib
import os
import pickle
from typing import Any

from llvmlite.binding import parse_assembly
from numba.core import caching, compiler, dispatcher
from numba.core.compiler_lock import global_compiler_lock as lock
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from engine.compile import cache as kernel_cache
from engine.compile import inner, interrupts, symbols

PACKAGE = __name__.partition(".")[0]


class KernelCache(caching.FunctionCache):
    """The cache of one function, with the interface that Numba's dispatcher uses."""

    def __init__(self, py_func: Any, name: str = "", *others: Any) -> None:
        """name: identifies the function, together with ``others``, whose representations are equal in all processes; "": its
        own name and a hash of its code and closure do."""
        self._py_func = py_func
        self._given = (name, others) if name else None
        self._name = name or f"{py_func.__module__}.{py_func.__qualname__}"
        self.enable()

    @property
    def cache_path(self) -> str:
        """The folder that new results are written to; "" if they are not stored."""
        return str(kernel_cache.places("cpu").write or "")

    def flush(self) -> None:
        """Do nothing: results in the folder of their version are never outdated."""

    def file(self, signature: Any, codegen: Any) -> str:
        """The file name for a signature (argument types) and the kind of CPU that ``codegen`` targets."""
        arguments, _ = normalize_signature(signature)
        key = repr(
            (arguments, codegen.magic_tuple(), self._given) if self._given else self._index_key(arguments, codegen)
        )
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.numba"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the compiled function for a signature; None if it is not stored."""
        target_context.refresh()
        if not self._enabled or inner.is_inner():
            return None
        data = kernel_cache.read("cpu", self.file(sig, target_context.codegen()))
        if data is None:
            return None
        with interrupts.deferred():
            return compiler.CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function, unless it refers to addresses of this process."""
        if inner.is_inner() or not self._enabled:
            return
        if not data.lifted and not data.library.has_dynamic_globals:
            kernel_cache.write("cpu", self.file(sig, data.codegen), dumps(self._reduced(data)))

    def _reduced(self, data: Any) -> tuple[Any, ...]:
        """What is stored of a compiled function."""
        reduced: tuple[Any, ...] = data._reduce()
        return reduced


class EntryCache(KernelCache):
    """The cache of a function that no other function calls.  It does not keep the intermediate code for callers, most of
    what there is to load."""

    def _reduced(self, data: Any) -> tuple[Any, ...]:
        (name, kind, (machine_code, _)), *others = data._reduce()
        symbols = data.fndesc.llvm_func_name, data.fndesc.llvm_cpython_wrapper_name
        # Numba reads there which symbols the machine code has.
        text = "".join(f'define void @"{symbol}"() {{ ret void }}\n' for symbol in symbols)
        return ((name, kind, (machine_code, parse_assembly(text).as_bitcode())), *others)


def _cache_of(py_func: Any) -> Any:
    ours = py_func.__module__.partition(".")[0] == PACKAGE
    return KernelCache(py_func) if ours else caching.FunctionCache(py_func)


symbols.install()

# Functions of this package that are declared from now on use this cache.
vars(dispatcher)["FunctionCache"] = _cache_of

if hasattr(os, "register_at_fork"):
    # A fork waits while another thread compiles.  In the middle of that, nothing could be compiled in the new process.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
