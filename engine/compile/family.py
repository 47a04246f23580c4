"""Kernels that are specialized by constants, such as a block format: one function per tuple of constants."""

from collections.abc import Callable
from typing import Any

from engine.compile.numba_cache import KernelCache


class Family:
    """A factory of kernels.  A call with constants returns the ``@njit`` function for them, which is made once.

    Results are stored on disk under the factory's name and the constants, because Numba's own key, a hash of the closure,
    differs from process to process.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        """build: returns the ``@njit`` function for the constants, which must be strings, numbers or booleans."""
        self._build = build
        self._made: dict[tuple[Any, ...], Any] = {}
        self.__doc__ = build.__doc__
        self.__name__ = build.__name__
        self.__module__ = build.__module__
        self.__wrapped__ = build

    def __call__(self, *constants: str | float | bool) -> Any:
        """The kernel for these constants."""
        if constants not in self._made:
            function = self._build(*constants)
            name = f"{self.__module__}.{self.__name__}[{','.join(map(str, constants))}]"
            function._cache = KernelCache(function.py_func, name)
            function.family = self, constants
            self._made[constants] = function
        return self._made[constants]


def family(build: Callable[..., Any]) -> Family:
    """Decorator: make a factory of ``@njit`` functions a family of kernels."""
    return Family(build)
