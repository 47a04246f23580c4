"""Compile jobs: what a kernel is compiled for.  Those of CPU kernels are the types of their arguments.

Jobs are small values that can be sent to another process (``engine/compile/worker.py``).
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from engine.compile import cache as kernel_cache
from engine.compile import inner
from engine.compile.numba_cache import KernelCache

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class CPUJob:
    """A function of module ``home`` that Numba compiles, for arguments of these Numba types."""

    home: str
    name: str
    signature: tuple[Any, ...]
    part: ClassVar[kernel_cache.Part] = "cpu"

    @property
    def _dispatcher(self) -> Any:
        return getattr(import_module(self.home), self.name)

    def kept(self) -> bool:
        """Whether it was compiled before."""
        dispatcher = self._dispatcher
        if self.signature in dispatcher.overloads:
            return True
        return kernel_cache.has("cpu", dispatcher._cache.file(self.signature, dispatcher.targetctx.codegen()))

    def compile(self) -> None:
        """Compile it and keep what comes of it."""
        inner.forget(self._dispatcher, self.signature)
        self._dispatcher.compile(self.signature)

    def size(self) -> int:
        """An estimate of the work: bytes of bytecode of the function and of the functions that it calls."""
        return size_of(self._dispatcher.py_func)


class Job(Protocol):
    """Something to compile: a small value, which can be sent to another process."""

    @property
    def part(self) -> kernel_cache.Part:
        """Whose kernel it is: "cpu" or "gpu"."""

    def kept(self) -> bool:
        """Whether it was compiled before."""

    def compile(self) -> None:
        """Compile it and store the result."""

    def size(self) -> int:
        """An estimate of the work."""


def size_of(function: FunctionType) -> int:
    """Bytes of bytecode of a function and of all functions of this package that it uses."""
    seen: set[Any] = set()
    waiting = [function]
    total = 0
    while waiting:
        one = waiting.pop()
        if one in seen or not one.__module__.startswith(PACKAGE):
            continue
        seen.add(one)
        codes = [one.__code__]
        while codes:
            code = codes.pop()
            total += len(code.co_code)
            codes += [inner for inner in code.co_consts if hasattr(inner, "co_code")]
            for name in code.co_names:
                value = one.__globals__.get(name)
                value = getattr(value, "py_func", value)
                if isinstance(value, FunctionType):
                    waiting.append(value)
    return total


# --- what a pass calls -----------------------------------------------------------------------------------------


class _Noted:
    """Replaces a CPU kernel: calls by one thread are recorded, calls by other threads are executed."""

    def __init__(self, dispatcher: Any, jobs: dict[Job, None], thread: int) -> None:
        self._dispatcher = dispatcher
        self._jobs = jobs
        self._thread = thread

    def __call__(self, *arguments: Any) -> Any:
        dispatcher = self._dispatcher
        if threading.get_ident() != self._thread:
            return dispatcher(*arguments)
        signature = tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
        function = dispatcher.py_func
        self._jobs[CPUJob(function.__module__, function.__name__, signature)] = None
        # A result used as a number must pass every filter and be a valid index into every list.
        return 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)


@contextmanager
def noted(jobs: dict[Job, None]) -> Iterator[None]:
    """A context in which this thread's calls of CPU kernels are added to ``jobs`` and not executed: results are not
    written."""
    # A thread that compiles at the same time would see the replaced functions.
    with global_compiler_lock, np.errstate(all="ignore"):
        replaced: list[tuple[ModuleType, str, Any]] = []
        stands: dict[Any, _Noted] = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != PACKAGE:
                continue
            for attribute, value in list(vars(module).items()):
                if isinstance(value, Dispatcher) and isinstance(vars(value).get("_cache"), KernelCache):
                    replaced.append((module, attribute, value))
                    stand = stands.setdefault(value, _Noted(value, jobs, threading.get_ident()))
                    setattr(module, attribute, stand)
        try:
            yield
        finally:
            for module, attribute, value in replaced:
                setattr(module, attribute, value)
